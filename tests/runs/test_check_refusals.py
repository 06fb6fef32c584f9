"""What `check` refuses before a weight is loaded: no truths, reward models that are none, answers of one kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tutelage.build import check_recipe, run_recipe
from tutelage.config import load_checked
from tutelage.config.common import ModelConfig
from tutelage.errors import ConfigError, DataError, ModelError, RewardError, TutelageError
from tutelage.models.load import load_scalar_model
from tutelage.rewards.calls import ONE, manner_of
from tutelage.rewards.library import BUILTIN_RULES, NEED_TRUTHS
from tutelage.rewards.loading import load_rule

Check = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("tutelage.build.kit.load_causal_lm", never)
    monkeypatch.setattr("tutelage.build.kit.load_scalar_model", never)


@pytest.fixture
def check(tmp_path: Path, tiny_llama_folder: Path) -> Check:
    """check(algorithm, overrides..., command=...): of a recipe in the test's folder, on the tiny model."""

    def say(algorithm: str, *overrides: str, command: Callable[..., Any] = check_recipe) -> Any:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"algorithm: {algorithm}\nname: r\n")
        given = [f"output_dir={tmp_path}", f"model.path={tiny_llama_folder}", *overrides]
        last = {text.partition("=")[0]: text for text in given}
        return command(load_checked(str(recipe), list(last.values()))[0])

    return say


def rows(path: Path, truths: list[Any]) -> str:
    made = [{"prompt": f"what is {i}", **({} if t is None else {"truth": t})} for i, t in enumerate(truths)]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(path)


def rule(name: str, **more: Any) -> str:
    return "reward.rules=" + json.dumps([{"function": name, **more}])


# ---- truths

FEW = ("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_new_tokens=4", "kl.coef=0")


def test_the_rules_that_need_truths_are_those_that_refuse_a_row_without_one() -> None:
    settings = {
        "regex": {"pattern": "a"},
        "contains": {"texts": ["a"]},
        "soft_overlong": {"limit": 10, "buffer": 5},
        "json_schema": {"schema": {}},
    }
    row = {"prompt": "p", "messages": [], "response": "1", "truth": None, "tokens": 1, "finished": True}
    assert set(row) == set(ONE)
    refuse = set()
    for name in BUILTIN_RULES:
        made = load_rule(name, settings=settings.get(name))
        try:
            made(**{asked: row[asked] for asked in manner_of(made, name).names})
        except RewardError as error:
            refuse.add(name if "no ground truth" in error.what else f"{name}: {error.what}")
    assert refuse == NEED_TRUTHS


@pytest.mark.parametrize("command", [check_recipe, run_recipe], ids=["check", "run"])
def test_a_rule_without_its_truths_is_refused_with_rule_file_and_number(
    check: Check, tmp_path: Path, command: Callable[..., Any]
) -> None:
    train = rows(tmp_path / "some.jsonl", ["1", None, "3", None, "5"])
    with pytest.raises(DataError) as caught:
        check("grpo", *FEW, f"data.train={train}", "data.eval_fraction=0", rule("exact_match"), command=command)
    assert caught.value.what == f"reward rule exact_match needs a truth, and 2 of 5 rows of {train} have none"
    assert "data.columns={its name: truth}" in caught.value.fix
    assert "reward.on_error=skip" in caught.value.fix


@pytest.mark.parametrize("name", ["math_answer", "numeric_match(tolerance=0.1)"])
def test_held_out_rows_are_looked_at_too_as_far_as_they_are_answered(check: Check, tmp_path: Path, name: str) -> None:
    train, held = rows(tmp_path / "t.jsonl", ["1", "2"]), tmp_path / "h.jsonl"
    held.write_text("".join(json.dumps({"prompt": f"why {i}"}) + "\n" for i in range(3)))
    given = (*FEW, f"data.train={train}", f"data.eval={held}", "evaluation.prompts=2")
    with pytest.raises(DataError) as caught:
        check("grpo", *given, rule(name))
    assert caught.value.what == f"reward rule {name} needs a truth, and 2 of 2 held-out rows of {held} have none"
    judge = "evaluation.rules=" + json.dumps([{"name": "right", "function": name}])
    with pytest.raises(DataError, match=r"^evaluation rule .* needs a truth, and 2 of 2 held-out rows"):
        check("grpo", *given, rule("length_range(low=1)"), judge)


def test_under_skip_some_rows_may_lack_the_truth_and_it_is_said(check: Check, tmp_path: Path) -> None:
    some, none = rows(tmp_path / "s.jsonl", ["1", None, "3"]), rows(tmp_path / "n.jsonl", [None] * 3)
    given = (*FEW, "data.eval_fraction=0", "reward.on_error=skip", rule("exact_match"))
    lines = check("grpo", *given, f"data.train={some}")
    assert (
        f"reward rule exact_match needs a truth, and 1 of 3 rows of {some} have none: responses to them are left out"
        in lines
    )
    with pytest.raises(DataError, match="3 of 3 rows") as caught:
        check("grpo", *given, f"data.train={none}")
    assert "skip" not in caught.value.fix


def test_beside_an_environment_a_reward_rule_still_stops_a_run_and_an_evaluation_rule_does_not(
    check: Check, tmp_path: Path
) -> None:
    train = rows(tmp_path / "s.jsonl", ["1", None, "3", "4"])
    game = "environment.functions={sum: 'calculator(role=\"user\")'}"
    given = (*FEW, f"data.train={train}", "data.eval_fraction=0", game)
    with pytest.raises(DataError, match="reward rule exact_match needs a truth, and 1 of 4"):
        check("grpo", *given, rule("exact_match"))


def test_a_rule_of_the_users_own_may_do_without_and_is_told_of(check: Check, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def asks(response, truth):\n    return 1.0\n\n\ndef free(response):\n    return 1.0\n"
    )
    none = rows(tmp_path / "n.jsonl", [None] * 3)
    given = (*FEW, f"data.train={none}", "data.eval_fraction=0")
    asking = [line for line in check("grpo", *given, rule("own.py:asks")) if "asks for the truth" in line]
    assert len(asking) == 1
    assert f"none of the rows of {none} has one: it gets None" in asking[0]
    assert not any("asks for the truth" in line for line in check("grpo", *given, rule("own.py:free")))
    some = rows(tmp_path / "s.jsonl", [None, "1"])
    assert not any(
        "asks for the truth" in line for line in check("grpo", *given, f"data.train={some}", rule("own.py:asks"))
    )


def test_rules_that_need_none_pass(check: Check, tmp_path: Path) -> None:
    none = rows(tmp_path / "n.jsonl", [None] * 3)
    assert check("grpo", *FEW, f"data.train={none}", "data.eval_fraction=0", rule("length_range(low=1)"))


def test_a_built_in_environment_is_begun_with_its_rows(check: Check, tmp_path: Path) -> None:
    given = (*FEW, "data.eval_fraction=0", "environment.functions={sum: 'calculator(role=\"user\")'}")
    none, some = rows(tmp_path / "n.jsonl", [None] * 2), rows(tmp_path / "s.jsonl", ["3", "many"])
    with pytest.raises(
        DataError, match=r"environment sum cannot begin with 2 of 2 rows of .*n\.jsonl: the truth of"
    ) as e:
        check("grpo", *given, f"data.train={none}")
    assert "give a number as its truth" in e.value.fix
    assert any("cannot begin with 1 of 2 rows" in line for line in check("grpo", *given, f"data.train={some}"))


# ---- reward models


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory: pytest.TempPathFactory, tiny_llama_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "model"
    load_scalar_model(ModelConfig(path=str(tiny_llama_folder)), "reward").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("which", ["reward.model", "reward.ensemble"])
@pytest.mark.parametrize("command", [check_recipe, run_recipe], ids=["check", "run"])
def test_a_reward_model_without_a_head_is_refused(
    check: Check, files: dict[str, Path], tiny_llama_folder: Path, reward_folder: Path, which: str,
    command: Callable[..., Any],
) -> None:  # fmt: skip
    given = tiny_llama_folder if which == "reward.model" else f"[{reward_folder},{tiny_llama_folder}]"
    key = which if which == "reward.model" else "reward.ensemble[1]"
    with pytest.raises(ModelError) as caught:
        check("grpo", *FEW, f"data.train={files['prompts']}", f"{which}={given}", command=command)
    assert caught.value.what.startswith(f"{key} {tiny_llama_folder} has no reward head")
    assert "algorithm: reward_model" in caught.value.fix


def test_a_critic_is_no_reward_model(
    check: Check, files: dict[str, Path], tmp_path: Path, tiny_llama_folder: Path
) -> None:
    load_scalar_model(ModelConfig(path=str(tiny_llama_folder)), "value").save_pretrained(tmp_path / "critic")
    with pytest.raises(ModelError, match=r"^reward\.model .*critic is a critic, not a reward model"):
        check("grpo", *FEW, f"data.train={files['prompts']}", f"reward.model={tmp_path / 'critic'}")


@pytest.mark.parametrize("which", ["reward.model", "reward.ensemble"])
def test_scores_of_steps_need_the_file_of_steps(
    check: Check, files: dict[str, Path], reward_folder: Path, which: str
) -> None:
    given = reward_folder if which == "reward.model" else f"[{reward_folder},{reward_folder}]"
    common = (*FEW, f"data.train={files['prompts']}", f"{which}={given}")
    assert check("grpo", *common)
    with pytest.raises(ConfigError, match=r"reward\.steps is min, but .* is no process reward model"):
        check("grpo", *common, "reward.steps=min")


def test_a_broken_file_of_steps_is_refused(
    check: Check, files: dict[str, Path], tmp_path: Path, tiny_llama_folder: Path
) -> None:
    folder = tmp_path / "steps"
    load_scalar_model(ModelConfig(path=str(tiny_llama_folder)), "reward").save_pretrained(folder)
    given = (*FEW, f"data.train={files['prompts']}", f"reward.model={folder}", "reward.steps=min")
    for text, said in (('{"separator": "\\n"}', "does not say loss"), ("{", "cannot be read")):
        (folder / "tutelage_steps.json").write_text(text)
        with pytest.raises(ModelError, match=said):
            check("grpo", *given)
    (folder / "tutelage_steps.json").write_text('{"separator": "\\n", "loss": "step_bce"}')
    assert check("grpo", *given)


# ---- one kind of answers


@pytest.mark.parametrize(("label", "kind"), [(True, "desirable"), (False, "undesirable")])
def test_bco_needs_both_kinds_of_answers(check: Check, tmp_path: Path, label: bool, kind: str) -> None:
    path = tmp_path / "a.jsonl"
    made = [{"prompt": f"p {i}", "completion": f"c {i}", "label": label} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    given = (f"data.train={path}", "data.eval_fraction=0", "kto.batch_size=2")
    with pytest.raises(DataError) as caught:
        check("kto", *given, "kto.loss=bco")
    assert caught.value.what.startswith(f"all 6 training rows of {path} are {kind}, and kto.loss is bco")
    for loss in ("kto", "apo_zero_unpaired"):
        assert any("in one direction only" in line for line in check("kto", *given, f"kto.loss={loss}"))


@pytest.mark.parametrize("loss", ["step_bce", "step_mse"])
def test_steps_with_one_label_are_refused(check: Check, tmp_path: Path, loss: str) -> None:
    path = tmp_path / "s.jsonl"

    def write(last: int) -> None:
        made = [{"prompt": f"p {i}", "completions": ["a", "b"], "labels": [1, 1]} for i in range(4)]
        made[-1]["labels"] = [1, last]
        path.write_text("".join(json.dumps(row) + "\n" for row in made))

    given = (f"data.train={path}", "data.eval_fraction=0", f"reward_model.loss={loss}")
    write(1)
    with pytest.raises(
        DataError, match=r"all 8 step labels of the training rows of .* are 1: there is nothing to tell"
    ):
        check("reward_model", *given)
    write(0)
    assert check("reward_model", *given)


# ---- whose rule


def test_messages_name_the_gold_function_and_the_rules_of_the_evaluation(
    check: Check, files: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text("NUMBER = 3\n")
    given = (*FEW, f"data.train={files['prompts']}", rule("length_range(low=1)"))
    for gold, said in (
        ("nosuch:f", "evaluation.gold 'nosuch:f': importing nosuch failed"),
        ("own.py:gold", "holds nothing named 'gold'"),
        ("own.py:NUMBER", "is a int, not a function"),
        ("plain", "evaluation.gold is 'plain', which names no function of yours"),
    ):
        with pytest.raises(TutelageError) as caught:
            check("grpo", *given, f"evaluation.gold={gold}")
        assert caught.value.what.startswith("evaluation.gold")
        assert said in caught.value.what
        assert "reward rule" not in str(caught.value)
    with pytest.raises(RewardError, match=r"^evaluation rule 'regx' is neither built in .* Did you mean regex\?"):
        check("grpo", *given, "evaluation.rules=[{name: a, function: regx}]")
    with pytest.raises(RewardError, match=r"^reward rule 'regx'"):
        check("grpo", *given[:-1], rule("regx"))
