"""Every preference loss by its name in a recipe, and several of them added up.   Shapes: P pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tutelage.errors import ConfigError, ShapeError
from tutelage.math.preference import gap, optimal_transport, sides, without_reference
from tutelage.math.preference.inputs import (
    PreferenceInputs,
    PreferenceLossFunction,
    PreferenceSettings,
    PreferenceTerms,
)

PREFERENCE_LOSSES: dict[str, PreferenceLossFunction] = {
    "sigmoid": gap.sigmoid,
    "sigmoid_norm": gap.sigmoid_norm,
    "robust": gap.robust,
    "hinge": gap.hinge,
    "ipo": gap.ipo,
    "ipo_sum": gap.ipo_sum,
    "exo_pair": gap.exo_pair,
    "discopop": gap.discopop,
    "nca_pair": sides.nca_pair,
    "bco_pair": sides.bco_pair,
    "sppo_hard": sides.sppo_hard,
    "apo_zero": sides.apo_zero,
    "apo_down": sides.apo_down,
    "aot": optimal_transport.aot,
    "aot_unpaired": optimal_transport.aot_unpaired,
    "orpo": without_reference.orpo,
    "cpo": without_reference.cpo,
    "simpo": without_reference.simpo,
    "alphapo": without_reference.alphapo,
}

UserLoss = Callable[[PreferenceInputs, PreferenceSettings], Tensor | PreferenceTerms]


def users_terms(function: UserLoss, x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """What a function of the user's own returns: PreferenceTerms, or losses (P,) with DPO's rewards added.

    Raises ShapeError for anything else than one loss a pair.
    """
    found = function(x, cfg)
    if not isinstance(found, PreferenceTerms):
        if not isinstance(found, Tensor):
            raise ShapeError(
                f"the preference loss returned a {type(found).__name__}", fix="return a tensor with one loss a pair"
            )
        found = PreferenceTerms.of(found, *gap.rewards(x, cfg))
    if found.loss.shape != x.chosen_logp.shape:
        raise ShapeError(
            f"the preference loss returned {tuple(found.loss.shape)} losses for {len(x.chosen_logp)} pairs",
            fix="return one loss a pair, not their mean",
        )
    return found


def require_separable(function: UserLoss, cfg: PreferenceSettings, name: str) -> None:
    """Raises ConfigError for a function whose loss of a pair depends on the other pairs, or on no logprob.

    Looked at on six made-up pairs, together and one at a time.
    """
    random = torch.Generator().manual_seed(0)
    columns_PK = -torch.rand(6, 8, generator=random, dtype=torch.float64)
    columns_PK[:, 4:] = columns_PK[:, 4:].abs() + 1.0
    leaf_PK = columns_PK.requires_grad_(True)
    loss_P = users_terms(function, PreferenceInputs.from_columns(leaf_PK), cfg).loss
    alone = [users_terms(function, PreferenceInputs.from_columns(leaf_PK[p : p + 1]), cfg).loss for p in range(6)]
    if not torch.allclose(loss_P, torch.cat(alone), rtol=1e-6, atol=1e-9):
        raise ConfigError(
            f"the loss of a pair under {name} depends on the other pairs given with it",
            fix="compute each pair's loss from its own row; statistics of a mini-batch need a coupled loss",
        )
    if not loss_P.requires_grad:
        raise ConfigError(
            f"the loss {name} does not depend on the policy's logprobs",
            fix="compute it from chosen_logp and rejected_logp, without detach or item()",
        )


def combined(
    losses: Sequence[tuple[PreferenceLossFunction, float]],
    nll_coef: float,
    x: PreferenceInputs,
    cfg: PreferenceSettings,
) -> PreferenceTerms:
    """sum_k weight_k loss_k * w + nll_coef * chosen_nll, w the pair's weight; rewards are those of the first loss.

    The last term holds up the chosen answers (RPO, Pang et al. 2024, arXiv:2404.19733, eq. 1); w does not weigh it.
    """
    found = [(function(x, cfg), weight) for function, weight in losses]
    loss_P = sum((weight * terms.loss for terms, weight in found), torch.zeros_like(x.weight)) * x.weight
    if nll_coef:
        loss_P = loss_P + nll_coef * x.chosen_nll
    first = found[0][0]
    return PreferenceTerms(loss_P, first.reward_chosen, first.reward_rejected)
