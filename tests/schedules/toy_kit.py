"""A toy policy whose every number can be followed, and the algorithm that trains it.

The policy is one number, w.  A response of a prompt under w is a row of floor(1000 w)-coloured tokens; training adds a
function of the batch to w, so a wrong batch, order or version shows in every later token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from tutelage.rollout.partial import Carried, Sample, samples_of
from tutelage.transport.local import LocalTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Prompts, Ragged, Rollout, Sequences, Stat

LIMIT = 12


def prompts(step: int, count: int = 2, n: int = 2) -> Prompts:
    ids = tuple(f"{step}.{i}" for i in range(count))
    return Prompts(
        tokens=tuple((1, step + 2, i + 2) for i in range(count)),
        ids=ids,
        truths=tuple({"answer": (step, i)} for i in range(count)),
        messages=tuple(({"role": "user", "content": name},) for name in ids),
        step=step,
        n=n,
    )


def length(name: str, sample: int) -> int:
    """Between 1 and LIMIT, scattered."""
    step, place = map(int, name.split("."))
    return (step * 7 + place * 5 + sample * 3) * 11 % LIMIT + 1


class ToyActor:
    """log: (what, about which) of every call.  lag: how many publications the sampler is behind."""

    def __init__(self, log: list[tuple[str, Any]] | None = None, lag: int = 0) -> None:
        self.log = [] if log is None else log
        self.w = 0.5
        self.version = 0
        self.lag = lag

    def _reported(self) -> int:
        return self.version - self.lag

    def generate(self, asked: Prompts) -> Rollout:
        self.log.append(("generate", asked.ids))
        done, _ = self._decode(samples_of(asked), None)
        return self._rollout(done)

    def generate_partial(self, asked: Prompts, carried: Carried | None, budget: int | None) -> tuple[Rollout, Carried]:
        self.log.append(("generate_partial", asked.ids))
        begun = [] if carried is None else list(carried.samples)
        done, left = self._decode([*begun, *samples_of(asked)], budget)
        return self._rollout(done), Carried(tuple(left))

    def _decode(self, samples: list[Sample], budget: int | None) -> tuple[list[Sample], list[Sample]]:
        """One token a sample in each round, until the budget is used up: (finished, the others), in their order."""
        sampled, colour = 0, int(self.w * 1000)
        while any(not s.finished for s in samples) and (budget is None or sampled < budget):
            for i, s in enumerate(samples):
                if not s.finished:
                    at = len(s.response)
                    last = at + 1 == length(s.prompt_id, s.sample)
                    samples[i] = s.extended([colour + at], [-self.w], self._reported(), last)
                    sampled += 1
        return [s for s in samples if s.finished], [s for s in samples if not s.finished]

    def _rollout(self, samples: list[Sample]) -> Rollout:
        rows = [list(s.response) for s in samples]
        return Rollout(
            sequences=Sequences.build([s.prompt for s in samples], rows),
            rollout_logp=Ragged.from_rows([torch.tensor(s.logps) for s in samples], torch.float32),
            finished=torch.ones(len(rows), dtype=torch.bool),
            prompt_ids=tuple(s.prompt_id for s in samples),
            samples=torch.tensor([s.sample for s in samples], dtype=torch.int64),
            group=torch.zeros(len(rows), dtype=torch.int64),
            truths=tuple(s.truth for s in samples),
            messages=tuple(s.messages for s in samples),
            texts=tuple(map(str, rows)),
            weights_version=torch.tensor([s.version for s in samples], dtype=torch.int64),
        )

    def logprobs(self, rollout: Rollout) -> Ragged:
        self.log.append(("logprobs", tuple(dict.fromkeys(rollout.prompt_ids))))
        return rollout.rollout_logp.with_flat(torch.full_like(rollout.rollout_logp.flat, -self.w))

    def step(self, batch: Rollout, loss: Any) -> dict[str, Stat]:
        self.log.append(("step", tuple(dict.fromkeys(batch.prompt_ids))))
        tokens = batch.sequences.responses().flat.double()
        order = torch.arange(1, len(tokens) + 1).double()
        self.w = (self.w + float((tokens * order).sum() / order.sum()) / 7000 + 0.1) % 1.0
        return {"w": Stat(self.w, 1)}

    def publish(self, version: int) -> None:
        self.log.append(("publish", version))
        self.version = version

    def state(self) -> dict[str, Any]:
        return {"w": torch.tensor(self.w, dtype=torch.float64)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.w = float(state["w"])

    def save_pretrained(self, folder: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)


class WholeActor(ToyActor):
    """Without partial rollouts."""

    generate_partial: Any = property(lambda self: (_ for _ in ()).throw(AttributeError("generate_partial")))


@dataclass(frozen=True)
class ToyState:
    step: int

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}


def infer(rollout: Any, roles: Any, cfg: Any) -> Any:
    return rollout.adding(old_logp=roles.actor.logprobs(rollout))


TOY = SimpleNamespace(
    PUBLISHED=("actor",),
    PREFIXES={"actor": "policy"},
    initial_state=lambda cfg: ToyState(0),
    state_from=lambda saved: ToyState(saved["step"]),
    generate=lambda batch, roles, cfg: roles.actor.generate(batch),
    infer=infer,
    collect=lambda batch, roles, cfg: infer(roles.actor.generate(batch), roles, cfg),
    advantages=lambda batch, state, cfg: (batch, replace(state, step=state.step + 1), {}),
    learn=lambda batch, roles, cfg, state: [roles.update(batch, actor=None)],
)


class Supply:
    """`draw` over the batches from `begin` to `end`; counts what was taken."""

    def __init__(self, end: int, begin: int = 0, count: int = 2, n: int = 2) -> None:
        self.taken, self.end, self.count, self.n = begin, end, count, n

    def __call__(self) -> Prompts | None:
        if self.taken >= self.end:
            return None
        self.taken += 1
        return prompts(self.taken - 1, self.count, self.n)


class Watched(LocalTransport):
    """The local transport, whose results note in `log` that they were gathered."""

    def __init__(self, log: list[tuple[str, Any]]) -> None:
        super().__init__()
        self.log = log

    def handle(self, name: str, role: Any) -> Any:
        return WatchedHandle(super().handle(name, role), self.log)


class WatchedHandle:
    def __init__(self, inner: Any, log: list[tuple[str, Any]]) -> None:
        self._inner, self._log = inner, log

    def __getattr__(self, method: str) -> Callable[..., Any]:
        target = getattr(self._inner, method)

        def call(*args: Any) -> Any:
            given = [a.result if isinstance(a, WatchedResult) else a for a in args]
            return WatchedResult(target(*given), method, self._log)

        return call


class WatchedResult:
    def __init__(self, result: Any, method: str, log: list[tuple[str, Any]]) -> None:
        self.result, self.method, self.log = result, method, log

    def gather(self) -> Any:
        self.log.append(("gather", self.method))
        return self.result.gather()

    def adding(self, **columns: Any) -> Any:
        given = {k: v.result if isinstance(v, WatchedResult) else v for k, v in columns.items()}
        return self.result.adding(**given)


def toy(make: Callable[..., Any], actor: ToyActor | None = None, **kwargs: Any) -> tuple[Any, ToyActor]:
    """A schedule of the toy algorithm on the local transport, and its actor."""
    actor = ToyActor() if actor is None else actor
    transport = LocalTransport()
    return make(TOY, transport, RoleSet({"actor": transport.handle("actor", actor)}), None, **kwargs), actor


def run(schedule: Any, draw: Any, steps: int, state: ToyState | None = None) -> tuple[list[Any], ToyState]:
    """Up to `steps` results, and the state after them."""
    state = ToyState(0) if state is None else state
    results = []
    for _ in range(steps):
        result = schedule.advance(draw, state)
        if result is None:
            break
        results.append(result)
        state = result.state
    return results, state


def numbers(results: list[Any], name: str) -> list[float]:
    return [result.stats[name].mean for result in results]
