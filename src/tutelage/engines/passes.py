"""Forward and backward passes over one mini-batch: micro-batches, fillers, errors that every rank raises.

Shapes: B items of the mini-batch, b items of a micro-batch, N loss items, K scalars of an item.

A separable loss is sum(items * weights) with weights of the whole mini-batch; a coupled one is differentiated by its
scalars once, globally (`math.coupled`).  Micro-batches and ranks only add up gradients: their cut changes nothing but
rounding.  Every rank runs as many micro-batches as the busiest one, since sharded weights are gathered by all together.
A filler is a forward whose outputs get a gradient of 0; its loss is never computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from tutelage.data.packing import pack
from tutelage.engines.ranks import Ranks
from tutelage.errors import ShapeError, TrainingError
from tutelage.math.coupled import coupled_loss, surrogate
from tutelage.models.forward import (
    COMPUTED,
    Model,
    candidates_of,
    outputs,
    predicting_index,
    require_computed,
    shares_prompts,
)
from tutelage.models.heads import ScalarModel
from tutelage.models.language_model import LanguageModel
from tutelage.models.noise import embedding_noise
from tutelage.models.prefix import attention_cost
from tutelage.models.recompute import Recompute, Sizes
from tutelage.protocols import CoupledLoss, Loss, NoisyLoss, SeparableLoss
from tutelage.sharing import Share, workload
from tutelage.types import Outputs, Sequences, Stat, Stats, merge_stats

PREDICTED = COMPUTED["language"] | COMPUTED["value"]
"""Outputs that are read at the token before, so that a first response token needs a prompt."""

NOT_FINITE = "lower optim.lr, look at the rewards and the data of this step, or use dtype float32"


@dataclass(frozen=True)
class Found:
    """Of the whole mini-batch, the same on every rank.  micro_batches: of all data ranks together, without fillers."""

    loss: float
    stats: Stats
    micro_batches: int


@dataclass(frozen=True, eq=False)
class Passes:
    """Passes of one model over mini-batches.

    budget    tokens of a micro-batch.
    update    the number of the update, for error texts.
    backward  add the gradients to the weights'.
    """

    model: Model
    ranks: Ranks
    temperature: float
    budget: int
    update: int
    backward: bool

    def run(self, share: Share, loss: Loss) -> Found:
        """Raises TrainingError on every rank for a loss that is not finite on one."""
        self.ranks.agree(problem_of(lambda: require_learnable(self.model, share.rows, loss.outputs)))
        recompute = self.model.trunk.recompute
        try:
            found = self._coupled(share, loss) if isinstance(loss, CoupledLoss) else self._separable(share, loss)
        except Exception:
            if recompute is not None:
                recompute.read()  # of a pass that counts for nothing
            if self.backward and self.ranks.sum_once:
                self._drop_held_gradients(share, loss)
            raise
        if self.backward and recompute is not None:
            self._agree_on(recompute, found)
        return found

    def _agree_on(self, recompute: Recompute, found: Found) -> None:
        """What was recomputed, over all ranks; and all plan with the bytes of the rank that saw most."""
        sizes = None if recompute.sizes is None else asdict(recompute.sizes)
        theirs = self.ranks.from_parts({"stat": asdict(recompute.read()), "sizes": sizes})
        for one in theirs:
            if one["sizes"] is not None:
                recompute.learn(Sizes(**one["sizes"]))
        stat = merge_stats([{"recomputed_blocks": Stat(**one["stat"])} for one in theirs])
        found.stats.update({name: value for name, value in stat.items() if value.weight})

    def _drop_held_gradients(self, share: Share, loss: Loss) -> None:
        """Gradients that wait for the last micro-batch become those of the weights, where the caller discards them."""
        self.ranks.reduce_with_next_backward(self.model.root, True)
        self._backward(nothing(self._outputs(share.rows.select(torch.zeros(1, dtype=torch.int64)), loss)))

    # ---- one pass over the micro-batches ----

    def parts(self, share: Share, may_share: bool = True) -> tuple[list[Tensor], int]:
        """The micro-batches of this rank, and how many of them there are on all data ranks.  may_share: prompts."""
        parts = [] if share.filler else micro_batches(self.model, share.rows, self.budget, may_share)
        return parts, sum(self.ranks.from_parts(len(parts)))

    def rounds(self, share: Share, parts: list[Tensor], backward: bool) -> Iterator[tuple[Tensor, bool]]:
        """(index_b, counted) of every micro-batch, and of the fillers after them."""
        count = self.ranks.most(len(parts))
        filler = torch.argmin(share.item_tokens()).reshape(1)
        for k in range(count):
            if backward:
                self.ranks.reduce_with_next_backward(self.model.root, k == count - 1)
            yield (parts[k], True) if k < len(parts) else (filler, False)

    def computed(self, part: Any, loss: Loss) -> dict[str, Tensor]:
        """What the loss asks for, by name; inside the model's root."""
        candidates_RC = candidates_of(part, loss.outputs)
        with self._noise(part, loss):
            share = not self._noisy(loss)
            found = outputs(self.model, part.sequences, loss.outputs, self.temperature, candidates_RC, share)
        # copies: FSDP hooks the gradients of what is returned, and a hook on a view is lost when the view is changed
        return {f.name: x.clone() for f in fields(found) if (x := getattr(found, f.name)) is not None}

    def _noise(self, part: Any, loss: Loss) -> AbstractContextManager[None]:
        """On the input embeddings, where the loss asks for it and this pass trains."""
        if not self._noisy(loss):
            return nullcontext()
        assert isinstance(loss, NoisyLoss)
        assert loss.noise_alpha is not None
        return embedding_noise(self.model.trunk, part.sequences.tokens, loss.noise_keys(part), loss.noise_alpha)

    def _noisy(self, loss: Loss) -> bool:
        """Noise is each sequence's own, in the prompt too: none is shared."""
        return self.backward and isinstance(loss, NoisyLoss) and loss.noise_alpha is not None

    def _outputs(self, part: Any, loss: Loss) -> Outputs:
        return Outputs(**self.model.root(lambda: self.computed(part, loss)))

    def _backward(self, value: Tensor) -> None:
        (value if self.ranks.peers == 1 else value / self.ranks.peers).backward()

    # ---- separable ----

    def _separable(self, share: Share, loss: SeparableLoss) -> Found:
        parts, micro_batches = self.parts(share, not self._noisy(loss))
        total, reports = 0.0, []
        for index_b, counted in self.rounds(share, parts, self.backward):
            error: Exception | None = None
            value = None
            try:
                part = share.rows.select(index_b)
                out = self._outputs(part, loss)
                if counted:
                    value, stats = self.value(share, index_b, part, out, loss)
                    reports.append(stats)
                else:
                    value = nothing(out)
            except Exception as problem:
                error = problem
            self.ranks.agree(error)
            assert value is not None
            if self.backward:
                self._backward(value)
            total += float(value.detach()) if counted else 0.0
        mine = {"loss": total, "stats": {name: asdict(stat) for name, stat in merge_stats(reports).items()}}
        theirs = self.ranks.from_parts(mine)
        stats = merge_stats([{name: Stat(**stat) for name, stat in one["stats"].items()} for one in theirs])
        return Found(sum(one["loss"] for one in theirs), stats, micro_batches)

    def value(
        self, share: Share, index_b: Tensor, part: Any, out: Outputs, loss: SeparableLoss
    ) -> tuple[Tensor, Stats]:
        assert share.weights is not None
        items_N, stats = loss.items(out, part)
        weights_N = share.weights.select(index_b).flat.to(items_N)
        if items_N.shape != weights_N.shape:
            raise ShapeError(f"{type(loss).__name__}: {items_N.shape[0]} items, {weights_N.shape[0]} weights")
        value = (items_N * weights_N).sum()
        if not bool(torch.isfinite(value)):
            raise self._refused(items_N.detach(), share.weights.lens[index_b], share.index[index_b], loss)
        return value, stats

    # ---- coupled ----

    def _coupled(self, share: Share, loss: CoupledLoss) -> Found:
        parts, micro_batches = self.parts(share, not self._noisy(loss))
        with torch.no_grad():
            found = [x for x in self._each_scalars(share, parts, loss, backward=False) if x is not None]
        order_b = torch.cat(parts) if parts else torch.zeros(1, dtype=torch.int64)
        scalars_bK = torch.cat(found[: max(len(parts), 1)])
        scalars_BK = self.ranks.items(scalars_bK, share.index[order_b], len(share.whole))  # type: ignore[arg-type]
        value, derivative_BK, stats = self.couple(scalars_BK, share, loss)
        if self.backward:
            for _ in self._each_scalars(share, parts, loss, backward=True, derivative_BK=derivative_BK):
                pass
        return Found(float(value), stats, micro_batches)

    def couple(self, scalars_BK: Tensor, share: Share, loss: CoupledLoss) -> tuple[Tensor, Tensor, Stats]:
        """The loss, its derivative (B, K) by each scalar, and its statistics.

        Raises TrainingError where scalars or loss are not finite.
        """
        if not bool(torch.isfinite(scalars_BK).all()):
            every_B = torch.arange(len(scalars_BK))
            raise self._refused(scalars_BK, torch.ones_like(every_B), every_B, loss)
        reports: list[Stats] = []

        def coupled(leaf_BK: Tensor) -> Tensor:
            value, stats = loss.couple(leaf_BK, share.whole)
            reports.append(stats)
            return value

        value, derivative_BK = coupled_loss(scalars_BK, coupled)
        if not bool(torch.isfinite(value)):
            raise TrainingError(f"{type(loss).__name__} is {float(value)} at update {self.update}", fix=NOT_FINITE)
        return value, derivative_BK, reports[0]

    def _each_scalars(
        self,
        share: Share,
        parts: list[Tensor],
        loss: CoupledLoss,
        *,
        backward: bool,
        derivative_BK: Tensor | None = None,
    ) -> Iterator[Tensor | None]:
        """The scalars of every micro-batch; with `backward`, their part of the gradient is added.

        None for a filler, but on a rank without items: there a row of index -1 shows the shape to the gather.
        """
        for index_b, counted in self.rounds(share, parts, backward):
            error: Exception | None = None
            scalars_bK = value = None
            try:
                part = share.rows.select(index_b)
                out = self._outputs(part, loss)
                if counted or (share.filler and not backward):
                    scalars_bK = self.scalars(out, part, loss)
                if backward:
                    assert derivative_BK is not None
                    at_b = share.index[index_b].to(derivative_BK.device)
                    value = nothing(out) if scalars_bK is None else surrogate(scalars_bK, derivative_BK[at_b])
            except Exception as problem:
                error = problem
            self.ranks.agree(error)
            if value is not None:
                self._backward(value)
            yield scalars_bK

    def scalars(self, out: Outputs, part: Any, loss: CoupledLoss) -> Tensor:
        scalars_bK = loss.scalars(out, part)
        if scalars_bK.shape[0] != len(part):
            raise ShapeError(f"{type(loss).__name__}: scalars {tuple(scalars_bK.shape)} for {len(part)} items")
        return scalars_bK

    def _refused(self, items: Tensor, lens_b: Tensor, index_b: Tensor, loss: Loss) -> TrainingError:
        """index_b: where each of the b items is in the mini-batch."""
        bad = torch.nonzero(~torch.isfinite(items.reshape(items.shape[0], -1)).all(dim=1)).squeeze(1)
        row = index_b[torch.repeat_interleave(torch.arange(len(lens_b)), lens_b.cpu())]
        where = f", first in item {int(row[bad[0].cpu()])} of the mini-batch" if len(bad) else ""
        return TrainingError(
            f"{type(loss).__name__} is not finite at update {self.update}{where}; no weight was changed",
            fix=NOT_FINITE,
        )


def micro_batches(model: Model, items: Any, budget: int, may_share: bool = True) -> list[Tensor]:
    """Sequences, or items of a batch, cut into parts within the token budget, even in cost (`data.packing.pack`).

    may_share: where the model shares prompts, those with one prompt run together, and it counts once.
    """
    share = may_share and shares_prompts(model)
    return pack(workload(items, attention_cost(model.trunk.model.config), share), budget)


def nothing(out: Outputs) -> Tensor:
    """0, with a gradient of 0 by every output: the backward pass runs and adds nothing."""
    found = [x for f in fields(out) if (x := getattr(out, f.name)) is not None]
    return torch.stack([(x * 0.0).sum() for x in found]).sum()


def require_learnable(model: Model, rows: Any, wanted: frozenset[str]) -> None:
    """What a pass over these rows would refuse, before any rank begins it."""
    require_computed(model, wanted)
    require_runnable(model, rows.sequences, wanted)
    candidates_RC = candidates_of(rows, wanted)
    if candidates_RC is not None and candidates_RC.numel():
        assert isinstance(model, LanguageModel), "no other model computes candidate_logp"
        tokens = int(model.model.config.get_text_config().vocab_size)
        least, most = int(candidates_RC.min()), int(candidates_RC.max())
        if least < 0 or most >= tokens:
            raise ShapeError(
                f"candidate_ids lie between {least} and {most}, the model has {tokens} tokens",
                fix="take the candidates from a model with the same vocabulary",
            )


def require_runnable(model: Model, sequences: Sequences, wanted: frozenset[str]) -> None:
    """What a forward would refuse, before any rank begins it."""
    model.trunk.check(sequences.tokens)
    if wanted & PREDICTED:
        predicting_index(sequences)
    mean = isinstance(model, ScalarModel) and model.pooling == "response_mean"
    if mean and bool((sequences.response_lens < 1).any()):
        raise ShapeError(
            f"sequence {int(sequences.response_lens.argmin())} has no response to take the mean of",
            fix="drop empty responses",
        )


def problem_of(check: Callable[[], None]) -> Exception | None:
    try:
        check()
    except Exception as problem:
        return problem
    return None
