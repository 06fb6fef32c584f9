"""What vLLM reads from the environment and changes in the process that starts it; the only place that writes it.

vLLM writes variables of its own while an engine starts.  Those named VLLM_* stay, because it reads them later; every
other one is put back, so that the trainer and the processes it starts do not inherit them.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from tutelage.config.vllm import VLLMConfig
from tutelage.rollout.vllm.threads import kept_thread_setter


def engine_variables(config: VLLMConfig, device: str) -> dict[str, str]:
    """For an engine in the calling process.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 keeps the scheduler here (its workers too, with tensor_parallel 1).
    """
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **_common(config, device)}


def server_variables(config: VLLMConfig, device: str) -> dict[str, str]:
    """For a server process, on top of this process's environment.

    VLLM_SERVER_DEV_MODE=1 opens pause, resume, sleep, collective_rpc and weight transfer, so the server must be
    reachable by the trainer alone.
    """
    return {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        **_common(config, device),
        **_without_compilation(config, device),
    }


def full_environment(changes: dict[str, str]) -> dict[str, str]:
    """This process's environment with changes, for a child process."""
    return {**os.environ, **changes}


def _common(config: VLLMConfig, device: str) -> dict[str, str]:
    found = {"VLLM_LOGGING_LEVEL": config.log_level, "VLLM_NO_USAGE_STATS": "1"}
    if config.tensor_parallel > 1:
        found |= _without_compilation(config, device)
    if device == "cpu" and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        found["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # it wants one NUMA node per worker and does not start otherwise
    return found


def _without_compilation(config: VLLMConfig, device: str) -> dict[str, str]:
    """Worker processes of an eager engine compile two helpers of the sampler with the C++ compiler: 15 s, for nothing.

    In the calling process `torch.compiler.set_stance` says the same.
    """
    return {"TORCHDYNAMO_DISABLE": "1"} if device == "cpu" and config.enforce_eager is not False else {}


@contextmanager
def starting(config: VLLMConfig, device: str) -> Iterator[None]:
    """Inside, vLLM may be imported and an engine started.

    Afterwards the log level holds, and everything else that vLLM changed in this process is as it was: variables that
    are not named VLLM_*, `torch.set_num_threads`, and the states of the global random generators, which it seeds.
    """
    before = dict(os.environ)
    os.environ.update(engine_variables(config, device))
    logging.getLogger("vllm").setLevel(config.log_level)
    states = random.getstate(), numpy.random.get_state()
    devices = list(range(torch.cuda.device_count())) if device != "cpu" else []
    try:
        with torch.random.fork_rng(devices=devices), kept_thread_setter():
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        for name in [name for name in os.environ if not name.startswith("VLLM_")]:
            if name not in before:
                del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if not name.startswith("VLLM_")})
