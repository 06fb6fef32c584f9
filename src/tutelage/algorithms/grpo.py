"""Group relative policy optimisation (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300) and its relatives: no critic.

Several responses to each prompt; a response's advantage is its score against the others of its group, the same for all
of its tokens; clipped updates with the KL to a reference in the loss.  `grpo.estimator` names other ways to make
advantages of scores (`math.group_advantages`), and DAPO's parts are settings (Yu et al. 2025, arXiv:2503.14476).
Shapes: B sequences, T response tokens, R flat response tokens, K reward sources.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutelage.algorithms import policy
from tutelage.algorithms.policy import (
    PolicyState,
    actor_loss,
    budget_scale,
    corrected,
    reference_stats,
    sampling_stats,
    update_has_old_logprobs,
    updates_of,
    with_old_logprobs,
)
from tutelage.algorithms.rollout_stats import rollout_stats, scored_rows, sequence_kl_of
from tutelage.config.grpo import GRPOConfig, grouped
from tutelage.errors import ConfigError, closest
from tutelage.math.group_advantages import (
    ESTIMATORS,
    Estimator,
    EstimatorInputs,
    Groups,
    estimate,
    group_statistics,
)
from tutelage.math.kl import KL_ESTIMATORS, kl_shaped_reward
from tutelage.math.length_penalty import soft_overlong_penalty
from tutelage.math.masking import masked_row_sum
from tutelage.named import load_function
from tutelage.types import Ragged, Rollout, Stat, Stats

ROLES: tuple[str, ...] = ("actor", "reference", "reward")
PREFIXES = {"actor": "policy"}
PUBLISHED: tuple[str, ...] = ("actor",)
GREEDY = "greedy"
"""Purpose of the greedy responses that remax compares with."""
state_from = policy.state_from


def initial_state(cfg: GRPOConfig) -> PolicyState:
    """Of the first step.  Raises ConfigError where the recipe's estimator or policy loss does not exist."""
    estimator_of(cfg)
    return policy.initial_state(cfg)


def estimator_of(cfg: GRPOConfig) -> Estimator:
    """The recipe's advantage estimator, or the user's own.  Raises ConfigError for a name that leads nowhere."""
    name = cfg.grpo.estimator
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if ":" not in name:
        raise ConfigError(
            f"{name!r} is not an advantage estimator.{closest(name, ESTIMATORS)}",
            fix=f"choose one of {', '.join(ESTIMATORS)}, or module:function of your own",
        )
    return load_function(name, "advantage estimator")


def roles_needed(cfg: GRPOConfig) -> tuple[str, ...]:
    """Without a KL term nothing asks the reference anything, so none is built."""
    return ROLES if cfg.kl.coef > 0 else ("actor", "reward")


def reuses_old_logprobs(cfg: GRPOConfig) -> bool:
    """Whether no pass infers old logprobs, since the step's update computes them (`policy.update_has_old_logprobs`) and
    no estimator reads them: of the built-in ones `optimal_token_baseline` does, and one of the user's own may.
    """
    reads_them = cfg.grpo.estimator not in ESTIMATORS or cfg.grpo.estimator == "optimal_token_baseline"
    return update_has_old_logprobs(cfg) and not reads_them


def collect(prompts: Any, roles: Any, cfg: GRPOConfig) -> Any:
    """Prompts -> scored rollouts; works on any part of a batch that keeps a prompt's responses together."""
    return infer(generate(prompts, roles, cfg), roles, cfg)


def generate(prompts: Any, roles: Any, cfg: GRPOConfig) -> Any:
    """Prompts -> rollouts, which a schedule may begin ahead of their step; for remax with the scores of one greedy
    response to each prompt, under the same weights.
    """
    rollout = policy.generate(prompts, roles, cfg)
    if cfg.grpo.estimator != "remax":
        return rollout
    greedy = policy.generate(prompts.adding(greedy=True, n=1, purpose=GREEDY), roles, cfg)
    return rollout.adding(baseline=roles.reward.score(greedy))


def infer(rollout: Any, roles: Any, cfg: GRPOConfig) -> Any:
    """Every inference pass, under the weights of the moment: old logprobs unless the update computes them, reference
    logprobs, scores.
    """
    columns = {} if reuses_old_logprobs(cfg) else {"old_logp": roles.actor.logprobs(rollout)}
    columns["score"] = roles.reward.score(rollout)
    if "reference" in roles_needed(cfg):
        columns["ref_logp"] = roles.reference.logprobs(rollout)
    if cfg.grpo.estimator == "optimal_token_baseline":
        columns["log_collision"] = roles.actor.log_collisions(rollout)
    return rollout.adding(**columns)


def advantages(batch: Rollout, state: PolicyState, cfg: GRPOConfig) -> tuple[Rollout, PolicyState, Stats]:
    """Scores against the group's (or as the estimator says), over the global batch, once, before it is cut."""
    batch = with_old_logprobs(batch, cfg)
    mask_BT, scored_B = batch.sequences.trained.padded(), compared_rows(batch)
    shaping_B = penalties(batch, cfg) + token_rewards(batch, mask_BT)
    score_B = totals(batch, scored_B) + shaping_B
    stats = score_stats(batch, cfg, scored_B)
    scale, kl, cost_BT = 1.0, state.kl, torch.zeros_like(mask_BT, dtype=torch.float32)
    if batch.ref_logp is not None:
        kl_B = sequence_kl_of(batch, "rollout_logp" if reuses_old_logprobs(cfg) else "old_logp", "ref_logp")
        scale = budget_scale(float(kl_B.mean()), cfg)
        if cfg.kl.placement == "reward":
            penalty = KL_ESTIMATORS[cfg.kl.estimator]
            cost_BT = state.kl.coef * penalty(batch.column("old_logp").padded(), batch.ref_logp.padded())
        paid_B = -masked_row_sum(cost_BT, mask_BT)
        stats |= reference_stats(batch, kl_B, score_B, paid_B, scale, state.kl.coef)
        stats["reward/rlhf"] = Stat.of(score_B + paid_B, scored_B)
        kl = state.kl.after(float(kl_B.mean()), len(batch))

    inputs = inputs_of(batch, cfg, scored_B, shaping_B, cost_BT)
    found = estimate(inputs, estimator_of(cfg), scored_B, grouped=grouped(cfg.grpo.estimator))
    signal_BT, off_policy = (
        (found.advantage, {}) if reuses_old_logprobs(cfg) else corrected(found.advantage, batch, cfg)
    )
    counted_B = found.counted & batch.finished if cfg.grpo.overlong_filtering else found.counted
    scored = batch.adding(
        advantage=Ragged.from_padded(signal_BT * scale, batch.sequences.response_lens), counted=counted_B, baseline=None
    )
    if cfg.rollout.samples_per_prompt > 1:
        stats |= group_stats(found.groups)
    return scored, state.after(batch, kl), {**stats, **off_policy}


def learn(batch: Any, roles: Any, cfg: GRPOConfig, state: PolicyState) -> list[dict[str, Any]]:
    """Updates by the policy loss: `epochs` passes over the batch, each in `minibatches` parts."""
    updates = enumerate(updates_of(batch, cfg, state.step))
    own_old = reuses_old_logprobs(cfg)
    return [roles.update(mb, actor=actor_loss(cfg, state, mb, k, own_old=own_old)) for k, mb in updates]


# ---- what an estimator is given


def compared_rows(batch: Rollout) -> Tensor:
    """(B,) bool: rows whose response, greedy response (remax) and episode were scored without an error."""
    assert batch.score is not None, "advantages runs after collect"
    scored_B = scored_rows(batch)
    return scored_B if batch.baseline is None else scored_B & batch.baseline.valid[batch.group]


def overlong_penalty(batch: Rollout, cfg: GRPOConfig) -> Tensor:
    """(B,) DAPO's soft penalty on the tokens of the policy; 0 where the recipe has none."""
    buffer = cfg.grpo.overlong_buffer
    if not buffer:
        return torch.zeros(len(batch))
    tokens_B = batch.sequences.trained.padded().sum(dim=1)
    return soft_overlong_penalty(tokens_B, cfg.rollout.max_new_tokens, buffer, cfg.grpo.overlong_factor)


def penalties(batch: Rollout, cfg: GRPOConfig) -> Tensor:
    """(B,) what overlong and truncated responses lose."""
    return overlong_penalty(batch, cfg) - cfg.grpo.missing_eos_penalty * (~batch.finished).float()


def token_rewards(batch: Rollout, mask_BT: Tensor) -> Tensor:
    """(B,) per-token rewards, such as those of the turns of an episode, summed over the mask."""
    if batch.token_reward is None:
        return torch.zeros(len(batch))
    return masked_row_sum(batch.token_reward.padded(), mask_BT)


def totals(batch: Rollout, scored_B: Tensor) -> Tensor:
    """(B,) the weighted sum of the reward sources; 0 for a response that has none."""
    assert batch.score is not None
    return torch.where(scored_B, batch.score.total, 0.0)


def inputs_of(batch: Rollout, cfg: GRPOConfig, scored_B: Tensor, shaping_B: Tensor, cost_BT: Tensor) -> EstimatorInputs:
    """The columns of the estimators.  shaping_B: penalties and per-token rewards; cost_BT: the KL paid by each token.

    Raises ConfigError for gdpo where the reward does not say how its sources are weighted.
    """
    score, mask_BT = batch.score, batch.sequences.trained.padded()
    assert score is not None
    if cfg.grpo.estimator == "gdpo" and len(score.weights) != len(score.names):
        raise ConfigError(
            f"gdpo needs the weights of the reward sources {', '.join(score.names)}; the reward names "
            f"{len(score.weights)}",
            fix="give Scores its weights",
        )
    added_B = shaping_B - masked_row_sum(cost_BT, mask_BT)
    rows_BT = None if batch.token_reward is None else batch.token_reward.padded()
    outcome_B = totals(batch, scored_B) + penalties(batch, cfg)
    return EstimatorInputs(
        score=totals(batch, scored_B) + added_B,
        token_reward=kl_shaped_reward(outcome_B, cost_BT, mask_BT, 1.0, rows_BT),
        group=batch.group,
        mask=mask_BT,
        values=score.values,
        weights=torch.tensor(score.weights if score.weights else [1.0] * len(score.names)),
        shaping=added_B,
        baseline=None if batch.baseline is None else batch.baseline.total[batch.group],
        old_logp=None if reuses_old_logprobs(cfg) else batch.column("old_logp").padded(),
        log_collision=None if batch.log_collision is None else batch.log_collision.padded(),
        scale=cfg.grpo.scale_rewards,
        eps=cfg.grpo.std_eps,
        gamma=cfg.grpo.gamma,
    )


# ---- dynamic sampling: what a schedule asks


def refills(cfg: GRPOConfig) -> int:
    """Further generations that a step may use to replace the groups that say nothing; 0: it takes them as they come."""
    return cfg.grpo.max_refills if cfg.grpo.dynamic_sampling else 0


def fewest_rows(cfg: GRPOConfig) -> int:
    """A mini-batch must not be empty."""
    return cfg.grpo.minibatches


def informative(batch: Rollout, cfg: GRPOConfig) -> Tensor:
    """(B,) bool: rows of groups with two scored responses whose scores differ   (DAPO, eq. 11).

    The scores are those of reward sources and environments, before penalties and KL, as DAPO filters on accuracy; for
    gdpo, which looks at the sources apart, one source whose scores differ is enough.
    """
    assert batch.score is not None
    kept_b = torch.nonzero(compared_rows(batch)).squeeze(1)
    columns_bK = batch.rewarded()[kept_b, None]
    if cfg.grpo.estimator == "gdpo":
        columns_bK = torch.cat([columns_bK, batch.score.values[kept_b]], dim=1)
    group_b, differs_b = batch.group[kept_b], torch.zeros(len(kept_b), dtype=torch.bool)
    for column_b in columns_bK.unbind(dim=1):
        differs_b |= ~group_statistics(column_b, group_b).equal
    return torch.isin(batch.group, group_b[differs_b])


def generated_stats(batch: Rollout, cfg: GRPOConfig) -> Stats:
    """Of everything that was generated, before groups were dropped: the scores that say how good the policy is."""
    assert batch.score is not None
    return {"reward/generated_mean": Stat.of(batch.score.total, batch.score.valid)}


# ---- statistics


def score_stats(batch: Rollout, cfg: GRPOConfig, scored_B: Tensor) -> Stats:
    """`sampling_stats`, without what an update says itself, and what overlong responses lose."""
    stats = (rollout_stats if reuses_old_logprobs(cfg) else sampling_stats)(batch, scored_B)
    if cfg.grpo.overlong_buffer:
        stats["reward/overlong_penalty"] = Stat.of(overlong_penalty(batch, cfg))
    return stats


def group_stats(groups: Groups) -> Stats:
    """How much the groups say: nothing where all scores of a group are equal, or where a response has no other."""
    several_B = groups.size >= 2
    return {
        "reward/group_std": Stat.of(groups.std, several_B),
        "reward/group_equal_fraction": Stat.of(groups.equal.double(), several_B),
        "reward/group_singletons": Stat(float((~several_B).sum()), 1),
    }
