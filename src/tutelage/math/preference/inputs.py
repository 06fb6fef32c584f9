"""What a preference loss reads and returns.   Shapes: P pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tutelage.errors import ConfigError
from tutelage.math.masking import at_least_float32, require_same_shape

COLUMNS = (
    "chosen_logp",
    "rejected_logp",
    "ref_chosen_logp",
    "ref_rejected_logp",
    "chosen_len",
    "rejected_len",
    "chosen_nll",
    "weight",
)


@dataclass(frozen=True, eq=False)
class PreferenceInputs:
    """Pairs of answers to one prompt each, all (P,); float32 at least.

    chosen_logp, rejected_logp          log pi(y | x) of whole answers, summed over trained tokens, in nats; where the
                                        recipe sets `ld_alpha`, with the tail of the longer answer weighed down.
    ref_chosen_logp, ref_rejected_logp  the same under the reference, without gradient; 0 without a reference.
    chosen_len, rejected_len            trained tokens.
    chosen_nll                          -log pi(y_w | x) / |y_w|, nats per token, of all trained tokens alike.
    weight                              of each pair, without gradient; 1 unless the recipe weighs pairs.
    delta                               reward shift of bco_pair, a number without gradient.

    Raises ShapeError when shapes differ.
    """

    chosen_logp: Tensor
    rejected_logp: Tensor
    ref_chosen_logp: Tensor
    ref_rejected_logp: Tensor
    chosen_len: Tensor
    rejected_len: Tensor
    chosen_nll: Tensor
    weight: Tensor
    delta: float | Tensor = 0.0

    def __post_init__(self) -> None:
        require_same_shape(**{name: getattr(self, name) for name in COLUMNS})
        for name in COLUMNS:
            column = at_least_float32(getattr(self, name))
            constant = name not in ("chosen_logp", "rejected_logp", "chosen_nll")
            object.__setattr__(self, name, column.detach() if constant else column)

    @classmethod
    def of(
        cls,
        chosen_logp_P: Tensor,
        rejected_logp_P: Tensor,
        ref_chosen_logp_P: Tensor | None = None,
        ref_rejected_logp_P: Tensor | None = None,
        chosen_len_P: Tensor | None = None,
        rejected_len_P: Tensor | None = None,
        delta: float | Tensor = 0.0,
    ) -> PreferenceInputs:
        """Pairs of weight 1 from their sums; without a reference its logprobs are 0, without lengths these are 1."""
        zero, one = torch.zeros_like(chosen_logp_P), torch.ones_like(chosen_logp_P)
        chosen_len = one if chosen_len_P is None else chosen_len_P
        return cls(
            chosen_logp_P,
            rejected_logp_P,
            zero if ref_chosen_logp_P is None else ref_chosen_logp_P,
            zero if ref_rejected_logp_P is None else ref_rejected_logp_P,
            chosen_len,
            one if rejected_len_P is None else rejected_len_P,
            -chosen_logp_P / chosen_len,
            one,
            delta,
        )

    def columns(self) -> Tensor:
        """(P, 8) in the order of COLUMNS: what a coupled loss gathers from all ranks."""
        return torch.stack([getattr(self, name) for name in COLUMNS], dim=1)

    @classmethod
    def from_columns(cls, columns_PK: Tensor, delta: float | Tensor = 0.0) -> PreferenceInputs:
        return cls(**dict(zip(COLUMNS, columns_PK.unbind(1), strict=True)), delta=delta)

    @property
    def log_ratio_chosen(self) -> Tensor:
        """log pi / ref of the chosen answer."""
        return self.chosen_logp - self.ref_chosen_logp

    @property
    def log_ratio_rejected(self) -> Tensor:
        return self.rejected_logp - self.ref_rejected_logp


@dataclass(frozen=True)
class PreferenceSettings:
    """The numbers of a recipe that a loss may read; see `config.dpo.DPOSettings` for each.

    Raises ConfigError unless beta > 0 and 0 <= label_smoothing < 0.5.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.5
    alpha: float = 0.25
    tau: float = 0.05
    divergence: str = "reverse_kl"
    divergence_alpha: float = 0.5

    def __post_init__(self) -> None:
        if not self.beta > 0.0:
            raise ConfigError(f"beta of the preference loss is {self.beta}", fix="use a number above 0; 0.1 is usual")
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"label_smoothing is {self.label_smoothing}",
                fix="use a number in [0, 0.5): the share of labels that are wrong",
            )


@dataclass(frozen=True, eq=False)
class PreferenceTerms:
    """All (P,).  Only `loss` carries gradient.

    reward_chosen, reward_rejected: the implicit rewards whose order the loss teaches, in the loss's own units.
    """

    loss: Tensor
    reward_chosen: Tensor
    reward_rejected: Tensor

    @classmethod
    def of(cls, loss_P: Tensor, reward_chosen_P: Tensor, reward_rejected_P: Tensor) -> PreferenceTerms:
        return cls(loss_P, reward_chosen_P.detach(), reward_rejected_P.detach())


PreferenceLossFunction = Callable[[PreferenceInputs, PreferenceSettings], PreferenceTerms]
