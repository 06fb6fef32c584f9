"""Losses of direct preference optimisation on pairs of log ratios, per pair. Shapes: P pairs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from tutelage.errors import ConfigError
from tutelage.math.masking import at_least_float32, require_same_shape


@dataclass(frozen=True)
class PreferenceTerms:
    """All (P,).  Only `loss` carries gradient.

    reward_chosen, reward_rejected: implicit rewards beta log(pi / ref), in nats times beta.
    """

    loss: Tensor
    reward_chosen: Tensor
    reward_rejected: Tensor


def dpo_loss(
    chosen_logp_P: Tensor,
    rejected_logp_P: Tensor,
    ref_chosen_logp_P: Tensor,
    ref_rejected_logp_P: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
) -> PreferenceTerms:
    """-(1 - s) log sigmoid(z) - s log sigmoid(-z),  z = beta ((log pi_c - log ref_c) - (log pi_r - log ref_r)).

    (Rafailov et al. 2023, eq. 7; label smoothing s, the chance that a label is wrong: cDPO, Mitchell 2023.)  Logprobs
    of whole responses, summed over trained tokens, in nats; c is the chosen one, r the rejected.  With pi = ref the
    loss is log 2, whatever s.  With s > 0 the loss has its least at z = log((1 - s) / s) instead of at infinity.

    (P,) each; elementwise, not averaged.  The reference gets no gradient.
    Raises ShapeError when shapes differ, ConfigError unless beta > 0 and 0 <= label_smoothing < 0.5.
    """
    require_same_shape(
        chosen=chosen_logp_P, rejected=rejected_logp_P, ref_chosen=ref_chosen_logp_P, ref_rejected=ref_rejected_logp_P
    )
    if not beta > 0.0:
        raise ConfigError(f"beta of the preference loss is {beta}", fix="use a number above 0; 0.1 is usual")
    if not 0.0 <= label_smoothing < 0.5:
        raise ConfigError(
            f"label_smoothing is {label_smoothing}", fix="use a number in [0, 0.5): the share of labels that are wrong"
        )
    chosen_P = beta * (at_least_float32(chosen_logp_P) - at_least_float32(ref_chosen_logp_P.detach()))
    rejected_P = beta * (at_least_float32(rejected_logp_P) - at_least_float32(ref_rejected_logp_P.detach()))
    gap_P = chosen_P - rejected_P
    loss_P = -logsigmoid(gap_P)
    if label_smoothing > 0.0:
        loss_P = (1.0 - label_smoothing) * loss_P - label_smoothing * logsigmoid(-gap_P)
    return PreferenceTerms(loss_P, chosen_P.detach(), rejected_P.detach())
