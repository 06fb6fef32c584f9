"""Advantage estimators without a critic: one pure function each, and the dict that names them.

Shapes: B sequences, T response tokens, K reward sources; G responses in a group.  Float32 at least, no gradient.

Every function takes `EstimatorInputs`, in which each row has a score, and returns the advantage of a response (B,), the
same for all of its tokens, or of each token (B, T).  `inputs.estimate` calls them: it keeps rows without a score away
from them, and puts 0 under the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutelage.errors import ConfigError, closest
from tutelage.math.advantages import gae, whiten
from tutelage.math.group_advantages.groups import SCALES, group_advantages, group_statistics
from tutelage.math.group_advantages.inputs import Estimator, EstimatorInputs
from tutelage.math.group_advantages.tokens import optimal_token_baseline

PASSK_SCALES: tuple[str, ...] = (*SCALES, "none")
WHITEN_EPS = 1e-8
"""Added to the variance in `whiten`."""


# ---- against the group


def grpo(inputs: EstimatorInputs) -> Tensor:
    """A_i = (r_i - mean r) / (std r + eps)   (Shao et al. 2024, 2402.03300, section 4.1.2): `group_advantages`."""
    return group_advantages(inputs.score, inputs.group, inputs.scale, inputs.eps)


def dr_grpo(inputs: EstimatorInputs) -> Tensor:
    """A_i = r_i - mean r, the mean over the group of i   (Liu et al. 2025, 2503.20783, section 3.2).  (B,)

    No standard deviation, so that easy and hard prompts keep their weight.  The other half of Dr. GRPO is the
    aggregation constant_horizon.
    """
    groups = group_statistics(inputs.score, inputs.group)
    return (inputs.score - groups.mean).masked_fill(groups.equal, 0.0)


def rloo(inputs: EstimatorInputs) -> Tensor:
    """A_i = r_i - 1 / (G - 1) sum_{j != i} r_j   (Ahmadian et al. 2024, 2402.14740, eq. 7).  (B,)

    The baseline does not see r_i, so the gradient is unbiased.  Equal to G / (G - 1) times dr_grpo.
    """
    groups = group_statistics(inputs.score, inputs.group)
    others = (groups.mean * groups.size - inputs.score) / (groups.size - 1).clamp(min=1)
    return (inputs.score - others).masked_fill(groups.equal, 0.0)


def opo(inputs: EstimatorInputs) -> Tensor:
    """A_i = r_i - sum_j l_j r_j / sum_j l_j, over the group, l_j tokens in response j   (Hao et al. 2025, 2505.23585).

    The baseline of least variance if the squared norm of a response's gradient is proportional to its length (their
    eq. 8).  l counts the tokens of the mask.  (B,)  A group without a token has A = 0.
    """
    lens_B = (inputs.mask != 0).sum(dim=1).to(inputs.score.dtype)
    groups = group_statistics(inputs.score, inputs.group)
    tokens_B = group_sum(lens_B, inputs.group)
    baseline_B = group_sum(lens_B * inputs.score, inputs.group) / tokens_B.clamp(min=1.0)
    return (inputs.score - baseline_B).masked_fill(groups.equal | (tokens_B == 0), 0.0)


def gpg(inputs: EstimatorInputs) -> Tensor:
    """A_i = alpha (r_i - mean r),  alpha = B / (B - M)   (Chu et al. 2025, 2504.02546, section 3.2, F_norm = 1).  (B,)

    M of the B responses are in groups whose rewards are all equal: they have no gradient, and the mean over B would
    shrink the gradient of the others.  A response that is alone in its group is in neither.  alpha = 1 where M = B.
    """
    groups = group_statistics(inputs.score, inputs.group)
    several = int((groups.size >= 2).sum())
    informative = int((~groups.equal).sum())
    alpha = several / informative if informative else 1.0
    return (alpha * (inputs.score - groups.mean)).masked_fill(groups.equal, 0.0)


def grpo_passk(inputs: EstimatorInputs) -> Tensor:
    """A_i = max r - max_{j != i} r_j: above 0 for the single best of a group, 0 for all others   (2503.19595).  (B,)

    The leave-one-out advantage of the objective E[max of G rewards], which is pass@G for rewards of 0 and 1 (Tang et
    al. 2025, section 3.3).  scale: none is the paper's; group and batch divide by that standard deviation plus eps.
    Two equal best responses have A = 0: either one is dispensable.
    """
    score_B, group_B = inputs.score, inputs.group
    if inputs.scale not in PASSK_SCALES:
        raise ConfigError(
            f"{inputs.scale!r} is not a scale of grpo_passk.{closest(inputs.scale, PASSK_SCALES)}",
            fix=f"choose one of {', '.join(PASSK_SCALES)}",
        )
    _, inverse_B = torch.unique(group_B, return_inverse=True)
    order = torch.argsort(score_B, descending=True, stable=True)
    order = order[torch.argsort(inverse_B[order], stable=True)]  # by group, the best first
    sizes_g = torch.bincount(inverse_B)
    first_g = sizes_g.cumsum(0) - sizes_g
    second_g = torch.minimum(first_g + 1, first_g + sizes_g - 1)
    best_g, next_g = score_B[order[first_g]], score_B[order[second_g]]
    advantage_B = torch.zeros_like(score_B)
    advantage_B[order[first_g]] = best_g - next_g
    if inputs.scale == "none":
        return advantage_B
    return advantage_B / (deviation(score_B, group_B, inputs.scale) + inputs.eps)


# ---- against the batch


def reinforce_plus_plus(inputs: EstimatorInputs) -> Tensor:
    """A_t = (G_t - mean G) / sqrt(var G + 1e-8),  G_t = sum_{k >= t} gamma^(k - t) r_k   (REINFORCE++, 2501.03262).

    Mean and sample variance over all tokens of the batch.  No group: one response to a prompt is enough.  r_k holds the
    KL penalty of a token where the recipe pays it in the reward (their eq. 6), and the score on the last token.  Time
    counts the tokens of the policy: a hole in the mask takes no discount.  (B, T)
    """
    return whiten(discounted_returns(inputs.token_reward, inputs.mask, inputs.gamma), inputs.mask, eps=WHITEN_EPS)


def reinforce_plus_plus_baseline(inputs: EstimatorInputs) -> Tensor:
    """A = (a - mean a) / sqrt(var a + 1e-8),  a_i = r_i - mean r of the group of i   (2501.03262, section 3.3).  (B, T)

    Mean and sample variance over all tokens of the batch, so a long response weighs more in them.  A group whose
    rewards are all equal, or of one, has A = 0 exactly: a = 0 there, and only the shift would move it.
    """
    groups = group_statistics(inputs.score, inputs.group)
    centred_B = (inputs.score - groups.mean).masked_fill(groups.equal, 0.0)
    several_BT = (inputs.mask != 0) & (groups.size >= 2)[:, None]
    whitened_BT = whiten(centred_B[:, None].expand_as(inputs.token_reward), several_BT, eps=WHITEN_EPS)
    return whitened_BT.masked_fill(groups.equal[:, None], 0.0)


def gdpo(inputs: EstimatorInputs) -> Tensor:
    """A_i = (s_i - mean s) / (std s + eps),  s_i = sum_k w_k (r_ik - mean r_k) / (std r_k + eps)   (2601.05242).  (B,)

    Each reward source is normalised apart in the group of i (sample standard deviation), then weighted and summed, then
    normalised over all responses of the batch (Liu et al. 2026, eqs. 4 to 6).  So sources of different scale, or whose
    sums happen to agree, stay apart.  What was added to the sources (shaping) is one more source of weight 1.
    A group in which every source is constant has A = 0 exactly.  A response alone in its group is in no statistic.
    """
    columns, weights = inputs.values, inputs.weights
    if bool((inputs.shaping != 0).any()):
        columns = torch.cat([columns, inputs.shaping[:, None]], dim=1)
        weights = torch.cat([weights, weights.new_ones(1)])
    sum_B, silent_B = torch.zeros_like(inputs.score), torch.ones_like(inputs.score, dtype=torch.bool)
    for k in range(columns.shape[1]):
        sum_B = sum_B + weights[k] * group_advantages(columns[:, k], inputs.group, "group", inputs.eps)
        silent_B &= group_statistics(columns[:, k], inputs.group).equal
    several = sum_B[group_statistics(inputs.score, inputs.group).size >= 2]
    if len(several) < 2:
        return torch.zeros_like(sum_B)
    return ((sum_B - several.mean()) / (several.std() + inputs.eps)).masked_fill(silent_B, 0.0)


# ---- against a greedy response, or token by token


def remax(inputs: EstimatorInputs) -> Tensor:
    """A_i = r_i - r(greedy response to the prompt of i)   (ReMax, Li et al. 2023, 2310.10505, eq. 6).  (B,)

    One response to a prompt is enough.  The greedy response's score is what the reward sources say: penalties and KL,
    which score may hold, are not charged to it (a baseline may be any number that does not depend on the response).
    Raises ShapeError without a baseline.
    """
    return inputs.score - inputs.needed("baseline")


def otb(inputs: EstimatorInputs) -> Tensor:
    """`optimal_token_baseline` of the columns.  (B, T)  Raises ShapeError without old_logp and log_collision."""
    return optimal_token_baseline(
        discounted_returns(inputs.token_reward, inputs.mask, 1.0),
        inputs.needed("old_logp"),
        inputs.needed("log_collision"),
        inputs.group,
        inputs.mask,
    )


ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "grpo_passk": grpo_passk,
    "optimal_token_baseline": otb,
    "gdpo": gdpo,
}


# ---- shared


def discounted_returns(reward_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_t', t' the next token with mask 1; 0 under the mask.  (B, T).  Raises as `gae`."""
    return gae(reward_BT, torch.zeros_like(reward_BT), mask_BT, gamma, 1.0)[0]


def group_sum(x_B: Tensor, group_B: Tensor) -> Tensor:
    """(B,) the sum of x over the group of each row."""
    names_g, inverse_B = torch.unique(group_B, return_inverse=True)
    return x_B.new_zeros(len(names_g)).index_add(0, inverse_B, x_B)[inverse_B]


def deviation(score_B: Tensor, group_B: Tensor, scale: str) -> Tensor:
    """(B,) sample standard deviation of the group of each row, or of all rows (scale = batch); 0 for one row."""
    if scale == "group":
        return group_statistics(score_B, group_B).std
    return (score_B.std() if len(score_B) > 1 else score_B.new_zeros(())).expand_as(score_B)
