"""Passes over a mini-batch through pipeline stages, on `torch.distributed.pipelining`.

Shapes: B items of the mini-batch, b items of a micro-batch, W tokens of the longest micro-batch, H hidden, K scalars.

Every stage is given the same rows, so each knows positions and segments of every micro-batch by itself; hidden states
alone travel.  Their shape must be one: they are filled up to (W, H) on the wire and cut back on arrival, so that no
stage computes on the filling.  The last stage computes outputs and losses; what all ranks report comes from it.

Weights sharded by FSDP are gathered once for a whole pass and their gradients summed over ranks once, at its end.

An error on one stage must not leave the others waiting: the stage goes on with zeros, and when the pass is over every
rank raises.  An error inside a backward pass, or between the collectives of one stage's own ranks, cannot be kept back;
there the others wait as long as the timeout of the process group says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from tutelage.engines.passes import Found, Passes, nothing, problem_of, require_learnable
from tutelage.engines.ranks import gradient_norm
from tutelage.errors import ConfigError, ModelError, closest
from tutelage.math.coupled import surrogate
from tutelage.models.forward import Model
from tutelage.models.heads import ScalarModel
from tutelage.models.parallel.pipeline import inlet_of
from tutelage.models.parallel.stages import Stages
from tutelage.models.sharding import local
from tutelage.protocols import CoupledLoss, Loss, SeparableLoss
from tutelage.sharing import Share
from tutelage.types import Outputs, Sequences, Stat, Stats, merge_stats

Schedule = Literal["1f1b", "gpipe"]
SCHEDULES: dict[str, type[Schedule1F1B] | type[ScheduleGPipe]] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
"""1f1b: a stage keeps the activations of one micro-batch, and of one more for each stage after it.  gpipe: of all."""

AHEAD = 8
"""Micro-batches for each stage that one forward-only pass takes at most: their buffers exist all at once."""


@dataclass(frozen=True, eq=False)
class Job:
    """One micro-batch.

    read  on the last stage, inside the model's root: what is computed.
    loss  of that; None without a backward pass.
    """

    sequences: Sequences
    read: Callable[[], Tensor]
    loss: Callable[[Tensor], Tensor] | None = None


def pipeline_of(model: Model, schedule: str) -> Pipeline | None:
    """None where the model is on one stage.  Collective over the stages.

    Raises ConfigError for an unknown schedule, ModelError for cached hidden states.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"{schedule!r} is not a pipeline schedule.{closest(schedule, SCHEDULES)}",
            fix=f"use {' or '.join(SCHEDULES)}",
        )
    stages = None if model.sharding is None else model.sharding.stages
    if stages is None:
        return None
    if isinstance(model, ScalarModel) and model.features is not None:
        raise ModelError(
            "hidden states are cached, and the blocks below the head are on several pipeline stages",
            fix="set pipeline to 1 for this role, or train without the cache",
        )
    inlet = inlet_of(model)
    mine = [n for n, p in model.module.named_parameters() if inlet is not None and p is inlet.weight]
    tied = stages.every(mine)[-1]
    return Pipeline(model, stages, schedule, tied[0] if tied else None)


@dataclass(frozen=True, eq=False)
class Pipeline:
    """One stage of a model, and how it works with the others.

    tied  name of the weight that the first and the last stage share; None: there is none.
    """

    model: Model
    stages: Stages
    schedule: str
    tied: str | None

    # ---- passes ----

    def forward(self, jobs: Sequence[Job]) -> tuple[list[Tensor], Exception | None]:
        """What the last stage read for each job, without gradient (nothing on other stages); the first error here."""
        found: list[Tensor] = []
        failed: Exception | None = None
        step = AHEAD * self.stages.count
        with torch.no_grad():
            for start in range(0, len(jobs), step):
                run = _Run(self, jobs[start : start + step], backward=False)
                run.go()
                found += run.outputs
                failed = failed or run.failed
        return found, failed

    def train(self, jobs: Sequence[Job]) -> Exception | None:
        """Add the gradient of the sum of the jobs' losses to the weights'; the first error here."""
        run = _Run(self, jobs, backward=True)
        run.go()
        return run.failed

    # ---- weights ----

    def sum_tied(self, masters: Mapping[str, nn.Parameter]) -> None:
        """The gradient of a tied weight is the sum of both ends': in one order, so that they stay equal to the bit."""
        master = None if self.tied is None else masters.get(self.tied)
        if master is None or not (self.stages.first or self.stages.last):
            return
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        own = local(master.grad)
        other = self.stages.exchanged(own)
        own.copy_(own + other if self.stages.first else other + own)

    def gradient_norm(self, masters: Mapping[str, nn.Parameter]) -> Tensor:
        """The 2-norm over all stages; a tied weight counts once."""
        counted = [m for name, m in masters.items() if name != self.tied or self.stages.first]
        return self.stages.total(gradient_norm(counted).double().square()).sqrt().float()


class _Run:
    """One schedule over some jobs; every stage makes the same one."""

    def __init__(self, pipeline: Pipeline, jobs: Sequence[Job], backward: bool) -> None:
        self.pipeline = pipeline
        self.jobs = jobs
        self.backward = backward
        self.outputs: list[Tensor] = []
        self.failed: Exception | None = None
        self._broken: set[int] = set()
        self._inlet = inlet_of(pipeline.model)
        sharding = pipeline.model.sharding
        assert sharding is not None
        self._wire = sharding.dtype
        self._width = max(self._tokens(job.sequences) for job in jobs)

    def go(self) -> None:
        stages = self.pipeline.stages
        stage = PipelineStage(
            self.pipeline.model.root,
            stages.index,
            stages.count,
            stages.device,
            input_args=torch.zeros(1, dtype=torch.int64, device="meta") if stages.first else self._like(),
            output_args=self._like(),
            group=stages.group,
        )
        number_J = torch.arange(len(self.jobs))
        rows = (number_J,) if stages.first else ()
        if not self.backward:
            forward = ScheduleGPipe(stage, len(self.jobs), scale_grads=False)
            forward.step(*rows, return_outputs=False, work=self._work, job=number_J)
            return
        # with fewer micro-batches than stages the two schedules are one
        name = self.pipeline.schedule if len(self.jobs) >= stages.count else "gpipe"
        schedule = SCHEDULES[name](stage, len(self.jobs), loss_fn=self._loss, scale_grads=False)
        target = number_J if stages.last else None
        schedule.step(*rows, target=target, return_outputs=False, work=self._work, job=number_J)

    def _work(self, received: Tensor, *, job: Tensor) -> Tensor:
        """What a stage computes of a micro-batch: hidden states (W, H) for the next one, or the outputs.

        received: (W, H); on the first stage nothing of use.
        """
        number = int(job)
        try:
            if self._inlet is not None:
                self._inlet.hidden = received[None]
            if not self.pipeline.stages.last:
                hidden = self.pipeline.model.trunk.states(self.jobs[number].sequences.tokens).hidden
                return nn.functional.pad(hidden.to(self._wire), (0, 0, 0, self._width - hidden.shape[0]))
            found = self.jobs[number].read()
        except Exception as error:
            return self._instead(number, error)
        finally:
            if self._inlet is not None:
                self._inlet.hidden = None
        if not self.backward:
            self.outputs.append(found)
        return found

    def _instead(self, number: int, error: Exception) -> Tensor:
        """Zeros that nothing depends on."""
        self.failed = self.failed or error
        self._broken.add(number)
        zeros = torch.zeros_like(self._like(), device=self.pipeline.stages.device)
        return zeros.requires_grad_(self.backward)

    def _loss(self, found: Tensor, job: Tensor) -> Tensor:
        number = int(job)
        loss = self.jobs[number].loss
        assert loss is not None
        if number not in self._broken:
            try:
                return loss(found)
            except Exception as error:
                self.failed = self.failed or error
        return (found * 0.0).nan_to_num(0.0).sum()

    def _like(self) -> Tensor:
        """Shape and type of what travels."""
        size = (self._width, int(self.pipeline.model.trunk.model.config.hidden_size))
        return torch.empty(size, dtype=self._wire, device="meta").requires_grad_(self.backward)

    def _tokens(self, sequences: Sequences) -> int:
        """Of one micro-batch, on this rank."""
        cut = self.pipeline.model.trunk.tokens
        size = sequences.tokens.flat.shape[0]
        return size if cut is None else cut.cut(sequences.tokens).index.shape[0]


@dataclass(frozen=True, eq=False)
class PipelinePasses:
    """What `Passes` does, with the same loss terms, through pipeline stages.

    passes  of the same model and mini-batch.
    """

    passes: Passes
    pipeline: Pipeline

    def run(self, share: Share, loss: Loss) -> Found:
        """Raises TrainingError, on every rank of every stage, for a loss that is not finite on one."""
        model, ranks = self.passes.model, self.passes.ranks
        ranks.agree(problem_of(lambda: require_learnable(model, share.rows, loss.outputs)))
        return self._coupled(share, loss) if isinstance(loss, CoupledLoss) else self._separable(share, loss)

    def _job(self, part: Any, loss: Loss, value: Callable[[Outputs], Tensor], backward: bool) -> Job:
        """value: of the outputs of one micro-batch, for its gradient or as what is found."""
        if not backward:
            return Job(part.sequences, lambda: value(Outputs(**self.passes.computed(part, loss))))
        shapes: dict[str, torch.Size] = {}

        def read() -> Tensor:
            """All outputs in one row: a stage has one tensor."""
            found = self.passes.computed(part, loss)
            shapes.update({name: x.shape for name, x in found.items()})
            return torch.cat([x.flatten() for x in found.values()])

        def of(found: Tensor) -> Tensor:
            flat = found.split([shape.numel() for shape in shapes.values()])
            out = {name: x.view(shape) for (name, shape), x in zip(shapes.items(), flat, strict=True)}
            return value(Outputs(**out)) / self.passes.ranks.peers

        return Job(part.sequences, read, of)

    def _through(self, jobs: list[Job], backward: bool) -> list[Tensor]:
        """Every rank raises where one failed."""
        found: list[Tensor] = []
        if backward:
            error = self.pipeline.train(jobs)
        else:
            found, error = self.pipeline.forward(jobs)
        self.passes.ranks.agree(error)
        return found

    def _from_last(self, mine: Any) -> list[Any]:
        """A JSON value of every data rank, as the last stage has it."""
        theirs: list[Any] = self.pipeline.stages.every(self.passes.ranks.from_parts(mine))[-1]
        return theirs

    # ---- separable ----

    def _separable(self, share: Share, loss: SeparableLoss) -> Found:
        passes = self.passes
        parts, micro_batches = passes.parts(share)
        totals: list[float] = []
        reports: list[Stats] = []

        def term(index_b: Tensor, part: Any) -> Callable[[Outputs], Tensor]:
            def value(out: Outputs) -> Tensor:
                found, stats = passes.value(share, index_b, part, out, loss)
                totals.append(float(found.detach()))
                reports.append(stats)
                return found

            return value

        jobs = []
        for index_b, counted in passes.rounds(share, parts, backward=False):
            part = share.rows.select(index_b)
            jobs.append(self._job(part, loss, term(index_b, part) if counted else nothing, passes.backward))
        self._through(jobs, passes.backward)
        mine = {"loss": sum(totals), "stats": {name: asdict(stat) for name, stat in merge_stats(reports).items()}}
        theirs = self._from_last(mine)
        stats = merge_stats([{name: Stat(**stat) for name, stat in one["stats"].items()} for one in theirs])
        return Found(sum(one["loss"] for one in theirs), stats, micro_batches)

    # ---- coupled ----

    def _coupled(self, share: Share, loss: CoupledLoss) -> Found:
        passes = self.passes
        parts, micro_batches = passes.parts(share)
        rounds = list(passes.rounds(share, parts, backward=False))

        def scalars(part: Any) -> Callable[[Outputs], Tensor]:
            return lambda out: passes.scalars(out, part, loss)

        picked = [(index_b, share.rows.select(index_b), counted) for index_b, counted in rounds]
        first = [self._job(part, loss, scalars(part), backward=False) for _, part, _ in picked]
        found = self._through(first, backward=False)
        terms: list[tuple[Tensor, Tensor, Stats]] = []
        error = None
        if self.pipeline.stages.last:
            order_b = torch.cat(parts) if parts else torch.zeros(1, dtype=torch.int64)
            scalars_bK = torch.cat(found[: max(len(parts), 1)])
            scalars_BK = passes.ranks.items(scalars_bK, share.index[order_b], len(share.whole))  # type: ignore[arg-type]
            error = problem_of(lambda: terms.append(passes.couple(scalars_BK, share, loss)))
        passes.ranks.agree(error)
        if passes.backward:

            def part_of(index_b: Tensor, part: Any) -> Callable[[Outputs], Tensor]:
                def value(out: Outputs) -> Tensor:
                    at_b = share.index[index_b].to(terms[0][1].device)
                    return surrogate(passes.scalars(out, part, loss), terms[0][1][at_b])

                return value

            jobs = [
                self._job(part, loss, part_of(index_b, part) if counted else nothing, backward=True)
                for index_b, part, counted in picked
            ]
            self._through(jobs, backward=True)
        mine = [[float(value), {name: asdict(stat) for name, stat in stats.items()}] for value, _, stats in terms]
        value, stats = self.pipeline.stages.every(mine)[-1][0]
        return Found(value, {name: Stat(**stat) for name, stat in stats.items()}, micro_batches)
