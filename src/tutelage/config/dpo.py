"""Schema of the `dpo` stage: preference pairs, a policy and, where the loss reads one, its reference."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from tutelage.config.common import CheckpointConfig, DataConfig, ModelConfig, OptimConfig, RunConfig
from tutelage.config.schema import OnlyIf, Schema, setting
from tutelage.errors import closest

REFERENCE, SMOOTHING, DIVERGENCE, SUMS = "reference", "label_smoothing", "divergence", "sums"
GAMMA, ALPHA, TAU, PER_PAIR = "gamma", "alpha", "tau", "per_pair"
_OF_A_GAP = frozenset({REFERENCE, DIVERGENCE, SUMS, PER_PAIR})
_OF_RATIOS = frozenset({REFERENCE, SUMS, PER_PAIR})

LOSS_READS: dict[str, frozenset[str]] = {
    "sigmoid": _OF_A_GAP | {SMOOTHING},
    "sigmoid_norm": _OF_A_GAP | {SMOOTHING},
    "robust": _OF_A_GAP | {SMOOTHING},
    "hinge": _OF_A_GAP,
    "ipo": _OF_A_GAP,
    "ipo_sum": _OF_A_GAP,
    "exo_pair": _OF_A_GAP | {SMOOTHING},
    "discopop": _OF_A_GAP | {TAU},
    "nca_pair": _OF_RATIOS,
    "bco_pair": _OF_RATIOS,
    "sppo_hard": _OF_RATIOS,
    "apo_zero": _OF_RATIOS,
    "apo_down": _OF_RATIOS,
    "aot": frozenset({REFERENCE, SUMS, SMOOTHING}),
    "aot_unpaired": frozenset({REFERENCE, SUMS, SMOOTHING}),
    "orpo": frozenset({PER_PAIR}),
    "cpo": frozenset({SUMS, SMOOTHING, PER_PAIR}),
    "simpo": frozenset({SMOOTHING, GAMMA, PER_PAIR}),
    "alphapo": frozenset({SMOOTHING, GAMMA, ALPHA, PER_PAIR}),
}
"""What each loss reads: the reference; the keys of its own; a gap of two scores, which an f-divergence may shape; sums
over the tokens of an answer rather than means; one pair at a time, so that pairs may be weighed."""
ANY_KEY = frozenset().union(*LOSS_READS.values())
"""A function of the user's own may read all of it."""
OWN_NLL = {"cpo": 1.0, "orpo": 1.0}
"""Weight of the chosen answers' NLL that belongs to a loss itself."""
COUPLED = ("aot", "aot_unpaired", "bco_pair")
"""Losses that look at the whole mini-batch."""
NEEDS_SMOOTHING = {
    "robust": "without it robust is sigmoid",
    "exo_pair": "without it the loss is infinite; 1e-3 is the paper's",
}


def reads(name: str) -> frozenset[str]:
    return LOSS_READS.get(name, ANY_KEY)


def losses_of(settings: DPOSettings) -> dict[str, float]:
    """Name -> weight of every loss of the run."""
    return dict(settings.loss_weights) or {settings.loss: 1.0}


def any_reads(settings: DPOSettings, what: str) -> bool:
    return any(what in reads(name) for name in losses_of(settings))


def all_read(settings: DPOSettings, what: str) -> bool:
    return all(what in reads(name) for name in losses_of(settings))


def has_reference(settings: DPOSettings) -> bool:
    """Whether the run asks a reference anything."""
    return any_reads(settings, REFERENCE) and not settings.reference_free


def some_loss(what: str) -> OnlyIf:
    names = ", ".join(name for name, found in LOSS_READS.items() if what in found)
    return OnlyIf(f"dpo.loss is {names} or a function of yours", lambda c: any_reads(c.dpo, what))


ONE_LOSS = OnlyIf("dpo.loss_weights is not given", lambda c: not c.dpo.loss_weights)
A_GAP = OnlyIf(
    "every loss is a function of the gap between two scores: "
    + ", ".join(name for name, found in LOSS_READS.items() if DIVERGENCE in found),
    lambda c: all_read(c.dpo, DIVERGENCE),
)
ALL_SUMS = OnlyIf(
    "every loss reads sums over tokens: " + ", ".join(name for name, found in LOSS_READS.items() if SUMS in found),
    lambda c: all_read(c.dpo, SUMS),
)
ALL_PER_PAIR = OnlyIf("no loss is aot or aot_unpaired, which sort the pairs apart", lambda c: all_read(c.dpo, PER_PAIR))
ALPHA_DIVERGENCE = OnlyIf(
    "dpo.divergence is alpha_divergence",
    lambda c: c.dpo.divergence == "alpha_divergence" and all_read(c.dpo, DIVERGENCE),
)
MOVING = OnlyIf(
    "the loss reads a reference of its own, which can move: dpo.reference_free is false, dpo.reference_cache is not "
    "given, and model.lora_rank is 0 (with LoRA the reference is the base under the adapter)",
    lambda c: has_reference(c.dpo) and c.dpo.reference_cache is None and c.model.lora_rank == 0,
)
SYNCED = OnlyIf("dpo.sync_every is above 0", lambda c: c.dpo.sync_every > 0)
STILL = OnlyIf(
    "the loss reads a reference and dpo.sync_every is 0", lambda c: has_reference(c.dpo) and c.dpo.sync_every == 0
)
MEASURED = OnlyIf("evaluation.distance_prompts is above 0", lambda c: c.evaluation.distance_prompts > 0)


class DPOSettings(Schema):
    epochs: int = setting(1, "Passes over the pairs.", ge=1)
    batch_size: int = setting(32, "Pairs per optimiser update.", ge=1)
    loss: str = setting(
        "sigmoid",
        f"One of {', '.join(LOSS_READS)}; or module:function of your own (docs/preference_losses.md).",
        only_if=ONE_LOSS,
    )
    loss_weights: dict[str, float] = setting(dict, "Several losses added up: {name: weight}, in place of loss.")
    beta: float = setting(
        0.1, "Strength of the pull to the reference (IPO's tau, ORPO's lambda); see docs/preference_losses.md.", gt=0
    )
    label_smoothing: float = setting(
        0.0, "Share of preferences taken to be the wrong way round (cDPO).", ge=0, lt=0.5, only_if=some_loss(SMOOTHING)
    )
    gamma: float = setting(0.5, "Margin of the rewards that simpo and alphapo ask for.", ge=0, only_if=some_loss(GAMMA))
    alpha: float = setting(
        0.25, "Shape of alphapo's reward; towards 0 it is simpo's. Not 0.", ge=-2, le=2, only_if=some_loss(ALPHA)
    )
    tau: float = setting(0.05, "Temperature of discopop's blend.", gt=0, only_if=some_loss(TAU))
    divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = setting(
        "reverse_kl", "Divergence from the reference that the loss stands for (f-DPO).", only_if=A_GAP
    )
    divergence_alpha: float = setting(
        0.5, "Between reverse_kl (0) and forward_kl (1).", gt=0, lt=1, only_if=ALPHA_DIVERGENCE
    )
    reference_free: bool = setting(
        False, "Take every reference logprob as 0; none is built.", only_if=some_loss(REFERENCE)
    )
    ld_alpha: float | None = setting(
        None, "Weight of the tokens past the shorter answer's length (LD-DPO).", ge=0, lt=1, only_if=ALL_SUMS
    )
    weighting: Literal["none", "wpo", "wpo_aligned"] = setting(
        "none",
        "Weigh pairs by how likely the policy writes them (WPO); aligned: against its own samples.",
        only_if=ALL_PER_PAIR,
    )
    nll_coef: float | None = setting(
        None, "Weight of the chosen answers' NLL per token (RPO); default: 1 for cpo and orpo, else 0.", ge=0
    )
    sync_every: int = setting(
        0, "Move the reference to the policy every N steps (TR-DPO); 0: never.", ge=0, only_if=MOVING
    )
    sync_alpha: float = setting(
        0.6, "Reference = sync_alpha * policy + (1 - sync_alpha) * reference.", gt=0, le=1, only_if=SYNCED
    )
    reference_cache: str | None = setting(
        None,
        "File of reference logprobs: made in one pass at the start where it does not exist, else read; then no "
        "reference is loaded.",
        only_if=STILL,
    )

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, name: str) -> str:
        _require_known(name)
        return name

    @field_validator("loss_weights")
    @classmethod
    def _known_losses(cls, weights: dict[str, float]) -> dict[str, float]:
        for name, weight in weights.items():
            _require_known(name)
            if not weight > 0:
                raise PydanticCustomError("loss_weight", "must be above 0 for every loss named")
        return weights

    @field_validator("alpha")
    @classmethod
    def _not_simpo(cls, alpha: float) -> float:
        if abs(alpha) < 1e-3:
            raise PydanticCustomError("alpha", "must not be 0, where alphapo is simpo; use dpo.loss=simpo")
        return alpha

    @field_validator("label_smoothing")
    @classmethod
    def _smoothed(cls, smoothing: float, info: ValidationInfo) -> float:
        names = info.data.get("loss_weights") or [info.data.get("loss", "")]
        require_smoothing(names, smoothing)
        return smoothing


def require_smoothing(names: Iterable[str], smoothing: float) -> None:
    """A problem of the key label_smoothing where one of these losses is nothing without it."""
    for name in names:
        if name in NEEDS_SMOOTHING and smoothing == 0:
            raise PydanticCustomError(
                "smoothing",
                "must be above 0 for the loss {name}: {why}",
                {"name": name, "why": NEEDS_SMOOTHING[name]},
            )


def _require_known(name: str) -> None:
    if name in LOSS_READS or ":" in name:
        return
    raise PydanticCustomError(
        "loss",
        "must be one of {known}, or module:function of your own; {name} is not.{hint}",
        {"known": ", ".join(LOSS_READS), "name": name, "hint": closest(name, LOSS_READS)},
    )


class DPOEvaluation(Schema):
    every: int = setting(0, "Evaluate every N steps; 0: at the start and the end.", ge=0)
    max_rows: int = setting(256, "Held-out pairs used.", ge=1)
    distance_prompts: int = setting(
        16, "Prompts that the policy answers at the start, to compare its logprobs with the data's; 0: none.", ge=0
    )
    distance_warning: float = setting(
        1.0, "Warn where chosen answers are this many nats a token below the policy's own.", gt=0, only_if=MEASURED
    )


class DPOConfig(RunConfig):
    algorithm: Literal["dpo"] = setting("dpo", "Preference optimisation on pairs: DPO and its relatives.")
    model: ModelConfig = setting(..., "The policy; its snapshot at the start is the reference.")
    data: DataConfig = setting(..., "Preference pairs.")
    dpo: DPOSettings = setting(DPOSettings, "The algorithm.")
    optim: OptimConfig = setting(OptimConfig, "Optimiser.")
    evaluation: DPOEvaluation = setting(DPOEvaluation, "Held-out loss and accuracy; distance of the data.")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "Checkpoints.")
