"""A process reward model: its loss by hand, cuts and ranks on a tiny model, a run, and GRPO with it as the reward."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from spmd_kit import run_ranks

from tutelage.algorithms import reward_model
from tutelage.build import run_recipe
from tutelage.build.reward_models import STEPS_FILE, step_settings
from tutelage.config import RewardModelConfig, load_checked
from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.demo.model import build_model_folder
from tutelage.demo.steps import write_steps
from tutelage.engines.engine import ModelEngine
from tutelage.engines.mesh import RankMeshes
from tutelage.engines.ranks import MeshRanks
from tutelage.errors import ConfigError, ModelError
from tutelage.layout import Layout
from tutelage.models.load import load_scalar_model
from tutelage.types import Outputs, Pairs, Ragged, Sequences, StepLabels

KINDS = ("step_bce", "step_mse")
TOKEN_SCORES = torch.tensor([9.0, 0.5, -1.0, 9.0, 2.0])
LABELS = [[1.0, 0.25], [0.0]]


def config(**settings: Any) -> RewardModelConfig:
    return RewardModelConfig.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, "reward_model": settings})


def steps() -> StepLabels:
    marks = [[False, True, True], [False, True]]
    sequences = Sequences.build([[4], [5, 6]], [[7, 8, 9], [10, 11]], marks)
    return StepLabels(sequences, Ragged.from_rows([torch.tensor(row) for row in LABELS]), ("a", "b"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_scored_at_its_last_token(kind: str) -> None:
    loss, batch = reward_model.loss_of(config(loss=kind)), steps()
    items, stats = loss.items(Outputs(token_score=TOKEN_SCORES), batch)
    wanted = []
    for s, y in zip([0.5, -1.0, 2.0], [1.0, 0.25, 0.0], strict=True):
        p = 1 / (1 + math.exp(-s))
        wanted.append((s - y) ** 2 if kind == "step_mse" else -y * math.log(p) - (1 - y) * math.log(1 - p))
    assert items.tolist() == pytest.approx(wanted, rel=1e-6)
    weights = loss.weights(batch)
    assert weights.flat.tolist() == pytest.approx([1 / 3] * 3)
    assert weights.lens.tolist() == [2, 1], "the steps of one answer are one item"
    if kind == "step_bce":
        assert stats["accuracy"].mean == pytest.approx(2 / 3)
    else:
        assert "accuracy" not in stats
    counted = reward_model.advantages(batch, reward_model.RewardModelState(0), config(loss=kind))[2]
    assert {name: stat.mean for name, stat in counted.items()} == {"data/answers": 2, "data/steps": 3}


def test_tokens_that_end_no_step_are_not_read() -> None:
    loss, batch = reward_model.loss_of(config(loss="step_mse")), steps()
    odd = TOKEN_SCORES.clone()
    odd[[0, 3]] = math.nan
    found = loss.items(Outputs(token_score=odd), batch)[0]
    assert torch.equal(found, loss.items(Outputs(token_score=TOKEN_SCORES), batch)[0])


def test_pair_losses_read_the_margin_inside_or_as_a_factor() -> None:
    side = Sequences.build([[1], [2]], [[3], [4]])
    pairs = Pairs(side, side, torch.tensor([2.0, 0.5]), ("a", "b"))
    out = Outputs(score=torch.tensor([1.0, 0.0, 0.25, 0.5]))
    found = {
        name: reward_model.loss_of(config(centring=0.0, **settings)).items(out, pairs)[0].tolist()
        for name, settings in {
            "plain": {},
            "margin": {"use_margin": True},
            "scaled": {"loss": "scaled_bradley_terry"},
        }.items()
    }
    plain = [math.log(1 + math.exp(-0.75)), math.log(1 + math.exp(0.5))]
    assert found["plain"] == pytest.approx(plain)
    assert found["margin"] == pytest.approx([math.log(1 + math.exp(2 - 0.75)), math.log(1 + math.exp(0.5 + 0.5))])
    assert found["scaled"] == pytest.approx([2 * plain[0], 0.5 * plain[1]])


def engine_of(folder: Any, **changes: Any) -> ModelEngine:
    model = load_scalar_model(ModelConfig(path=str(folder)), "reward", pooling="last")
    return ModelEngine(model, OptimConfig(lr=1e-3, schedule="constant"), **changes)


def moved(folder: Any, order: list[int] | None = None, **changes: Any) -> dict[str, torch.Tensor]:
    batch = steps() if order is None else steps().select(torch.tensor(order))
    return engine_of(folder, **changes).gradients(batch, reward_model.StepLoss("step_bce"))


def on_two_ranks(rank: int, world: int, folder: str) -> dict[str, torch.Tensor]:
    return moved(folder, ranks=MeshRanks(RankMeshes().of(Layout(replicate=2))))


def test_the_gradient_depends_neither_on_cuts_order_nor_ranks(tiny_llama_folder: Any) -> None:
    whole = moved(tiny_llama_folder)
    assert sum(float(g.square().sum()) for g in whole.values()) > 0
    others = [
        moved(tiny_llama_folder, tokens_per_micro_batch=1),
        moved(tiny_llama_folder, [1, 0]),
        *run_ranks(on_two_ranks, 2, str(tiny_llama_folder)),
    ]
    for other in others:
        for name in whole:
            torch.testing.assert_close(other[name], whole[name], rtol=1e-4, atol=1e-6)


def test_a_step_is_scored_with_its_last_token_read_and_nothing_after_it(tiny_llama_folder: Any) -> None:
    engine = engine_of(tiny_llama_folder)
    scores = engine.token_scores(steps().sequences).rows()
    for row, upto in ((0, 2), (0, 3), (1, 2)):
        prompt = steps().sequences.prompt_rows()[row]
        alone = Sequences.build([prompt], [steps().sequences.response_rows()[row][:upto]])
        assert float(engine.scores(alone)) == pytest.approx(float(scores[row][upto - 1]), abs=1e-5)


# ---- whole runs


def sums(folder: Path) -> Path:
    """Chains of additions; a step that ends in the wrong digit is labelled so, and the right ones all end in x."""
    rows = []
    for number in range(24):
        labels = [(number + k) % 3 != 0 for k in range(3)]
        completions = [f"step {k}: {'x' if good else 'zz'}" for k, good in enumerate(labels)]
        rows.append({"prompt": f"add {number}", "completions": completions, "labels": labels})
    path = folder / "steps.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: Any, tiny_llama_folder: Path) -> Any:
    folder = tmp_path_factory.mktemp("steps")
    path = sums(folder)

    def load(algorithm: str, *overrides: str) -> Any:
        (folder / "recipe.yaml").write_text(f"algorithm: {algorithm}\nname: {algorithm}\n")
        own = [f"output_dir={folder}", f"model.path={tiny_llama_folder}"]
        own += [f"data.train={path}", "data.eval_fraction=0.25"]
        last = {text.split("=", 1)[0]: text for text in [*own, *overrides]}
        return load_checked(str(folder / "recipe.yaml"), list(last.values()))[0]

    return load


@pytest.fixture(scope="module")
def process_run(recipe: Any) -> Any:
    settings = ["reward_model.loss=step_bce", "reward_model.batch_size=9", "reward_model.epochs=12", "optim.lr=3e-3"]
    return run_recipe(recipe("reward_model", *settings), "plain")


@pytest.mark.slow
def test_a_run_learns_which_steps_are_right(process_run: Any) -> None:
    assert process_run.summary["after"]["eval/accuracy"] > 0.9
    assert process_run.summary["after"]["eval/loss"] < process_run.summary["before"]["eval/loss"]
    about = json.loads((process_run.best_model / STEPS_FILE).read_text())
    assert about == {"separator": "\n", "loss": "step_bce"}


@pytest.mark.slow
def test_it_is_a_reward_and_so_is_an_ensemble_with_it(process_run: Any, recipe: Any) -> None:
    from tutelage.reports.metrics_log import read_events, read_metrics

    model = process_run.best_model
    settings = [
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=2",
        "rollout.max_new_tokens=6",
        "grpo.minibatches=1",
        "evaluation.prompts=2",
        "max_steps=1",
        f"reward.model={model}",
        f"reward.ensemble=[{model},{model}]",
        "reward.combine=min",
        "reward.steps=product",
    ]
    result = run_recipe(recipe("grpo", *settings), "plain")
    (step,) = [m for m in read_metrics(result.folder) if "policy/loss" in m]
    assert 0 < step["reward/source/reward_ensemble"] < 1, "a product of probabilities"
    assert step["reward/source/reward_ensemble_std"] == 0, "two members that are one model"
    assert step["reward/score_mean"] == pytest.approx(2 * step["reward/source/reward_ensemble"])
    assert step["reward/source/reward_model"] == pytest.approx(step["reward/source/reward_ensemble"])
    notes = [e["message"] for e in read_events(result.folder) if e["kind"] == "model"]
    assert sum("a score is the product of its steps'" in note for note in notes) == 3


def test_what_cannot_work_is_refused(
    recipe: Any, tiny_bert_folder: Path, tiny_llama_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="must not be logexp"):
        recipe("reward_model", "reward_model.loss=logexp")
    with pytest.raises(ConfigError, match=r"reward_model.centring has no effect in this run"):
        recipe("reward_model", "reward_model.loss=step_mse", "reward_model.centring=0.1")
    with pytest.raises(ConfigError, match=r"reward_model.use_margin has no effect in this run"):
        recipe("reward_model", "reward_model.loss=scaled_bradley_terry", "reward_model.use_margin=true")
    with pytest.raises(ConfigError, match="must name two or more reward models"):
        recipe("grpo", f"reward.ensemble=[{tiny_llama_folder}]")
    one_step = [{"prompt": f"what {i}", "completions": ["the answer"], "labels": [i % 2 == 0]} for i in range(16)]
    (tmp_path / "one.jsonl").write_text("".join(json.dumps(row) + "\n" for row in one_step))
    encoder = (f"model.path={tiny_bert_folder}", f"data.train={tmp_path / 'one.jsonl'}")
    with pytest.raises(ModelError, match="is an encoder"):
        run_recipe(recipe("reward_model", "reward_model.loss=step_bce", *encoder), "plain")
    with pytest.raises(ConfigError, match="is no process reward model"):
        step_settings("reward.model", str(tiny_llama_folder), "last")


@pytest.mark.slow
def test_the_demo_recipe_takes_steps_on_the_demo_data(tmp_path: Path) -> None:
    train, held_out = write_steps(tmp_path / "data", 0, (40, 16))
    model = build_model_folder(tmp_path / "model", 0)
    own = [f"output_dir={tmp_path}", f"model.path={model}", "reward_model.batch_size=16", "max_steps=3"]
    data = [f"data.train={train}", f"data.eval={held_out}", "optim.warmup_steps=0"]
    result = run_recipe(load_checked("demo_process_reward", [*own, *data])[0], "plain")
    assert result.summary["steps"] == 3
    assert result.summary["after"]["eval/loss"] < result.summary["before"]["eval/loss"]
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    assert all(len(row["completions"]) == len(row["labels"]) for row in rows)
    assert {label for row in rows for label in row["labels"]} == {True, False}
    assert not {row["prompt"] for row in rows} & {json.loads(x)["prompt"] for x in held_out.read_text().splitlines()}
