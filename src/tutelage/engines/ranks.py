"""What an engine asks of the other ranks that train the same model; alone, or over a device mesh.

Shapes: B items of a mini-batch, b items of this rank, K scalars of an item.

Data ranks work on different parts of a mini-batch; gradients are sums over them, since the weights of a loss are of the
whole mini-batch.  Peers (context and sequence parallel) compute the loss of the same rows: each backpropagates its
value divided by their number, and the sum over them is the gradient once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tutelage.engines.mesh import RankMesh
from tutelage.errors import RolloutError
from tutelage.models import agreement
from tutelage.models.parallel.pipeline import keep_stage
from tutelage.models.parallel.stages import Stages
from tutelage.models.parallel.tensor import tensor_parallel
from tutelage.models.parallel.tokens import TokenParallel, token_parallel
from tutelage.models.sharding import Sharding, by_mesh, gathered, is_sharded, local, sharded_modules
from tutelage.protocols import Loss
from tutelage.sharing import Share, shares, whole_share


class Ranks(Protocol):
    """All methods but `clip` are collective over data ranks or all ranks where there is more than one.

    rank    of this process; 0 writes what is written once.  world: all ranks that train this model.
    peers   what a loss value is divided by before its backward pass.
    sum_once  whether gradients of all micro-batches but the last stay on their rank.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def peers(self) -> int: ...
    @property
    def sum_once(self) -> bool: ...
    def share(self, batch: Any, loss: Loss) -> Share:
        """This rank's part of a mini-batch that every rank holds."""
        ...

    def most(self, count: int) -> int:
        """The largest count of any data rank."""
        ...

    def agree(self, error: Exception | None) -> None:
        """Raise on every rank where one brings an error."""
        ...

    def from_parts(self, value: Any) -> list[Any]:
        """A JSON value of every data rank, in their order."""
        ...

    def from_all(self, value: Any) -> list[Any]:
        """A JSON value of every rank."""
        ...

    def items(self, rows_b: Tensor, index_b: Tensor, count: int) -> Tensor:
        """(count, ...): the rows of all data ranks, each at its index; rows of index -1 are left out."""
        ...

    def reduce_with_next_backward(self, root: nn.Module, last: bool) -> None:
        """Before each backward pass of an update; last: of the last one."""
        ...

    def sum_gradients(self, weights: Iterable[nn.Parameter]) -> None:
        """After the last backward pass: whatever was not summed by it."""
        ...

    def generating(self, root: nn.Module) -> AbstractContextManager[None]:
        """Inside, forwards need no other rank."""
        ...


class Alone:
    """One process."""

    rank = 0
    world = 1
    peers = 1
    sum_once = False

    def share(self, batch: Any, loss: Loss) -> Share:
        return whole_share(batch, loss)

    def most(self, count: int) -> int:
        return count

    def agree(self, error: Exception | None) -> None:
        if error is not None:
            raise error

    def from_parts(self, value: Any) -> list[Any]:
        return [value]

    def from_all(self, value: Any) -> list[Any]:
        return [value]

    def items(self, rows_b: Tensor, index_b: Tensor, count: int) -> Tensor:
        return in_order([rows_b], [index_b], count)

    def reduce_with_next_backward(self, root: nn.Module, last: bool) -> None:
        return None

    def sum_gradients(self, weights: Iterable[nn.Parameter]) -> None:
        return None

    def generating(self, root: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True, eq=False)
class MeshRanks:
    """The ranks of a mesh.

    bucket_bytes  replicated weights: gradients are summed in all-reduces of about this size.
    offload       parameters, gradients and optimiser rest in the host's memory; weights are sharded, if over one rank.
    sum_once      sharded weights: gradients stay whole on every rank until the last micro-batch of an update, which
                  alone is summed over ranks: less traffic, for the memory of one whole gradient in float32.
    """

    mesh: RankMesh
    bucket_bytes: int = 64 << 20
    sum_once: bool = False
    offload: bool = False

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def fsdp(self) -> bool:
        """Whether FSDP holds the weights, and sums their gradients."""
        return self.mesh.shards > 1 or self.offload

    @property
    def world(self) -> int:
        return self.mesh.layout.size

    @property
    def peers(self) -> int:
        return self.mesh.peers

    def sharding(self) -> Sharding | None:
        """How a model for these ranks is spread; None where the layout has replicas only.

        Raises ConfigError for an offload without an accelerator.
        """
        layout = self.mesh.layout
        if layout.tensor == layout.pipeline == 1 and not self.fsdp:
            return None
        stages = Stages(self.mesh.mesh["pipeline"].get_group(), self.mesh.device) if layout.pipeline > 1 else None
        cut = functools.partial(tensor_parallel, mesh=self.mesh.mesh["tensor"]) if layout.tensor > 1 else None
        return Sharding(
            self.mesh.fsdp() if self.fsdp else None,
            self.mesh.everyone,
            self.mesh.device,
            self.agree,
            offload=self.offload,
            parallelize=cut,
            tokens=self.tokens(),
            stages=stages,
            keep_stage=None if stages is None else functools.partial(keep_stage, stages=stages),
        )

    def tokens(self) -> TokenParallel | None:
        """The ranks that packed rows are cut over."""
        return token_parallel(self.mesh.mesh)

    def share(self, batch: Any, loss: Loss) -> Share:
        return shares(batch, loss, self.mesh.layout.data)[self.mesh.data_part]

    def most(self, count: int) -> int:
        return agreement.most(count, self.mesh.data_group, self.mesh.device)

    def agree(self, error: Exception | None) -> None:
        agreement.agree(error, self.mesh.world_group, self.mesh.device)

    def from_parts(self, value: Any) -> list[Any]:
        return agreement.gather_json(value, self.mesh.data_group, self.mesh.device)

    def from_all(self, value: Any) -> list[Any]:
        return agreement.gather_json(value, self.mesh.world_group, self.mesh.device)

    def items(self, rows_b: Tensor, index_b: Tensor, count: int) -> Tensor:
        group, device = self.mesh.data_group, self.mesh.device
        return in_order(
            agreement.gather_rows(rows_b, group, device), agreement.gather_rows(index_b, group, device), count
        )

    def reduce_with_next_backward(self, root: nn.Module, last: bool) -> None:
        if self.sum_once:
            for module in sharded_modules(root):
                module.set_requires_gradient_sync(last, recurse=False)

    @torch.no_grad()
    def sum_gradients(self, weights: Iterable[nn.Parameter]) -> None:
        """Sharded weights were summed by FSDP, in their reduce-scatter; others are summed here."""
        group = self.mesh.sum_group
        if self.fsdp or dist.get_world_size(group) == 1:
            return
        grads = [local(weight.grad) for weight in weights if weight.grad is not None]
        for bucket in buckets(grads, self.bucket_bytes):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            dist.all_reduce(flat, group=group)
            for grad, part in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(part.view_as(grad))

    def generating(self, root: nn.Module) -> AbstractContextManager[None]:
        """Raises RolloutError where the blocks are on several pipeline stages."""
        if self.mesh.layout.pipeline > 1:
            raise RolloutError(
                f"generation in the training process needs all blocks on its rank, here they are on "
                f"{self.mesh.layout.pipeline} pipeline stages",
                fix="set rollout.engine to vllm, or the actor's pipeline axis to 1",
            )
        return gathered(root) if is_sharded(root) else nullcontext()


def in_order(rows: list[Tensor], index: list[Tensor], count: int) -> Tensor:
    """(count, ...): row i is the one whose index is i. Every item is there exactly once, or it is a bug."""
    rows_B, index_B = torch.cat(rows), torch.cat([part.cpu() for part in index])
    kept = torch.nonzero(index_B >= 0).squeeze(1)
    order = kept[torch.argsort(index_B[kept])]
    assert torch.equal(index_B[order], torch.arange(count)), "the shares are not a partition of the mini-batch"
    return rows_B[order.to(rows_B.device)]


def buckets(tensors: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Runs of tensors of one type and device, of at most `limit` bytes together; a larger tensor is alone."""
    held: list[Tensor] = []
    size = 0
    for tensor in tensors:
        other = bool(held) and (held[0].dtype, held[0].device) != (tensor.dtype, tensor.device)
        if held and (other or size + tensor.nbytes > limit):
            yield held
            held, size = [], 0
        held.append(tensor)
        size += tensor.nbytes
    if held:
        yield held


def gradient_norm(weights: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients together; collective over the meshes of sharded ones."""
    norms = []
    for grads in by_mesh([weight.grad for weight in weights if weight.grad is not None]):
        norm = torch.nn.utils.get_total_norm(grads)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if len(norms) == 1:
        return norms[0]
    return torch.stack(norms).norm() if norms else torch.zeros(())


def clip(weights: Iterable[nn.Parameter], limit: float, norm: Tensor) -> None:
    """Scale all gradients by min(1, limit / (norm + 1e-6)), in place; gradients within the limit are not touched."""
    if bool(limit / (norm + 1e-6) >= 1.0):
        return
    for group in by_mesh([weight for weight in weights if weight.grad is not None]):
        torch.nn.utils.clip_grads_with_norm_(group, limit, norm)
