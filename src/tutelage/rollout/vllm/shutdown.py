"""Workaround: closing an in-process engine of vLLM destroys the default process group, which may be the trainer's.

`EngineCore.shutdown` ends with `cleanup_dist_env_and_memory`, which calls `torch.distributed.destroy_process_group()`
whoever made that group; so does the finaliser of an engine that is garbage collected.  Seen in vLLM 0.32.0:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/engine/core.py (EngineCore.shutdown).
"""

from __future__ import annotations

import gc
from typing import Any

from tutelage.errors import RolloutError
from tutelage.rollout.vllm.threads import SEEN_IN, vllm_version


def keep_trainers_group(engine: Any) -> None:
    """Right after the start: a garbage-collected engine leaves the trainer's group alone.

    Raises RolloutError for a version of vLLM whose client is put together otherwise.
    """
    finalizer = getattr(engine.engine_core, "_finalizer", None)
    if finalizer is None:
        raise RolloutError(
            f"vLLM {vllm_version()} cannot be colocated with a trainer of several ranks here",
            fix=f"install vLLM {SEEN_IN[0]}, or set rollout.vllm.mode to separate",
        )
    finalizer.detach()


def close_beside_trainer(engine: Any) -> None:
    """What `EngineCore.shutdown` does, but for the default group: workers, scheduler, and vLLM's own groups."""
    from vllm.distributed.parallel_state import destroy_model_parallel

    core = engine.engine_core.engine_core
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()
    destroy_model_parallel()
    gc.collect()
