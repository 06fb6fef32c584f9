"""Weights over a process group: bytes, buckets, errors on either side, and an engine with two workers."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from vllm_kit import gap, moved, prompts_of, rows_of, running, spec_of, trainer_of, weights_of

from tutelage.errors import RolloutError
from tutelage.rollout.vllm.publication import WeightSender

pytestmark = pytest.mark.vllm
PROMPTS = prompts_of(n=3, step=5)


class Sending:
    """The trainer's side, in a thread; what it returned or raised."""

    def __init__(self, sender, named):
        self.result = self.error = None
        self.thread = threading.Thread(target=self._run, args=(sender, named), daemon=True)
        self.thread.start()

    def _run(self, sender, named):
        try:
            self.result = sender.send(named)
        except Exception as error:
            self.error = error

    def join(self):
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self


@pytest.fixture(scope="module")
def engine(tiny_llama_folder, tiny_tokenizer):
    config = {"mode": "separate", "load": "publication", "transfer_timeout": 30.0}
    with running(spec_of(tiny_llama_folder, tiny_tokenizer, config=config)) as rollout:
        yield rollout


@pytest.fixture(scope="module")
def sender(engine):
    sender = WeightSender(2, bucket_bytes=10_000, timeout=30)
    connecting = threading.Thread(target=sender.connect, daemon=True)
    connecting.start()
    engine.join(sender.address, 2)
    connecting.join(30)
    yield sender
    sender.close()


@pytest.fixture
def trainer(tiny_llama_folder):
    return trainer_of(tiny_llama_folder)


def test_an_engine_that_waits_for_its_first_weights_generates_nothing(engine):
    with pytest.raises(RolloutError, match="no weights of a known version"):
        engine.generate(PROMPTS)


def test_every_weight_goes_over_the_wire_once(engine, sender, trainer):
    weights = weights_of(moved(trainer, 1))
    sending = Sending(sender, weights.items())
    received = engine.receive(3)
    want = sum(w.numel() * w.element_size() for w in weights.values())
    assert received == sending.join().result
    assert received.weight_bytes == want
    assert received.buffers == -(-want // 10_000)  # full buckets, although tensors are larger and smaller than one
    assert max(w.numel() * 4 for w in weights.values()) > 10_000
    rollout = engine.generate(PROMPTS)
    assert rollout.weights_version.tolist() == [3] * 12
    assert gap(trainer, rollout) < 1e-5


def test_a_trainer_that_fails_says_so_and_the_engine_recovers(engine, sender, trainer):
    def broken():
        yield from list(weights_of(trainer).items())[:4]
        raise ValueError("a shard was lost")

    sending = Sending(sender, broken())
    with pytest.raises(Exception, match="stopped sending weights: ValueError: a shard was lost"):
        engine.receive(4)
    assert isinstance(sending.join().error, ValueError)
    with pytest.raises(RolloutError, match="no weights of a known version"):
        engine.generate(PROMPTS)
    sending = Sending(sender, weights_of(moved(trainer, 2)).items())
    engine.receive(5)
    assert sending.join().error is None
    assert gap(trainer, engine.generate(PROMPTS)) < 1e-5


def test_a_wrong_set_of_weights_does_not_leave_the_trainer_hanging(engine, sender, trainer):
    wrong = weights_of(trainer)
    wrong["model.embed_tokens.weight"] = torch.zeros(120, 64)
    sending = Sending(sender, wrong.items())
    with pytest.raises(Exception, match=r"\(120, 64\) in the policy"):
        engine.receive(6)
    assert sending.join().error is None
    sending = Sending(sender, weights_of(moved(trainer, 3)).items())
    engine.receive(7)
    assert gap(trainer, engine.generate(PROMPTS)) < 1e-5


def test_a_trainer_that_never_comes_is_given_up():
    sender = WeightSender(2, timeout=1.0)
    started = time.monotonic()
    with pytest.raises(RolloutError, match="process group failed"):
        sender.connect()
    assert time.monotonic() - started < 30


@pytest.mark.slow
def test_two_workers_sample_the_same_and_take_weights_both_ways(tiny_llama_folder, tiny_tokenizer, trainer):
    """tensor_parallel 2, so heads and vocabulary are cut; the samples are those of one worker."""
    config = {"mode": "separate", "tensor_parallel": 2, "transfer_timeout": 60.0, "bucket_bytes": 10_000}
    with running(spec_of(tiny_llama_folder, tiny_tokenizer)) as one:
        want = rows_of(one.generate(PROMPTS))
    with running(spec_of(tiny_llama_folder, tiny_tokenizer, config=config)) as engine:
        rollout = engine.generate(PROMPTS)
        assert rows_of(rollout) == want
        assert gap(trainer, rollout) < 1e-5
        engine.load_weights(weights_of(moved(trainer, 1)).items(), 1)
        assert gap(trainer, engine.generate(PROMPTS)) < 1e-5
        sender = WeightSender(3, bucket_bytes=10_000, timeout=60)
        sending = Sending(sender, weights_of(moved(trainer, 2)).items())
        engine.join(sender.address, 3)
        assert engine.receive(2) == sending.join().result
        assert gap(trainer, engine.generate(PROMPTS)) < 1e-5
