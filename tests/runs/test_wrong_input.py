"""Wrong input through the commands: the class of the error, the value seen, the fix, and that nothing is lost.

The cases are those of scripts/wrong_input.py; what each must say is written here.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "wrong_input.py"


def load_script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(SCRIPT.parent)
        return importlib.import_module(SCRIPT.stem)


script = load_script()


@dataclass(frozen=True)
class Says:
    """error: class, or empty where the command works; words: what must stand in the message; left: a run folder."""

    error: str
    words: tuple[str, ...]
    exit_code: int = 1
    left: bool = False


SAYS = {
    "misspelt_recipe": Says("ConfigError", ("hh_pppo", "Did you mean hh_ppo?", "demo_sft"), 2),
    "unknown_key": Says(
        "ConfigError",
        ("ppo.cliprange is not a setting", "unknown_key.yaml:8, value 0.1", "Did you mean ppo.clip_high?"),
        2,
    ),
    "wrong_type": Says("ConfigError", ("optim.lr must be a valid number", 'value "fast"'), 2),
    "out_of_range": Says("ConfigError", ("rollout.temperature must be greater than 0", "value 0"), 2),
    "no_effect": Says(
        "ConfigError", ("kl.target has no effect", "value 3.0", "kl.controller is adaptive", "remove"), 2
    ),
    "vf_coef_0": Says("ConfigError", ("ppo.vf_coef is 0", "give it a weight above 0"), 2),
    "k1_in_the_loss": Says("ConfigError", ("kl.estimator is k1", "use k2 or k3"), 2),
    "top_p": Says("ConfigError", ("rollout.top_p", "value 0.9", "Remove it"), 2),
    "kl_0": Says("", ("warning: kl.coef is 0", "follow the gold score"), 0),
    "missing_file": Says(
        "DataError",
        ("data/demonstration.jsonl", "Did you mean data/demonstrations.jsonl?"),
    ),
    "missing_column": Says(
        "DataError", ("prompt, chosen, rejcted", "preference lacks rejected (is it rejcted?)", "data.columns={")
    ),
    "mixed_formats": Says(
        "DataError", ("22 of prompt_completion", "2 of text (rows 5, 9)", "split the file by format")
    ),
    "empty_responses": Says(
        "DataError", ("6 of 24 rows (25.0%)", "responses without text: 6", "rows 4, 8, 12", "repair the data")
    ),
    "one_empty_response": Says("", ("responses without text: 1 (dropped; rows 20)", "train: 21 rows"), 0),
    "long_prompts": Says("DataError", ("the context of the model: 6", "longest 512 tokens, allowed 122", "repair")),
    "one_long_prompt": Says("DataError", ("rows 20", "longest 512 tokens", "set data.too_long to drop or truncate")),
    "no_room": Says("DataError", ("rollout.max_new_tokens=128", "context of 128", "lower rollout.max_new_tokens")),
    "identical_pairs": Says(
        "DataError", ("pairs with chosen equal to rejected: 6", "rows 4, 8, 12", "raise data.max_bad_fraction")
    ),
    "no_model": Says("ModelNotFoundError", ("models/polcy does not exist", "Did you mean policy?", "config.json")),
    "no_eos": Says("ModelError", ("models/no_eos", "no EOS token", "set eos_token in tokenizer_config.json")),
    "no_pad": Says("", ("run folder: runs/no_pad",), 0, left=True),
    "pickled": Says("ModelError", ("models/pickled", "pickled weights", "never opened", "save_pretrained")),
    "no_reward_model": Says("ModelNotFoundError", ("models/rewrd does not exist", "config.json and safetensors")),
    "plain_model": Says("ModelError", ("models/policy has no reward head", "train a reward model on it first")),
    "no_rule": Says("RewardError", ("rules.py:shrt", "Did you mean short?", "correct the name after the colon")),
    "nan_reward": Says(
        "RewardError",
        ("nan_in_step_2 returned nan for row 0", "response ", "return a finite number", "at step 2 of 4", "runs/nan"),
        left=True,
    ),
    "nan_reward_model": Says(
        "RewardError", ("returned nan for row 0", "train it again", "in the first evaluation"), left=True
    ),
    "nan_weights": Says("ModelError", ("models/nan_weights", "NaN or infinite", "norm.weight", "earlier checkpoint")),
    "wrong_number": Says(
        "RewardError", ("one_too_few returned 1 scores for 2 responses", "one float per response"), left=True
    ),
    "rule_raises": Says("RewardError", ("failed on row 0", "ZeroDivisionError: float division by zero"), left=True),
    "not_a_run": Says("CheckpointError", ("runs/min does not exist", "Did you mean mine?", "name the folder of a run")),
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return script.build_workspace(tmp_path_factory.mktemp("wrong").resolve())


@pytest.fixture(scope="module")
def outcomes(workspace: Path) -> dict[str, Any]:
    """Every case, in the order of the script: a later one may use what an earlier one made."""
    return {case.name: script.run_case(workspace, case) for case in script.CASES}


def test_every_case_of_the_script_is_judged_here() -> None:
    assert list(SAYS) == [case.name for case in script.CASES]


@pytest.mark.parametrize("name", SAYS)
def test_a_message_names_the_error_the_value_and_the_fix(outcomes: dict[str, Any], name: str) -> None:
    outcome, says = outcomes[name], SAYS[name]
    assert outcome.exit_code == says.exit_code
    if says.error:
        assert outcome.message.startswith(f"{says.error}: ")
    assert [words for words in says.words if words not in outcome.message] == []
    assert "Traceback" not in outcome.message


@pytest.mark.parametrize("name", SAYS)
def test_a_run_folder_is_left_only_where_the_run_had_begun(outcomes: dict[str, Any], name: str) -> None:
    assert bool(outcomes[name].left) == SAYS[name].left


@pytest.mark.parametrize("name", [name for name, says in SAYS.items() if says.error == "ModelNotFoundError"])
def test_a_missing_model_is_noticed_before_another_one_loads(
    workspace: Path, outcomes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("tutelage.build.kit.load_causal_lm", never)
    (case,) = [case for case in script.CASES if case.name == name]
    assert script.call(workspace, case.args).message == outcomes[name].message


def test_pickled_weights_run_no_code(workspace: Path, outcomes: dict[str, Any]) -> None:
    assert outcomes["pickled"].exit_code == 1
    assert not (workspace / "unpickled").exists()
    assert (workspace / "models" / "pickled" / "pytorch_model.bin").is_file()


def test_a_nan_reward_keeps_the_steps_and_samples_before_it_and_its_reason(
    workspace: Path, outcomes: dict[str, Any]
) -> None:
    assert outcomes["nan_reward"].left == ["runs/nan"]
    folder = workspace / "runs" / "nan"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "policy/loss" in line] == [1]
    samples = [json.loads(line) for line in (folder / "samples" / "before.jsonl").read_text().splitlines()]
    assert len(samples) == 2
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["kind"] == "error"]
    assert "nan_in_step_2 returned nan" in event["message"]


@pytest.mark.parametrize(
    ("room", "reason"), [(0.3, "it needs 266 kB"), (1.06, "No space left on device")], ids=["refused", "half-way"]
)
def test_a_full_disk_leaves_the_earlier_checkpoints_and_the_run_goes_on_when_there_is_room(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, room: float, reason: str
) -> None:
    seen: list[tuple[list[str], int]] = []
    original = script.hidden

    def look(folder: Path) -> list[str]:
        """While the disk is full: every checkpoint there opens in transformers."""
        for step in script.checkpoints(folder):
            model = AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / step / "model")
            seen.append((script.checkpoints(folder), model.config.vocab_size))
        return original(folder)

    monkeypatch.setattr(script, "hidden", look)
    failed, resumed = script.full_disk(workspace, room)
    if "simulated" in failed.facts[0]:
        reason = "No space left on device"
    assert failed.exit_code == 1
    assert failed.message.startswith(
        "CheckpointError: checkpoint disk/full/checkpoints/step_000003 cannot be written: "
    )
    for words in (reason, "the last good one is step_000002", "free disk space, then `tutelage resume` the run"):
        assert words in failed.message
    assert seen == [(["step_000001", "step_000002"], 98)] * 2
    assert "left of the failed one: nothing" in failed.facts
    assert resumed.exit_code == 0
    assert "checkpoints: step_000001, step_000002, step_000003, step_000004" in resumed.facts
    assert any(fact.startswith("metrics of the steps [1, 2, 3, 4]") for fact in resumed.facts)


def test_a_disk_that_fills_under_the_tokenizer_is_an_error_of_the_checkpoint_and_leaves_nothing(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tokenizers library raises for a full disk, seen on one that had 4 KiB left, is a bare Exception."""

    def full(*args: Any, **kwargs: Any) -> None:
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full)
    outcome = script.call(workspace, ("run", "sft.yaml", "name=tokenizer"))
    assert outcome.message.startswith("CheckpointError: checkpoint runs/tokenizer/checkpoints/step_000004 cannot")
    assert "No space left on device" in outcome.message
    assert script.hidden(workspace / "runs" / "tokenizer") == []


def test_the_reason_is_told_also_when_the_full_disk_takes_no_more_events(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tutelage.errors import CheckpointError
    from tutelage.reports.metrics_log import MetricsLog

    write = MetricsLog.event

    def full(log: MetricsLog, step: int, kind: str, message: str) -> None:
        if kind == "error":
            raise CheckpointError("cannot write events.jsonl")
        write(log, step, kind, message)

    monkeypatch.setattr(MetricsLog, "event", full)
    outcome = script.call(workspace, ("run", "ppo.yaml", "name=silent", script.with_rule("one_too_few")))
    assert outcome.message.startswith("RewardError: ")


def test_what_fails_after_the_last_step_has_lost_no_step(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tutelage.checkpoints import Checkpoints
    from tutelage.errors import CheckpointError

    def full(*args: Any) -> bool:
        raise CheckpointError("the best model cannot be written", fix="free disk space")

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save_best", full)
        failed = script.call(workspace, ("run", "sft.yaml", "name=late"))
    assert failed.exit_code == 1
    assert "its last checkpoint is step_000004. Go on with: tutelage resume runs/late" in failed.message
    resumed = script.call(workspace, ("resume", "runs/late"))
    assert resumed.exit_code == 0
    folder = workspace / "runs" / "late"
    assert (folder / "checkpoints" / "best" / "model" / "model.safetensors").is_file()
    assert [record["step"] for record in script.read_metrics(folder) if "time/step_s" in record] == [1, 2, 3, 4]


def test_a_run_folder_that_cannot_be_begun_is_not_left_behind(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tutelage import runfolder
    from tutelage.errors import CheckpointError

    def full(path: Path, value: Any) -> None:
        raise CheckpointError(f"cannot write {path}: No space left on device", fix="free space")

    monkeypatch.setattr(runfolder, "write_json", full)
    outcome = script.call(workspace, ("run", "sft.yaml", "name=nowhere"))
    assert outcome.message.startswith("CheckpointError: cannot write runs/nowhere/lineage.json")
    assert outcome.left == []


@pytest.fixture(scope="module")
def killed(workspace: Path) -> list[Any]:
    return script.killed_run(workspace)


@pytest.mark.slow
def test_kill_9_in_the_middle_of_a_step_leaves_the_steps_before_it(killed: list[Any]) -> None:
    first = killed[0]
    assert first.exit_code == -9
    assert first.facts == ["metrics of the steps [1, 2], samples: before", "checkpoints: step_000001, step_000002"]


@pytest.mark.slow
def test_resuming_with_other_data_is_refused_with_both_fingerprints(killed: list[Any], workspace: Path) -> None:
    refused = killed[1]
    then = json.loads((workspace / "runs" / "killed" / "lineage.json").read_text())["data"]["data"]
    assert refused.exit_code == 1
    assert refused.message.startswith("CheckpointError: the data of runs/killed changed since the run began")
    assert f"fingerprint {then[:12]}, now " in refused.message
    assert "put back what the run started from, or start a new run" in refused.message


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_its_end(killed: list[Any], workspace: Path) -> None:
    resumed = killed[2]
    assert resumed.exit_code == 0
    assert resumed.facts == ["metrics of the steps [1, 2, 3, 4], samples: after, before"]
    summary = json.loads((workspace / "runs" / "killed" / "summary.json").read_text())
    assert (summary["steps"], summary["stopped"]) == (4, None)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(workspace: Path) -> None:
    refused, resumed = script.damaged_checkpoint(workspace)
    assert refused.message.startswith(
        "CheckpointError: runs/damaged/checkpoints/step_000004/actor/rank_00000.safetensors cannot be read"
    )
    assert "delete this checkpoint folder and resume from the one before it" in refused.message
    assert resumed.exit_code == 0
