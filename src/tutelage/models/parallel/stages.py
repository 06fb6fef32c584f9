"""What the pipeline stages of one model tell each other: JSON values, and tensors one at a time.

Every function is collective over the group: all stages call it, in the same order.  Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutelage.models import agreement


@dataclass(frozen=True, eq=False)
class Stages:
    """group: this rank and its peers on every other stage, the first stage first.  device: where this rank computes."""

    group: dist.ProcessGroup
    device: torch.device

    @property
    def index(self) -> int:
        return dist.get_rank(self.group)

    @property
    def count(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    def every(self, value: Any) -> list[Any]:
        """A JSON value of every stage, in their order."""
        return agreement.gather_json(value, self.group, self.device)

    def union(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """JSON values by name of all stages together; of a name on several stages the first one's."""
        found: dict[str, Any] = {}
        for theirs in self.every(dict(named)):
            for name, value in theirs.items():
                found.setdefault(name, value)
        return found

    def stream(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all stages on every stage, in their order; a name comes once, from its first stage.

        Every stage must take all of them.  A stage computes its next tensor when its turn is there, not before.
        """
        seen: set[str] = set()
        for stage in range(self.count):
            if stage == self.index:
                for name, tensor in tensors:
                    if name not in seen:
                        self._send(name, tensor)
                        seen.add(name)
                        yield name, tensor
                self._broadcast_json(None, stage)
                continue
            while (about := self._broadcast_json(None, stage)) is not None:
                name, shape, dtype = about
                received = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                self._broadcast(received, stage)
                seen.add(name)
                yield name, received

    def from_last(self, tensor: Tensor) -> Tensor:
        """The last stage's tensor on every stage; the others bring one of the same shape and type."""
        found = tensor.to(self.device).contiguous()
        self._broadcast(found, self.count - 1)
        return found.to(tensor.device)

    def exchanged(self, tensor: Tensor) -> Tensor:
        """On the first and the last stage: the other's tensor of this shape. The stages between do not take part."""
        other = self.count - 1 if self.first else 0
        sent, received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
        work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=self.group, group_peer=other),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=other),
            ]
        )
        for each in work:
            each.wait()
        return received

    def total(self, value: Tensor) -> Tensor:
        """The sum of a scalar over the stages."""
        found = value.detach().to(self.device).clone()
        dist.all_reduce(found, group=self.group)
        return found.to(value.device)

    def _send(self, name: str, tensor: Tensor) -> None:
        self._broadcast_json([name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")], self.index)
        self._broadcast(tensor.detach().to(self.device).contiguous(), self.index)

    def _broadcast(self, tensor: Tensor, stage: int) -> None:
        if tensor.numel():
            dist.broadcast(tensor, group=self.group, group_src=stage)

    def _broadcast_json(self, value: Any, stage: int) -> Any:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        size = torch.tensor([data.numel()], dtype=torch.int64, device=self.device)
        dist.broadcast(size, group=self.group, group_src=stage)
        if stage != self.index:
            data = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        dist.broadcast(data, group=self.group, group_src=stage)
        return json.loads(bytes(data.cpu().numpy().tobytes()).decode())
