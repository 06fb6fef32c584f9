"""Schema of the `vllm` section: how the rollout engine vLLM is started, and how weights reach it.

Torch-free.  Every key has an effect in the modes it names only; `OnlyIf` conditions look at the section itself, so that
any recipe that holds the section as `rollout.vllm` can check them.
"""

from __future__ import annotations

from typing import Any, Literal

from tutelage.config.schema import OnlyIf, Schema, setting


def _section(config: Any) -> VLLMConfig:
    section = config if isinstance(config, VLLMConfig) else config.rollout.vllm
    assert isinstance(section, VLLMConfig)
    return section


SERVER = OnlyIf("rollout.vllm.mode is server", lambda c: _section(c).mode == "server")
STARTED = OnlyIf("rollout.vllm.url is not given", lambda c: _section(c).url is None)
NO_KV_BYTES = OnlyIf(
    "rollout.vllm.kv_cache_memory_bytes is not given", lambda c: _section(c).kv_cache_memory_bytes is None
)
OTHER_PROCESS = OnlyIf("rollout.vllm.mode is separate or server", lambda c: _section(c).mode != "colocated")


class VLLMConfig(Schema):
    mode: Literal["colocated", "separate", "server"] = setting(
        "colocated",
        "colocated: in the actor's own processes; separate: processes of its own; server: over HTTP.",
    )
    url: str | None = setting(
        None, "A server that runs already (http://HOST:PORT); default: one is started.", only_if=SERVER
    )
    port: int = setting(0, "Port of the server that is started; 0: a free one.", ge=0, le=65535, only_if=SERVER)
    tensor_parallel: int = setting(
        1, "Devices that hold one copy of the weights; colocated: 1 a process.", ge=1, only_if=STARTED
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "Compute type of generation; auto: that of model.dtype.", only_if=STARTED
    )
    max_model_len: int | None = setting(None, "Longest prompt plus response; default: the model's context.", ge=1)
    kv_cache_memory_bytes: int | None = setting(
        None, "Bytes of the KV cache on each device; default: what gpu_memory_utilization leaves.", ge=1 << 20
    )
    gpu_memory_utilization: float = setting(
        0.5,
        "Share of a device's memory for weights, activations and KV cache (of a CPU's memory without a GPU).",
        gt=0,
        le=1,
        only_if=NO_KV_BYTES,
    )
    enforce_eager: bool | None = setting(
        None, "No compilation and no CUDA graphs: starts faster, runs slower; default: true on CPUs alone."
    )
    max_num_seqs: int = setting(256, "Responses decoded at the same time; more wait.", ge=1)
    max_num_batched_tokens: int | None = setting(
        None, "Tokens of one forward pass, prompts included; default: vLLM's.", ge=1
    )
    prefix_caching: bool = setting(True, "Samples of one prompt share its KV cache; emptied when weights change.")
    load: Literal["folder", "publication"] = setting(
        "folder", "First weights: model.path, or none until the trainer publishes (no file is read)."
    )
    lora: Literal["merged", "adapter"] = setting(
        "merged", "A LoRA policy is published as merged weights, or as its adapter over the weights of model.path."
    )
    sleep_level: Literal[0, 1, 2] = setting(
        0, "While the trainer works: 0 keep everything; 1 weights to the host, KV cache dropped; 2 drop both."
    )
    transfer: Literal["auto", "gloo", "nccl", "ipc"] = setting(
        "auto",
        "How weights reach another process; auto: nccl on GPUs, else gloo; ipc: the same GPU, no copy over a wire.",
        only_if=OTHER_PROCESS,
    )
    bucket_bytes: int = setting(
        256 << 20, "Most bytes of weights staged at once while publishing.", ge=1 << 10, only_if=OTHER_PROCESS
    )
    start_timeout: float = setting(600.0, "Seconds until an engine that does not come up is given up.", gt=0)
    request_timeout: float = setting(
        600.0, "Seconds without a token until a response of the server is given up.", gt=0, only_if=SERVER
    )
    transfer_timeout: float = setting(
        300.0, "Seconds until a transfer of weights is given up.", gt=0, only_if=OTHER_PROCESS
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = setting("ERROR", "What vLLM itself may print.")
    engine_args: dict[str, Any] = setting(dict, "More of vLLM's own engine arguments, by their names there.")
