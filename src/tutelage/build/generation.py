"""What generates: the training weights themselves, or vLLM; beside the actor, or in a pool of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tutelage.build.environments import episodes, has_environments, most_tokens, room_for_a_turn
from tutelage.build.kit import Kit
from tutelage.engines.engine import ModelEngine
from tutelage.errors import ClusterError
from tutelage.models.language_model import LanguageModel
from tutelage.models.load import context_length
from tutelage.models.lora import adapter_off, write_adapter
from tutelage.roles.actor import Sender
from tutelage.roles.generator import Generator
from tutelage.rollout.environments.driver import HeldContext, ReceivingEpisodes
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.inprocess.mixture import GeometricMixture
from tutelage.rollout.inprocess.partial import InProcessPartial
from tutelage.rollout.inprocess.receiving import ReceivingInProcess
from tutelage.rollout.sampling import SamplingParams
from tutelage.transport.routed import RoutedActor

ROLLOUT = "rollout"


def generates_elsewhere(cfg: Any) -> bool:
    """Whether a role of its own generates, in other processes than the actor's."""
    if cfg.rollout.engine == "vllm" and cfg.rollout.vllm.mode != "colocated":
        return True
    cluster = cfg.cluster
    return cluster.transport == "ray" and cluster.pool_of(ROLLOUT) != cluster.pool_of("actor")


def beside_actor(kit: Kit, engine: ModelEngine) -> tuple[Any, Any]:
    """The rollout engine in the actor's processes, whole and partial, or None twice where another role generates.

    Episodes with environments have no partial one.
    """
    if generates_elsewhere(kit.cfg):
        return None, None
    several_turns = has_environments(kit.cfg)
    if kit.cfg.rollout.engine == "inprocess":
        held = HeldContext(engine.forward_context)
        rollout = in_process(kit, kit.policy, held)
        if several_turns:
            return episodes(kit, rollout, rollout.complete, most_tokens(kit, kit.policy), held), None
        return rollout, InProcessPartial(rollout)
    turns = vllm(kit, engine.named_weights, adapter_writer(kit, engine))
    if several_turns:
        return episodes(kit, turns, turns.rollout.complete, turns.rollout.spec.config.max_model_len), None
    return turns, turns


def adapter_writer(kit: Kit, engine: ModelEngine) -> Callable[[Path], None] | None:
    """Writes the adapter as peft does, where the recipe publishes it alone."""
    adapted = kit.policy.adapted
    if adapted is None or kit.cfg.rollout.vllm.lora != "adapter":
        return None

    def write(folder: Path) -> None:
        write_adapter(adapted, {name: tensor.cpu() for name, tensor in engine.named_weights(adapter_only=True)}, folder)

    return write


def generator(kit: Kit) -> Generator:
    """The role that generates elsewhere; it starts from the policy's folder."""
    rank = kit.place.layout(ROLLOUT).part(kit.place.rank)
    if kit.cfg.rollout.engine == "inprocess":
        policy = kit.frozen_policy(ROLLOUT)
        engine = kit.engine(ROLLOUT, policy, None)
        held = HeldContext(engine.forward_context)
        rollout = in_process(kit, policy, held)
        receiving = ReceivingInProcess(rollout, policy.model)
        if has_environments(kit.cfg):
            made = episodes(kit, rollout, rollout.complete, most_tokens(kit, policy), held)
            several = ReceivingEpisodes(made, receiving)
            return Generator(several, rank, 0, several)
        return Generator(receiving, rank, 0, InProcessPartial(rollout))
    turns, workers = vllm(kit, None), kit.cfg.rollout.vllm.tensor_parallel
    if has_environments(kit.cfg):
        made = episodes(kit, turns, turns.rollout.complete, turns.rollout.spec.config.max_model_len)
        several = ReceivingEpisodes(made, turns)
        return Generator(several, rank, workers, several)
    return Generator(turns, rank, workers, turns)


def sender(kit: Kit) -> Callable[[int], Sender] | None:
    """The sending side of publications to vLLM engines elsewhere, on one rank."""
    cfg = kit.cfg
    if kit.place.rank != 0 or cfg.rollout.engine != "vllm" or not generates_elsewhere(cfg):
        return None
    from tutelage.rollout.vllm.publication import WeightSender

    settings, cuda = cfg.rollout.vllm, kit.device.startswith("cuda")
    kind = settings.transfer if settings.transfer != "auto" else ("nccl" if cuda else "gloo")

    def make(members: int) -> Sender:
        made: Sender = WeightSender(
            members,
            host=kit.place.address,
            backend=kind,
            device=kit.device if kind == "nccl" else "cpu",
            bucket_bytes=settings.bucket_bytes,
            timeout=settings.transfer_timeout,
        )
        return made

    return make


def routed(cfg: Any, handles: dict[str, Any]) -> dict[str, Any]:
    """Handles in which the actor's generation and publication go where generation is."""
    if ROLLOUT not in handles:
        return handles
    found = {**handles, "actor": RoutedActor(handles["actor"], handles[ROLLOUT], wire=cfg.rollout.engine == "vllm")}
    connect(cfg, found)
    return found


def first_weights_are_published(cfg: Any) -> bool:
    """Whether the actor's weights must come before the engine is asked anything: it read none at its start, or the
    folder's, where the actor's base is those quantised."""
    if not hasattr(cfg, "rollout"):
        return False
    serves = cfg.rollout.engine == "vllm"
    other = cfg.model.quantize != "none" and (serves or generates_elsewhere(cfg))
    return other or (serves and cfg.rollout.vllm.load == "publication")


def connect(cfg: Any, handles: dict[str, Any]) -> None:
    """Open the way that weights take to engines elsewhere, where they take one of their own."""
    if isinstance(actor := handles.get("actor"), RoutedActor):
        actor.connect(cfg.cluster.layout_of(ROLLOUT).data if cfg.cluster.transport == "ray" else 1)


def sampling(cfg: Any) -> SamplingParams:
    return SamplingParams(
        temperature=cfg.rollout.temperature, max_new_tokens=cfg.rollout.max_new_tokens, stop=tuple(cfg.rollout.stop)
    )


def in_process(kit: Kit, policy: LanguageModel, context: Callable[[], AbstractContextManager[Any]]) -> InProcessRollout:
    return generating_with(kit, policy.model, context)


def generating_with(kit: Kit, model: nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> InProcessRollout:
    """The in-process engine of the recipe on a model; context: what its forward passes run in."""
    progress = kit.place.progress
    return InProcessRollout(
        model,
        kit.template.tokenizer,
        kit.template.eos_ids,
        sampling(kit.cfg),
        seed=kit.cfg.seed,
        tokens_in_flight=kit.cfg.rollout.tokens_in_flight,
        progress=lambda done, total: progress("rollout", done, total),
        forward_context=context,
        response_prefix=kit.template.response_prefix,
    )


def from_reference(kit: Kit, engine: ModelEngine, adapter: bool) -> InProcessRollout:
    """Samples from the reference; adapter False: from the policy's base, with its adapter off."""
    model = policy_of(engine)
    off = nullcontext if adapter else functools.partial(adapter_off, model.adapted)
    return generating_with(kit, model.model, functools.partial(together, engine.forward_context, off))


def from_mixture(kit: Kit, engine: ModelEngine, adapter: bool, coef: float) -> InProcessRollout:
    """Samples from policy^(1 - coef) reference^coef, token by token, with the policy's weights of the moment.

    Raises ClusterError where the reference's processes do not hold the policy too.
    """
    if "actor" not in kit.names or kit.place.layout("actor") != kit.place.layout("reference"):
        raise ClusterError(
            "the mixture of policy and reference needs both in the same processes, arranged alike",
            fix="give actor and reference one pool and one layout in the cluster section",
        )
    reference = policy_of(engine)
    off = nullcontext if adapter else functools.partial(adapter_off, reference.adapted)
    mixture = GeometricMixture(kit.policy.model, reference.model, coef, off)
    contexts = dict.fromkeys([kit.policy_engine.forward_context, engine.forward_context])
    return generating_with(kit, mixture, functools.partial(together, *contexts))


def policy_of(engine: ModelEngine) -> LanguageModel:
    assert isinstance(engine.model, LanguageModel), "a reference is a language model"
    return engine.model


@contextmanager
def together(*contexts: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """All of these, entered in their order."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def vllm(
    kit: Kit,
    source: Callable[[], Iterator[tuple[str, Tensor]]] | None,
    adapter: Callable[[Path], None] | None = None,
) -> Any:
    """vLLM in this process; source, adapter: whole weights and adapter of the policy, where it is trained beside."""
    from tutelage.rollout.vllm.engine import VLLMRollout, VLLMSpec
    from tutelage.rollout.vllm.turns import TakingTurns

    cfg, progress = kit.cfg, kit.place.progress
    settings = cfg.rollout.vllm
    if settings.max_model_len is None:
        longest = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens + room_for_a_turn(cfg)
        context = context_length(cfg.model.path)
        settings = settings.model_copy(update={"max_model_len": longest if context is None else min(longest, context)})
    spec = VLLMSpec(
        model=cfg.model.path,
        tokenizer=kit.template.tokenizer,
        eos_ids=tuple(kit.template.eos_ids),
        params=sampling(cfg),
        config=settings,
        seed=cfg.seed,
        response_prefix=kit.template.response_prefix,
        dtype=cfg.model.dtype,
        device=kit.device,
        lora_rank=cfg.model.lora_rank,
    )
    rollout = VLLMRollout(spec, progress=lambda done, total: progress("rollout", done, total), source=source)
    return TakingTurns(rollout, settings.sleep_level, adapter)
