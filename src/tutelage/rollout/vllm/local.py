"""vLLM's engine in this process: its scheduler here, its model here or (tensor_parallel above 1) in worker processes.

The engine is stepped by our own loop over its public calls `add_request`, `step` and `abort_request`, so tokens are
seen as they are sampled: stop rules, progress and partial rollouts need nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tutelage.config.vllm import VLLMConfig
from tutelage.errors import RolloutError
from tutelage.rollout.sampling import SamplingParams
from tutelage.rollout.vllm.checks import require_vllm, start_error
from tutelage.rollout.vllm.environment import starting
from tutelage.rollout.vllm.jobs import Collector, Job
from tutelage.rollout.vllm.manifest import Named, buckets
from tutelage.rollout.vllm.shutdown import close_beside_trainer, keep_trainers_group
from tutelage.rollout.vllm.worker import EXTENSION

ADAPTER = "policy"


def engine_arguments(model: str, config: VLLMConfig, dtype: str, device: str, lora_rank: int) -> dict[str, Any]:
    """vLLM's engine arguments by name; those that are the same in this process and for a server."""
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": dtype if config.dtype == "auto" else config.dtype,
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": config.tensor_parallel,
        "max_num_seqs": config.max_num_seqs,
        "enable_prefix_caching": config.prefix_caching,
        "enforce_eager": config.enforce_eager if config.enforce_eager is not None else device == "cpu",
        "load_format": "dummy" if config.load == "publication" else "auto",
        "worker_extension_cls": EXTENSION,
    }
    if config.max_model_len is not None:
        arguments["max_model_len"] = config.max_model_len
    if config.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = config.max_num_batched_tokens
    if config.kv_cache_memory_bytes is not None:
        arguments["kv_cache_memory_bytes"] = config.kv_cache_memory_bytes
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    if config.lora == "adapter":
        arguments |= {"enable_lora": True, "max_lora_rank": max(lora_rank, 8), "max_loras": 1}
    if config.sleep_level and device != "cpu":
        arguments["enable_sleep_mode"] = True
    return arguments | config.engine_args


class LocalEngine:
    """Implements `jobs.Backend`."""

    def __init__(self, model: str, config: VLLMConfig, dtype: str, device: str, lora_rank: int = 0) -> None:
        """Raises MissingExtraError without vLLM, RolloutError where it does not start."""
        require_vllm()
        self.config = config
        self.device = device
        self._had_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._adapter: Any = None
        self._requests = 0
        with starting(config, device):
            self._engine = self._start(engine_arguments(model, config, dtype, device, lora_rank))
        if self._had_group:
            keep_trainers_group(self._engine)
        self.max_model_len = int(self._engine.model_config.max_model_len)

    def _start(self, arguments: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

        executor = "mp" if self.config.tensor_parallel > 1 else "uni"
        try:
            args = EngineArgs(
                **{"distributed_executor_backend": executor, "use_tqdm_on_load": False, **arguments},
                disable_log_stats=True,
                log_level=self.config.log_level,
            )
            vllm_config = args.create_engine_config()
            return LLMEngine(
                vllm_config=vllm_config,
                executor_class=Executor.get_class(vllm_config),
                log_stats=False,
                multiprocess_mode=False,
            )
        except TypeError as error:
            raise RolloutError(
                f"vLLM does not take one of its engine arguments: {error}", fix="look at rollout.vllm.engine_args"
            ) from error
        except Exception as error:
            raise start_error(error, self.config) from error

    def run(self, jobs: Sequence[Job], params: SamplingParams, stop_ids: Sequence[int], collector: Collector) -> None:
        live: dict[str, int] = {}
        with torch.random.fork_rng(devices=[]), self._eager():
            try:
                for index, job in enumerate(jobs):
                    live[self._submit(job, params, stop_ids)] = index
                while live and not collector.enough():
                    self._step(live, collector)
            finally:
                if live:
                    self._engine.abort_request(list(live))

    def _submit(self, job: Job, params: SamplingParams, stop_ids: Sequence[int]) -> str:
        from vllm.inputs import tokens_input

        self._requests += 1
        name = f"tutelage-{self._requests}"
        self._engine.add_request(
            name, tokens_input(list(job.tokens)), _sampling(job, params, stop_ids), lora_request=self._adapter
        )
        return name

    def _step(self, live: dict[str, int], collector: Collector) -> None:
        over = []
        for output in self._engine.step():
            index = live.get(output.request_id)
            if index is None:
                continue
            new = output.outputs[0]
            logps = [at[token].logprob for token, at in zip(new.token_ids, new.logprobs or (), strict=True)]
            done = collector.take(index, new.token_ids, logps)
            if output.finished and not done:
                raise RolloutError(
                    f"vLLM ended prompt {collector.jobs[index].name!r} by itself ({new.finish_reason})",
                    fix="set rollout.vllm.log_level to INFO to see why",
                )
            if done:
                del live[output.request_id]
                if not output.finished:
                    over.append(output.request_id)
        if over:
            self._engine.abort_request(over)

    def _eager(self) -> AbstractContextManager[Any]:
        """Two helpers of the sampler are compiled at first use whatever enforce_eager says, which takes 15 s."""
        eager = self.device == "cpu" and self.config.enforce_eager is not False
        return torch.compiler.set_stance("force_eager") if eager else nullcontext()

    def rpc(self, method: str, kwargs: dict[str, Any], timeout: float | None = None) -> list[Any]:
        replies: list[Any] = self._engine.collective_rpc(method, timeout=timeout, kwargs=kwargs)
        return replies

    def load(self, named: Named) -> None:
        """Weights in place, one tensor at a time here, in buckets to worker processes."""
        try:
            if self.config.tensor_parallel == 1:
                self.rpc("reload_weights", {"weights_iterator": iter(named)})
                return
            self.rpc("tutelage_begin_load", {})
            for bucket in buckets(named, self.config.bucket_bytes):
                self.rpc("tutelage_add_weights", {"bucket": bucket})
        except BaseException:
            self.rpc("tutelage_end_load", {})  # or the next load would count the layers that were half loaded
            raise
        self.rpc("tutelage_end_load", {})

    def load_adapter(self, folder: str) -> None:
        from vllm.lora.request import LoRARequest

        self._engine.add_lora(LoRARequest(ADAPTER, 1, folder, load_inplace=True))
        self._adapter = LoRARequest(ADAPTER, 1, folder)

    def reset_prefix_cache(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise RolloutError(
                "vLLM could not empty its prefix cache: requests are running", fix="publish between generations"
            )

    def sleep(self, level: int) -> None:
        self._engine.sleep(level)

    def wake(self, tag: str) -> None:
        self._engine.wake_up([tag])

    def close(self) -> None:
        """Stop the workers, and the process groups that vLLM made here; one that was there before stays."""
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        if self._had_group:
            close_beside_trainer(engine)
        else:
            engine.engine_core.shutdown()


def _sampling(job: Job, params: SamplingParams, stop_ids: Sequence[int]) -> Any:
    from vllm import SamplingParams as Requested
    from vllm.sampling_params import RequestOutputKind

    return Requested(**sampling_arguments(job, params, stop_ids), output_kind=RequestOutputKind.DELTA)


def sampling_arguments(job: Job, params: SamplingParams, stop_ids: Sequence[int]) -> dict[str, Any]:
    """vLLM's sampling parameters by name.  It knows the tokens that stop; stop strings are looked for here."""
    drawn = {} if params.greedy else {"seed": job.seed}
    cut = {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    return {
        "n": 1,
        "temperature": 0.0 if params.greedy else params.temperature,
        "max_tokens": job.room,
        "stop_token_ids": list(stop_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
        **drawn,
        **{name: value for name, value in cut.items() if value is not None},
    }
