"""Schema of the `distill` stage: a student learns from a teacher on its own samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from tutelage.config.generating import GeneratingConfig
from tutelage.config.rollouts import RolloutConfig
from tutelage.config.schema import OnlyIf, Schema, setting
from tutelage.config.where import at

REVERSE = OnlyIf("distill.divergence is reverse_kl", lambda c: c.distill.divergence == "reverse_kl")
JSD = OnlyIf("distill.divergence is jsd", lambda c: c.distill.divergence == "jsd")
SAMPLED = OnlyIf(
    "distill.divergence is reverse_kl and distill.form is sampled", lambda c: c.distill.from_sampled_tokens
)
DISTRIBUTIONS = OnlyIf(
    "distill.form is distribution, or distill.divergence another than reverse_kl",
    lambda c: not c.distill.from_sampled_tokens,
)


class TeacherConfig(Schema):
    path: str = setting(..., "Model folder or hub name of the teacher; its tokenizer must be the student's.")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "Type that the frozen teacher is kept and computed in.")


class DistillRolloutConfig(RolloutConfig):
    prompts_per_step: int = setting(32, "Prompts of one step.", ge=1)


class DistillSettings(Schema):
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = setting(
        "reverse_kl",
        "reverse_kl: KL(student || teacher); forward_kl: KL(teacher || student); jsd: between the two (GKD).",
    )
    form: Literal["distribution", "sampled"] = setting(
        "distribution",
        "distribution: the divergence over the teacher's likeliest tokens, differentiated; sampled: the log ratio of "
        "teacher to student on the sampled token, as its advantage in a policy gradient.",
        only_if=REVERSE,
    )
    candidates: int = setting(
        64,
        "Likeliest tokens of the teacher at each position; all others are one outcome. The size of the vocabulary is "
        "exact.",
        ge=1,
        only_if=DISTRIBUTIONS,
    )
    beta: float = setting(
        0.5,
        "Share of the teacher in the mixture; near 0 like forward_kl, near 1 like reverse_kl.",
        gt=0,
        lt=1,
        only_if=JSD,
    )
    discount: float = setting(
        0.0,
        "0: a token is paid for itself alone; 1: for all that follow too, the reverse KL of whole responses (MiniLLM).",
        ge=0,
        le=1,
        only_if=SAMPLED,
    )
    baseline: Literal["leave_one_out", "none"] = setting(
        "leave_one_out",
        "What a token is paid is compared with the mean of the other responses at its position, or not at all.",
        only_if=SAMPLED,
    )
    clip: float = setting(
        0.2, "Ratios to the policy that began the step are clipped this far from 1.", gt=0, lt=1, only_if=SAMPLED
    )
    epochs: int = setting(1, "Passes over each rollout batch.", ge=1)
    minibatches: int = setting(1, "Optimiser updates per pass.", ge=1)
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_horizon"] = setting(
        "token_mean", "Denominator of the loss; constant_horizon divides by rollout.max_new_tokens."
    )

    @property
    def from_sampled_tokens(self) -> bool:
        return self.divergence == "reverse_kl" and self.form == "sampled"


class DistillAlarmConfig(Schema):
    teacher_ratio: float = setting(
        1.5, "Warn when the KL from the teacher, nats a token, passes this multiple of its start.", gt=1
    )
    length_ratio: float = setting(2.0, "Warn when mean length passes this multiple of its start.", gt=1)
    clip_fraction: float = setting(
        0.2, "Warn when more than this share of tokens is clipped.", gt=0, le=1, only_if=SAMPLED
    )


class DistillConfig(GeneratingConfig):
    algorithm: Literal["distill"] = setting("distill", "On-policy distillation: a teacher judges the samples.")
    teacher: TeacherConfig = setting(..., "What is learned from.")
    rollout: DistillRolloutConfig = setting(DistillRolloutConfig, "Generation.")
    distill: DistillSettings = setting(DistillSettings, "The algorithm.")
    alarms: DistillAlarmConfig = setting(DistillAlarmConfig, "When to warn.")

    @property
    def rewarded(self) -> bool:
        """Whether there is a reward to report; nothing is learned from it."""
        return self.reward.model is not None or bool(self.reward.ensemble or self.reward.rules)


def distill_problems(config: object, where: Mapping[str, object]) -> list[str]:
    """Rules across keys of the stage: one sentence for each that is broken; none for another stage."""
    if not isinstance(config, DistillConfig):
        return []
    found = []
    responses = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    if responses < config.distill.minibatches:
        found.append(
            f"a step has {responses} responses (rollout.prompts_per_step {config.rollout.prompts_per_step}"
            f"{at('rollout.prompts_per_step', where)}), fewer than distill.minibatches {config.distill.minibatches}"
            f"{at('distill.minibatches', where)}: a mini-batch would be empty"
        )
    asked = {
        "gold": config.evaluation.gold is not None,
        "rules": bool(config.evaluation.rules),
        "greedy": config.evaluation.greedy,
    }
    for key in [key for key, given in asked.items() if given and not config.rewarded]:
        name = f"evaluation.{key}"
        found.append(
            f"{name} is given{at(name, where)}, and the recipe names no reward: sampled answers are judged by the "
            f"teacher alone; give reward.rules or reward.model, which are only reported, or remove {name}"
        )
    if config.environment.functions:
        found.append(
            f"environment.functions is given{at('environment.functions', where)}, but distill reads no reward of an "
            "environment; use grpo, or prompts that are answered in one turn"
        )
    return found
