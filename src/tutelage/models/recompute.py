"""Activation checkpointing by budget: as few blocks as must are recomputed in the backward pass.

Of n tokens a block keeps n b bytes for the backward pass, and its input, n h bytes, stays whether it is recomputed or
not.  With the lowest k of L blocks recomputed, the blocks hold at most

    held(k) = n (L h + (L - k) b)    bytes,    0 <= k < L,

since the backward pass begins at the top: when it comes to a recomputed block, those that were kept are gone.  The
topmost is never recomputed: it would be held at once again.  k is the least with held(k) <= budget, chosen for every
micro-batch.  The gradient is the same for every k (Chen et al. 2016, arXiv:1604.06174).

b and h are the largest that any training pass has shown, measured at the topmost block; the first pass recomputes all
others.  They depend on the lengths in a row (copies of a shared prompt's keys, masks), so a pass that is unlike all
before it can hold more than was planned: then the next ones are planned with what it showed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from tutelage.types import Stat


@dataclass(frozen=True)
class Sizes:
    """Bytes a token: what a block keeps beside its input, and the input."""

    kept: float
    entering: float

    def held(self, tokens: int, blocks: int, recomputed: int) -> float:
        return tokens * (blocks * self.entering + (blocks - recomputed) * self.kept)

    def recomputed(self, tokens: int, blocks: int, budget: int) -> int:
        """The fewest blocks whose recomputation keeps within the budget; all but the topmost where nothing does."""
        return next((k for k in range(blocks) if self.held(tokens, blocks, k) <= budget), blocks - 1)


@dataclass(eq=False)
class Recompute:
    """blocks: of one model, from the lowest, with transformers' checkpointing switched on; budget: bytes."""

    blocks: Sequence[nn.Module]
    budget: int
    sizes: Sizes | None = None
    _chosen: list[int] = field(default_factory=list)
    _warned: set[str] = field(default_factory=set)

    @contextmanager
    def during(self, tokens: int) -> Iterator[None]:
        """Around the forward pass of `tokens` tokens, padding included."""
        count, known = len(self.blocks), self.sizes
        recomputed = count - 1 if known is None else known.recomputed(tokens, count, self.budget)
        for number, block in enumerate(self.blocks):
            block.gradient_checkpointing = number < recomputed  # type: ignore[assignment]
        self._chosen.append(recomputed)
        with _measured(self.blocks[-1]) as found:
            yield
        seen = Sizes(found.kept() / tokens, found.entering / tokens)
        self.learn(seen)
        self._warn(tokens, seen, recomputed)

    def of_trained(self) -> Recompute | None:
        """Of the blocks that have a trained weight: no other keeps anything.  None where there is no such block."""
        trained = [block for block in self.blocks if any(p.requires_grad for p in block.parameters())]
        return Recompute(trained, self.budget, self.sizes) if trained else None

    def learn(self, seen: Sizes) -> None:
        """Plan with these bytes, where they are more."""
        known = self.sizes if self.sizes is not None else seen
        self.sizes = Sizes(max(known.kept, seen.kept), max(known.entering, seen.entering))

    def _warn(self, tokens: int, seen: Sizes, recomputed: int) -> None:
        count = len(self.blocks)
        held, least = (math.ceil(seen.held(tokens, count, k)) for k in (recomputed, count - 1))
        if held <= self.budget:
            return
        what = f"model.activation_bytes is {self.budget}: a micro-batch of {tokens} tokens"
        if least > self.budget:
            self._say(
                "too little",
                f"{what} holds {least} bytes with all blocks but one recomputed; give as much, or "
                "lower optim.tokens_per_micro_batch",
            )
        else:
            self._say(
                "unlike",
                f"{what} held {held} bytes, more a token than those before it; the next ones are planned with that",
            )

    def _say(self, kind: str, text: str) -> None:
        """Once."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, stacklevel=2)

    def read(self) -> Stat:
        """Blocks recomputed, a mean over the passes since the last reading."""
        chosen, self._chosen = self._chosen, []
        return Stat(sum(chosen), len(chosen))


@dataclass(eq=False)
class _Found:
    """Storages by address: those that the backward pass keeps, and those that it would hold without the block."""

    held: dict[int, int] = field(default_factory=dict)
    apart: set[int] = field(default_factory=set)
    entering: int = 0

    def kept(self) -> int:
        return sum(size for address, size in self.held.items() if address not in self.apart)


@contextmanager
def _measured(block: nn.Module) -> Iterator[_Found]:
    """What one forward pass of a block keeps.  Its weights, and what is passed in, are held whatever becomes of it."""
    found = _Found()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found.held[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = saved_tensors_hooks(keep, lambda tensor: tensor)

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        passed = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        found.entering = max((x.numel() * x.element_size() for x in passed if x.requires_grad), default=0)
        outside = [*passed, *module.parameters(), *module.buffers()]
        found.apart |= {x.untyped_storage().data_ptr() for x in outside}
        hooks.__enter__()

    def after(*_: Any) -> None:
        hooks.__exit__(None, None, None)

    handles = [
        block.register_forward_pre_hook(before, with_kwargs=True),
        block.register_forward_hook(after, always_call=True),
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
