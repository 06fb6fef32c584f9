"""How far and when a reference follows, which cached logprobs a row gets, and whose keys the other side draws with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tutelage.algorithms import dpo, nash_md, online_dpo, xpo
from tutelage.config import DPOConfig, NashMDConfig, OnlineDPOConfig, XPOConfig
from tutelage.data.reference_cache import ReferenceTable
from tutelage.types import Prompts, Ragged, Sequences, Stat

BASE = {"model": {"path": "m"}, "data": {"train": "d"}}


class Recorded:
    """Roles that note how the reference is told to follow."""

    def __init__(self) -> None:
        self.alphas: list[float] = []
        self.actor = SimpleNamespace(whole_weights=lambda: {"w": torch.ones(1)})
        self.reference = SimpleNamespace(follow=self.follow)

    def follow(self, weights: dict[str, torch.Tensor], alpha: float) -> dict[str, Stat]:
        assert weights == self.actor.whole_weights()
        self.alphas.append(alpha)
        return {"reference_moved": Stat(0.0, 1)}

    def update(self, batch: Any, actor: Any) -> dict[str, Any]:
        return {"actor": {}}


def followed_at(module: Any, cfg: Any, steps: int) -> tuple[list[int], list[float]]:
    """The steps, counted from 1, after which the reference moved, and by which share."""
    roles, moved = Recorded(), []
    batch = SimpleNamespace(minibatches=lambda cfg, step: [None])
    state = module.initial_state(cfg)
    for step in range(steps):
        before = len(roles.alphas)
        module.learn(batch, roles, cfg, type(state)(**{**vars(state), "step": step}))
        moved += [step + 1] * (len(roles.alphas) > before)
    return moved, roles.alphas


@pytest.mark.parametrize(("alpha", "every", "moved"), [(0.25, 3, [3, 6]), (0.6, 1, [1, 2, 3, 4, 5, 6])])
def test_the_reference_of_dpo_moves_by_the_recipes_share_after_every_nth_step(
    alpha: float, every: int, moved: list[int]
) -> None:
    cfg = DPOConfig.model_validate({**BASE, "dpo": {"sync_every": every, "sync_alpha": alpha}})
    assert followed_at(dpo, cfg, 6) == (moved, [alpha] * len(moved))
    still = DPOConfig.model_validate({**BASE, "dpo": {}})
    assert followed_at(dpo, still, 6) == ([], [])


def test_the_reference_of_iterative_dpo_becomes_the_policy() -> None:
    cfg = OnlineDPOConfig.model_validate({**BASE, "online_dpo": {"reference_every": 2}})
    assert followed_at(online_dpo, cfg, 5) == ([2, 4], [1.0, 1.0])


# ---- reference logprobs in a file

ROWS = Sequences.build([[1], [1, 2], [3], [1]], [[5, 6], [7], [8, 9, 10], [5, 7]])
LOGP = Ragged(torch.tensor([-0.1, -0.2, -1.0, -2.1, -2.2, -2.3, -3.1, -3.2]), ROWS.response_lens)
OWN = [[-0.1, -0.2], [-1.0], [-2.1, -2.2, -2.3], [-3.1, -3.2]]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 1, 3], [3, 0]])
def test_every_row_gets_its_own_logprobs_whatever_the_order_of_the_batch(order: list[int], tmp_path: Path) -> None:
    made = ReferenceTable.of(ROWS, LOGP)
    made.save(tmp_path / "reference.safetensors", {"data": "d"})
    for table in (made, ReferenceTable.read(tmp_path / "reference.safetensors")):
        found = table.lookup(ROWS.select(torch.tensor(order)))
        assert [row.tolist() for row in found.rows()] == [pytest.approx(OWN[place]) for place in order]


def test_a_table_of_rows_that_came_in_another_order_says_the_same(tmp_path: Path) -> None:
    order = torch.tensor([2, 0, 3, 1])
    made = ReferenceTable.of(ROWS.select(order), LOGP.select(order))
    made.save(tmp_path / "reference.safetensors", {"data": "d"})
    found = ReferenceTable.read(tmp_path / "reference.safetensors").lookup(ROWS)
    assert [row.tolist() for row in found.rows()] == [pytest.approx(own) for own in OWN]


# ---- the other side of a pair


@pytest.mark.parametrize(("module", "config"), [(xpo, XPOConfig), (nash_md, NashMDConfig)])
def test_the_other_side_answers_the_same_prompts_with_keys_of_its_own(module: Any, config: Any) -> None:
    asked: dict[str, Prompts] = {}

    def side(name: str) -> Any:
        def generate(prompts: Prompts) -> str:
            asked[name] = prompts
            return name

        return SimpleNamespace(generate=generate, beside=lambda own, rival: (own, rival))

    prompts = Prompts(tokens=((1, 2), (3,)), ids=("a", "b"), truths=(None, None), messages=((), ()), step=4, n=2)
    roles = SimpleNamespace(actor=side("own"), reference=side("rival"))
    assert module.generate(prompts, roles, config.model_validate(BASE)) == ("own", "rival")
    own, rival = asked["own"], asked["rival"]
    assert own.purpose != rival.purpose, "else both would draw alike from equal weights"
    for name in ("tokens", "ids", "step", "n", "greedy"):
        assert getattr(own, name) == getattr(rival, name) == getattr(prompts, name), name
