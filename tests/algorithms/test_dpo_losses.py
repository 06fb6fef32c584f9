"""Every preference loss through an engine: one gradient however the mini-batch is cut, ordered or split over ranks."""

from __future__ import annotations

import math
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import dpo_kit
from dpo_kit import config, settings_for
from spmd_kit import run_ranks

from tutelage.algorithms.preference import (
    CoupledPreferenceLoss,
    PreferenceLoss,
    RewardMean,
    preference_loss,
    trained_position,
)
from tutelage.config.dpo import COUPLED, LOSS_READS
from tutelage.protocols import CoupledLoss, SeparableLoss
from tutelage.types import Outputs, Pairs, Ragged, Sequences, Stat

RECIPES: dict[str, dict[str, Any]] = {
    **{name: settings_for(name) for name in LOSS_READS},
    "length desensitised": settings_for("sigmoid", ld_alpha=0.3),
    "wpo": settings_for("sigmoid", weighting="wpo"),
    "wpo aligned": settings_for("hinge", weighting="wpo_aligned"),
    "rpo": settings_for("sigmoid", nll_coef=0.7),
    "forward kl": settings_for("sigmoid", divergence="forward_kl"),
    "reference free": settings_for("ipo", reference_free=True),
    "several": {"loss_weights": {"sigmoid": 0.8, "bco_pair": 0.2, "aot": 0.5}, "beta": 0.3, "nll_coef": 0.1},
}
ORDER = torch.tensor([3, 0, 4, 1, 2])


def require_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    size = math.sqrt(sum(float(g.double().square().sum()) for g in theirs.values()))
    gap = math.sqrt(sum(float((ours[n] - theirs[n]).double().square().sum()) for n in theirs))
    assert size > 1e-4
    assert gap <= 2e-5 * size


@pytest.fixture(scope="module")
def whole(tiny_llama_folder: Path) -> dict[str, Any]:
    """(gradients, statistics) of each recipe, the mini-batch in one piece, in one process."""
    engine, found = dpo_kit.engine(tiny_llama_folder, 1000), {}
    for name, settings in RECIPES.items():
        batch, loss = dpo_kit.pairs(settings), preference_loss(config(**settings).dpo)
        found[name] = (engine.gradients(batch, loss), engine.evaluate(batch, loss))
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_micro_batches_and_order_change_nothing(name: str, whole: dict[str, Any], tiny_llama_folder: Path) -> None:
    settings = RECIPES[name]
    batch, loss = dpo_kit.pairs(settings), preference_loss(config(**settings).dpo)
    gradients, stats = whole[name]
    engine = dpo_kit.engine(tiny_llama_folder, 1)
    require_close(engine.gradients(batch, loss), gradients)
    require_close(engine.gradients(batch.select(ORDER), loss), gradients)
    cut = engine.evaluate(batch.select(ORDER), loss)
    assert cut.keys() == stats.keys()
    for key, stat in stats.items():
        assert cut[key].mean == pytest.approx(stat.mean, rel=1e-5, abs=1e-6), key
    assert isinstance(loss, CoupledLoss) == (name in (*COUPLED, "several"))
    assert isinstance(loss, SeparableLoss) != isinstance(loss, CoupledLoss)
    assert pickle.loads(pickle.dumps(loss)) == loss


def test_a_split_over_two_ranks_changes_nothing(whole: dict[str, Any], tiny_llama_folder: Path) -> None:
    for ours in run_ranks(dpo_kit.split_gradients, 2, tiny_llama_folder, list(RECIPES.values())):
        for found, (gradients, stats) in zip(ours, whole.values(), strict=True):
            require_close(found["gradients"], gradients)
            wanted = {key: stat.mean for key, stat in stats.items()}
            assert found["stats"] == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["length desensitised", "wpo", "wpo aligned", "rpo", "forward kl", "reference free"])
def test_each_addition_changes_the_gradient(name: str, whole: dict[str, Any]) -> None:
    base = {"wpo aligned": "hinge", "reference free": "ipo"}.get(name, "sigmoid")
    assert any(float((whole[name][0][n] - g).abs().max()) > 1e-3 for n, g in whole[base][0].items())


# ---- what a pair is made of

CHOSEN = [-1.0, -2.0, -0.5, -3.0]
REJECTED = [-0.9, -1.1]
REF = [-1.5, -1.0, -0.5, -2.0, -0.2, -1.6]


def one_pair(hole: bool = False) -> Pairs:
    """A chosen answer of four tokens (the second may be a hole), a rejected one of two."""
    chosen = Sequences.build([[1]], [[11, 12, 13, 14]], [[True, not hole, True, True]])
    batch = Pairs(chosen, Sequences.build([[1]], [[21, 22]]), torch.zeros(1), ("a",))
    return batch.adding(ref_logp=Ragged(torch.tensor(REF), batch.sequences.response_lens))


def value(settings: dict[str, Any], batch: Pairs, **outputs: Any) -> tuple[float, Any]:
    loss = preference_loss(config(**settings).dpo)
    assert isinstance(loss, PreferenceLoss)
    items, stats = loss.items(Outputs(logp=torch.tensor([*CHOSEN, *REJECTED]), **outputs), batch)
    return items.item(), stats


def nls(z: float) -> float:
    return math.log1p(math.exp(-z))


@pytest.mark.parametrize("hole", [False, True])
def test_ld_dpo_weighs_the_tail_of_the_longer_answer_in_policy_and_reference(hole: bool) -> None:
    found, _ = value({"ld_alpha": 0.25, "beta": 0.5}, one_pair(hole))
    gaps = [a - b for a, b in zip(CHOSEN, REF[:4], strict=True)]
    kept = [gaps[0], gaps[2], gaps[3]] if hole else gaps
    chosen = sum(kept[:2]) + 0.25 * sum(kept[2:])
    rejected = sum(a - b for a, b in zip(REJECTED, REF[4:], strict=True))
    assert found == pytest.approx(nls(0.5 * (chosen - rejected)), rel=1e-6)
    without, _ = value({"beta": 0.5}, one_pair(hole))
    assert abs(found - without) > 1e-3


def test_wpo_weighs_the_pair_with_the_policys_own_mean_logprobs() -> None:
    plain, _ = value({"beta": 0.5}, one_pair())
    found, stats = value({"beta": 0.5, "weighting": "wpo"}, one_pair())
    weight = math.exp(sum(CHOSEN) / 4 + sum(REJECTED) / 2)
    assert found == pytest.approx(weight * plain, rel=1e-6)
    assert stats["pair_weight"].mean == pytest.approx(weight)
    collision = [-0.3, -0.2, -0.1, -0.4, -0.6, -0.8]
    aligned, _ = value({"beta": 0.5, "weighting": "wpo_aligned"}, one_pair(), log_collision=torch.tensor(collision))
    shift = -sum(collision[:4]) / 4 - sum(collision[4:]) / 2
    assert aligned == pytest.approx(math.exp(shift) * weight * plain, rel=1e-6)
    assert preference_loss(config(weighting="wpo_aligned").dpo).outputs == {"logp", "log_collision"}


def test_rpo_adds_the_chosen_nll_per_token_and_cpo_and_orpo_have_their_own() -> None:
    plain, _ = value({}, one_pair(hole=True))
    found, stats = value({"nll_coef": 0.7}, one_pair(hole=True))
    nll = -(CHOSEN[0] + CHOSEN[2] + CHOSEN[3]) / 3
    assert found == pytest.approx(plain + 0.7 * nll)
    assert stats["nll"].mean == pytest.approx(nll)
    for name in ("cpo", "orpo"):
        whole_, _ = value({"loss": name}, one_pair(hole=True))
        bare, _ = value({"loss": name, "nll_coef": 0.0}, one_pair(hole=True))
        assert whole_ == pytest.approx(bare + nll)


def test_rewards_are_in_the_units_of_the_loss() -> None:
    gap = sum(CHOSEN) - sum(REF[:4])
    wanted = {"sigmoid": 0.1 * gap, "ipo": 0.1 * gap / 4, "cpo": 0.1 * sum(CHOSEN), "simpo": 0.1 * sum(CHOSEN) / 4}
    wanted |= {"orpo": 0.1 * sum(CHOSEN) / 4, "alphapo": 0.1 * (1 - math.exp(-0.25 * sum(CHOSEN) / 4)) / 0.25}
    for name, reward in wanted.items():
        _, stats = value({"loss": name}, one_pair())
        assert stats["reward_chosen"].mean == pytest.approx(reward, rel=1e-5), name
        assert stats["margin"].mean == pytest.approx(stats["reward_chosen"].mean - stats["reward_rejected"].mean)


def test_an_answer_without_trained_tokens_is_not_a_number_and_never_a_silent_zero() -> None:
    chosen = Sequences.build([[1]], [[11]], [[False]])
    batch = Pairs(chosen, Sequences.build([[1]], [[21, 22]]), torch.zeros(1), ("a",))
    loss = preference_loss(config(loss="simpo").dpo)
    assert isinstance(loss, PreferenceLoss)
    items, _ = loss.items(Outputs(logp=torch.tensor([-1.0, -2.0, -3.0])), batch)
    assert math.isnan(items.item()), "the engine refuses it with the pair's number; data preparation drops such rows"


def test_trained_positions_start_anew_in_every_row_and_skip_holes() -> None:
    flags = torch.tensor([True, False, True, True, True, False, True])
    assert trained_position(Ragged(flags, torch.tensor([4, 0, 3]))).tolist() == [0, 1, 1, 2, 0, 1, 1]


# ---- bco_pair's running mean


def test_delta_is_the_mean_reward_of_all_answers_so_far() -> None:
    batch = dpo_kit.pairs(settings_for("bco_pair"))
    loss = preference_loss(config(loss="bco_pair", beta=0.5).dpo, rewards_total=3.0, rewards_count=4.0)
    assert isinstance(loss, CoupledPreferenceLoss)
    logp = -torch.rand(int(batch.sequences.response_lens.sum()), generator=torch.Generator().manual_seed(1))
    columns = loss.scalars(Outputs(logp=logp), batch)
    found, stats = loss.couple(columns, batch)
    rewards = (
        [0.5 * (row[0] - row[2]) for row in columns.tolist()],
        [0.5 * (row[1] - row[3]) for row in columns.tolist()],
    )
    delta = (3.0 + sum(rewards[0]) + sum(rewards[1])) / (4 + 2 * len(batch))
    wanted = [nls(c - delta) + nls(delta - r) for c, r in zip(*rewards, strict=True)]
    assert found.item() == pytest.approx(sum(wanted) / len(wanted), rel=1e-5)
    assert stats["delta"].mean == pytest.approx(delta, rel=1e-5)


class Later:
    def __init__(self, stats: dict[str, Stat]) -> None:
        self.stats = stats

    def gather(self) -> dict[str, Stat]:
        return self.stats


def test_the_running_mean_takes_every_update_once_and_survives_a_checkpoint() -> None:
    mean = RewardMean()
    mean.after(Later({"reward_chosen": Stat(6.0, 2), "reward_rejected": Stat(-1.0, 2)}))
    assert (mean.total, mean.count) == (0.0, 0.0), "nothing is waited for before it is needed"
    mean.after(Later({"reward_chosen": Stat(1.0, 2), "reward_rejected": Stat(0.0, 2)}))
    assert (mean.total, mean.count) == (5.0, 4.0)
    assert mean.state_dict() == {"total": 6.0, "count": 8.0}
    assert mean.state_dict() == {"total": 6.0, "count": 8.0}


# ---- a reference that follows


def test_shards_of_a_reference_follow_whole_weights_and_come_back_from_a_file(
    tiny_llama_folder: Path, tmp_path: Path
) -> None:
    start = dict(dpo_kit.engine(tiny_llama_folder, 100).named_weights())
    mine = run_ranks(dpo_kit.followed_weights, 2, tiny_llama_folder, 0.25, tmp_path / "reference")
    for found in mine:
        for name, tensor in start.items():
            wanted = 0.25 * (2 * tensor) + 0.75 * tensor
            torch.testing.assert_close(found["followed"][name], wanted, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(found["loaded"][name], found["followed"][name], rtol=0, atol=0)
            torch.testing.assert_close(found["start"][name], tensor, rtol=0, atol=0)
        squares = sum(float((0.25 * t).double().square().sum()) for t in unique(start))
        count = sum(t.numel() for t in unique(start))
        assert found["moved"] == pytest.approx(math.sqrt(squares / count), rel=1e-5)


def unique(weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Tied weights once."""
    return list({t.data_ptr(): t for t in weights.values()}.values())
