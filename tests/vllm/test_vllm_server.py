"""A server that is started, spoken to, given weights and killed."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace

import psutil
import pytest
from vllm_kit import gap, moved, prompts_of, rows_of, running, spec_of, trainer_of, weights_of

from tutelage.errors import RolloutError
from tutelage.rollout.vllm.engine import VLLMRollout
from tutelage.rollout.vllm.publication import WeightSender

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS = prompts_of(n=3, step=5)


def group_of(process):
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


@pytest.fixture(scope="module")
def engine(tiny_llama_folder, tiny_tokenizer, tmp_path_factory):
    config = {"mode": "server", "transfer_timeout": 60.0, "request_timeout": 60.0}
    folder = tmp_path_factory.mktemp("logs")
    with running(spec_of(tiny_llama_folder, tiny_tokenizer, config=config), log_folder=str(folder)) as rollout:
        yield rollout
        group = rollout.server.process.pid
    living = [p for p in psutil.process_iter(["status"]) if group_of(p) == group]
    assert [p for p in living if p.info["status"] != psutil.STATUS_ZOMBIE] == []
    assert list(folder.glob("vllm-*.log"))


def test_samples_and_logprobs_are_those_of_an_engine_in_this_process(engine, tiny_llama_folder, tiny_tokenizer):
    rollout = engine.generate(PROMPTS)
    assert gap(trainer_of(tiny_llama_folder), rollout) < 1e-5
    with running(spec_of(tiny_llama_folder, tiny_tokenizer)) as local:
        want = local.generate(PROMPTS)
        stop = replace(engine.spec.params, n=3, stop=(want.texts[0][2:4],))
        assert rows_of(engine.complete(PROMPTS, stop)) == rows_of(local.complete(PROMPTS, stop))
    assert rows_of(rollout) == rows_of(want)
    assert rollout.texts == want.texts


def test_weights_partial_rollouts_sleep_and_pause(engine, tiny_llama_folder):
    trainer = moved(trainer_of(tiny_llama_folder), 1)
    sender = WeightSender(2, bucket_bytes=10_000, timeout=60)
    sent = []
    thread = threading.Thread(target=lambda: sent.append(sender.send(weights_of(trainer).items())), daemon=True)
    thread.start()
    engine.join(sender.address, 2)
    received = engine.receive(1)
    thread.join(30)
    assert [received] == sent
    _, carried = engine.generate_partial(PROMPTS, None, 30)
    assert len(carried)
    rest, none = engine.generate_partial(prompts_of([]), carried)
    assert len(none) == 0
    assert gap(trainer, rest) < 1e-5
    engine.sleep(1)
    engine.wake("weights")
    engine.trainer_freed()
    engine.wake("kv_cache")
    backend = engine._backend
    backend.pause("wait")
    assert backend.paused()
    backend.resume()
    assert not backend.paused()
    assert backend.abort() == 0
    assert gap(trainer, engine.generate(PROMPTS)) < 1e-5
    engine.load_folder(str(tiny_llama_folder), 2)
    assert gap(trainer_of(tiny_llama_folder), engine.generate(PROMPTS)) < 1e-5
    with pytest.raises(RolloutError, match="cannot be sent over HTTP"):
        engine.load_weights(weights_of(trainer).items(), 3)
    engine.load_folder(str(tiny_llama_folder), 0)


def test_another_process_attaches_and_leaves_it_running(engine, tiny_llama_folder, tiny_tokenizer):
    config = {"mode": "server", "url": engine.server.url, "request_timeout": 60.0}
    attached = VLLMRollout(spec_of(tiny_llama_folder, tiny_tokenizer, config=config))
    assert rows_of(attached.generate(PROMPTS)) == rows_of(engine.generate(PROMPTS))
    attached.close()
    assert engine.server.process.poll() is None


def test_a_server_that_dies_says_where_its_log_is(engine):
    os.killpg(engine.server.process.pid, 9)
    engine.server.process.wait(30)
    started = time.monotonic()
    with pytest.raises(RolloutError, match=r"it ended with -9(.|\n)*vllm-\d+\.log"):
        engine.generate(PROMPTS)
    assert time.monotonic() - started < 30
