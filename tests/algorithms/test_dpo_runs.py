"""Whole runs of the dpo stage: references that move, are in a file or are not there, resumed runs, far data."""

from __future__ import annotations

import json
import math
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from tutelage.build import RunResult, preference, resume_run, run_recipe
from tutelage.build.data import stage_data
from tutelage.build.stages import build_stage
from tutelage.config import load_checked
from tutelage.data.reference_cache import ReferenceTable
from tutelage.errors import ConfigError, DataError
from tutelage.reports.metrics_log import read_events, read_metrics
from tutelage.roles.cached_reference import CachedReference
from tutelage.roles.reference import Reference
from tutelage.types import Pairs, Ragged, Sequences

Run = Callable[..., RunResult]
VOLATILE = ("time", "memory/")
QUIET = "evaluation.distance_prompts=0"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    topics = ["tea", "cats", "rain", "bread", "music", "the sea", "bikes", "trees", "maps", "snow"]
    rows = [
        {"prompt": f"{v} {t}", "chosen": f"it is {t}.", "rejected": "no no"} for v in ("why", "what") for t in topics
    ]
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path, tiny_llama_folder: Path) -> Run:
    """run(overrides...): two steps an epoch; a later override replaces an earlier one."""

    def start(*overrides: str) -> RunResult:
        folder = tmp_path_factory.mktemp("runs")
        recipe = folder / "recipe.yaml"
        recipe.write_text("algorithm: dpo\nname: dpo\n")
        given = [f"output_dir={folder}", f"model.path={tiny_llama_folder}", f"data.train={data}", "dpo.batch_size=10"]
        given += ["data.eval_fraction=0.2", "optim.lr=1e-2", "optim.schedule=constant", *overrides]
        last = {text.split("=", 1)[0]: text for text in given}
        loaded, _ = load_checked(str(recipe), list(last.values()))
        return run_recipe(loaded, "plain")

    return start


def lasting(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(VOLATILE)} for row in read_metrics(folder)]


def steps(folder: Path) -> list[dict[str, Any]]:
    return [row for row in lasting(folder) if "dpo/loss" in row]


# ---- resumed runs


@pytest.mark.parametrize(
    "extra",
    [["dpo.loss=bco_pair"], ["dpo.sync_every=1", "dpo.sync_alpha=0.5"], ["dpo.loss=aot", "model.lora_rank=4"]],
    ids=["running mean", "moving reference", "coupled with lora"],
)
def test_a_resumed_run_repeats_the_rest_exactly(run: Run, extra: list[str]) -> None:
    result = run("dpo.epochs=2", "checkpoint.every=2", "checkpoint.keep=9", *extra)
    metrics = lasting(result.folder)
    last = max((result.folder / "checkpoints").glob("step_*"))
    assert last.name == "step_000004"
    roles = [role for role in ("actor", "reference") if (last / role).is_dir()]
    assert ("reference" in roles) == ("dpo.sync_every=1" in extra)
    before = {role: load_file(last / role / "rank_00000.safetensors") for role in roles}
    shutil.rmtree(last)
    shutil.rmtree(result.folder / "checkpoints" / "best")
    (result.folder / "summary.json").unlink()
    again = resume_run(result.folder, "plain")
    assert lasting(result.folder) == metrics
    assert again.summary["after"] == result.summary["after"]
    assert again.summary["data_distance"] == result.summary["data_distance"]
    for role, weights in before.items():
        after = load_file(last / role / "rank_00000.safetensors")
        assert all(torch.equal(weights[name], after[name]) for name in weights)


# ---- a reference that follows


def test_the_reference_moves_every_n_steps_and_the_held_out_loss_sees_it(run: Run) -> None:
    still = run("dpo.epochs=2", QUIET)
    moving = run("dpo.epochs=2", "dpo.sync_every=2", "dpo.sync_alpha=1", "evaluation.every=2", QUIET)
    assert steps(moving.folder)[0]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert ["dpo/reference_moved" in row for row in steps(moving.folder)] == [False, True, False, True]
    first, third = steps(moving.folder)[0], steps(moving.folder)[2]
    assert third["dpo/loss"] == pytest.approx(math.log(2), abs=1e-5), "alpha 1: the reference is the policy again"
    assert first["dpo/margin"] == pytest.approx(0.0, abs=1e-6)
    assert abs(steps(still.folder)[2]["dpo/loss"] - math.log(2)) > 1e-3
    synced = next(row for row in lasting(moving.folder) if row["step"] == 2)
    assert synced["eval/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert moving.summary["after"]["eval/loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_a_reference_that_cannot_move_is_refused(run: Run) -> None:
    for extra in (["model.lora_rank=4"], ["dpo.loss=simpo"], ["dpo.reference_free=true"]):
        with pytest.raises(ConfigError, match=r"dpo\.sync_every has no effect"):
            run("dpo.sync_every=2", *extra)


# ---- no reference


@pytest.mark.parametrize("extra", [["dpo.loss=orpo"], ["dpo.loss=simpo"], ["dpo.reference_free=true"]])
def test_no_reference_is_built_where_none_is_read(run: Run, extra: list[str], monkeypatch: Any) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("a reference was built")

    monkeypatch.setattr("tutelage.build.roles.reference", refuse)
    result = run(QUIET, "dpo.epochs=3", *extra)
    found = steps(result.folder)
    assert found[-1]["dpo/margin"] > found[0]["dpo/margin"]
    assert "reference" not in {name.rpartition("/")[2] for row in read_metrics(result.folder) for name in row}


# ---- reference logprobs in a file


def test_the_file_stands_for_the_reference(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "new" / "reference.safetensors"
    plain, made = run("dpo.epochs=2", QUIET), run("dpo.epochs=2", QUIET, f"dpo.reference_cache={path}")
    for ours, theirs in zip(lasting(made.folder), lasting(plain.folder), strict=True):
        assert ours.keys() == theirs.keys()
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert not list(path.parent.glob(".*partial"))
    written = path.read_bytes()

    def refuse(*args: Any) -> Any:
        raise AssertionError("a reference was built")

    monkeypatch.setattr("tutelage.build.roles.reference", refuse)
    again = run("dpo.epochs=2", QUIET, f"dpo.reference_cache={path}")
    assert lasting(again.folder) == lasting(made.folder)
    assert path.read_bytes() == written
    assert any("no reference is loaded" in e["message"] for e in read_events(again.folder))


def test_a_file_made_from_something_else_is_refused(
    run: Run, tmp_path: Path, data: Path, tiny_llama_two_eos_folder: Path
) -> None:
    path = tmp_path / "reference.safetensors"
    cache = f"dpo.reference_cache={path}"
    run("max_steps=1", QUIET, cache)
    other = tmp_path / "other.jsonl"
    other.write_text(data.read_text() + '{"prompt": "new", "chosen": "row", "rejected": "here"}\n')
    model = tmp_path / "model"
    shutil.copytree(tiny_llama_two_eos_folder, model)
    weights = load_file(model / "model.safetensors")
    save_file({k: v + 0.01 for k, v in weights.items()}, model / "model.safetensors", {"format": "pt"})
    for extra, word in (
        ([f"data.train={other}"], "data"),
        ([f"model.path={model}"], "model folder"),
        (["model.chat_template=plain"], "chat template"),
        (["data.max_response_tokens=6", "data.too_long=truncate", "data.max_bad_fraction=1"], "tokens of the rows"),
    ):
        with pytest.raises(DataError, match=f"what differs: .*{word}"):
            run("max_steps=1", QUIET, cache, *extra)
    with pytest.raises(ConfigError, match=r"dpo\.reference_cache has no effect"):
        run("max_steps=1", QUIET, cache, "dpo.loss=orpo")


def test_a_damaged_file_and_a_pickle_are_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "reference.safetensors"
    for content in (b"", b"\x80\x04\x95junk", b"not a tensor file at all, but longer than a header"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read"):
            run("max_steps=1", QUIET, f"dpo.reference_cache={path}")
    save_file({"keys": torch.zeros(2, 16, dtype=torch.uint8)}, path)
    with pytest.raises(DataError, match="does not say what it was made from"):
        run("max_steps=1", QUIET, f"dpo.reference_cache={path}")


class Answering:
    """A reference that says the length of what it reads."""

    def logprobs(self, batch: Any) -> Ragged:
        lens = batch.sequences.response_lens
        return Ragged(torch.arange(int(lens.sum())).float() - 50, lens)


def test_a_row_is_found_by_its_own_tokens_and_prompt_and_the_model_is_let_go(tmp_path: Path) -> None:
    chosen, rejected = Sequences.build([[1], [2, 3]], [[7, 8], [9]]), Sequences.build([[1], [2, 3]], [[8], [9, 9]])
    pairs = Pairs(chosen, rejected, torch.zeros(2), ("a", "b"))
    inner = Answering()
    role, gone = CachedReference(cast(Reference, inner)), weakref.ref(inner)
    found = role.logprobs(pairs)
    path = tmp_path / "table.safetensors"
    ReferenceTable.of(pairs.sequences, found).save(path, {"data": "d"})
    del inner
    role.use_table(str(path))
    assert gone() is None
    order = torch.tensor([1, 0])
    assert role.logprobs(pairs).flat.tolist() == found.flat.tolist()
    assert [row.tolist() for row in role.logprobs(pairs.select(order)).rows()] == [
        found.rows()[place].tolist() for place in (1, 0, 3, 2)
    ]
    other = Sequences.build([[1, 7], [2, 3]], [[8], [9]])  # the first has the tokens of a row, cut elsewhere
    with pytest.raises(DataError, match="1 of 4 rows have no reference logprobs in the cache, first row 0"):
        role.logprobs(Pairs(other, rejected, torch.zeros(2), ("a", "b")))


# ---- data far from the policy


def test_the_distance_of_the_data_is_measured_told_and_kept(run: Run) -> None:
    result = run("evaluation.distance_prompts=4", "evaluation.distance_warning=0.5")
    found = result.summary["data_distance"]
    below = found["own_samples_logp_per_token"] - found["chosen_logp_per_token"]
    assert found["chosen_below_own"] == pytest.approx(below)
    assert found["prompts"] == 4
    assert below > 0.5, "a model with random weights does not write these answers"
    (event,) = [e for e in read_events(result.folder) if e["kind"] == "data_distance"]
    assert f"{below:.2f} apart" in event["message"]
    calm = run("evaluation.distance_prompts=4", "evaluation.distance_warning=100")
    assert calm.summary["data_distance"] == found
    assert not [e for e in read_events(calm.folder) if e["kind"] == "data_distance"]


def test_the_distance_is_that_of_the_policy_on_its_own_samples(run: Run, data: Path, tiny_llama_folder: Path) -> None:
    """Pairs whose chosen answers are the policy's own samples lie 0 away, within the error of their mean."""
    from transformers import AutoTokenizer

    from tutelage.config.common import ModelConfig
    from tutelage.models.load import load_causal_lm
    from tutelage.rollout.inprocess.engine import InProcessRollout
    from tutelage.rollout.sampling import SamplingParams

    recipe_data = stage_data(config_of(data, tiny_llama_folder))
    model = load_causal_lm(ModelConfig(path=str(tiny_llama_folder)))
    params = SamplingParams(temperature=1.0, max_new_tokens=12, n=16)
    engine = InProcessRollout(model.model, AutoTokenizer.from_pretrained(tiny_llama_folder), (2,), params, seed=3)
    rollout = engine.complete(recipe_data.prepared.train.chosen.prompt_rows(), params)
    logp = rollout.rollout_logp.flat
    error = float(logp.std()) / len(logp) ** 0.5
    result = run("evaluation.distance_prompts=1000", "evaluation.distance_warning=100")
    own = result.summary["data_distance"]["own_samples_logp_per_token"]
    assert own == pytest.approx(float(logp.mean()), abs=6 * error + 0.3)


def config_of(data: Path, model: Path, *overrides: str) -> Any:
    recipe = data.parent / "plain.yaml"
    recipe.write_text("algorithm: dpo\n")
    loaded, _ = load_checked(str(recipe), [f"model.path={model}", f"data.train={data}", *overrides])
    return loaded.config


# ---- a function of the user's own


def test_a_loss_of_the_users_own_trains(run: Run, tmp_path: Path) -> None:
    module = tmp_path / "mine.py"
    module.write_text(
        "import torch\n"
        "def softer(x, cfg):\n"
        "    gap = cfg.beta * (x.log_ratio_chosen - x.log_ratio_rejected)\n"
        "    return torch.nn.functional.softplus(-gap / 2)\n"
        "def centred(x, cfg):\n"
        "    gap = x.log_ratio_chosen - x.log_ratio_rejected\n"
        "    return torch.nn.functional.softplus(gap.mean() - gap)\n"
    )
    result = run(f"dpo.loss={module}:softer", "dpo.epochs=2", QUIET)
    found = steps(result.folder)
    assert found[0]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert found[-1]["dpo/loss"] < found[0]["dpo/loss"]
    with pytest.raises(ConfigError, match="depends on the other pairs"):
        run(f"dpo.loss={module}:centred", QUIET)
    with pytest.raises(ConfigError, match="Did you mean softer"):
        run(f"dpo.loss={module}:sofer", QUIET)


# ---- what is asked before anything is loaded


def test_the_stage_knows_its_roles_and_states(data: Path, tiny_llama_folder: Path) -> None:
    cases: dict[tuple[str, ...], tuple[tuple[str, ...], tuple[str, ...]]] = {
        (): (("actor", "reference"), ("actor",)),
        ("dpo.sync_every=3",): (("actor", "reference"), ("actor", "reference")),
        ("dpo.loss=cpo",): (("actor",), ("actor",)),
        ("dpo.loss_weights={cpo: 1, sigmoid: 0.5}",): (("actor", "reference"), ("actor",)),
    }
    for overrides, (names, learners) in cases.items():
        cfg = config_of(data, tiny_llama_folder, *overrides)
        stage = build_stage(cfg, stage_data(cfg))
        assert (stage.names, stage.spec.learners) == (names, learners)
    cfg = config_of(data, tiny_llama_folder, f"dpo.reference_cache={data.parent}")
    with pytest.raises(ConfigError, match="a folder"):
        preference.cache_path(cfg)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["dpo.loss=sigmod"], "Did you mean sigmoid"),
        (["dpo.loss_weights={sigmod: 1}"], "Did you mean sigmoid"),
        (["dpo.loss_weights={sigmoid: 0}"], "above 0"),
        (
            ["dpo.loss=robust"],
            "dpo.label_smoothing must be above 0 for the loss robust: without it robust is sigmoid (",
        ),
        (["dpo.loss_weights={sigmoid: 1, robust: 1}"], "dpo.label_smoothing must be above 0 for the loss robust"),
        (["dpo.loss=exo_pair"], "infinite"),
        (["dpo.loss=alphapo", "dpo.alpha=0.0"], "alphapo is simpo"),
        (["dpo.loss=hinge", "dpo.label_smoothing=0.1"], "dpo.label_smoothing has no effect"),
        (["dpo.loss=simpo", "dpo.divergence=forward_kl"], "dpo.divergence has no effect"),
        (["dpo.divergence_alpha=0.3"], "dpo.divergence_alpha has no effect"),
        (["dpo.loss=aot", "dpo.weighting=wpo"], "dpo.weighting has no effect"),
        (["dpo.loss=simpo", "dpo.ld_alpha=0.3"], "dpo.ld_alpha has no effect"),
        (["dpo.tau=0.1"], "dpo.tau has no effect"),
        (["dpo.gamma=0.1"], "dpo.gamma has no effect"),
        (["dpo.loss=simpo", "dpo.alpha=0.1"], "dpo.alpha has no effect"),
        (["dpo.loss=hinge", "dpo.loss_weights={sigmoid: 1}"], "dpo.loss has no effect"),
        (["dpo.sync_alpha=0.5"], "dpo.sync_alpha has no effect"),
        ([QUIET, "evaluation.distance_warning=2.0"], "evaluation.distance_warning has no effect"),
    ],
)
def test_keys_that_cannot_work_or_do_nothing_are_refused(
    overrides: list[str], words: str, data: Path, tiny_llama_folder: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(data, tiny_llama_folder, *overrides)
    assert words in str(caught.value)
