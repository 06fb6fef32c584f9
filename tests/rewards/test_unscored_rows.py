"""A response without a score leaves the advantages of the others as if it were not there."""

from __future__ import annotations

import math

import pytest
import torch
from rewards_kit import make_rollout

from tutelage.algorithms import grpo, ppo
from tutelage.config import GRPOConfig, PPOConfig
from tutelage.types import Ragged, Scores

MADE = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"rules": [{"function": "regex"}]}}
LENGTHS = (3, 1, 2, 4, 2, 3)


def scored_batch(scores, errors, keep=None):
    """Six responses of two groups with every column, those of `keep` only."""
    torch.manual_seed(0)
    rollout = make_rollout([[1, 2]] * 6, [[5] * n for n in LENGTHS], [str(i) for i in range(6)])
    lens = rollout.sequences.response_lens
    total = torch.tensor(scores)
    old = torch.randn(int(lens.sum()))
    batch = rollout.adding(
        rollout_logp=Ragged(old, lens),
        old_logp=Ragged(old, lens),
        ref_logp=Ragged(old + 0.1 * torch.randn(len(old)), lens),
        value=Ragged(torch.randn(int(lens.sum()) + 6), lens + 1),
        score=Scores(total[:, None], total, ("r",), (1.0,), errors),
        group=torch.tensor([0, 0, 0, 1, 1, 1]),
    )
    return batch if keep is None else batch.select(torch.tensor(keep))


@pytest.mark.parametrize("stage", ["grpo", "ppo"])
def test_the_other_rows_are_as_if_it_were_not_there(stage):
    algorithm, schema = {"grpo": (grpo, GRPOConfig), "ppo": (ppo, PPOConfig)}[stage]
    cfg = schema(**MADE, kl={"coef": 0.1})
    scores = [1.0, math.nan, 0.5, 0.0, 2.0, 1.0]
    others = [0, 2, 3, 4, 5]
    state = algorithm.initial_state(cfg)
    whole, _, stats = algorithm.advantages(scored_batch(scores, ("", "late", "", "", "", "")), state, cfg)
    alone, _, known = algorithm.advantages(scored_batch(scores, ("",) * 6, others), state, cfg)
    without = whole.select(torch.tensor(others))
    torch.testing.assert_close(without.advantage.flat, alone.advantage.flat)
    assert whole.advantage.rows()[1].tolist() == [0.0]
    assert whole.counted.tolist() == [True, False, True, True, True, True]
    names = ["reward/score_mean", "reward/score_std", "reward/source/r", "reward/rlhf"]
    assert {n: stats[n].mean for n in names} == pytest.approx({n: known[n].mean for n in names})
    assert stats["reward/errors"].mean == 1
    assert "reward/errors" not in known
    if stage == "ppo":
        torch.testing.assert_close(without.ret.flat, alone.ret.flat)
        assert stats["value/explained_variance"].mean == pytest.approx(known["value/explained_variance"].mean)
        weights = ppo.ValueLoss(cfg).weights(whole).rows()
        assert weights[1].tolist() == [0.0]


def test_a_step_in_which_nothing_has_a_score_teaches_nothing():
    cfg = PPOConfig(**MADE)
    batch = scored_batch([math.nan] * 6, ("late",) * 6)
    scored, _, stats = ppo.advantages(batch, ppo.initial_state(cfg), cfg)
    assert not scored.advantage.flat.any()
    assert not scored.counted.any()
    assert stats["reward/errors"].mean == 6
