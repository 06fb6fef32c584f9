"""A generator with weights of its own behind the actor's handle: where calls go, and whose weights generate."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.engines.engine import ModelEngine
from tutelage.errors import PendingError, RolloutError
from tutelage.models.load import load_causal_lm
from tutelage.roles.actor import Actor
from tutelage.roles.generator import Generator
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.inprocess.partial import InProcessPartial
from tutelage.rollout.inprocess.receiving import ReceivingInProcess
from tutelage.rollout.sampling import SamplingParams
from tutelage.transport.local import LocalTransport
from tutelage.transport.routed import Both, RoutedActor
from tutelage.types import Demonstrations, Outputs, Prompts, Ragged, Stat, Stats


@dataclass(frozen=True)
class Likelihood:
    """-logp per token, the mean over all tokens."""

    outputs: frozenset[str] = frozenset({"logp"})

    def weights(self, batch: Demonstrations) -> Ragged:
        lens = batch.sequences.response_lens
        return Ragged(torch.full((int(lens.sum()),), 1.0 / int(lens.sum())), lens)

    def items(self, out: Outputs, batch: Demonstrations) -> tuple[torch.Tensor, Stats]:
        assert out.logp is not None
        return -out.logp, {"logp": Stat.of(out.logp)}


@dataclass
class Roles:
    routed: RoutedActor
    actor: Actor
    receiving: ReceivingInProcess


@pytest.fixture
def roles(tiny_llama_folder: Path, tiny_tokenizer: Any) -> Roles:
    settings = ModelConfig(path=str(tiny_llama_folder))
    trained, own = load_causal_lm(settings), load_causal_lm(settings)
    optim = OptimConfig(lr=1e-2, schedule="constant")
    actor = Actor(ModelEngine(trained, optim), None, 1.0, lambda folder: nullcontext())
    params = SamplingParams(temperature=1.0, max_new_tokens=8)
    rollout = InProcessRollout(own.model, tiny_tokenizer, (2,), params, seed=3)
    receiving = ReceivingInProcess(rollout, own.model)
    generator = Generator(receiving, 0, 0, InProcessPartial(rollout))
    transport = LocalTransport()
    routed = RoutedActor(transport.handle("actor", actor), transport.handle("rollout", generator), wire=False)
    routed.connect(1)
    return Roles(routed, actor, receiving)


def prompts(n: int = 2) -> Prompts:
    rows = ((5, 9, 20), (7, 8), (30, 31, 32, 33))
    return Prompts(tokens=rows, ids=("a", "b", "c"), truths=(None,) * 3, messages=((),) * 3, n=n)


def gap(roles: Roles, rollout: Any) -> float:
    """Largest difference of the sampler's logprobs and the actor's."""
    return float((roles.routed.logprobs(rollout).gather().flat - rollout.rollout_logp.flat).abs().max())


def test_generation_is_the_generators_and_follows_the_actor_only_when_it_publishes(roles: Roles) -> None:
    before = roles.routed.generate(prompts()).gather()
    assert before.weights_version.tolist() == [0] * 6
    assert gap(roles, before) < 1e-5
    roles.routed.step(Demonstrations(before.sequences, tuple("uvwxyz")), Likelihood()).gather()
    stale = roles.routed.generate(prompts()).gather()
    assert stale.sequences.response_rows() == before.sequences.response_rows()
    assert gap(roles, stale) > 1e-2, "the actor has moved, the generator has not"
    assert roles.routed.publish(7).gather() is None
    fresh = roles.routed.generate(prompts()).gather()
    assert fresh.weights_version.tolist() == [7] * 6
    assert gap(roles, fresh) < 1e-5
    with pytest.raises(RolloutError, match="the actor has no rollout engine"):
        roles.actor.generate(prompts())


def test_cut_responses_are_the_generators_too(roles: Roles) -> None:
    whole = roles.routed.generate(prompts()).gather()
    done, carried = roles.routed.generate_partial(prompts(), None, 12).gather()
    assert len(done) + len(carried.samples) == 6
    assert carried.samples
    rest, none = roles.routed.generate_partial(prompts().select([]), carried, None).gather()
    assert not none.samples
    found = {
        (name, sample): row
        for part in (done, rest)
        for name, sample, row in zip(
            part.prompt_ids, part.samples.tolist(), part.sequences.response_rows(), strict=True
        )
    }
    expected = zip(whole.prompt_ids, whole.samples.tolist(), whole.sequences.response_rows(), strict=True)
    assert found == {(name, sample): row for name, sample, row in expected}


def test_weights_that_do_not_fit_are_refused_and_are_no_new_version(roles: Roles) -> None:
    receiving, weights = roles.receiving, roles.actor.whole_weights()
    name = "model.layers.0.mlp.up_proj.weight"
    assert weights["lm_head.weight"].equal(weights["model.embed_tokens.weight"]), "tied, and published as both"
    with pytest.raises(RolloutError, match=r"has no weight 'model\.norm\.wieght'\. Did you mean model\.norm\.weight"):
        receiving.load_weights([("model.norm.wieght", torch.ones(64))], 1)
    with pytest.raises(RolloutError, match=rf"has {name} otherwise, published: \(128, 7\)"):
        receiving.load_weights([(name, torch.ones(128, 7))], 1)
    del weights[name]
    with pytest.raises(RolloutError, match="1 weights of the generator were not published"):
        receiving.load_weights(weights.items(), 1)
    assert receiving.generate(prompts()).weights_version.tolist() == [0] * 6
    one_name = {n: w for n, w in roles.actor.whole_weights().items() if n != "lm_head.weight"}
    receiving.load_weights(one_name.items(), 2)
    assert receiving.generate(prompts()).weights_version.tolist() == [2] * 6


def test_the_in_process_engine_has_no_wire(roles: Roles) -> None:
    for attempt in (lambda: roles.receiving.join(("127.0.0.1", 1), 2, 1), lambda: roles.receiving.receive(1)):
        with pytest.raises(RolloutError, match="no wire of its own"):
            attempt()


# ---- over a wire: both ends are asked before either is waited for ----


class Result:
    def __init__(self, told: list[str], name: str, value: Any) -> None:
        self.told, self.name, self.value = told, name, value

    def gather(self) -> Any:
        self.told.append(f"wait {self.name}")
        return self.value


class Recorded:
    """A handle that writes down what it is asked."""

    def __init__(self, told: list[str], name: str, **values: Any) -> None:
        self._told, self._name, self._values = told, name, values

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any) -> Result:
            told = f"{self._name}.{method}{args!r}"
            self._told.append(told)
            return Result(self._told, f"{self._name}.{method}", self._values.get(method))

        return call


def test_over_a_wire_both_ends_are_asked_before_either_is_waited_for() -> None:
    told: list[str] = []
    actor = Recorded(told, "actor", open_publication=("host", 5), send_weights={"bytes": 1.0})
    generator = Recorded(told, "generator", receivers=3, receive={"bytes": 2.0})
    routed = RoutedActor(actor, generator, wire=True)
    routed.connect(2)
    address = ("host", 5)
    assert told == [
        "generator.receivers()",
        "wait generator.receivers",
        "actor.open_publication(7,)",  # the actor's rank, and 2 engines of 3 processes
        "wait actor.open_publication",
        "actor.connect()",
        f"generator.join({address!r}, 7)",
        "wait actor.connect",
        "wait generator.join",
    ]
    told.clear()
    published = routed.publish(4)
    assert told == ["actor.send_weights()", "generator.receive(4,)"]
    with pytest.raises(PendingError, match=r"of a pending publication was read"):
        len(published)
    assert published.gather() == [{"bytes": 1.0}, {"bytes": 2.0}]


def test_of_two_errors_the_first_ones_is_raised() -> None:
    class Failed:
        def __init__(self, text: str) -> None:
            self.text = text

        def gather(self) -> None:
            raise RolloutError(self.text)

    with pytest.raises(RolloutError, match="the sender"):
        Both(Failed("the sender"), Failed("the receiver")).gather()
