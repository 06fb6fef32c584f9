"""Losses of demonstrations, per token.   Shapes: R flat response tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tutelage.errors import ConfigError, closest
from tutelage.math.masking import at_least_float32


def nll(logp_R: Tensor) -> Tensor:
    """-log pi(y_t), in nats; elementwise, not averaged.  Gradient by logp: -1."""
    return -at_least_float32(logp_R)


def dft(logp_R: Tensor) -> Tensor:
    """-stopgrad(pi(y_t)) log pi(y_t)    (dynamic fine-tuning, Wu et al. 2025, arXiv:2508.05629, eq. 9)

    The gradient by logp is -pi(y_t) instead of -1: a token that the policy finds unlikely pulls less.  In the view of
    policy gradients, the reward 1 / pi that hides in maximum likelihood becomes 1.  Elementwise, not averaged.
    """
    wide_R = at_least_float32(logp_R)
    return -wide_R.detach().exp() * wide_R


SUPERVISED_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {"nll": nll, "dft": dft}


def supervised_loss(kind: str, logp_R: Tensor) -> Tensor:
    """The loss of that name.  Raises ConfigError for an unknown one."""
    if kind not in SUPERVISED_LOSSES:
        raise ConfigError(
            f"{kind!r} is not a supervised loss.{closest(kind, SUPERVISED_LOSSES)}",
            fix=f"choose one of {', '.join(SUPERVISED_LOSSES)}",
        )
    return SUPERVISED_LOSSES[kind](logp_R)
