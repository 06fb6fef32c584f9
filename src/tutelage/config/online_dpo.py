"""Schemas of the stages that learn from preferences between fresh responses: `online_dpo`, `xpo` and `nash_md`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from tutelage.config.dpo import COUPLED, LOSS_READS, PER_PAIR, REFERENCE, SMOOTHING, TAU, reads, require_smoothing
from tutelage.config.generating import GeneratingConfig
from tutelage.config.rollouts import RolloutConfig
from tutelage.config.schedule import ScheduleConfig
from tutelage.config.schema import OnlyIf, Schema, setting
from tutelage.config.where import at
from tutelage.errors import closest

ONLINE_LOSSES = tuple(
    name for name, found in LOSS_READS.items() if {REFERENCE, PER_PAIR} <= found and name not in COUPLED
)
"""Losses of a pair against the reference that look at no other pair."""


def _some_loss(what: str) -> OnlyIf:
    names = [name for name in ONLINE_LOSSES if what in LOSS_READS[name]]
    return OnlyIf(
        f"the loss is {', '.join(names)} or a function of yours", lambda c: what in reads(getattr(c, c.algorithm).loss)
    )


class PairSettings(Schema):
    """What the losses of pairs share; each algorithm's section has these keys."""

    epochs: int = setting(1, "Passes over the pairs of each step.", ge=1)
    minibatches: int = setting(1, "Optimiser updates per pass.", ge=1)
    loss: str = setting(
        "sigmoid",
        f"One of {', '.join(ONLINE_LOSSES)} (ipo_sum is online IPO's); or module:function of your own "
        "(docs/preference_losses.md).",
    )
    beta: float = setting(0.1, "Strength of the pull to the reference; larger keeps the policy nearer.", gt=0)
    label_smoothing: float = setting(
        0.0,
        "Share of judgements taken to be the wrong way round (cDPO).",
        ge=0,
        lt=0.5,
        only_if=_some_loss(SMOOTHING),
    )
    tau: float = setting(0.05, "Temperature of discopop's blend.", gt=0, only_if=_some_loss(TAU))
    missing_eos_penalty: float = setting(0.0, "Subtracted from the score of a truncated response.", ge=0)

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, name: str) -> str:
        if name in ONLINE_LOSSES or ":" in name:
            return name
        hint = closest(name, ONLINE_LOSSES)
        known = ", ".join(ONLINE_LOSSES)
        raise PydanticCustomError(
            "loss",
            "must be one of {known}, or module:function of your own; {name} is not.{hint}",
            {"known": known, "name": name, "hint": hint},
        )

    @field_validator("label_smoothing")
    @classmethod
    def _smoothed(cls, smoothing: float, info: ValidationInfo) -> float:
        require_smoothing([info.data.get("loss", "")], smoothing)
        return smoothing


class OnlineDPOSettings(PairSettings):
    reference_every: int | None = setting(
        None,
        "Iterative DPO: after every N steps the reference becomes the policy of that moment; default: it stays as it "
        "was passed in.",
        ge=1,
    )


class XPOSettings(PairSettings):
    alpha: float = setting(
        1e-5, "Weight of the logprob of the reference's response: the optimism, in loss per nat.", ge=0
    )


class NashMDSettings(Schema):
    minibatches: int = setting(
        1, "Optimiser updates per step; with more than one the later ones are a little off-policy.", ge=1
    )
    beta: float = setting(0.1, "KL coefficient (the paper's tau).", ge=0)
    mixture_coef: float = setting(
        0.5,
        "Share of the reference in the mixture the policy plays against (the paper's beta): 0 is the policy itself, "
        "1 the reference.",
        ge=0,
        le=1,
    )
    preference: str = setting(
        "sigmoid",
        "Probability that a response is preferred, from two scores: sigmoid (of their difference), win (1, 0, or 1/2 "
        "for a tie), or module:function of yours, called with both (P,).",
    )
    kl: Literal["sequence", "token"] = setting(
        "sequence",
        "Credit of a token for KL: that of its whole response (the paper's), or its own alone (as in TRL).",
        only_if=OnlyIf("nash_md.beta is above 0", lambda c: c.nash_md.beta > 0),
    )
    missing_eos_penalty: float = setting(0.0, "Subtracted from the score of a truncated response.", ge=0)


class PreferenceAlarmConfig(Schema):
    kl: float = setting(10.0, "Warn when the sequence KL passes this many nats.", gt=0)
    length_ratio: float = setting(2.0, "Warn when mean length passes this multiple of its start.", gt=1)
    tied_fraction: float = setting(0.5, "Warn when more than this share of the pairs has equal scores.", gt=0, le=1)


class PairRolloutConfig(RolloutConfig):
    prompts_per_step: int = setting(32, "Prompts of one step.", ge=1)
    samples_per_prompt: int = setting(
        2, "Responses per prompt, at least 2; of more than 2 the best is compared with the worst.", ge=2
    )


class DuelRolloutConfig(RolloutConfig):
    prompts_per_step: int = setting(32, "Prompts of one step.", ge=1)
    samples_per_prompt: int = setting(1, "Pairs per prompt: a response of the policy and one of the other side.", ge=1)


class MixtureRolloutConfig(DuelRolloutConfig):
    engine: Literal["inprocess", "vllm"] = setting(
        "inprocess", "inprocess alone: every token is drawn from the logits of two models together."
    )

    @field_validator("engine")
    @classmethod
    def in_process(cls, engine: str) -> str:
        if engine != "inprocess":
            raise PydanticCustomError(
                "mixture",
                "must be inprocess: every token is drawn from the logits of policy and reference together",
            )
        return engine


class DuelScheduleConfig(ScheduleConfig):
    @field_validator("kind")
    @classmethod
    def not_asynchronous(cls, kind: str) -> str:
        if kind == "asynchronous":
            raise PydanticCustomError(
                "schedule", "must be synchronous or one_step_off: the two responses of a pair are begun together"
            )
        return kind


class OnPolicyScheduleConfig(ScheduleConfig):
    @field_validator("kind")
    @classmethod
    def synchronous(cls, kind: str) -> str:
        if kind != "synchronous":
            raise PydanticCustomError(
                "schedule",
                "must be synchronous: the policy gradient holds for responses of the newest weights",
            )
        return kind


class OnlineDPOConfig(GeneratingConfig):
    algorithm: Literal["online_dpo"] = setting(
        "online_dpo", "Online DPO and IPO: pairs of fresh responses, ranked by the reward."
    )
    rollout: PairRolloutConfig = setting(PairRolloutConfig, "Generation.")
    online_dpo: OnlineDPOSettings = setting(OnlineDPOSettings, "The algorithm.")
    alarms: PreferenceAlarmConfig = setting(PreferenceAlarmConfig, "When to warn.")


class XPOConfig(GeneratingConfig):
    algorithm: Literal["xpo"] = setting("xpo", "Exploratory preference optimisation: the policy against its reference.")
    rollout: DuelRolloutConfig = setting(DuelRolloutConfig, "Generation.")
    schedule: DuelScheduleConfig = setting(DuelScheduleConfig, "When to generate and when to learn.")
    xpo: XPOSettings = setting(XPOSettings, "The algorithm.")
    alarms: PreferenceAlarmConfig = setting(PreferenceAlarmConfig, "When to warn.")


class NashMDConfig(GeneratingConfig):
    algorithm: Literal["nash_md"] = setting(
        "nash_md", "Nash-MD: the policy against the geometric mixture of itself and its reference."
    )
    rollout: MixtureRolloutConfig = setting(MixtureRolloutConfig, "Generation.")
    schedule: OnPolicyScheduleConfig = setting(OnPolicyScheduleConfig, "When to generate and when to learn.")
    nash_md: NashMDSettings = setting(NashMDSettings, "The algorithm.")
    alarms: PreferenceAlarmConfig = setting(PreferenceAlarmConfig, "When to warn.")


PreferenceConfig = OnlineDPOConfig | XPOConfig | NashMDConfig


def preference_problems(config: object, where: Mapping[str, object]) -> list[str]:
    """Rules across keys of the three stages: one sentence for each that is broken; none for another stage."""
    if not isinstance(config, OnlineDPOConfig | XPOConfig | NashMDConfig):
        return []
    problems = _size_problems(config, where)
    if isinstance(config, OnlineDPOConfig) and config.online_dpo.reference_every and config.model.lora_rank:
        problems.append(
            f"online_dpo.reference_every is {config.online_dpo.reference_every}"
            f"{at('online_dpo.reference_every', where)} and model.lora_rank is {config.model.lora_rank}"
            f"{at('model.lora_rank', where)}: with LoRA the reference is the base with the adapter off, which never "
            "moves; train the full model, or merge the adapter after a run and start the next round from it"
        )
    if isinstance(config, NashMDConfig | XPOConfig):
        problems += _placement_problems(config, where)
        if config.environment.functions:
            problems.append(
                f"environment.functions is given{at('environment.functions', where)}, but the other side of a pair "
                f"answers in one turn; use another algorithm than {config.algorithm}"
            )
    return problems


def _size_problems(config: PreferenceConfig, where: Mapping[str, object]) -> list[str]:
    """A mini-batch holds at least one pair."""
    section = getattr(config, config.algorithm)
    duels = 1 if isinstance(config, OnlineDPOConfig) else config.rollout.samples_per_prompt
    pairs = config.rollout.prompts_per_step * duels
    if pairs >= section.minibatches:
        return []
    name = f"{config.algorithm}.minibatches"
    return [
        f"a step has {pairs} pairs (rollout.prompts_per_step {config.rollout.prompts_per_step}"
        f"{at('rollout.prompts_per_step', where)}), fewer than {name} {section.minibatches}{at(name, where)}: a "
        "mini-batch would be empty"
    ]


def _placement_problems(config: XPOConfig | NashMDConfig, where: Mapping[str, object]) -> list[str]:
    """Where a second side generates: with whole blocks, and for the mixture beside the policy."""
    cluster = config.cluster
    if cluster.transport != "ray":
        return []
    problems = []
    if cluster.layout_of("reference").pipeline > 1:
        problems.append(
            f"the layout of reference has {cluster.layout_of('reference').pipeline} pipeline stages, and it generates "
            f"in {config.algorithm}: no rank has the whole model; use a layout without pipeline"
        )
    if not isinstance(config, NashMDConfig):
        return problems
    pools = {role: cluster.pool_of(role) for role in ("actor", "reference", "rollout")}
    if len(set(pools.values())) > 1:
        said = ", ".join(f"{role} in {pool}" for role, pool in pools.items())
        problems.append(
            f"nash_md mixes policy and reference token by token, but cluster.place puts {said}: give them one pool"
        )
    if cluster.layout_of("actor") != cluster.layout_of("reference"):
        problems.append(
            "nash_md mixes policy and reference token by token, but the layout of actor "
            f"({cluster.layout_of('actor')}) is not that of reference ({cluster.layout_of('reference')}): give them one"
        )
    return problems
