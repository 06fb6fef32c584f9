"""Two models that generate as one: every token is drawn from the geometric mixture of policy and reference.

Shapes: b rows of a forward pass, V vocabulary.

    log p(v | before) = (1 - c) log pi(v | before) + c log ref(v | before) - log Z(before)

(Munos et al. 2023, arXiv:2312.00886, section 7.)  The rollout engine sees one model with these logits, so that draws,
keys, stop rules and `rollout_logp`, the mixture's own, are those of every other rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from tutelage.errors import RolloutError
from tutelage.math.online_preference import mixed_logits
from tutelage.rollout.inprocess.cache import PagedCache


@dataclass(frozen=True, eq=False)
class Mixed:
    """logits (b, ..., V) float32: of the mixture, not normalised."""

    logits: Tensor


class GeometricMixture(nn.Module):
    """A causal language model for `InProcessRollout` whose logits are (1 - coef) policy + coef reference.

    policy, reference   models with one vocabulary, or the same model twice.
    reference_context   what the reference's forward passes run in, such as an adapter that is switched off.
    coef                0: the policy alone, 1: the reference alone; the other one is not run.

    Both models keep their keys and values, so a page holds the layers of both.
    Raises RolloutError for two vocabularies.
    """

    def __init__(
        self,
        policy: nn.Module,
        reference: nn.Module,
        coef: float,
        reference_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.reference = reference
        self.coef = coef
        self.reference_context = reference_context
        self.config: Any = policy.config
        sizes = [int(model.config.vocab_size) for model in (policy, reference)]  # type: ignore[union-attr, arg-type]
        if sizes[0] != sizes[1]:
            raise RolloutError(
                f"policy and reference have {sizes[0]} and {sizes[1]} tokens in their vocabularies",
                fix="mix models with one tokenizer",
            )

    def forward(self, *, past_key_values: PagedCache, **inputs: Any) -> Mixed:
        """One forward pass of each model that counts, over the same tokens and pages."""
        if self.coef == 0.0:
            return Mixed(self.policy(past_key_values=past_key_values, **inputs).logits)
        if self.coef == 1.0:
            with self.reference_context():
                return Mixed(self.reference(past_key_values=past_key_values, **inputs).logits)
        own = self.policy(past_key_values=past_key_values, **inputs).logits
        second = SecondModel(past_key_values, int(self.config.num_hidden_layers))
        with self.reference_context():
            return Mixed(mixed_logits(own, self.reference(past_key_values=second, **inputs).logits, self.coef))


class SecondModel(Cache):
    """The cache of a batch as its second model sees it: the same pages and positions, layers behind the first's.

    first_layers  layers of the first model, which has run the same pass already.
    """

    def __init__(self, shared: PagedCache, first_layers: int) -> None:
        super().__init__(layers=[])
        self.shared = shared
        self.first_layers = first_layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.shared.update(key_states, value_states, layer_idx + self.first_layers, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.shared.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.shared.get_mask_sizes(query_length, layer_idx)

    def get_max_length(self, layer_idx: int | None = 0) -> int:
        return self.shared.get_max_length(layer_idx)
