"""Rollouts by vLLM: the same calls and the same batches as the in-process engine.

Shapes: B sequences (prompts times samples, a prompt's samples adjacent), R flat response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tutelage.config.vllm import VLLMConfig
from tutelage.errors import RolloutError
from tutelage.models.paths import load_config
from tutelage.rollout.inprocess.stopping import Decoder
from tutelage.rollout.partial import (
    Carried,
    Limit,
    Sample,
    ShouldStop,
    bare_prompts,
    require_partial,
    rollout_of,
    samples_of,
)
from tutelage.rollout.sampling import TRAINING_PURPOSE, SamplingParams, require_trainable
from tutelage.rollout.vllm.checks import require_same_vocabulary, require_sampling, require_servable, require_vllm
from tutelage.rollout.vllm.jobs import Backend, Collector, Job
from tutelage.rollout.vllm.local import LocalEngine
from tutelage.rollout.vllm.manifest import Manifest, Named
from tutelage.rollout.vllm.order import HybridOrder
from tutelage.rollout.vllm.publication import WeightReceiver
from tutelage.rollout.vllm.server import ServerEngine, VLLMServer
from tutelage.rollout.vllm.wire import Transfer
from tutelage.types import Prompts, Rollout

Progress = Callable[[int, int], None]
"""Called with (responses done, responses in all)."""


@dataclass(frozen=True)
class VLLMSpec:
    """Everything an engine needs to start, picklable, so that it can start in any process.

    model      folder or hub name: architecture, and the first weights unless config.load is "publication".
    tokenizer  the policy's; it decodes texts and finds stop strings.
    eos_ids    tokens that end a response; the model's own are not looked at.
    params     defaults of `generate`;  purpose: what they are for (truncation is refused in training).
    dtype      the policy's; used where config.dtype is "auto".
    version    of the first weights.
    """

    model: str
    tokenizer: Any
    eos_ids: tuple[int, ...]
    params: SamplingParams
    config: VLLMConfig = field(default_factory=VLLMConfig)
    seed: int = 0
    purpose: str = TRAINING_PURPOSE
    response_prefix: str = ""
    dtype: str = "float32"
    device: str = "cpu"
    lora_rank: int = 0
    version: int = 0

    def check(self) -> None:
        """What can be refused before vLLM is imported; raises ModelError, ConfigError, RolloutError."""
        require_trainable(self.params, self.purpose)
        require_sampling(self.params)
        config = load_config(self.model)
        require_servable(config, self.config, self.device)
        require_same_vocabulary(self.tokenizer, self.model, config)


class VLLMRollout:
    """Implements `protocols.RolloutEngine` and `partial.PartialRollout`.

    Each sample is a request of its own with a seed from its key (seed, step, prompt id, sample, purpose), so it does
    not depend on the batch around it beyond the rounding of the logits.  `rollout_logp` is of the sampled distribution,
    softmax(logits / temperature) after any truncation; greedy answers report that of temperature 1.

    source  makes the weights that `publish` moves into the engine (name in the checkpoint, whole tensor), for an engine
            in the trainer's own process; without it they come by `load_weights`, `receive` or `load_adapter`.
    """

    def __init__(
        self,
        spec: VLLMSpec,
        *,
        progress: Progress | None = None,
        source: Callable[[], Named] | None = None,
        log_folder: str | None = None,
    ) -> None:
        """Raises MissingExtraError without vLLM; ModelError, ConfigError or RolloutError for what it cannot serve."""
        require_vllm()
        spec.check()
        self.spec = spec
        self.progress = progress
        self.source = source
        self.order = HybridOrder()
        self.version: int | None = None if spec.config.load == "publication" else spec.version
        self.manifest = Manifest.of(load_config(spec.model))
        self._receiver: WeightReceiver | None = None
        self.server: VLLMServer | None = None
        self._backend: Backend
        if spec.config.mode == "server":
            self.server = VLLMServer.of(spec.model, spec.config, spec.dtype, spec.device, spec.lora_rank, log_folder)
            self._backend = ServerEngine(self.server)
        else:
            self._backend = LocalEngine(spec.model, spec.config, spec.dtype, spec.device, spec.lora_rank)

    # ---- generation ----

    def generate(self, prompts: Prompts) -> Rollout:
        """`prompts.n` responses to each prompt, under the default parameters; greedy where the prompts say so.

        Raises RolloutError: truncated sampling in training; an empty prompt; a prompt whose response may not fit the
        engine's context; logits that are not finite; an engine that sleeps, or has no weights of a known version.
        """
        params = replace(self.spec.params, n=prompts.n)
        return self.complete(prompts, params.with_greedy() if prompts.greedy else params)

    def complete(
        self,
        prompts: Prompts | Sequence[Sequence[int]],
        params: SamplingParams,
        progress: Progress | None = None,
    ) -> Rollout:
        """`params.n` responses to each prompt under these parameters, for evaluation and chat.  Errors as `generate`.

        Bare rows of token ids are taken as prompts named "0", "1"... with the purpose "complete".
        """
        if not isinstance(prompts, Prompts):
            prompts = bare_prompts(prompts)
        prompts = replace(prompts, n=params.n, greedy=params.greedy)
        require_trainable(params, prompts.purpose)
        samples = self._run(samples_of(prompts), params, Limit(), progress)
        return self._rollout(samples)

    def generate_partial(
        self,
        prompts: Prompts,
        carried: Carried | None = None,
        budget_tokens: int | None = None,
        should_stop: ShouldStop | None = None,
    ) -> tuple[Rollout, Carried]:
        """See `partial.PartialRollout`.  A continued response draws from a new stream, keyed by where it was cut."""
        require_partial(prompts, budget_tokens)
        require_trainable(self.spec.params, prompts.purpose)
        samples = [*(carried.samples if carried is not None else ()), *samples_of(prompts)]
        after = self._run(samples, self.spec.params, Limit(budget_tokens, should_stop), None)
        whole = [self._whole(sample) for sample in after]
        rest = tuple(sample for sample, done in zip(after, whole, strict=True) if not done)
        return self._rollout([s for s, done in zip(after, whole, strict=True) if done]), Carried(rest)

    def _whole(self, sample: Sample) -> bool:
        return sample.finished or len(sample.response) >= self.spec.params.max_new_tokens

    def _run(
        self, samples: Sequence[Sample], params: SamplingParams, limit: Limit, progress: Progress | None
    ) -> list[Sample]:
        """The samples with what was sampled added."""
        self.order.require_awake()
        require_sampling(params)
        version = self._require_version()
        self._require_room(samples, params)
        seed = self.spec.seed if params.seed is None else params.seed
        stop_ids = sorted({*self.spec.eos_ids, *params.stop_token_ids})
        jobs = [
            Job(
                s.prompt_id,
                (*s.prompt, *s.response),
                s.response,
                s.position_key(seed),
                params.max_new_tokens - len(s.response),
            )
            for s in samples
        ]
        told = progress or self.progress

        def report(done: int) -> None:
            if told is not None:
                told(done, len(jobs))

        collector = Collector(jobs, params, self._decoder, stop_ids, limit, report)
        self._backend.run(jobs, params, stop_ids, collector)
        return [
            s.extended(collector.tokens[i], collector.logps[i], version, collector.ended[i])
            for i, s in enumerate(samples)
        ]

    @property
    def _decoder(self) -> Decoder:
        decoder: Decoder = self.spec.tokenizer
        return decoder

    def _rollout(self, samples: Sequence[Sample]) -> Rollout:
        spec = self.spec
        return rollout_of(samples, self._decoder, spec.eos_ids, spec.response_prefix, self._require_version())

    def _require_version(self) -> int:
        if self.version is None:
            raise RolloutError(
                "the engine has no weights of a known version: none were published, or a publication failed",
                fix="publish all weights before generating",
            )
        return self.version

    def _require_room(self, samples: Sequence[Sample], params: SamplingParams) -> None:
        for s in samples:
            size = len(s.prompt) + params.max_new_tokens
            if not s.prompt:
                raise RolloutError(f"prompt {s.prompt_id!r} is empty", fix="give it at least one token, such as a BOS")
            if size > self._backend.max_model_len:
                raise RolloutError(
                    f"prompt {s.prompt_id!r} has {len(s.prompt)} tokens and may get {params.max_new_tokens} more: "
                    f"{size}, the engine's context is {self._backend.max_model_len}",
                    fix="raise rollout.vllm.max_model_len, or lower rollout.max_new_tokens or data.max_prompt_tokens",
                )

    # ---- weights ----

    def publish(self, version: int) -> None:
        """New weights are in place, or come from `source`; later rollouts carry this version."""
        if self.source is not None:
            self.load_weights(self.source(), version)
        elif self.version != version:
            raise RolloutError(
                f"version {version} is published, but the engine's weights are of version {self.version}",
                fix="move them first: load_weights, receive or load_adapter",
            )

    def load_weights(self, named: Named, version: int) -> None:
        """Every weight by its name in a checkpoint, in place; raises RolloutError for a wrong or incomplete set."""
        with self._publishing(version):
            self._backend.load(self.manifest.checked(named))

    def load_folder(self, folder: str, version: int) -> None:
        """Every weight from a checkpoint folder in safetensors that the engine's processes see."""
        with self._publishing(version):
            self._backend.rpc("tutelage_load_folder", {"folder": folder})

    def load_adapter(self, folder: str, version: int) -> None:
        """A LoRA adapter as peft writes it, over the weights of `spec.model`; needs config.lora "adapter"."""
        if self.spec.config.lora != "adapter":
            raise RolloutError(
                "rollout.vllm.lora is merged", fix="set rollout.vllm.lora to adapter, or publish merged weights"
            )
        with self._publishing(version):
            self._backend.load_adapter(folder)

    def join(self, address: tuple[str, int], world: int, offset: int = 1) -> None:
        """Open the receiving side of a `WeightSender`; blocks until it connects or config.transfer_timeout is over."""
        config = self.spec.config
        kind = config.transfer if config.transfer != "auto" else ("gloo" if self.spec.device == "cpu" else "nccl")
        self._receiver = WeightReceiver(
            self._backend, address, world, offset=offset, transport=kind, timeout=config.transfer_timeout
        )

    def receive(self, version: int) -> Transfer:
        """One publication from the sender, while it sends; returns what came over the wire to each worker."""
        if self._receiver is None:
            raise RolloutError("no sender was joined", fix="call join(address, world) first")
        with self._publishing(version):
            return self._receiver.receive()

    @contextmanager
    def published_by_rpc(self, version: int) -> Iterator[None]:
        """Around a publication that another process makes through `rpc` (see `publication.send_by_ipc`)."""
        with self._publishing(version):
            yield

    def rpc(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        """A method of every worker of the engine."""
        return self._backend.rpc(method, kwargs)

    @contextmanager
    def _publishing(self, version: int) -> Iterator[None]:
        """Inside, weights are of no version; afterwards of `version`, unless an error came between."""
        self.order.require_publishable()
        self.version = None
        yield
        self._backend.reset_prefix_cache()
        self.order.publish()
        self.version = version

    # ---- memory ----

    def sleep(self, level: int | None = None) -> None:
        """Give memory back (default: config.sleep_level): 1 keeps the weights on the host, 2 drops them."""
        level = self.spec.config.sleep_level if level is None else level
        self.order.sleep(level)
        self._backend.sleep(level)
        if level == 2:
            self.version = None

    def wake(self, tag: str) -> None:
        """ "weights" first, "kv_cache" last; see `order.HybridOrder`."""
        if tag == "weights":
            self.order.wake_weights()
        elif tag == "kv_cache":
            self.order.wake_kv_cache()
        else:
            raise RolloutError(f"wake tag {tag!r} is unknown", fix="use weights or kv_cache")
        self._backend.wake(tag)

    def rest(self) -> None:
        """Training begins: sleep at config.sleep_level, where that is above 0."""
        if self.spec.config.sleep_level:
            self.sleep()

    def trainer_freed(self) -> None:
        """The caller has moved what the trainer holds off the device: the KV cache may come back."""
        self.order.trainer_freed()

    def close(self) -> None:
        """Stop the engine and everything it started."""
        self._backend.close()
