"""What every algorithm says of its rollouts: rewards, lengths, episodes, KL; and which of them have a reward at all.

Shapes: B sequences, T response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutelage.algorithms.episodes import episode_stats
from tutelage.math.kl import kl_k1
from tutelage.math.masking import masked_row_sum
from tutelage.types import Ragged, Rollout, Stat, Stats

# ---- sums over the tokens of a response


def trained_sums(values: Ragged, trained: Ragged) -> Tensor:
    """(B,) sum over the trained tokens of each row; what lies under mask 0 is never read."""
    return masked_row_sum(values.padded(), trained.padded().to(values.flat.device))


def sequence_kl_of(batch: Rollout, own: str, other: str) -> Tensor:
    """(B,) k1 of the columns `own` against `other`, summed over the trained tokens; nats."""
    kl_BT = kl_k1(batch.column(own).padded(), batch.column(other).padded())
    return masked_row_sum(kl_BT, batch.sequences.trained.padded())


# ---- rewards


def penalised(batch: Rollout, missing_eos_penalty: float) -> Tensor:
    """(B,) what each response is paid, less the penalty of those that the length limit cut."""
    return batch.rewarded() - missing_eos_penalty * (~batch.finished).float()


def scored_rows(batch: Rollout) -> Tensor:
    """(B,) bool: responses whose episode went well and that have a score, where they are scored at all."""
    scored_B = torch.ones(len(batch), dtype=torch.bool) if batch.score is None else batch.score.valid.clone()
    if batch.episode_errors is None:
        return scored_B
    return scored_B & torch.tensor([not error for error in batch.episode_errors], dtype=torch.bool)


# ---- statistics


def kl_stats(kl_B: Tensor, batch: Rollout, name: str = "kl/") -> Stats:
    """NAMEsequence: mean over responses; NAMEtoken: mean over trained tokens; nats."""
    tokens = float(batch.sequences.trained.flat.sum())
    return {f"{name}sequence": Stat.of(kl_B), f"{name}token": Stat(float(kl_B.double().sum()), tokens)}


def policy_lengths(batch: Rollout) -> Tensor:
    """(B,) tokens that the policy produced; what environments said in between is not its length."""
    return batch.sequences.trained.padded().sum(dim=1).double()


def rollout_stats(batch: Rollout, scored_B: Tensor | None = None) -> Stats:
    """Lengths and episodes of the rollouts of one step; rewards of those that have one, and how many have none."""
    lens = policy_lengths(batch)
    found = {
        "rollout/length_mean": Stat.of(lens),
        "rollout/length_max": Stat(float(lens.max()), 1),
        "rollout/truncated_fraction": Stat.of((~batch.finished).double()),
        "rollout/tokens": Stat(float(lens.sum()), 1),
        **episode_stats(batch),
    }
    if batch.score is None:
        return found
    scored_B = scored_rows(batch) if scored_B is None else scored_B
    known_B = batch.rewarded().double()[scored_B]
    failed = len(batch) - len(known_B)
    sources = {f"reward/source/{n}": batch.score.values[:, k] for k, n in enumerate(batch.score.names)}
    return {
        "reward/score_mean": Stat.of(known_B),
        "reward/score_std": Stat(float(known_B.std()) if len(known_B) > 1 else 0.0, 1),
        **{name: Stat.of(values, scored_B) for name, values in sources.items()},
        **({"reward/errors": Stat(float(failed), 1)} if failed else {}),
        **found,
    }
