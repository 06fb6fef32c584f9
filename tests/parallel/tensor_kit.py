"""Cases of tensor parallelism, run on ranks and on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parallel_kit as kit
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from tutelage.errors import ModelError
from tutelage.math.logprobs import Asked
from tutelage.models.parallel.tensor import tensor_parallel
from tutelage.models.parallel.tokens import TokenParallel, token_parallel
from tutelage.models.parallel.vocabulary import vocabulary_outputs
from tutelage.models.weights import blocks_of
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams
from tutelage.types import Prompts

CASES: dict[str, tuple[Callable[[], Any], kit.Work, str]] = {
    "llama": (lambda: kit.language_model(), kit.logprobs_of, "uneven"),
    "tied": (lambda: kit.language_model(tie_word_embeddings=True), kit.logprobs_of, "uneven"),
    "biases": (lambda: kit.language_model(attention_bias=True, mlp_bias=True), kit.logprobs_of, "uneven"),
    "odd vocabulary": (lambda: kit.language_model(vocab_size=97), kit.logprobs_of, "uneven"),
    "odd vocabulary, tied": (
        lambda: kit.language_model(vocab_size=97, tie_word_embeddings=True),
        kit.logprobs_of,
        "uneven",
    ),
    "checkpointing": (lambda: kit.checkpointing(kit.language_model()), kit.logprobs_of, "uneven"),
    "lora": (lambda: kit.language_model(lora=3), kit.logprobs_of, "uneven"),
    "lora, tied": (lambda: kit.language_model(lora=3, tie_word_embeddings=True), kit.logprobs_of, "uneven"),
    "mistral": (lambda: kit.language_model("mistral", sliding_window=5), kit.logprobs_of, "uneven"),
    "qwen2": (lambda: kit.language_model("qwen2"), kit.logprobs_of, "uneven"),
    "qwen3": (lambda: kit.language_model("qwen3"), kit.logprobs_of, "uneven"),
    "qwen3 lora": (lambda: kit.language_model("qwen3", lora=2), kit.logprobs_of, "uneven"),
    "smollm3": (lambda: kit.language_model("smollm3"), kit.logprobs_of, "uneven"),
    "gemma": (lambda: kit.language_model("gemma"), kit.logprobs_of, "uneven"),
    "gemma2": (
        lambda: kit.language_model("gemma2", attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
        kit.logprobs_of,
        "uneven",
    ),
    "granite": (lambda: kit.language_model("granite", logits_scaling=3.0), kit.logprobs_of, "uneven"),
    "starcoder2": (lambda: kit.language_model("starcoder2"), kit.logprobs_of, "uneven"),
    "value": (lambda: kit.scalar_model("llama", "value", "last"), kit.values_of, "uneven"),
    "value lora": (lambda: kit.scalar_model("llama", "value", "last", lora=2), kit.values_of, "uneven"),
    "last": (lambda: kit.scalar_model("llama", "reward", "last"), kit.scores_of, "uneven"),
    "mean": (lambda: kit.scalar_model("llama", "reward", "mean"), kit.scores_of, "uneven"),
    "response_mean": (lambda: kit.scalar_model("qwen3", "reward", "response_mean"), kit.scores_of, "long"),
}


def every_case(rank: int, world: int) -> dict[str, Any]:
    """The loss and the gradients are those of every rank by itself: nothing is divided, nothing summed."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",))
    found = {}
    for name, (make, work, rows) in CASES.items():
        try:
            model = make()
            notes = tensor_parallel(model, mesh)
            found[name] = (*kit.run(model, work, kit.sequences(rows)), notes)
        except Exception as error:
            raise AssertionError(name) from error
    return found


def sharded_and_cut(rank: int, world: int) -> dict[str, Any]:
    """FSDP over 2 x tensor over 2: the objective of shard 0 counts 1/4, that of shard 1 3/4; gradients are summed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    part = (0.25, 0.75)[mesh["shard"].get_local_rank()]
    found = {}
    for name in SHARDED:
        make, work, rows = CASES[name]
        model = make()
        tensor_parallel(model, mesh["tensor"])
        for module in (*blocks_of(model.trunk.model), model.root):
            fully_shard(module, mesh=mesh["shard"])
        for module in model.root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

        def inside(model: Any, seqs: Any, work: Any = work) -> Any:
            return model.root(lambda: work(model, seqs))

        found[name] = kit.run(model, inside, kit.sequences(rows), divide=1 / part)
    return found


SHARDED = ("llama", "tied", "biases", "lora", "qwen3", "value", "mean")


def cut_both_ways(rank: int, world: int, axis: str) -> dict[str, Any]:
    """Tensor over 2 inside token-parallel over 2: divided by the token peers, summed over them alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(axis, "tensor"))
    tokens = token_parallel(mesh)
    found = {}
    for name in ("llama", "lora, tied", "qwen3", "value", "mean"):
        make, work, rows = CASES[name]
        model = kit.over(make(), tokens)
        tensor_parallel(model, mesh["tensor"])
        numbers, grads = kit.run(model, work, kit.sequences(rows), divide=2)
        for grad in grads.values():
            dist.all_reduce(grad, group=mesh.get_group(axis))
        found[name] = (numbers, grads)
    return found


GENERATED: dict[str, Callable[[], Any]] = {
    "llama": lambda: kit.language_model(),
    "tied": lambda: kit.language_model(tie_word_embeddings=True),
    "odd vocabulary": lambda: kit.language_model(vocab_size=97),
    "lora": lambda: kit.language_model(lora=3),
    "qwen3": lambda: kit.language_model("qwen3"),
}


def generated(model: Any) -> tuple[list[list[int]], Tensor]:
    """Responses to three prompts, four samples each, and their logprobs."""
    engine = InProcessRollout(
        model.model, model.tokenizer, (2,), SamplingParams(temperature=0.8, max_new_tokens=12), seed=7
    )
    prompts = Prompts(
        tokens=((5, 9, 11), (40,), (7, 8, 9, 10, 11, 12)),
        ids=("a", "b", "c"),
        truths=(None,) * 3,
        messages=((),) * 3,
        n=4,
    )
    rollout = engine.generate(prompts)
    return rollout.sequences.response_rows(), rollout.rollout_logp.flat


def generate(rank: int, world: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",))
    found = {}
    for name, make in GENERATED.items():
        model = make()
        tensor_parallel(model, mesh)
        found[name] = generated(model)
    return found


def sliced_softmax(rank: int, world: int, logits_rV: Tensor, targets_r: Tensor, cuts: list[int]) -> Any:
    """logp, entropy, and the gradient by this rank's slice, of vocabulary slices that end at `cuts`."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",))
    start, end = [0, *cuts][rank], cuts[rank]
    slice_rv = logits_rV[:, start:end].clone().requires_grad_()
    found = vocabulary_outputs(slice_rv, targets_r, start, mesh.get_group(), Asked(entropy=True))
    logp_r, entropy_r = found["logp"], found["entropy"]
    weight_r = torch.arange(1.0, 1.0 + len(targets_r), dtype=logits_rV.dtype)
    ((logp_r + 2 * entropy_r) * weight_r).sum().backward()
    return logp_r.detach(), entropy_r.detach(), slice_rv.grad


def refusals(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",))
    said = []
    one = kit.language_model(num_key_value_heads=1)
    before = {name: p.clone() for name, p in one.model.named_parameters()}
    for model in (one, kit.over(kit.language_model(), TokenParallel(sequence=dist.group.WORLD))):
        try:
            tensor_parallel(model, mesh)
        except ModelError as error:
            said.append(str(error))
    assert all(type(p) is torch.nn.Parameter and torch.equal(p, before[n]) for n, p in one.model.named_parameters())
    return said


def cut_without_storage(rank: int, world: int) -> dict[str, Any]:
    """A model on the meta device keeps no more than its slice."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",))
    model = kit.language_model()
    whole = {name: tuple(p.shape) for name, p in model.model.named_parameters()}
    model.model.to("meta")
    tensor_parallel(model, mesh)
    found = dict(model.model.named_parameters())
    assert {name: tuple(p.shape) for name, p in found.items()} == whole
    return {name: tuple(p.to_local().shape) if isinstance(p, DTensor) else tuple(p.shape) for name, p in found.items()}
