"""Schema of the `schedule` and `off_policy` sections: when to generate and learn, and what corrects for the delay."""

from __future__ import annotations

from typing import Any, Literal

from tutelage.config.schema import OnlyIf, Schema, setting

ASYNCHRONOUS = OnlyIf("schedule.kind is asynchronous", lambda c: c.schedule.kind == "asynchronous")
TRAINERS_OLD = OnlyIf("off_policy.old_logprobs is not rollout", lambda c: c.off_policy.old_logprobs != "rollout")
CORRECTED = OnlyIf("off_policy.correction is not none", lambda c: c.off_policy.correction != "none")
STREAMED = OnlyIf(
    "schedule.kind is synchronous, cluster.transport is local, rollout.engine is inprocess, the recipe names a reward, "
    "environment.functions and implementation are not given, grpo.estimator is not remax, and algorithm is neither xpo "
    "nor nash_md",
    lambda c: _streams(c),
)


def _streams(config: Any) -> bool:
    reward, environment = config.reward, getattr(config, "environment", None)
    here = config.schedule.kind == "synchronous" and config.cluster.transport == "local"
    rewarded = bool(reward.model or reward.ensemble or reward.rules) and not (environment and environment.functions)
    estimator = getattr(getattr(config, "grpo", None), "estimator", None)
    apart = config.implementation is None and config.algorithm not in ("xpo", "nash_md") and estimator != "remax"
    return here and config.rollout.engine == "inprocess" and rewarded and apart


class ScheduleConfig(Schema):
    kind: Literal["synchronous", "one_step_off", "asynchronous"] = setting(
        "synchronous",
        "synchronous: generate, learn, publish; one_step_off: generate the next batch while learning on this one; "
        "asynchronous: generation runs ahead up to max_staleness.",
    )
    stream: bool = setting(
        False,
        "Score the responses to a prompt as soon as they end, while others decode; with dynamic sampling, end a "
        "generation when the step has its groups (docs/rollout.md).",
        only_if=STREAMED,
    )
    max_staleness: int = setting(
        2, "Weight versions by which a rollout may be older than the policy it trains.", ge=1, only_if=ASYNCHRONOUS
    )
    ahead: int | None = setting(
        None,
        "Batches begun ahead, at most max_staleness; fewer let long responses be overtaken. Default: max_staleness, "
        "with partial_tokens one less.",
        ge=1,
        only_if=ASYNCHRONOUS,
    )
    partial_tokens: int | None = setting(
        None,
        "Cut a generation call after this many sampled tokens, of all responses together, and carry unfinished ones "
        "over to the next weights; default: every response is finished in one call.",
        ge=1,
        only_if=ASYNCHRONOUS,
    )


class OffPolicyConfig(Schema):
    old_logprobs: Literal["auto", "trainer", "rollout"] = setting(
        "auto",
        "Which logprobs the ratio of the loss starts from: trainer: the weights before this step's updates (decoupled "
        "PPO), inferred in a pass of their own; auto: the same, without that pass where the step's one update computes "
        "them itself (docs/grpo.md); rollout: the sampler's own.",
    )
    correction: Literal[
        "none",
        "token_truncated",
        "sequence_truncated",
        "geometric_truncated",
        "token_masked",
        "sequence_masked",
        "geometric_masked",
    ] = setting(
        "none",
        "Importance weight trainer / sampler on the policy loss: of each token, of the whole sequence, or the "
        "geometric mean over the sequence; above the cap it is cut to the cap (truncated) or to 0 (masked).",
        only_if=TRAINERS_OLD,
    )
    cap: float = setting(
        2.0, "Largest importance weight; 2 suits tokens, 5 sequences, 1.001 a geometric mean.", ge=1, only_if=CORRECTED
    )
    floor: float | None = setting(
        None,
        "Smallest importance weight: below it, it is raised to it (truncated) or 0 (masked); default: no bound.",
        gt=0,
        le=1,
        only_if=CORRECTED,
    )
    normalize: bool = setting(
        False, "Divide the weights by their mean over the batch, of tokens or of sequences.", only_if=CORRECTED
    )
    veto: float | None = setting(
        None,
        "A response with a token whose ratio trainer / sampler is below this, such as 0.0001, weighs 0; default: none.",
        gt=0,
        lt=1,
        only_if=TRAINERS_OLD,
    )
