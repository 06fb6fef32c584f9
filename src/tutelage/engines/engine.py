"""Training and inference of one model, on one rank or many: token budgets, summed gradients, one optimiser.

Shapes: B sequences or items, R flat response tokens.

The passes over micro-batches are in `engines.passes`, what ranks do together in `engines.ranks`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutelage.config.common import OptimConfig
from tutelage.engines.optim import learning_rate, load_moments, make_optimizer, moments
from tutelage.engines.passes import NOT_FINITE, Passes, micro_batches, problem_of, require_runnable
from tutelage.engines.pipeline import Job, PipelinePasses, pipeline_of
from tutelage.engines.ranks import Alone, Ranks, clip, gradient_norm
from tutelage.engines.saved import SavedTensors, save_tensors
from tutelage.engines.trained import below_top
from tutelage.errors import CheckpointError, ModelError, TrainingError
from tutelage.math.logprobs import LOGPROB_ALONE, Asked
from tutelage.models.export import bucketed
from tutelage.models.forward import (
    Model,
    logprobs_and_values,
    require_computed,
    sequence_scores,
    token_outputs,
    token_scores,
    values_with_bootstrap,
)
from tutelage.models.heads import ScalarModel
from tutelage.models.language_model import LanguageModel
from tutelage.models.lora import adapter_off
from tutelage.models.sharding import begin, is_sharded, local, whole
from tutelage.protocols import Loss
from tutelage.sharing import Share
from tutelage.types import Ragged, Sequences, Stat, Stats, flat_index


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
        self._optimizer = None if optim is None else make_optimizer(optim, model.masters.masters)
        if is_sharded(model.root) and isinstance(model, ScalarModel) and model.features is not None:
            raise ModelError(
                "hidden states are cached, and the weights below them are sharded over ranks that gather them together",
                fix="train the head alone on replicas (cluster layout with shard 1), or without the cache",
            )
        self._trained = self._shapes(model.masters.masters)
        self._every = self._shapes(dict(model.module.named_parameters()))
        begin(model.root)

    def _shapes(self, named: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """Of these weights, and of those of the other pipeline stages."""
        own = {name: tuple(tensor.shape) for name, tensor in named.items()}
        if self.pipeline is None:
            return own
        return {name: tuple(shape) for name, shape in self.pipeline.stages.union(own).items()}

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
        return self._of_tokens(sequences, LOGPROB_ALONE, "logp", temperature, adapter)

    def log_collisions(self, sequences: Sequences, temperature: float, adapter: bool = True) -> Ragged:
        """Ragged (R): log sum_v p_v^2 of the distribution that each response token was drawn from."""
        return self._of_tokens(sequences, Asked(log_collision=True), "log_collision", temperature, adapter)

    def top_logprobs(
        self, sequences: Sequences, count: int, temperature: float, below: int | None = None
    ) -> tuple[Ragged, Ragged, Ragged]:
        """Ragged (R) logprobs of the response tokens; (R, count) int64 ids and (R, count) logprobs of the likeliest
        tokens at each position, likeliest first.  All from one pass.

        below: among ids 0 .. below - 1 only.  Raises ShapeError for more tokens than there are.
        """
        model = self._at(temperature)

        def of_part(part: Sequences) -> Tensor:
            found = token_outputs(model, part, Asked(top=count, below=below), temperature)
            logp_R, ids_RC = found["logp"], found["top_ids"]
            return torch.cat([logp_R[:, None], ids_RC.to(logp_R.dtype), found["top_logp"]], dim=1)

        every = self._by_budget(sequences, sequences.response_lens, of_part, (1 + 2 * count,))
        logp_R1, ids_RC, top_RC = every.flat.split([1, count, count], dim=1)
        columns = (logp_R1.squeeze(1), ids_RC.to(torch.int64), top_RC.contiguous())
        return every.with_flat(columns[0].contiguous()), every.with_flat(columns[1]), every.with_flat(columns[2])

    def _of_tokens(self, sequences: Sequences, asked: Asked, name: str, temperature: float, adapter: bool) -> Ragged:
        """Ragged (R): one of `math.logprobs.distribution_outputs`."""
        model = self._at(temperature)
        with nullcontext() if adapter else adapter_off(model.adapted):
            return self._by_budget(
                sequences, sequences.response_lens, lambda part: token_outputs(model, part, asked, temperature)[name]
            )

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
        return self._by_budget(
            sequences, sequences.response_lens + 1, lambda part: values_with_bootstrap(model, part).flat
        )

    def logprobs_and_values(self, sequences: Sequences, temperature: float) -> tuple[Ragged, Ragged]:
        """`logprobs` (R) and `values` (R + B) of a policy with a value head, from one pass.  Raises ModelError without.

        A row of the pass has the two side by side; the entry after the last token has no logprob.
        """
        model = self._at(temperature)
        require_computed(model, ("value",))

        def of_part(part: Sequences) -> Tensor:
            logp_R, values = logprobs_and_values(model, part, temperature)
            both = torch.zeros(len(values.flat), 2, device=values.flat.device)
            both[_but_last(values), 0] = logp_R.to(both)
            both[:, 1] = values.flat
            return both

        every = self._by_budget(sequences, sequences.response_lens + 1, of_part, (2,))
        logp = Ragged(every.flat[_but_last(every), 0], sequences.response_lens)
        return logp, every.with_flat(every.flat[:, 1].contiguous())

    def scores(self, sequences: Sequences) -> Tensor:
        """(B,) float32, one scalar per sequence, pooled over its real tokens."""
        model = self._scalar_model("reward")
        ones_B = torch.ones_like(sequences.tokens.lens)
        return self._by_budget(sequences, ones_B, lambda part: sequence_scores(model, part)).flat

    def token_scores(self, sequences: Sequences) -> Ragged:
        """Ragged (R): a reward model's scalar at each response token, with the token itself read."""
        model = self._scalar_model("reward")
        return self._by_budget(sequences, sequences.response_lens, lambda part: token_scores(model, part))

    def evaluate(self, batch: Any, loss: Loss) -> Stats:
        """The loss and its statistics on a batch, without gradient or update."""
        self.model.module.eval()
        with torch.no_grad():
            found = self._passes(backward=False).run(self._share(batch, loss), loss)
        return {**found.stats, "loss": Stat(found.loss, 1)}

    def _by_budget(
        self,
        sequences: Sequences,
        lens_B: Tensor,
        run: Callable[[Sequences], Tensor],
        entry: tuple[int, ...] = (),
    ) -> Ragged:
        """`run` on parts within the token budget, without gradient; rows of length `lens`, back in their order.

        entry: the shape of one entry.
        """
        self.model.module.eval()
        flat = torch.zeros(int(lens_B.sum()), *entry, device=lens_B.device)
        wanted = frozenset({"logp"}) if isinstance(self.model, LanguageModel) else frozenset({"score"})
        error = problem_of(lambda: require_runnable(self.model, sequences, wanted)) if len(sequences) else None
        self.ranks.agree(error)
        parts = micro_batches(self.model, sequences, self.tokens_per_micro_batch) if len(sequences) else []
        idle = self.ranks.most(len(parts)) - len(parts)
        found = self._each([*(sequences.select(index_b) for index_b in parts), *[IDLE] * idle], run)
        for index_b, out in zip(parts, found, strict=False):
            flat[flat_index(lens_B, index_b)] = out.to(flat)
        return Ragged(flat if self.pipeline is None else self.pipeline.stages.from_last(flat), lens_B)

    @torch.no_grad()
    def _each(self, parts: list[Sequences], run: Callable[[Sequences], Tensor]) -> list[Tensor]:
        """Of pipeline stages the last one has the results."""
        if self.pipeline is None:
            return [self.model.root(lambda part=part: run(part)) for part in parts]
        found, error = self.pipeline.forward([Job(part, functools.partial(run, part)) for part in parts])
        self.ranks.agree(error)
        return found

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
            return self._copies((n, m.grad) for n, m in masters.items() if m.grad is not None)
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
            bad = [name for name in self._trained if name in found]
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
        state = self._tensors()
        save_tensors(folder, state, {"updates": self.updates}, self.ranks)

    def checkpoint_bytes(self) -> int:
        """Bytes of a saved state with its two moments, and of the exported model beside it, over all ranks."""
        trained, every = (sum(map(math.prod, shapes.values())) for shapes in (self._trained, self._every))
        return 4 * (3 * trained + every)

    def _tensors(self) -> dict[str, Tensor]:
        masters = self.model.masters.masters
        saved = {} if self._optimizer is None else moments(self._optimizer, masters)
        weights = {f"weights/{name}": master.detach() for name, master in masters.items()}
        return weights | {f"moments/{n}/{k}": v for n, values in saved.items() for k, v in values.items()}

    def state(self) -> dict[str, Any]:
        """Copies of everything a step depends on: trained weights in float32, optimiser moments, updates done."""
        state: dict[str, Any] = {"updates": self.updates, "weights": {}, "moments": {}}
        for path, tensor in self._copies(self._tensors().items()).items():
            kind, _, name = path.partition("/")
            if kind == "weights":
                state["weights"][name] = tensor
            else:
                name, _, key = name.rpartition("/")
                state["moments"].setdefault(name, {})[key] = tensor
        return state

    def _copies(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Whole, and of all pipeline stages; collective."""
        every: Iterable[tuple[str, Tensor]] = ((name, whole(tensor)) for name, tensor in tensors)
        if self.pipeline is not None:
            every = self.pipeline.stages.stream(every)
        return {name: tensor.detach().clone() for name, tensor in every}

    def load_state(self, state: Path | Mapping[str, Any]) -> None:
        """Continue from a folder of `save_state`, or on one rank from `state()`.

        Raises CheckpointError, on every rank and with the weights untouched, for another model or other trained layers,
        and for a file that is damaged or missing.
        """
        masters = self.model.masters.masters
        if isinstance(state, Path):
            folder, read = state, {}
            self.ranks.agree(problem_of(lambda: read.update(self._read(folder))))
            state = read
        weights, saved = state.get("weights", {}), state.get("moments", {})
        self._require_fit({n: w.shape for n, w in weights.items()}, {n: local(m).shape for n, m in masters.items()})
        self._require_fit(dict.fromkeys(set(saved) - set(masters)), {})
        self.model.masters.load(weights)
        if self._optimizer is not None:
            load_moments(self._optimizer, masters, saved)
        self.updates = int(state["updates"])

    def _read(self, folder: Path) -> dict[str, Any]:
        """This rank's parts of a saved state."""
        masters = self.model.masters.masters
        held = SavedTensors.open(folder)
        shapes = {name.removeprefix("weights/"): held.shape(name) for name in held.names("weights/")}
        self._require_fit(shapes, self._trained)
        found: dict[str, dict[str, Tensor]] = {}
        for path in held.names("moments/"):
            name, _, key = path.removeprefix("moments/").rpartition("/")
            self._require_fit({} if name in self._trained else {name: None}, {})
            if name not in masters:
                continue
            like = torch.zeros(()) if key == "step" else masters[name].detach()
            self._require_fit({name: held.shape(path)}, {name: tuple(like.shape)})
            found.setdefault(name, {})[key] = held.read(path, like)
        weights = {name: held.read(f"weights/{name}", master.detach()) for name, master in masters.items()}
        return {"weights": weights, "moments": found, "updates": held.plain.get("updates", 0)}

    @staticmethod
    def _require_fit(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Raises CheckpointError unless names and shapes are the same."""
        strange = sorted(set(saved) ^ set(own)) or [name for name, shape in own.items() if saved[name] != shape]
        if strange:
            raise CheckpointError(
                f"the saved state does not fit the model: {len(strange)} weights differ, first {strange[:1]}",
                fix="resume with the model, LoRA and train_layers settings that the run began with",
            )

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


def _but_last(rows: Ragged) -> Tensor:
    """(N,) bool: every entry but the last one of each row."""
    keep = torch.ones(len(rows.flat), dtype=torch.bool, device=rows.flat.device)
    keep[rows.offsets()[1:] - 1] = False
    return keep


IDLE = Sequences.build([[0]], [[0]])
"""What a rank without rows runs along with the others."""
