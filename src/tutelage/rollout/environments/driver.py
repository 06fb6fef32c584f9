"""Episodes with environments, turn by turn for all of them at once, around any rollout engine.

Token in, token out: what was sampled is never tokenised again.  The chat template writes what stands between two
answers, and that alone is tokenised.

Shapes: B episodes (prompts times samples, a prompt's samples adjacent), R flat response tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tutelage.errors import RolloutError, closest
from tutelage.math.keyed import sample_key
from tutelage.protocols import Environment, RolloutEngine
from tutelage.rollout.environments.episode import Episode, assembled, problem_of
from tutelage.rollout.environments.stepping import Outcome, Steps
from tutelage.rollout.inprocess.stopping import Decoder, decode_rows
from tutelage.rollout.sampling import SamplingParams
from tutelage.types import Prompts, Rollout

Factory = Callable[[], Environment]
"""Makes the environment of one episode."""
Complete = Callable[[Prompts, SamplingParams], Rollout]
"""`params.n` responses to each prompt under these parameters: an engine's `complete`."""


class ObservationTemplate(Protocol):
    """The part of `data.chat.ChatTemplate` that episodes need."""

    tokenizer: Any
    eos_ids: tuple[int, ...]
    end_id: int
    response_prefix: str

    def encode_observation(self, messages: Sequence[dict[str, str]], *, closed: bool) -> list[int]: ...
    def special_texts(self) -> list[str]: ...


@dataclass(frozen=True)
class EpisodeLimits:
    """total_tokens  of a response: all turns and observations.   turn_tokens  of one turn (None: what is left).

    max_turns     of the policy.      step_seconds, workers  see `Steps`.
    context       positions of the engine: a prompt, a response and one more turn may have that many; None: no bound.
    """

    total_tokens: int
    max_turns: int = 8
    turn_tokens: int | None = None
    step_seconds: float = 30.0
    workers: int = 32
    context: int | None = None

    @property
    def turn(self) -> int:
        return self.total_tokens if self.turn_tokens is None else min(self.turn_tokens, self.total_tokens)


class EpisodeRollout:
    """Implements `protocols.RolloutEngine`: prompts begin episodes, `prompts.environments` names whose.

    Turn k of sample s draws with the key (seed, step, (s, prompt id), purpose of turn k), the first turn with the key
    it has without environments; so an episode is the same alone and in any batch.  Each episode has an environment of
    its own, whose seed is keyed by (seed, step, prompt id, sample).

    An episode is finished when its environment says done to a response that ended by itself.  It is truncated when a
    turn reaches its length limit (the environment is asked all the same: its reward counts), when the observation and
    one more token do not fit, and after max_turns.  An environment that raises, answers with nonsense or is late ends
    its episode in `Rollout.episode_errors`; nothing of such a row is trained.

    engine     publishes and rests.    complete, params  generate; n, greedy and the length limit are set here.
    factories  name -> maker.          held   the context that all calls of one batch share (`HeldContext`).
    """

    def __init__(
        self,
        engine: RolloutEngine,
        complete: Complete,
        params: SamplingParams,
        template: ObservationTemplate,
        factories: Mapping[str, Factory],
        limits: EpisodeLimits,
        *,
        seed: int,
        held: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Raises RolloutError for no factories, DataError for a template that cannot write an observation."""
        if not factories:
            raise RolloutError("there is no environment", fix="give environment.functions at least one")
        self.engine = engine
        self.complete = complete
        self.params = params
        self.template = template
        self.factories = dict(factories)
        self.limits = limits
        self.seed = seed
        self.held = held
        self.steps = Steps(limits.step_seconds, limits.workers)
        self._closing = frozenset({*template.eos_ids, template.end_id})
        self._special = re.compile("|".join(map(re.escape, template.special_texts())) or r"(?!)")
        probe = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
        template.encode_observation(probe, closed=True)

    def publish(self, version: int) -> None:
        self.engine.publish(version)

    def rest(self) -> None:
        self.engine.rest()

    def generate(self, prompts: Prompts) -> Rollout:
        """`prompts.n` episodes of each prompt, with `token_reward` and the columns of episodes.

        Raises RolloutError: an unknown environment; prompts without messages; every episode failed; and as the engine.
        DataError where the template cannot write an observation, such as one in a role that it does not know.
        """
        episodes = self._begun(prompts)
        with self.held():
            self._first_turns(episodes, prompts)
            self._stepped(self._reset(episodes, prompts), 1)
            for turn in range(2, self.limits.max_turns + 1):
                going = [e for e in episodes if e.live]
                if not going:
                    break
                self._next_turns(going, prompts, turn)
                self._stepped(going, turn)
        failed = [e for e in episodes if e.error]
        if episodes and len(failed) == len(episodes):
            raise RolloutError(
                f"all {len(episodes)} episodes failed; the first: {failed[0].label}: {failed[0].error}",
                fix="correct the environment, or give it rows that it can begin with",
            )
        return assembled(episodes, prompts, self._texts([e.tokens for e in episodes]))

    # ---- the policy's turns ----

    def _begun(self, prompts: Prompts) -> list[Episode]:
        names = prompts.environments if prompts.environments is not None else self._only(len(prompts))
        for place, name in enumerate(names):
            if name not in self.factories:
                raise RolloutError(
                    f"prompt {prompts.ids[place]!r} is of the environment {name!r}.{closest(name, self.factories)}",
                    fix=f"use one of {', '.join(self.factories)}, or add it to environment.functions",
                )
            if not prompts.messages[place]:
                raise RolloutError(
                    f"prompt {prompts.ids[place]!r} has no messages, so no observation can follow it",
                    fix="give prompts as chats",
                )
        return [
            Episode(
                name=names[p],
                place=p,
                sample=sample,
                prompt_id=prompts.ids[p],
                prompt=tuple(prompts.tokens[p]),
                messages=[dict(message) for message in prompts.messages[p]],
                truth=prompts.truths[p],
            )
            for p in range(len(prompts))
            for sample in range(prompts.n)
        ]

    def _only(self, count: int) -> tuple[str, ...]:
        if len(self.factories) > 1:
            raise RolloutError(
                f"the prompts name no environment, and there are {len(self.factories)}: {', '.join(self.factories)}",
                fix="give the data a column `environment`",
            )
        return tuple(self.factories) * count

    def _first_turns(self, episodes: Sequence[Episode], prompts: Prompts) -> None:
        """All samples of a prompt together, as without environments."""
        if episodes:
            self._take(episodes, self.complete(prompts, self._params(prompts, prompts.n, self.limits.turn)))

    def _next_turns(self, episodes: Sequence[Episode], prompts: Prompts, turn: int) -> None:
        """Every episode is a prompt of its own: what it holds so far."""
        for limit, group in self._calls(episodes):
            asked = Prompts(
                tokens=tuple((*e.prompt, *e.tokens) for e in group),
                ids=tuple(f"{e.sample}:{e.prompt_id}" for e in group),
                truths=(None,) * len(group),
                messages=((),) * len(group),
                step=prompts.step,
                purpose=f"{prompts.purpose}/turn {turn}",
                greedy=prompts.greedy,
            )
            self._take(group, self.complete(asked, self._params(prompts, 1, limit)))

    def _params(self, prompts: Prompts, n: int, limit: int) -> SamplingParams:
        params = replace(self.params, n=n, max_new_tokens=limit)
        return params.with_greedy() if prompts.greedy else params

    def _room(self, episode: Episode) -> int:
        """Tokens that its next turn may have."""
        return min(self.limits.turn, self.limits.total_tokens - len(episode.tokens))

    def _calls(self, episodes: Sequence[Episode]) -> Iterator[tuple[int, list[Episode]]]:
        """(limit, episodes): one call for all, and further ones for those whose context is too short for its limit.

        An episode with less room than its call's limit is cut to its room afterwards (`_take`), which is what it would
        have had alone: a draw depends on its key and place, never on the limit.
        """
        limit = max(self._room(e) for e in episodes)
        groups: dict[int, list[Episode]] = {}
        for e in episodes:
            bound = self.limits.context
            fits = bound is None or len(e.prompt) + len(e.tokens) + limit <= bound
            groups.setdefault(limit if fits else self._room(e), []).append(e)
        yield from sorted(groups.items(), reverse=True)

    def _take(self, episodes: Sequence[Episode], rollout: Rollout) -> None:
        """The engine's answers, a row an episode, cut to the room of each; `finished` of a cut one is False."""
        rows = zip(
            episodes,
            rollout.sequences.response_rows(),
            rollout.rollout_logp.rows(),
            rollout.finished.tolist(),
            rollout.texts,
            rollout.weights_version.tolist(),
            strict=True,
        )
        for e, tokens, logps, finished, text, version in rows:
            room = self._room(e)
            if len(tokens) > room:
                tokens, finished = tokens[:room], False
                (text,) = self._texts([tokens])
            e.finished = finished  # of this turn, until `_judge` says it of the episode
            e.said(tokens, logps[:room].tolist(), text, version)

    def _texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """As the engine makes them: without special tokens, and without the template's prefix at the start."""
        decoder: Decoder = self.template.tokenizer
        shown = [row[:-1] if row and row[-1] in self._closing else row for row in rows]
        texts = decode_rows(decoder, shown, skip_special_tokens=True)
        return [text.removeprefix(self.template.response_prefix) for text in texts]

    # ---- the environments' ----

    def _reset(self, episodes: Sequence[Episode], prompts: Prompts) -> list[Episode]:
        """The episodes that have begun; the others have failed."""

        def begin(e: Episode) -> Environment:
            purpose = f"{prompts.purpose}/environment"
            environment = self.factories[e.name]()
            opening = tuple(dict(message) for message in prompts.messages[e.place])
            environment.reset(opening, e.truth, sample_key(self.seed, prompts.step, e.prompt_id, e.sample, purpose))
            return environment

        outcomes = self.steps.run([lambda e=e: begin(e) for e in episodes])  # type: ignore[misc]
        for e, outcome in zip(episodes, outcomes, strict=True):
            if outcome.error:
                e.fail(f"reset: {outcome.error}")
            e.environment = outcome.value
        return [e for e in episodes if e.live]

    def _stepped(self, episodes: Sequence[Episode], turn: int) -> None:
        """Ask every environment at once; then, in the order of the episodes, what follows from its answer."""

        def ask(e: Episode) -> Callable[[], Any]:
            tokens, text = tuple(e.tokens[e.turn_start :]), e.messages[-1]["content"]
            return lambda: e.environment.step(tokens, text)

        outcomes = self.steps.run([ask(e) for e in episodes])
        for e, outcome in zip(episodes, outcomes, strict=True):
            self._judge(e, outcome, last=turn == self.limits.max_turns)

    def _judge(self, e: Episode, outcome: Outcome, *, last: bool) -> None:
        problem = outcome.error or problem_of(outcome.value)
        if problem:
            e.fail(f"turn {e.turns}: {problem}")
            return
        turn, ended = outcome.value, e.finished
        e.told(turn)
        if turn.done or not ended or last:
            e.end(finished=turn.done and ended)
            return
        content, removed = self._plain(turn.observation)
        e.count("special_texts_removed", removed)
        message = {"role": turn.role, "content": content}
        closed = e.tokens[-1] in self._closing
        ids = self.template.encode_observation([*e.messages, message], closed=closed)
        if len(e.tokens) + len(ids) >= self.limits.total_tokens:
            e.end(finished=False)
            return
        e.heard(message, ids)

    def _plain(self, text: str) -> tuple[str, int]:
        """The text without what the tokenizer would read as special tokens: a tool's output is no end of a turn."""
        removed = 0
        while self._special.search(text):
            text, count = self._special.subn("", text)
            removed += count
        return text, removed


class HeldContext:
    """A context that an episode's batch enters once, around all of its calls; entered inside, it does nothing.

    Ranks whose weights are gathered for generation do so together; their episodes take different numbers of turns.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self.make = make
        self.inside = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self.inside:
            yield
            return
        with self.make():
            self.inside = True
            try:
                yield
            finally:
                self.inside = False


class ReceivingEngine(Protocol):
    """An engine whose weights come from elsewhere (`roles.generator`)."""

    def join(self, address: tuple[str, int], world: int, offset: int) -> None: ...
    def receive(self, version: int) -> Any: ...
    def load_weights(self, named: Any, version: int) -> None: ...


class ReceivingEpisodes:
    """Episodes in processes of their own: generation is `episodes`', weights go to the `engine` below it."""

    def __init__(self, episodes: EpisodeRollout, engine: ReceivingEngine) -> None:
        self.episodes = episodes
        self.engine = engine

    def generate(self, prompts: Prompts) -> Rollout:
        return self.episodes.generate(prompts)

    def join(self, address: tuple[str, int], world: int, offset: int) -> None:
        self.engine.join(address, world, offset)

    def receive(self, version: int) -> Any:
        return self.engine.receive(version)

    def load_weights(self, named: Any, version: int) -> None:
        self.engine.load_weights(named, version)

    def generate_partial(self, *call: Any, **limits: Any) -> Any:
        raise RolloutError("an episode with an environment cannot be cut short", fix="remove schedule.partial_tokens")
