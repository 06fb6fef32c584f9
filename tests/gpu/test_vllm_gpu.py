"""vLLM where there is a GPU: bytes given back by sleep, and weights by CUDA IPC.  Models are built from a config."""

from __future__ import annotations

import multiprocessing
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from tutelage.config.common import ModelConfig
from tutelage.config.vllm import VLLMConfig
from tutelage.engines.engine import ModelEngine
from tutelage.errors import installed
from tutelage.models.load import load_causal_lm
from tutelage.rollout.partial import bare_prompts
from tutelage.rollout.sampling import SamplingParams

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not installed("vllm"), reason="vLLM is not installed: run `make vllm`"),
]
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=16)
ROWS = [[5, 9, 20], [7, 8]]


def spec_of(folder: Path, tokenizer: Any, **config: Any) -> Any:
    from tutelage.rollout.vllm.engine import VLLMSpec

    values = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 256 << 20, "enforce_eager": True}
    return VLLMSpec(str(folder), tokenizer, (2,), PARAMS, VLLMConfig(**values | config), seed=3, device="cuda")


def trainer_of(folder: Path) -> ModelEngine:
    return ModelEngine.frozen(load_causal_lm(ModelConfig(path=str(folder)), device="cuda"))


def weights_of(trainer: ModelEngine, change: float) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        for parameter in trainer.model.module.parameters():
            parameter.mul_(1 + change)
    return {name: p.detach() for name, p in trainer.model.module.named_parameters()}


def gap(trainer: ModelEngine, rollout: Any) -> float:
    return float((trainer.logprobs(rollout.sequences, 1.0).flat.cpu() - rollout.rollout_logp.flat).abs().max())


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_publication_wakes_the_weights(level, tiny_llama_folder, tiny_tokenizer):
    from tutelage.rollout.vllm.engine import VLLMRollout

    engine = VLLMRollout(spec_of(tiny_llama_folder, tiny_tokenizer, sleep_level=level))
    try:
        trainer = trainer_of(tiny_llama_folder)
        assert gap(trainer, engine.complete(bare_prompts(ROWS), PARAMS)) < 1e-3
        awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        asleep = torch.cuda.mem_get_info()[0]
        assert asleep - awake > 200 << 20  # most of the 256 MiB of KV cache at least
        engine.wake("weights")
        engine.load_weights(weights_of(trainer, 0.05).items(), 1)
        engine.trainer_freed()
        engine.wake("kv_cache")
        assert gap(trainer, engine.complete(bare_prompts(ROWS), PARAMS)) < 1e-3
    finally:
        engine.close()


def _serve(pipe: Any, spec: Any) -> None:
    """The engine's process: answers calls until it is told to stop."""
    from tutelage.rollout.vllm.engine import VLLMRollout

    try:
        engine = VLLMRollout(spec)
        pipe.send("ready")
        while True:
            kind, *args = pipe.recv()
            if kind == "stop":
                break
            if kind == "publish":
                with engine.published_by_rpc(args[0]):
                    pipe.send("publishing")
                    while (call := pipe.recv())[0] != "published":
                        pipe.send(engine.rpc(*call))
                pipe.send("done")
            else:
                pipe.send(engine.complete(bare_prompts(ROWS), PARAMS))
        engine.close()
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


def test_weights_by_cuda_ipc(tiny_llama_folder, tiny_tokenizer):
    from tutelage.rollout.vllm.publication import send_by_ipc

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    spec = spec_of(tiny_llama_folder, tiny_tokenizer, mode="separate", transfer="ipc")
    process = context.Process(target=_serve, args=(theirs, spec))
    process.start()

    def ask(*message: Any) -> Any:
        ours.send(message)
        assert ours.poll(120), "the engine's process did not answer"
        answer = ours.recv()
        assert not (isinstance(answer, str) and answer.startswith("Traceback")), answer
        return answer

    try:
        assert ours.poll(300)
        assert ours.recv() == "ready"
        trainer = trainer_of(tiny_llama_folder)
        weights = weights_of(trainer, 0.05)
        head = {"lm_head.weight": weights["model.embed_tokens.weight"]}
        assert ask("publish", 1) == "publishing"
        moved = send_by_ipc(ask, {**weights, **head}.items(), 1 << 16)
        assert ask("published") == "done"
        assert moved.weight_bytes == sum(w.numel() * 4 for w in {**weights, **head}.values())
        assert gap(trainer, ask("generate")) < 1e-3
        ours.send(("stop",))
        process.join(60)
    finally:
        if process.is_alive():
            process.kill()
            process.join()
