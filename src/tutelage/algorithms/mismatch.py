"""What a step says of how far the trainer's logprobs are from the sampler's.

Shapes: B sequences, T response tokens, R flat response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutelage.math.importance import Mismatch, chi_squared, effective_sample_size, mismatch_of
from tutelage.types import Ragged, Stat, Stats


def update_mismatch(logp_R: Tensor, rollout_logp_R: Tensor, mask_R: Tensor) -> Stats:
    """How far the sampler's logprobs are from an update's own, over tokens: what `mismatch_stats` and `sampling_stats`
    say of the old ones, as far as it adds up over micro-batches.
    """
    lens = torch.tensor([len(logp_R)])
    columns = (Ragged(x_R, lens).padded() for x_R in (logp_R, rollout_logp_R, mask_R))
    apart = mismatch_of(*columns)
    gap_R = apart.kl_k1.squeeze(0).abs()
    return {
        "logp_gap": Stat.of(gap_R, mask_R),
        "mismatch_kl_k1": Stat.of(apart.kl_k1.squeeze(0), mask_R),
        "mismatch_kl_k3": Stat.of(apart.kl_k3.squeeze(0), mask_R),
        "mismatch_chi2_token": Stat.of(apart.ratio.squeeze(0).double().square() - 1, mask_R),
    }


def mismatch_stats(apart: Mismatch, mask_BT: Tensor) -> Stats:
    """Of tokens, or of responses where the name says so."""
    ratio, sequence_ratio = apart.ratio[mask_BT], apart.log_ratio[apart.filled].exp()
    return {
        "mismatch/kl_k1": Stat.of(apart.kl_k1, mask_BT),
        "mismatch/kl_k3": Stat.of(apart.kl_k3, mask_BT),
        "mismatch/perplexity_ratio": Stat.of(apart.perplexity_ratio, apart.filled),
        "mismatch/ratio_min": Stat(float(ratio.min()) if len(ratio) else 1.0, 1),
        "mismatch/ratio_max": Stat(float(ratio.max()) if len(ratio) else 1.0, 1),
        "mismatch/chi2_token": Stat(chi_squared(ratio), 1),
        "mismatch/chi2_sequence": Stat(chi_squared(sequence_ratio), 1),
        "mismatch/ess_token": Stat(effective_sample_size(ratio), 1),
        "mismatch/ess_sequence": Stat(effective_sample_size(sequence_ratio), 1),
    }
