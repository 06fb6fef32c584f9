"""Bounded asynchrony: a buffer of answered prompts, none of which is learned from past a staleness limit.

A call asks for responses and runs wherever the transport puts it; calls come back in the order in which they were sent.
Which prompts make up a step depends on the rollouts alone, never on how long anything took, so a run is the same on
every transport.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from tutelage.errors import ConfigError, TrainingError
from tutelage.protocols import Algorithm, Transport
from tutelage.rollout.partial import Carried, Sample
from tutelage.schedules.asked import Asked, Call, Key, joined, sorted_out
from tutelage.schedules.choice import Waiting, choose
from tutelage.schedules.saved import packed, packed_samples, unpacked, unpacked_samples
from tutelage.schedules.training import Draw, Publications, StepResult, Training, generating
from tutelage.types import Prompts


class BoundedAsync:
    """Generation runs ahead of learning by at most `max_staleness` weight versions (Fu et al. 2025, section 5.1).

    With B prompts a step, no more than (ahead + 1) B are ever in flight or in the buffer: beyond that nothing is sent
    off (backpressure).  Steps take complete prompts, and wait for an incomplete one only where it, or one behind it,
    would else be learned from past the limit (`choice.choose`).  So nothing becomes too stale as long as rollouts carry
    the version that was published when they were asked for.  Where they carry an older one, the responses are dropped,
    counted, and asked for again; a second time in one step is a TrainingError.

    ahead    batches begun ahead, at most max_staleness; where it is less, a prompt whose responses are long may be
             overtaken by later ones for max_staleness - ahead steps.  None: max_staleness, with partial rollouts one
             less, but at least 1.
    partial_tokens  None: a call returns finished responses.  Else a call stops after this many tokens
             (`rollout.partial.PartialRollout`), and unfinished responses go on in the next one with the weights of that
             moment; their oldest token counts for the limit.
    Raises ConfigError for an algorithm that does not generate, a role that cannot continue responses, or an `ahead`
    outside 1 to max_staleness.
    """

    LOOKS_AHEAD = True
    refills = 0

    def __init__(
        self,
        algorithm: Algorithm,
        transport: Transport,
        roles: Any,
        cfg: Any,
        max_staleness: int,
        ahead: int | None = None,
        partial_tokens: int | None = None,
    ) -> None:
        self.algorithm = generating(algorithm, "asynchronous")
        self.training = Training(algorithm, transport, roles, cfg)
        self.publications = Publications()
        self.max_staleness = max_staleness
        self.ahead = max(1, max_staleness - (partial_tokens is not None)) if ahead is None else ahead
        self.partial_tokens = partial_tokens
        self.size = 0
        self.drawn = 0
        self.asked: dict[int, Asked] = {}
        self.calls: deque[Call] = deque()
        self.unfinished: list[tuple[Key, Sample]] = []
        self.no_prompts: Prompts | None = None
        if not 1 <= self.ahead <= max_staleness:
            raise ConfigError(
                f"schedule.ahead is {self.ahead} and schedule.max_staleness is {max_staleness}: rollouts would be too "
                "old when they are learned from",
                fix="use an ahead from 1 to max_staleness",
            )
        if partial_tokens is not None and not hasattr(roles.actor, "generate_partial"):
            raise ConfigError(
                "schedule.partial_tokens is given, but the rollout engine cannot continue unfinished responses",
                fix="remove schedule.partial_tokens, or choose another rollout engine",
            )

    def advance(self, draw: Draw, state: Any) -> StepResult | None:
        version, training = state.step, self.training
        self._submit(draw, version)
        taken, dropped = self._take(version)
        if not taken:
            return None
        carried = len(self.unfinished)
        self._continue(self.unfinished, self.partial_tokens)  # while this step is learned
        batch = training.transport.put(joined([asked.rollout() for asked in taken]))
        result, published = training.update(self.algorithm.infer(batch, training.roles, training.cfg), state)
        self.publications.follow(published)
        counts = {"buffered": len(self.asked), "dropped": dropped}
        if self.partial_tokens is not None:
            counts["carried"] = carried
        return training.with_staleness(result, state, counts)

    # ---- sending ----

    def _submit(self, draw: Draw, version: int) -> None:
        """Send off new prompts until the limit, and with the first of them what was carried over."""
        while self.size == 0 or len(self.asked) + self.size <= (self.ahead + 1) * self.size:
            prompts = draw()
            if prompts is None:
                return
            self.size = self.size or len(prompts)
            self.no_prompts = prompts.select([])
            new = [
                Asked(prompts.select([place]), self.drawn + place, version + self.max_staleness)
                for place in range(len(prompts))
            ]
            self.drawn += len(prompts)
            self._send(prompts, new)

    def _send(self, prompts: Prompts, new: Sequence[Asked]) -> None:
        """Ask for all responses to prompts; with partial rollouts, within the tokens of one call."""
        self.asked |= {asked.order: asked for asked in new}
        keys = tuple(key for asked in new for key in asked.responses())
        training = self.training
        if self.partial_tokens is None:
            put = training.transport.put(prompts)
            self.calls.append(Call(keys, self.algorithm.generate(put, training.roles, training.cfg)))
        else:
            self._send_partial(prompts, keys, self.unfinished, self.partial_tokens)
            self.unfinished = []

    def _continue(self, unfinished: list[tuple[Key, Sample]], budget: int | None) -> None:
        """Go on with responses that were carried over, these and no others; no budget: to their end."""
        if unfinished:
            assert self.no_prompts is not None, "something was sent before"
            going = {id(sample) for _, sample in unfinished}
            self._send_partial(self.no_prompts, (), unfinished, budget)
            self.unfinished = [pair for pair in self.unfinished if id(pair[1]) not in going]

    def _send_partial(
        self, prompts: Prompts, keys: tuple[Key, ...], begun: list[tuple[Key, Sample]], budget: int | None
    ) -> None:
        put = self.training.transport.put
        carried = Carried(tuple(sample for _, sample in begun))
        result = self.training.roles.actor.generate_partial(put(prompts), put(carried), budget)
        self.calls.append(Call((*(key for key, _ in begun), *keys), result))

    # ---- receiving ----

    def _take(self, version: int) -> tuple[list[Asked], int]:
        """The prompts of this step, all complete and no longer waited for; and how many were dropped on the way."""
        dropped: set[int] = set()
        while self.asked:
            self._drop_stale(version, dropped)
            done = sum(asked.complete for asked in self.asked.values())
            due: set[int] = set()
            if done >= min(self.size, len(self.asked)):
                waiting = [Waiting(a.order, a.deadline, a.complete) for a in self.asked.values()]
                chosen = choose(waiting, self.size, version)
                due = {w.order for w in chosen if not w.complete}
                if not due:
                    return [self.asked.pop(order) for order in sorted(w.order for w in chosen)], len(dropped)
            self._continue([pair for pair in self.unfinished if pair[0].order in due], None)
            if not self.calls:
                self._continue(self.unfinished, self.partial_tokens)
            self._receive(self.calls.popleft())
        return [], len(dropped)

    def _receive(self, call: Call) -> None:
        """Wait for a call and keep what came back."""
        result = call.result.gather()
        rollout, carried = (result, Carried()) if self.partial_tokens is None else result
        finished, unfinished = sorted_out(call, rollout, carried)
        self.unfinished += unfinished
        for order, rows in finished:
            asked = self.asked[order]
            now = Asked(asked.prompt, order, asked.deadline, (*asked.parts, rows))
            self.asked[order] = (
                Asked(now.prompt, order, now.oldest + self.max_staleness, now.parts) if now.complete else now
            )

    def _drop_stale(self, version: int, dropped: set[int]) -> None:
        """Ask again for the answers that this step may no longer learn from, and add them to `dropped`."""
        for asked in [a for a in self.asked.values() if a.complete and a.deadline < version]:
            if asked.order in dropped:
                raise TrainingError(
                    f"rollouts asked for at weight version {version} carry version {asked.oldest}; "
                    f"schedule.max_staleness is {self.max_staleness}",
                    fix="see that the rollout engine takes the weights that are published",
                )
            dropped.add(asked.order)
            self._send(asked.prompt, [Asked(asked.prompt, asked.order, version + self.max_staleness)])

    # ---- state ----

    def state(self) -> dict[str, Any]:
        """Everything that was begun; calls are gathered and kept as calls, so a resumed run meets them in order."""
        self.publications.settle()
        results = [(call.keys, call.result.gather()) for call in self.calls]
        put = self.training.transport.put
        self.calls = deque(Call(keys, put(result)) for keys, result in results)
        return {
            "size": self.size,
            "drawn": self.drawn,
            "no_prompts": {} if self.no_prompts is None else packed(self.no_prompts),
            "asked": {f"{a.order:012d}": a.state() for a in self.asked.values()},
            "calls": {f"{place:06d}": self._call_state(*call) for place, call in enumerate(results)},
            "unfinished": packed_samples([sample for _, sample in self.unfinished]),
            "unfinished_keys": [list(key) for key, _ in self.unfinished],
        }

    def _call_state(self, keys: tuple[Key, ...], result: Any) -> dict[str, Any]:
        rollout, carried = (result, Carried()) if self.partial_tokens is None else result
        return {
            "keys": [list(key) for key in keys],
            "rollout": packed(rollout),
            "carried": packed_samples(carried.samples),
        }

    def load_state(self, saved: dict[str, Any]) -> None:
        put = self.training.transport.put
        self.size, self.drawn = saved["size"], saved["drawn"]
        self.no_prompts = unpacked(saved["no_prompts"]) if saved["no_prompts"] else None
        self.asked = {int(order): Asked.from_state(asked) for order, asked in saved["asked"].items()}
        keys = [Key(*key) for key in saved["unfinished_keys"]]
        self.unfinished = list(zip(keys, unpacked_samples(saved["unfinished"]), strict=True))
        self.calls = deque()
        for _, call in sorted(saved["calls"].items()):
            rollout = unpacked(call["rollout"])
            carried = Carried(tuple(unpacked_samples(call["carried"])))
            result = rollout if self.partial_tokens is None else (rollout, carried)
            self.calls.append(Call(tuple(Key(*key) for key in call["keys"]), put(result)))
