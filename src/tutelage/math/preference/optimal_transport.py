"""Alignment by optimal transport (AOT, Melnyk et al. 2024, arXiv:2406.05882): losses of sorted values.

Shapes: P pairs.

The P pairs are the whole mini-batch: a sort of a part of it is another loss.  (P,) in the order of the sorted values,
not in that of the pairs; only the mean has a meaning.
"""

from __future__ import annotations

from tutelage.math.preference.gap import smoothed_logistic
from tutelage.math.preference.inputs import PreferenceInputs, PreferenceSettings, PreferenceTerms
from tutelage.math.preference.sides import ratio_rewards


def aot(x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """-log sigmoid(beta (sort(log pi_w - log pi_l) - sort(log ref_w - log ref_l)))   (paired AOT).

    The policy's margins are to dominate the reference's as a distribution, to first order.
    """
    margin_P = (x.chosen_logp - x.rejected_logp).sort().values
    ref_margin_P = (x.ref_chosen_logp - x.ref_rejected_logp).sort().values
    loss_P = smoothed_logistic(cfg.beta * (margin_P - ref_margin_P), cfg.label_smoothing)
    return PreferenceTerms.of(loss_P, *ratio_rewards(x, cfg))


def aot_unpaired(x: PreferenceInputs, cfg: PreferenceSettings) -> PreferenceTerms:
    """-log sigmoid(beta (sort(log ratio_w) - sort(log ratio_l)))   (unpaired AOT).

    Rewards of chosen answers are to dominate those of rejected ones as a distribution.
    """
    gap_P = x.log_ratio_chosen.sort().values - x.log_ratio_rejected.sort().values
    loss_P = smoothed_logistic(cfg.beta * gap_P, cfg.label_smoothing)
    return PreferenceTerms.of(loss_P, *ratio_rewards(x, cfg))
