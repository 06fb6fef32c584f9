"""Weights over a process group of their own: one sender (rank 0), and every worker of the rollout engines.

A transfer is a row of messages.  Each is a header, whose length goes first, and for weights one buffer of at most
`bucket_bytes` with the bytes of consecutive tensors; a tensor that is larger than what is left continues in the next
buffer.  So the sender stages one buffer at a time, whatever the size of a tensor.  The last message is "end", or
"error" with a text when the sender's weights fail to come.

The group is apart from the default one, so the trainer's own ranks are not touched.  Every wait has the group's
timeout.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from tutelage.errors import RolloutError

Piece = tuple[str, str, list[int], int, int]
"""(name, dtype, shape, first byte of the tensor in this buffer, bytes in this buffer)."""


@dataclass(frozen=True)
class Transfer:
    """What went over the wire to each worker: bytes of weights, bytes of headers, number of buffers."""

    weight_bytes: int
    header_bytes: int
    buffers: int


class WireGroup:
    """A process group of `world` members; member 0 sends.  backend: gloo (CPU tensors) or nccl (CUDA tensors)."""

    def __init__(
        self, store: Any, rank: int, world: int, *, backend: str, timeout: float, device: torch.device | str
    ) -> None:
        """Blocks until all members are there; raises RolloutError after `timeout` seconds."""
        limit = timedelta(seconds=timeout)
        self.device = torch.device(device)
        self.rank = rank
        scoped = distributed.PrefixStore(f"tutelage-weights-{world}", store)
        try:
            if backend == "nccl":
                options = distributed.ProcessGroupNCCL.Options()
                options._timeout = limit
                self._group: Any = distributed.ProcessGroupNCCL(scoped, rank, world, options)
            else:
                self._group = distributed.ProcessGroupGloo(scoped, rank, world, limit)
        except RuntimeError as error:
            raise _lost(error, timeout) from error
        self._timeout = timeout

    def broadcast(self, tensor: Tensor) -> None:
        """In place, from member 0.  Raises RolloutError when a member is gone or silent for the timeout."""
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        try:
            self._group.broadcast([tensor], options).wait()
        except RuntimeError as error:
            raise _lost(error, self._timeout) from error

    def close(self) -> None:
        self._group = None


def _lost(error: Exception, timeout: float) -> RolloutError:
    first = str(error).splitlines()[0][:300]
    return RolloutError(
        f"the weights' process group failed (timeout {timeout:g} s): {first}",
        fix="look for the trainer's or the engine's own error; raise rollout.vllm.transfer_timeout for a slow one",
    )


def open_store(host: str, port: int, world: int, timeout: float) -> Any:
    """The sender's meeting point; port 0 takes a free one (`store.port`)."""
    return distributed.TCPStore(
        host, port, world, is_master=True, timeout=timedelta(seconds=timeout), wait_for_workers=False
    )


def join_store(host: str, port: int, world: int, timeout: float) -> Any:
    try:
        return distributed.TCPStore(host, port, world, is_master=False, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        raise _lost(error, timeout) from error


def pieces(named: Iterable[tuple[str, Tensor]], staging: Tensor) -> Iterator[tuple[list[Piece], int]]:
    """Fill `staging` (uint8) again and again with the tensors' bytes: (what it holds, bytes used)."""
    held: list[Piece] = []
    used = 0
    for name, tensor in named:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        dtype, shape, first = str(tensor.dtype).removeprefix("torch."), list(tensor.shape), 0
        while first < flat.numel():
            count = min(flat.numel() - first, staging.numel() - used)
            staging[used : used + count].copy_(flat[first : first + count])
            held.append((name, dtype, shape, first, count))
            used, first = used + count, first + count
            if used == staging.numel():
                yield held, used
                held, used = [], 0
    if held:
        yield held, used


def send(group: WireGroup, named: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Transfer:
    """All weights to every other member.  An error of the iterator is told to the members, then raised."""
    staging = torch.empty(bucket_bytes, dtype=torch.uint8, device=group.device)
    weights = headers = buffers = 0
    try:
        for held, used in pieces(named, staging):
            headers += _send_header(group, {"pieces": held, "bytes": used})
            group.broadcast(staging[:used])
            weights, buffers = weights + used, buffers + 1
    except RolloutError:
        raise
    except Exception as error:
        _send_header(group, {"error": f"{type(error).__name__}: {error}"})
        raise
    headers += _send_header(group, {"end": True})
    return Transfer(weights, headers, buffers)


def receive(group: WireGroup) -> Iterator[tuple[str, Tensor] | Transfer]:
    """(name, tensor) as they become whole, and the `Transfer` as the last item.

    Raises RolloutError when the sender tells of an error.
    """
    weights = headers = buffers = 0
    part: Tensor | None = None
    while True:
        header, size = _receive_header(group)
        headers += size
        if "error" in header:
            raise RolloutError(
                f"the trainer stopped sending weights: {header['error']}",
                fix="the engine's weights are incomplete: publish again before generating",
            )
        if "end" in header:
            yield Transfer(weights, headers, buffers)
            return
        buffer = torch.empty(header["bytes"], dtype=torch.uint8, device=group.device)
        group.broadcast(buffer)
        weights, buffers = weights + header["bytes"], buffers + 1
        used = 0
        for name, dtype, shape, first, count in header["pieces"]:
            if first == 0:
                part = torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
            assert part is not None
            flat = part.view(-1).view(torch.uint8)
            flat[first : first + count].copy_(buffer[used : used + count])
            used += count
            if first + count == flat.numel():
                yield name, part


def _send_header(group: WireGroup, header: dict[str, Any]) -> int:
    data = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8).to(group.device)
    group.broadcast(torch.tensor([data.numel()], dtype=torch.int64, device=group.device))
    group.broadcast(data)
    return data.numel() + 8


def _receive_header(group: WireGroup) -> tuple[dict[str, Any], int]:
    size = torch.zeros(1, dtype=torch.int64, device=group.device)
    group.broadcast(size)
    data = torch.empty(int(size), dtype=torch.uint8, device=group.device)
    group.broadcast(data)
    header: dict[str, Any] = json.loads(bytes(data.cpu().tolist()))
    return header, data.numel() + 8
