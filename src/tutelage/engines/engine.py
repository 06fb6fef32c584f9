"""Training and inference of one model, on one rank or many: token budgets, summed gradients, one optimiser.

Shapes: B sequences or items, R flat response tokens.

The passes over micro-batches are in `engines.passes` and `engines.inference`, what ranks do together in
`engines.ranks`, what a checkpoint holds in `engines.trained_state`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutelage.config.common import OptimConfig
from tutelage.engines.inference import Inference
from tutelage.engines.optim import learning_rate, make_optimizer
from tutelage.engines.passes import NOT_FINITE, Passes, problem_of
from tutelage.engines.pipeline import PipelinePasses, pipeline_of
from tutelage.engines.ranks import Alone, Ranks, clip, gradient_norm
from tutelage.engines.saved import save_tensors
from tutelage.engines.trained import below_top
from tutelage.engines.trained_state import TrainedState
from tutelage.errors import ModelError, TrainingError
from tutelage.math.logprobs import LOGPROB_ALONE, Asked
from tutelage.models.export import bucketed
from tutelage.models.forward import (
    Model,
    require_computed,
    sequence_scores,
    token_scores,
    values_with_bootstrap,
)
from tutelage.models.heads import ScalarModel
from tutelage.models.language_model import LanguageModel
from tutelage.models.recompute import Sizes
from tutelage.models.sharding import begin, is_sharded, local
from tutelage.protocols import Loss
from tutelage.sharing import Share
from tutelage.types import Ragged, Sequences, Stat, Stats


class ModelEngine:
    """Implements `protocols.Engine`.

    optim           None: the model is frozen; `step` is refused.
    total_updates   optimiser updates of the whole run, for the learning-rate schedule.
    temperature     divides the logits in training; for a trained policy, also what `logprobs` must be asked for, since
                    old and new logprobs of one update are of one distribution.
    train_layers    train the topmost N transformer blocks and the head only; the part below records no gradient.
    ranks           the other ranks that train this model; default: there is none.
    schedule        of pipeline stages, where the model is cut into some: "1f1b" or "gpipe".

    On many ranks every method is collective: all ranks call it, in the same order.  `step`, `evaluate` and `gradients`
    take the whole mini-batch on every rank, of which each works on its own share, or this rank's `Share`.  Inference
    (`logprobs` to `token_scores`) takes and returns this data rank's rows, of which there may be none.  A collective
    waits as long as the process group's timeout says.
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
        ranks: Ranks | None = None,
        schedule: str = "1f1b",
    ) -> None:
        """Raises ModelError for cached hidden states of a trunk that is sharded or cut into pipeline stages, for
        `train_layers` below_top, and for `train_layers` of stages; ConfigError for an unknown schedule."""
        self.model = model
        self.ranks = ranks if ranks is not None else Alone()
        self.optim = optim
        self.total_updates = total_updates
        self.temperature = temperature
        default = optim.tokens_per_micro_batch if optim is not None else 8192
        self.tokens_per_micro_batch = tokens_per_micro_batch if tokens_per_micro_batch is not None else default
        self.updates = 0
        self.model.module.eval()
        self.pipeline = pipeline_of(model, schedule)
        if self.pipeline is not None and train_layers is not None:
            raise ModelError(
                f"train_layers is {train_layers} and the blocks are on {self.pipeline.stages.count} pipeline stages: "
                "the first would have nothing to train",
                fix="set the pipeline axis of this role to 1, or leave train_layers out",
            )
        if optim is None:
            model.masters.freeze([name for name, _ in model.module.named_parameters()])
        elif train_layers is not None:
            model.masters.freeze(below_top(model, train_layers))
        if model.trunk.recompute is not None:
            model.trunk.recompute = model.trunk.recompute.of_trained()
        self._optimizer = None if optim is None else make_optimizer(optim, model.masters.masters)
        if is_sharded(model.root) and isinstance(model, ScalarModel) and model.features is not None:
            raise ModelError(
                "hidden states are cached, and the weights below them are sharded over ranks that gather them together",
                fix="train the head alone on replicas (cluster layout with shard 1), or without the cache",
            )
        self._saved = TrainedState.of(model, self._optimizer, None if self.pipeline is None else self.pipeline.stages)
        begin(model.root)

    @classmethod
    def frozen(cls, model: Model, optim: OptimConfig | None = None, *, ranks: Ranks | None = None) -> ModelEngine:
        """For a reference or a reward model: nothing is trained; `optim` gives the token budget alone."""
        budget = optim.tokens_per_micro_batch if optim is not None else None
        return cls(model, None, tokens_per_micro_batch=budget, ranks=ranks)

    def snapshot(self) -> ModelEngine:
        """A frozen engine on an exact copy of the policy as it is at this moment (`LanguageModel.snapshot`)."""
        copied = self._language_model().snapshot()
        return ModelEngine(copied, None, tokens_per_micro_batch=self.tokens_per_micro_batch, ranks=self.ranks)

    def forward_context(self) -> AbstractContextManager[Any]:
        """What generation with the training weights runs in; they are in the compute precision already.

        Sharded weights are gathered for its time, since ranks decode different numbers of tokens.
        """
        return self.ranks.generating(self.model.root)

    # ---- inference ----

    def logprobs(self, sequences: Sequences, temperature: float, adapter: bool = True) -> Ragged:
        """Ragged (R): log softmax(logits / temperature) of the response tokens; adapter False: of LoRA's base."""
        return self._inference().of_tokens(
            self._at(temperature), sequences, LOGPROB_ALONE, "logp", temperature, adapter
        )

    def log_collisions(self, sequences: Sequences, temperature: float, adapter: bool = True) -> Ragged:
        """Ragged (R): log sum_v p_v^2 of the distribution that each response token was drawn from."""
        model, asked = self._at(temperature), Asked(log_collision=True)
        return self._inference().of_tokens(model, sequences, asked, "log_collision", temperature, adapter)

    def top_logprobs(
        self, sequences: Sequences, count: int, temperature: float, below: int | None = None
    ) -> tuple[Ragged, Ragged, Ragged]:
        """Ragged (R) logprobs of the response tokens; (R, count) int64 ids and (R, count) logprobs of the likeliest
        tokens at each position, likeliest first.  All from one pass.

        below: among ids 0 .. below - 1 only.  Raises ShapeError for more tokens than there are.
        """
        return self._inference().top_logprobs(self._at(temperature), sequences, count, temperature, below)

    def _at(self, temperature: float) -> LanguageModel:
        """The policy.  Raises TrainingError where it is trained at another temperature."""
        if self.optim is not None and temperature != self.temperature:
            raise TrainingError(
                f"logprobs are asked for at temperature {temperature}, the policy is trained at {self.temperature}",
                fix="give the engine the temperature of the rollouts",
            )
        return self._language_model()

    def values(self, sequences: Sequences) -> Ragged:
        """Ragged (R + B): V before each response token, and one bootstrap value after the last."""
        model = self._scalar_model("value")
        return self._inference().by_budget(
            sequences, sequences.response_lens + 1, lambda part: values_with_bootstrap(model, part).flat
        )

    def logprobs_and_values(self, sequences: Sequences, temperature: float) -> tuple[Ragged, Ragged]:
        """`logprobs` (R) and `values` (R + B) of a policy, from one pass.  Raises ModelError without a value head."""
        model = self._at(temperature)
        require_computed(model, ("value",))
        return self._inference().logprobs_and_values(model, sequences, temperature)

    def scores(self, sequences: Sequences) -> Tensor:
        """(B,) float32, one scalar per sequence, pooled over its real tokens."""
        model = self._scalar_model("reward")
        ones_B = torch.ones_like(sequences.tokens.lens)
        return self._inference().by_budget(sequences, ones_B, lambda part: sequence_scores(model, part)).flat

    def token_scores(self, sequences: Sequences) -> Ragged:
        """Ragged (R): a reward model's scalar at each response token, with the token itself read."""
        model = self._scalar_model("reward")
        return self._inference().by_budget(sequences, sequences.response_lens, lambda part: token_scores(model, part))

    def evaluate(self, batch: Any, loss: Loss) -> Stats:
        """The loss and its statistics on a batch, without gradient or update."""
        self.model.module.eval()
        with torch.no_grad():
            found = self._passes(backward=False).run(self._share(batch, loss), loss)
        return {**found.stats, "loss": Stat(found.loss, 1)}

    def _inference(self) -> Inference:
        return Inference(self.model, self.ranks, self.pipeline, self.tokens_per_micro_batch)

    # ---- training ----

    def step(self, batch: Any, loss: Loss) -> Stats:
        """One optimiser update on one mini-batch: loss, grad_norm (before clipping), lr, micro_batches, the loss's own.

        Raises TrainingError, with the weights untouched, for a loss or a gradient that is not finite.
        """
        if self._optimizer is None or self.optim is None:
            raise TrainingError("this engine's model is frozen", fix="build the engine with optimiser settings")
        rate = learning_rate(self.optim, self.updates, self.total_updates)
        masters = self.model.masters
        share = self._share(batch, loss)
        self.model.module.train()
        try:
            found = self._passes(backward=True).run(share, loss)
            self._sum_gradients()
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
            "loss": Stat(found.loss, 1),
            "grad_norm": Stat(norm, 1),
            "lr": Stat(rate, 1),
            "micro_batches": Stat(found.micro_batches, 1),
        }
        assert not own.keys() & found.stats.keys(), f"a loss may not report {sorted(own)}"
        return {**found.stats, **own}

    def gradients(self, batch: Any, loss: Loss) -> dict[str, Tensor]:
        """The gradient of the loss by every trained weight, whole, by name, without clipping or update."""
        self.model.module.train()
        try:
            self._passes(backward=True).run(self._share(batch, loss), loss)
            self._sum_gradients()
            masters = self.model.masters.masters
            return self._saved.copies((n, m.grad) for n, m in masters.items() if m.grad is not None)
        finally:
            self.model.masters.zero_grad()
            self.model.module.eval()

    def _share(self, batch: Any, loss: Loss) -> Share:
        return batch if isinstance(batch, Share) else self.ranks.share(batch, loss)

    def _passes(self, backward: bool) -> Passes | PipelinePasses:
        update, budget = self.updates + 1, self.tokens_per_micro_batch
        passes = Passes(self.model, self.ranks, self.temperature, budget, update, backward)
        return passes if self.pipeline is None else PipelinePasses(passes, self.pipeline)

    def _sum_gradients(self) -> None:
        masters = self.model.masters.masters
        self.ranks.sum_gradients(masters.values())
        if self.pipeline is not None:
            self.pipeline.sum_tied(masters)

    def _clip(self, loss_name: str) -> float:
        assert self.optim is not None
        masters = self.model.masters.masters
        norm = gradient_norm(masters.values()) if self.pipeline is None else self.pipeline.gradient_norm(masters)
        if not bool(torch.isfinite(norm)):
            here = [n for n, m in masters.items() if m.grad is not None and not bool(local(m.grad).isfinite().all())]
            found = {name for names in self.ranks.from_all(here) for name in names}
            bad = [name for name in self._saved.trained if name in found]
            raise TrainingError(
                f"the gradient of {loss_name} is not finite at update {self.updates + 1} "
                f"({len(bad)} weights, first {bad[0] if bad else 'in the norm alone'}); no weight was changed",
                fix=NOT_FINITE,
            )
        clip(masters.values(), self.optim.max_grad_norm, norm)
        return float(norm)

    # ---- state ----

    def save_state(self, folder: Path) -> None:
        """Trained weights in float32, optimiser moments and updates, in a form that any number of ranks can load.

        Raises CheckpointError, on every rank, where a file cannot be written.
        """
        save_tensors(folder, self._saved.tensors(), {"updates": self.updates, **self._activations()}, self.ranks)

    def checkpoint_bytes(self) -> int:
        """Bytes of a saved state with its two moments, and of the exported model beside it, over all ranks."""
        return self._saved.checkpoint_bytes()

    def state(self) -> dict[str, Any]:
        """Copies of everything a step depends on: trained weights in float32, optimiser moments, updates done."""
        return {"updates": self.updates, **self._activations(), **self._saved.copied()}

    def _activations(self) -> dict[str, list[float]]:
        """Bytes a token by which blocks are recomputed (`models.recompute`), so that a resumed run plans as it did."""
        recompute = self.model.trunk.recompute
        if recompute is None or recompute.sizes is None:
            return {}
        return {"activations": [recompute.sizes.kept, recompute.sizes.entering]}

    def load_state(self, state: Path | Mapping[str, Any]) -> None:
        """Continue from a folder of `save_state`, or on one rank from `state()`.

        Raises CheckpointError, on every rank and with the weights untouched, for another model or other trained layers,
        and for a file that is damaged or missing.
        """
        if isinstance(state, Path):
            folder, read = state, {}
            self.ranks.agree(problem_of(lambda: read.update(self._saved.read(folder))))
            state = read
        self._saved.load(state)
        self.updates = int(state["updates"])
        if self.model.trunk.recompute is not None and "activations" in state:
            self.model.trunk.recompute.sizes = Sizes(*state["activations"])

    # ---- weights for others ----

    def named_weights(self, adapter_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole float32 tensor) of every weight, one at a time; LoRA merged, or the adapter alone.

        A tied output head comes under its own name too.  Collective: every rank takes all of them.  A tensor may be the
        weight itself: copy what is kept.
        """
        return self.model.named_weights(adapter_only)

    def weight_buckets(self, bucket_bytes: int, adapter_only: bool = False) -> Iterator[list[tuple[str, Tensor]]]:
        """`named_weights` in lists of at most `bucket_bytes`; a larger tensor is alone."""
        return bucketed(self.named_weights(adapter_only), bucket_bytes)

    def save_pretrained(self, folder: Path) -> None:
        """An ordinary Hugging Face folder, tokenizer included (see the model's own `save_pretrained`).

        Sharded weights are written in several files, each by one rank, which holds no more than that file at a time.
        Raises OSError, on every rank, where a file cannot be written.
        """
        if self.model.sharding is not None:
            self.model.save_sharded(folder, self.ranks)
            return
        self.ranks.agree(problem_of(lambda: self.model.save_pretrained(folder)) if self.ranks.rank == 0 else None)

    @torch.no_grad()
    def shift_bias(self, shift: float) -> None:
        """Add to the head's bias, so that every score moves by `shift`."""
        if (bias := self._bias()) is not None:
            bias.add_(shift)

    @contextmanager
    def shifted_bias(self, shift: float) -> Iterator[None]:
        """`shift_bias` for a while; the bias is then what it was, to the bit."""
        bias = self._bias()
        saved = None if bias is None else bias.detach().clone()
        self.shift_bias(shift)
        try:
            yield
        finally:
            if bias is not None and saved is not None:
                with torch.no_grad():
                    bias.copy_(saved)

    def _bias(self) -> Tensor | None:
        """None on a pipeline stage without the head."""
        return getattr(self._scalar_model("reward").score, "bias", None)

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
