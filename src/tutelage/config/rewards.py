"""What is rewarded, and what else held-out answers are judged by."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from tutelage.config.reward_ensemble import EnsembleConfig
from tutelage.config.schema import OnlyIf, Schema, setting

HAS_REWARD_MODEL = OnlyIf("reward.model is given", lambda c: c.reward.model is not None)
ON_A_BASE = OnlyIf(
    "model.shared_base is true, and reward.model or reward.ensemble is given",
    lambda c: c.model.shared_base and bool(c.reward.model or c.reward.ensemble),
)
HAS_RULES = OnlyIf(
    "reward.rules or evaluation.rules names a rule", lambda c: bool(c.reward.rules or c.evaluation.rules)
)
SAMPLED = OnlyIf("evaluation.greedy is false", lambda c: not c.evaluation.greedy)
SEVERAL_ANSWERS = OnlyIf(
    "evaluation.samples is above 1 and evaluation.rules names a rule",
    lambda c: c.evaluation.samples > 1 and bool(c.evaluation.rules),
)


class RuleSettings(Schema):
    """How a rule is named and called."""

    function: str = setting(..., "A built-in rule, module:function or file.py:function (docs/rewards.md).")
    settings: dict[str, Any] = setting(
        dict, "Keyword arguments of the rule, as function: name(key=value) has them too."
    )
    seconds: float = setting(10.0, "Deadline of one response; a call on N responses at once has N times that.", gt=0)
    concurrency: int | None = setting(
        None, "Responses judged at once; default: 32 for an async function, else 1 (each has a process).", ge=1
    )


class RuleConfig(RuleSettings):
    weight: float = setting(1.0, "Weight in the total reward.")


class HeldOutRule(RuleSettings):
    name: str = setting(..., "Its name in the metrics: eval/rule/NAME.", pattern=r"^[A-Za-z][A-Za-z0-9_]*$")


class RewardConfig(EnsembleConfig):
    model: str | None = setting(None, "Reward model folder or hub name.")
    weight: float = setting(1.0, "Weight of the reward model.", only_if=HAS_REWARD_MODEL)
    shared_base: bool | None = setting(
        None,
        "Reward models are adapters on the policy's base. true: refused where one cannot be; false: each has weights "
        "of its own; default: those that can be, the others are named.",
        only_if=ON_A_BASE,
    )
    rules: list[RuleConfig] = setting(list, "Rule functions, each with a weight.")
    on_error: Literal["stop", "skip"] = setting(
        "stop",
        "A rule raises, returns NaN or passes its deadline on a response. stop: the run ends and names it; "
        "skip: the response is left out, counted in reward/errors and written to samples/errors.jsonl.",
        only_if=HAS_RULES,
    )


class AnswersEvaluation(Schema):
    every: int = setting(0, "Evaluate every N steps; 0: at the start and the end.", ge=0)
    prompts: int = setting(64, "Held-out prompts answered, the same before and after.", ge=1)
    samples: int = setting(1, "Answers to each of them.", ge=1, only_if=SAMPLED)
    greedy: bool = setting(False, "Take the most likely token instead of sampling; no KL is reported then.")
    gold: str | None = setting(
        None, "module:function that scores held-out answers; never used for training; picks the best checkpoint."
    )
    rules: list[HeldOutRule] = setting(list, "Rules that judge held-out answers besides, each reported by its name.")
    pass_at: list[int] = setting(
        list,
        "For each k: the chance that one of k answers has the full mark of a rule, 1 (Chen et al. 2021).",
        only_if=SEVERAL_ANSWERS,
    )

    @field_validator("rules")
    @classmethod
    def different_names(cls, rules: list[HeldOutRule]) -> list[HeldOutRule]:
        names = [rule.name for rule in rules]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise PydanticCustomError("names", "must have different names, {twice} is there twice", {"twice": twice})
        return rules

    @field_validator("pass_at")
    @classmethod
    def enough_answers(cls, pass_at: list[int], info: ValidationInfo) -> list[int]:
        samples = info.data.get("samples", 1)
        if not all(1 <= k <= samples for k in pass_at):
            said = "must be numbers from 1 to evaluation.samples, {samples}"
            raise PydanticCustomError("pass_at", said, {"samples": samples})
        return pass_at
