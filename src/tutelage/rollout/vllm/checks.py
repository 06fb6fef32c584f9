"""What can be refused before an engine starts: from the model's configuration, the tokenizer and the settings alone."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from tutelage.config.vllm import VLLMConfig
from tutelage.errors import ConfigError, MissingExtraError, ModelError, RolloutError, installed
from tutelage.models.load import load_tokenizer
from tutelage.rollout.sampling import SamplingParams

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Of vLLM's CPU attention (CPUAttentionBackend.get_supported_head_sizes, vLLM 0.32)."""
LOWEST_TEMPERATURE = 0.01
"""vLLM replaces a lower temperature by this one."""


def require_vllm() -> None:
    """Raises MissingExtraError where vLLM is not installed."""
    if not installed("vllm"):
        raise MissingExtraError(
            "rollouts by vllm need vLLM, which is not installed",
            fix="`make vllm`, or pip install 'tutelage[vllm]' on a machine with a GPU",
        )


def require_servable(model_config: Any, config: VLLMConfig, device: str) -> None:
    """model_config: of transformers.  Raises ModelError or ConfigError, each with the value seen."""
    heads = model_config.num_attention_heads
    head_dim = getattr(model_config, "head_dim", None) or model_config.hidden_size // heads
    kv_heads = getattr(model_config, "num_key_value_heads", None) or heads
    tensor = config.tensor_parallel
    if device == "cpu" and head_dim not in CPU_HEAD_SIZES:
        raise ModelError(
            f"the model's head_dim is {head_dim}, which vLLM's CPU attention does not have",
            fix=f"use the inprocess rollout, a GPU, or a model with one of {', '.join(map(str, CPU_HEAD_SIZES))}",
        )
    if heads % tensor:
        raise ConfigError(
            f"rollout.vllm.tensor_parallel is {tensor}, which does not divide the model's {heads} attention heads",
            fix=f"use one of {_divisors(heads)}",
        )
    if kv_heads % tensor and tensor % kv_heads:
        raise ConfigError(
            f"rollout.vllm.tensor_parallel is {tensor}: the model's {kv_heads} key/value heads can neither be split "
            "nor repeated over it",
            fix=f"use one of {[n for n in _divisors(heads) if not kv_heads % n or not n % kv_heads]}",
        )
    if config.mode == "colocated" and tensor > 1:
        raise ConfigError(
            f"rollout.vllm.tensor_parallel is {tensor} in mode colocated, where an engine has one process",
            fix="set rollout.vllm.mode to separate, or rollout.vllm.tensor_parallel to 1",
        )
    context = getattr(model_config, "max_position_embeddings", None)
    if config.max_model_len is not None and context is not None and config.max_model_len > context:
        raise ConfigError(
            f"rollout.vllm.max_model_len is {config.max_model_len}, the model's context is {context}",
            fix=f"set it to at most {context}, and shorten prompts or rollout.max_new_tokens to fit",
        )


def require_same_vocabulary(tokenizer: Any, model: str, model_config: Any) -> None:
    """The policy's tokenizer against that of the engine's model folder, where it has one, and against its embeddings.

    Raises RolloutError naming the first token that differs: an engine that numbers tokens otherwise writes nonsense.
    """
    size = model_config.vocab_size
    if len(tokenizer) > size:
        raise RolloutError(
            f"the policy's tokenizer has {len(tokenizer)} tokens, the engine's model {model} has {size} embeddings",
            fix="start the engine from the policy's own folder",
        )
    if not Path(model).is_dir() or not any(Path(model).glob("tokenizer*")):
        return
    ours, theirs = tokenizer.get_vocab(), load_tokenizer(model).get_vocab()
    if ours == theirs:
        return
    places = {name: min(ours.get(name, size), theirs.get(name, size)) for name in ours.keys() | theirs.keys()}
    names = sorted(places, key=lambda name: (places[name], name))
    first = next(name for name in names if ours.get(name) != theirs.get(name))
    raise RolloutError(
        f"token {first!r} is {ours.get(first)} for the policy and {theirs.get(first)} in {model}",
        fix="start the engine from the policy's own folder; its tokenizer must be the same",
    )


def require_sampling(params: SamplingParams) -> None:
    """What vLLM samples otherwise than asked.  Raises RolloutError."""
    if params.temperature < LOWEST_TEMPERATURE:
        raise RolloutError(
            f"temperature is {params.temperature}, vLLM would use {LOWEST_TEMPERATURE}",
            fix=f"use {LOWEST_TEMPERATURE} or more, or greedy=True",
        )
    if params.min_p and params.top_p is not None and params.top_p < 1:
        raise RolloutError(
            f"{params.truncation}: vLLM cuts by min_p before top_p, the in-process engine after it",
            fix="use one of the two",
        )


def require_free_port(port: int, host: str = "127.0.0.1") -> int:
    """The port, or a free one for 0.  Raises RolloutError where something listens there already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise RolloutError(
                f"port {port} of {host} is taken: {error.strerror}",
                fix="set rollout.vllm.port to another one, or to 0 for a free one; rollout.vllm.url attaches to a "
                "running server",
            ) from error
        return int(probe.getsockname()[1])


def start_error(error: BaseException, config: VLLMConfig) -> RolloutError:
    """What vLLM said when it did not start, with the setting to change."""
    text = " ".join(str(error).split()) or type(error).__name__
    lowered = text.lower()
    if "kv cache" in lowered or "memory" in lowered:
        fix = (
            f"in rollout.vllm, kv_cache_memory_bytes is {config.kv_cache_memory_bytes}, gpu_memory_utilization "
            f"{config.gpu_memory_utilization}, max_model_len {config.max_model_len}: give the cache more memory, or "
            "lower max_model_len"
        )
        return RolloutError(f"vLLM has no memory for its KV cache: {text[:600]}", fix=fix)
    return RolloutError(
        f"vLLM did not start: {text[:600]}", fix="set rollout.vllm.log_level to INFO to see what it does before this"
    )


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]
