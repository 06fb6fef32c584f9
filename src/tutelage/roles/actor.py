"""The actor: the policy that generates, reports its own logprobs, and is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor

from tutelage.errors import RolloutError
from tutelage.layout import Dispatch
from tutelage.protocols import Engine, Loss, RolloutEngine
from tutelage.roles.learner import Exporting
from tutelage.roles.parts import Parts
from tutelage.rollout.partial import Carried, PartialRollout
from tutelage.types import Prompts, Ragged, Rollout, Stats


class Sender(Protocol):
    """The sending side of a weight publication to engines in other processes."""

    address: tuple[str, int]

    def connect(self) -> None: ...
    def send(self, named: Iterable[tuple[str, Tensor]]) -> Any: ...


class Actor:
    """temperature  divides the logits in sampling and in every logprob, here and in the reference.
    rollout      generates in these processes; None where a generator elsewhere does.
    partial      the same, for responses that are cut and carried over; all of its ranks do the same work.
    sender       (members of its group, this one included) -> the sending side of publications; one rank has it.
    """

    DISPATCH: ClassVar[dict[str, Dispatch]] = {
        "generate": Dispatch.GENERATE,
        "logprobs": Dispatch.ROWS,
        "log_collisions": Dispatch.ROWS,
        "with_values": Dispatch.ROWS,
        "step": Dispatch.MINIBATCH,
        "evaluate": Dispatch.MINIBATCH,
    }

    def __init__(
        self,
        engine: Engine,
        rollout: RolloutEngine | None,
        temperature: float,
        exporting: Exporting,
        sender: Callable[[int], Sender] | None = None,
        partial: PartialRollout | None = None,
    ) -> None:
        self.engine = engine
        self.exporting = exporting
        self.rollout = rollout
        self.temperature = temperature
        self.partial = partial
        self._make_sender = sender
        self._sender: Sender | None = None
        self._parts = Parts()

    # ---- generation in these processes ----

    def generate(self, prompts: Prompts) -> Rollout:
        return self._own_rollout().generate(prompts)

    def begin_parts(self, prompts: Prompts) -> None:
        """Begin a generation whose groups are asked for one by one.  Raises RolloutError where the engine cannot."""
        self._parts.begin(self._own_rollout(), prompts)

    def next_part(self) -> Rollout | None:
        """All responses of the next group to end; None: there are no more."""
        return self._parts.next()

    def close_parts(self) -> None:
        """Give up what still decodes."""
        self._parts.close()

    def generate_partial(
        self, prompts: Prompts, carried: Carried | None, budget_tokens: int | None
    ) -> tuple[Rollout, Carried]:
        """Responses that are finished within the budget, and the rest to be carried over."""
        if self.partial is None:
            self._own_rollout()
            raise RolloutError("this rollout engine cannot be cut short", fix="remove schedule.partial_tokens")
        return self.partial.generate_partial(prompts, carried, budget_tokens)

    def publish(self, version: int) -> None:
        self._own_rollout().publish(version)

    def _own_rollout(self) -> RolloutEngine:
        if self.rollout is None:
            raise RolloutError(
                "the actor has no rollout engine: a generator elsewhere has it", fix="ask the handle that routes to it"
            )
        return self.rollout

    # ---- training ----

    def logprobs(self, batch: Any) -> Ragged:
        """(R,) logprobs of the response tokens under the present weights, without gradient."""
        return self.engine.logprobs(batch.sequences, self.temperature)

    def log_collisions(self, batch: Any) -> Ragged:
        """(R,) log sum_v p_v^2 at each response token under the present weights, without gradient."""
        return self.engine.log_collisions(batch.sequences, self.temperature)

    def with_values(self, rollout: Rollout) -> Rollout:
        """The rollout with `old_logp` (R) and `value` (R + B), from one pass, where the critic is on this trunk."""
        logp, value = self.engine.logprobs_and_values(rollout.sequences, self.temperature)
        return rollout.adding(old_logp=logp, value=value)

    def step(self, batch: Any, loss: Loss) -> Stats:
        if self.rollout is not None:
            self.rollout.rest()
        return self.engine.step(batch, loss)

    def evaluate(self, batch: Any, loss: Loss) -> Stats:
        return self.engine.evaluate(batch, loss)

    # ---- weights for a generator elsewhere ----

    def open_publication(self, members: int) -> tuple[str, int] | None:
        """Listen for `members` - 1 receivers: the address, on the rank that sends."""
        if self._make_sender is None:
            return None
        self._sender = self._make_sender(members)
        return self._sender.address

    def connect(self) -> None:
        """Wait for the receivers."""
        if self._sender is not None:
            self._sender.connect()

    def send_weights(self) -> dict[str, float]:
        """Every weight to the receivers: bytes and seconds on the sending rank.  All ranks gather, one sends."""
        named = self.engine.named_weights()
        if self._sender is None:
            for _ in named:
                pass
            return {}
        return dict(vars(self._sender.send(named)))

    def whole_weights(self) -> dict[str, Tensor]:
        """Copies of all weights by their names in a checkpoint, on the CPU."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.engine.named_weights()}

    # ---- state ----

    def save_state(self, folder: Path) -> None:
        """Weights, moments and updates, for `load_state` on any number of ranks."""
        self.engine.save_state(folder)

    def load_state(self, folder: Path) -> None:
        self.engine.load_state(folder)

    def checkpoint_bytes(self) -> int:
        """What `save_state` and `save_pretrained` write together, at most."""
        return self.engine.checkpoint_bytes()

    def save_pretrained(self, folder: Path) -> None:
        """A Hugging Face folder, and what the build adds to it."""
        with self.exporting(folder):
            self.engine.save_pretrained(folder)
