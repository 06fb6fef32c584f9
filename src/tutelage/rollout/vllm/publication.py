"""Weights from a trainer to an engine in another process.

The trainer's rank 0 holds a `WeightSender`; the process that owns the engine holds a `WeightReceiver`.  Both are called
at the same time, once per publication: `sender.send(weights)` here, `receiver.receive()` there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tutelage.errors import RolloutError
from tutelage.rollout.vllm.jobs import Backend
from tutelage.rollout.vllm.manifest import Named
from tutelage.rollout.vllm.wire import Transfer, WireGroup, open_store, send
from tutelage.rollout.vllm.worker import GROUP_BACKEND


class WeightSender:
    """Listens on `address` at once; `connect` waits for the engines' workers.

    world         1 + the workers of all engines (tensor_parallel of each).
    backend       gloo or nccl; device the tensors are staged on ("cpu" or "cuda:N").
    bucket_bytes  most bytes staged at a time.
    """

    def __init__(
        self,
        world: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        backend: str = "gloo",
        device: str = "cpu",
        bucket_bytes: int = 256 << 20,
        timeout: float = 300.0,
    ) -> None:
        self.world = world
        self.backend = backend
        self.bucket_bytes = bucket_bytes
        self.timeout = timeout
        self.device = device
        self._store = open_store(host, port, world, timeout)
        self.address: tuple[str, int] = (host, int(self._store.port))
        self._group: WireGroup | None = None

    def connect(self) -> None:
        """Blocks until every receiver has opened; raises RolloutError after the timeout."""
        self._group = WireGroup(
            self._store, 0, self.world, backend=self.backend, timeout=self.timeout, device=self.device
        )

    def send(self, named: Named) -> Transfer:
        """Every weight, from an iterator that may gather each one when it is asked for it."""
        if self._group is None:
            self.connect()
        assert self._group is not None
        return send(self._group, named, self.bucket_bytes)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class WeightReceiver:
    """offset: place in the sender's group of this engine's first worker, from 1; engines follow each other."""

    def __init__(
        self,
        backend: Backend,
        address: tuple[str, int],
        world: int,
        *,
        offset: int = 1,
        transport: str = "gloo",
        timeout: float = 300.0,
    ) -> None:
        """Blocks until the sender connects; raises RolloutError after the timeout."""
        self._engine = backend
        self._timeout = timeout
        self._engine.rpc("tutelage_open_transfer", {"backend": GROUP_BACKEND})
        init = {
            "host": address[0],
            "port": address[1],
            "world": world,
            "offset": offset,
            "backend": transport,
            "timeout": timeout,
        }
        self._engine.rpc("init_weight_transfer_engine", {"init_info": init}, timeout + 30)

    def receive(self) -> Transfer:
        """One publication, into the running engine; what came to its first worker.

        After an error the engine's weights are of no version: nothing may be generated before the next publication.
        """
        self._engine.rpc("start_weight_update", {})
        self._engine.rpc("update_weights", {"update_info": {}}, self._timeout + 60)
        self._engine.rpc("finish_weight_update", {})
        replies = self._engine.rpc("tutelage_received", {})
        if len({str(reply) for reply in replies}) != 1:
            raise RolloutError(f"the engine's workers received different weights: {replies}", fix="publish again")
        return Transfer(**replies[0])

    def close(self) -> None:
        self._engine.rpc("shutdown_weight_transfer_engine", {})


IPCCall = Callable[[str, dict[str, Any]], object]
"""Calls a method of the engine's workers, wherever it runs, and returns when it is done."""


def send_by_ipc(call: IPCCall, named: Named, bucket_bytes: int) -> Transfer:
    """Weights to an engine in another process on the same GPU, by CUDA IPC: the engine reads this process's memory.

    One GPU on each side.  `call` reaches `VLLMRollout.rpc` of that engine.  A bucket's tensors stay alive until the
    engine has copied them.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    weights = buffers = 0
    call("tutelage_open_transfer", {"backend": "ipc"})
    call("init_weight_transfer_engine", {"init_info": {"packed": False}})
    call("start_weight_update", {})
    for bucket in _on_gpu(named, bucket_bytes):
        device = torch.cuda.get_device_properties(bucket[0][1].device)
        handles = [{str(device.uuid): reduce_tensor(tensor)[1]} for _, tensor in bucket]
        info = {
            "names": [name for name, _ in bucket],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "ipc_handles": handles,
        }
        call("update_weights", {"update_info": info})
        weights += sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
        buffers += 1
        torch.cuda.ipc_collect()
    call("finish_weight_update", {})
    return Transfer(weights, 0, buffers)


def _on_gpu(named: Named, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    from tutelage.rollout.vllm.manifest import buckets

    def contiguous() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            if not tensor.is_cuda:
                raise RolloutError(f"{name} is on {tensor.device}", fix="CUDA IPC shares tensors of a GPU alone")
            yield name, tensor.detach().contiguous()

    yield from buckets(contiguous(), bucket_bytes)
