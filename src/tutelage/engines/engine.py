"""Training and inference of one model in this process: token budgets, summed gradients, one optimiser.

Shapes: B sequences or items, R flat response tokens, N loss items, K scalars of an item.

A separable loss is sum(items * weights) with weights of the whole mini-batch; a coupled one is differentiated by its
scalars once, globally (`math.coupled`).  Micro-batches only add up gradients: their cut changes nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutelage.config.common import OptimConfig
from tutelage.data.packing import pack_by_tokens
from tutelage.engines.optim import learning_rate, load_moments, make_optimizer, moments
from tutelage.errors import CheckpointError, ModelError, ShapeError, TrainingError
from tutelage.math.coupled import coupled_loss, surrogate
from tutelage.models.forward import Model, outputs, sequence_scores, token_logprobs, values_with_bootstrap
from tutelage.models.heads import ScalarModel
from tutelage.models.language_model import LanguageModel
from tutelage.models.load import blocks_of
from tutelage.models.lora import adapter_off
from tutelage.protocols import CoupledLoss, Loss, SeparableLoss
from tutelage.types import Ragged, Sequences, Stat, Stats, flat_index, merge_stats


class ModelEngine:
    """Implements `protocols.Engine`.

    optim           None: the model is frozen; `step` is refused.
    total_updates   optimiser updates of the whole run, for the learning-rate schedule.
    temperature     divides the logits in training; for a trained policy, also what `logprobs` must be asked for, since
                    old and new logprobs of one update are of one distribution.
    train_layers    train the topmost N transformer blocks and the head only; the part below records no gradient.
    """

    def __init__(
        self,
        model: Model,
        optim: OptimConfig | None,
        *,
        total_updates: int = 1,
        temperature: float = 1.0,
        tokens_per_micro_batch: int | None = None,
        train_layers: int | None = None,
    ) -> None:
        self.model = model
        self.optim = optim
        self.total_updates = total_updates
        self.temperature = temperature
        default = optim.tokens_per_micro_batch if optim is not None else 8192
        self.tokens_per_micro_batch = tokens_per_micro_batch if tokens_per_micro_batch is not None else default
        self.updates = 0
        self.model.module.eval()
        if optim is None:
            model.masters.freeze([name for name, _ in model.module.named_parameters()])
        elif train_layers is not None:
            model.masters.freeze(below_top(model, train_layers))
        self._optimizer = None if optim is None else make_optimizer(optim, model.masters.masters)

    @classmethod
    def frozen(cls, model: Model, optim: OptimConfig | None = None) -> ModelEngine:
        """For a reference or a reward model: nothing is trained; `optim` gives the token budget alone."""
        return cls(model, None, tokens_per_micro_batch=optim.tokens_per_micro_batch if optim is not None else None)

    def snapshot(self) -> ModelEngine:
        """A frozen engine on an exact copy of the policy as it is at this moment (`LanguageModel.snapshot`)."""
        return ModelEngine(self._language_model().snapshot(), None, tokens_per_micro_batch=self.tokens_per_micro_batch)

    def forward_context(self) -> AbstractContextManager[Any]:
        """What generation with the training weights runs in: nothing, they are in the compute precision already."""
        return nullcontext()

    # ---- inference ----

    def logprobs(self, sequences: Sequences, temperature: float, adapter: bool = True) -> Ragged:
        """Ragged (R): log softmax(logits / temperature) of the response tokens; adapter False: of LoRA's base."""
        model = self._language_model()
        if self.optim is not None and temperature != self.temperature:
            raise TrainingError(
                f"logprobs are asked for at temperature {temperature}, the policy is trained at {self.temperature}",
                fix="give the engine the temperature of the rollouts",
            )
        with nullcontext() if adapter else adapter_off(model.adapted):
            return self._by_budget(
                sequences, sequences.response_lens, lambda part: token_logprobs(model, part, temperature)[0]
            )

    def values(self, sequences: Sequences) -> Ragged:
        """Ragged (R + B): V before each response token, and one bootstrap value after the last."""
        model = self._scalar_model("value")
        return self._by_budget(
            sequences, sequences.response_lens + 1, lambda part: values_with_bootstrap(model, part).flat
        )

    def scores(self, sequences: Sequences) -> Tensor:
        """(B,) float32, one scalar per sequence, pooled over its real tokens."""
        model = self._scalar_model("reward")
        ones_B = torch.ones_like(sequences.tokens.lens)
        return self._by_budget(sequences, ones_B, lambda part: sequence_scores(model, part)).flat

    def evaluate(self, batch: Any, loss: Loss) -> Stats:
        """The loss and its statistics on a batch, without gradient or update."""
        self.model.module.eval()
        with torch.no_grad():
            total, stats = self._run(batch, loss, self._cut(batch), backward=False)
        return {**stats, "loss": Stat(total, 1)}

    def _by_budget(self, sequences: Sequences, lens_B: Tensor, run: Callable[[Sequences], Tensor]) -> Ragged:
        """`run` on parts within the token budget, without gradient; rows of length `lens`, back in their order."""
        self.model.module.eval()
        flat = torch.zeros(int(lens_B.sum()), device=lens_B.device)
        with torch.no_grad():
            for index_b in pack_by_tokens(sequences.tokens.lens, self.tokens_per_micro_batch):
                flat[flat_index(lens_B, index_b)] = run(sequences.select(index_b)).to(flat)
        return Ragged(flat, lens_B)

    # ---- training ----

    def step(self, batch: Any, loss: Loss) -> Stats:
        """One optimiser update on one mini-batch: loss, grad_norm (before clipping), lr, micro_batches, the loss's own.

        Raises TrainingError, with the weights untouched, for a loss or a gradient that is not finite.
        """
        if self._optimizer is None or self.optim is None:
            raise TrainingError("this engine's model is frozen", fix="build the engine with optimiser settings")
        rate = learning_rate(self.optim, self.updates, self.total_updates)
        masters = self.model.masters
        parts = self._cut(batch)
        self.model.module.train()
        try:
            total, stats = self._run(batch, loss, parts)
            norm = self._clip(type(loss).__name__)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            masters.publish()
        finally:
            masters.zero_grad()
            self.model.module.eval()
        self.updates += 1
        own = {
            "loss": Stat(total, 1),
            "grad_norm": Stat(norm, 1),
            "lr": Stat(rate, 1),
            "micro_batches": Stat(len(parts), 1),
        }
        assert not own.keys() & stats.keys(), f"a loss may not report {sorted(own)}"
        return {**stats, **own}

    def gradients(self, batch: Any, loss: Loss) -> dict[str, Tensor]:
        """The gradient of the loss by every trained weight, by name, without clipping or update."""
        self.model.module.train()
        try:
            self._run(batch, loss, self._cut(batch))
            masters = self.model.masters.masters
            return {n: m.grad.clone() for n, m in masters.items() if m.grad is not None}
        finally:
            self.model.masters.zero_grad()
            self.model.module.eval()

    def _cut(self, batch: Any) -> list[Tensor]:
        return pack_by_tokens(batch.item_tokens(), self.tokens_per_micro_batch)

    def _outputs(self, part: Any, loss: Loss) -> Any:
        return outputs(self.model, part.sequences, loss.outputs, self.temperature)

    def _run(self, batch: Any, loss: Loss, parts: list[Tensor], backward: bool = True) -> tuple[float, Stats]:
        """The loss and its statistics; with `backward`, the gradients of all parts summed into the weights."""
        if isinstance(loss, CoupledLoss):
            return self._coupled(batch, loss, parts, backward)
        return self._separable(batch, loss, parts, backward)

    def _separable(
        self, batch: Any, loss: SeparableLoss, parts: Iterable[Tensor], backward: bool
    ) -> tuple[float, Stats]:
        weights = loss.weights(batch)
        total, reports = 0.0, []
        for index_b in parts:
            part = batch.select(index_b)
            items_N, stats = loss.items(self._outputs(part, loss), part)
            weights_N = weights.select(index_b).flat.to(items_N)
            if items_N.shape != weights_N.shape:
                raise ShapeError(f"{type(loss).__name__}: {items_N.shape[0]} items, {weights_N.shape[0]} weights")
            value = (items_N * weights_N).sum()
            if not bool(torch.isfinite(value)):
                self._refuse_items(items_N.detach(), weights.lens[index_b], index_b, loss)
            if backward:
                value.backward()
            total += float(value.detach())
            reports.append(stats)
        return total, merge_stats(reports)

    def _coupled(self, batch: Any, loss: CoupledLoss, parts: list[Tensor], backward: bool) -> tuple[float, Stats]:
        with torch.no_grad():
            found = [self._scalars(batch.select(index_b), loss) for index_b in parts]
        order_B = torch.cat(parts)
        scalars_BK = torch.cat(found)[torch.argsort(order_B)]
        if not bool(torch.isfinite(scalars_BK).all()):
            self._refuse_items(scalars_BK, torch.ones_like(order_B), torch.arange(len(order_B)), loss)
        reports: list[Stats] = []

        def couple(leaf_BK: Tensor) -> Tensor:
            value, stats = loss.couple(leaf_BK, batch)
            reports.append(stats)
            return value

        value, derivative_BK = coupled_loss(scalars_BK, couple)
        if not bool(torch.isfinite(value)):
            raise TrainingError(f"{type(loss).__name__} is {float(value)} at update {self.updates + 1}", fix=NOT_FINITE)
        for index_b in parts if backward else ():
            surrogate(self._scalars(batch.select(index_b), loss), derivative_BK[index_b]).backward()
        return float(value), reports[0]

    def _scalars(self, part: Any, loss: CoupledLoss) -> Tensor:
        scalars_bK = loss.scalars(self._outputs(part, loss), part)
        if scalars_bK.shape[0] != len(part):
            raise ShapeError(f"{type(loss).__name__}: scalars {tuple(scalars_bK.shape)} for {len(part)} items")
        return scalars_bK

    def _refuse_items(self, items: Tensor, lens_b: Tensor, index_b: Tensor, loss: Loss) -> None:
        bad = torch.nonzero(~torch.isfinite(items.reshape(items.shape[0], -1)).all(dim=1)).squeeze(1)
        row = index_b[torch.repeat_interleave(torch.arange(len(lens_b)), lens_b.cpu())]
        where = f", first in item {int(row[bad[0].cpu()])} of the mini-batch" if len(bad) else ""
        raise TrainingError(
            f"{type(loss).__name__} is not finite at update {self.updates + 1}{where}; no weight was changed",
            fix=NOT_FINITE,
        )

    def _clip(self, loss_name: str) -> float:
        assert self.optim is not None
        masters = self.model.masters.masters
        norm = torch.nn.utils.get_total_norm([m.grad for m in masters.values() if m.grad is not None])
        if not bool(torch.isfinite(norm)):
            bad = [n for n, m in masters.items() if m.grad is not None and not bool(torch.isfinite(m.grad).all())]
            raise TrainingError(
                f"the gradient of {loss_name} is not finite at update {self.updates + 1} "
                f"({len(bad)} weights, first {bad[0] if bad else 'in the norm alone'}); no weight was changed",
                fix=NOT_FINITE,
            )
        torch.nn.utils.clip_grads_with_norm_(masters.values(), self.optim.max_grad_norm, norm)
        return float(norm)

    # ---- state ----

    def state(self) -> dict[str, Any]:
        """Copies of everything a step depends on: trained weights in float32, optimiser moments, updates done."""
        masters = self.model.masters.masters
        saved = {} if self._optimizer is None else moments(self._optimizer, masters)
        return {
            "updates": self.updates,
            "weights": {name: m.detach().clone() for name, m in masters.items()},
            "moments": {name: {k: v.clone() for k, v in values.items()} for name, values in saved.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`. Raises CheckpointError where it is of another model or of other trained layers."""
        masters = self.model.masters.masters
        weights, saved = state.get("weights", {}), state.get("moments", {})
        strange = sorted(set(weights) ^ set(masters)) or [
            name for name, master in masters.items() if weights[name].shape != master.shape
        ]
        if strange or set(saved) - set(masters):
            raise CheckpointError(
                f"the saved state does not fit the model: {len(strange)} weights differ, first {strange[:1]}",
                fix="resume with the model, LoRA and train_layers settings that the run began with",
            )
        self.model.masters.load(weights)
        if self._optimizer is not None:
            load_moments(self._optimizer, masters, saved)
        self.updates = int(state["updates"])

    def save_pretrained(self, folder: Path) -> None:
        """An ordinary Hugging Face folder, tokenizer included (see the model's own `save_pretrained`)."""
        self.model.save_pretrained(folder)

    @torch.no_grad()
    def shift_bias(self, shift: float) -> None:
        """Add to the head's bias, so that every score moves by `shift`."""
        self._scalar_model("reward").score.bias.add_(shift)

    @contextmanager
    def shifted_bias(self, shift: float) -> Iterator[None]:
        """`shift_bias` for a while; the bias is then what it was, to the bit."""
        bias = self._scalar_model("reward").score.bias
        saved = bias.detach().clone()
        self.shift_bias(shift)
        try:
            yield
        finally:
            with torch.no_grad():
                bias.copy_(saved)

    # ---- which model ----

    def _language_model(self) -> LanguageModel:
        if not isinstance(self.model, LanguageModel):
            raise ModelError(f"a {self.model.kind} model has no logprobs", fix="ask the actor or the reference")
        return self.model

    def _scalar_model(self, kind: str) -> ScalarModel:
        if not isinstance(self.model, ScalarModel) or self.model.kind != kind:
            what = self.model.kind if isinstance(self.model, ScalarModel) else "language"
            raise ModelError(f"a {kind} was asked of a {what} model", fix=f"load the model with kind {kind!r}")
        return self.model


NOT_FINITE = "lower optim.lr, look at the rewards and the data of this step, or use dtype float32"


def below_top(model: Model, train_layers: int) -> list[str]:
    """Names of the parameters outside the topmost `train_layers` blocks and the head. Raises ModelError."""
    backbone = model.trunk.model
    depth = int(backbone.config.num_hidden_layers)
    if train_layers > depth:
        raise ModelError(f"train_layers is {train_layers}, the model has {depth} blocks", fix=f"use 0 to {depth}")
    blocks = blocks_of(backbone)
    trained = {id(p) for block in blocks[depth - train_layers :] for p in block.parameters()}
    if isinstance(model, ScalarModel):
        trained |= {id(p) for name, p in model.named_parameters() if not name.startswith("backbone.")}
    elif (head := model.model.get_output_embeddings()) is not None:
        trained |= {id(p) for p in head.parameters()}
    return [name for name, p in model.module.named_parameters() if id(p) not in trained]
