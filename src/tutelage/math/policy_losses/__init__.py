"""The policy losses by name.  Adding one means one function and one entry here.

Each is a pure function of padded tensors, (logp_BT, old_logp_BT, advantage_BT, mask_BT, settings by keyword), and
returns `PolicyTerms` of their shape; only `loss` has a gradient, and only by logp_BT.  What lies under mask 0 is never
read, and its loss is 0.

Those in POLICY_LOSSES look at one row (sequence) at a time, so a mini-batch may be cut between rows.  Those in
COUPLED_POLICY_LOSSES look at all tokens of the mini-batch, and take order_BT, a random number of each.

Shapes: B sequences, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from tutelage.math.policy_loss import PolicyTerms
from tutelage.math.policy_losses.covariance import clip_cov, kl_cov
from tutelage.math.policy_losses.sequence_ratio import gmpo, gspo
from tutelage.math.policy_losses.token_ratio import cispo, ppo, reinforce, sapo
from tutelage.math.policy_losses.trust_region import dppo_kl, dppo_tv

PolicyLossFunction = Callable[..., PolicyTerms]

POLICY_LOSSES: dict[str, PolicyLossFunction] = {
    "ppo": ppo,
    "gspo": gspo,
    "sapo": sapo,
    "cispo": cispo,
    "gmpo": gmpo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "reinforce": reinforce,
}

COUPLED_POLICY_LOSSES: dict[str, PolicyLossFunction] = {"clip_cov": clip_cov, "kl_cov": kl_cov}

__all__ = [
    "COUPLED_POLICY_LOSSES",
    "POLICY_LOSSES",
    "PolicyLossFunction",
    "clip_cov",
    "cispo",
    "dppo_kl",
    "dppo_tv",
    "gmpo",
    "gspo",
    "kl_cov",
    "ppo",
    "reinforce",
    "sapo",
]
