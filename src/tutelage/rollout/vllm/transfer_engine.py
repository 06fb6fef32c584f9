"""A weight-transfer engine of vLLM's own interface over a torch process group: gloo on CPUs, NCCL on GPUs.

Imported by vLLM's worker alone, through its `WeightTransferEngineFactory`.  `update_weights` is overridden because the
base class ends it by synchronising an accelerator, which a CPU build has not:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/distributed/weight_transfer/base.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from tutelage.errors import RolloutError
from tutelage.rollout.vllm.manifest import Manifest
from tutelage.rollout.vllm.wire import Transfer, WireGroup, join_store, receive


@dataclass
class GroupInitInfo(WeightTransferInitInfo):
    """Where the sender waits; offset: place in the group of this engine's first worker."""

    host: str
    port: int
    world: int
    offset: int
    backend: str
    timeout: float


@dataclass
class GroupUpdateInfo(WeightTransferUpdateInfo):
    """The messages describe themselves: nothing to say beforehand."""


class GroupTransferEngine(WeightTransferEngine[GroupInitInfo, GroupUpdateInfo]):
    init_info_cls = GroupInitInfo
    update_info_cls = GroupUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.group: WireGroup | None = None
        self.received: dict[str, int] = {}
        self.manifest = Manifest.of(vllm_config.model_config.hf_config)

    def init_transfer_engine(self, init_info: GroupInitInfo) -> None:
        store = join_store(init_info.host, init_info.port, init_info.world, init_info.timeout)
        self.group = WireGroup(
            store,
            init_info.offset + self.parallel_config.rank,
            init_info.world,
            backend=init_info.backend,
            timeout=init_info.timeout,
            device=self.device,
        )

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: GroupUpdateInfo) -> None:
        if self.group is None:
            raise RolloutError("no trainer has joined", fix="call WeightReceiver.open first")
        stream = self._tensors(self.group)
        try:
            for weight in self.manifest.checked(stream):
                self._load([weight])
        except Exception:
            for _ in stream:  # the sender is not left waiting for us
                pass
            self.finish_weight_update()  # or the next update would count the layers that were half loaded
            raise

    def _load(self, weights: list[tuple[str, Tensor]]) -> None:
        load: Any = self.model.load_weights
        load(weights)

    def _tensors(self, group: WireGroup) -> Iterator[tuple[str, Tensor]]:
        for item in receive(group):
            if isinstance(item, Transfer):
                self.received = {
                    "weight_bytes": item.weight_bytes,
                    "header_bytes": item.header_bytes,
                    "buffers": item.buffers,
                }
            else:
                yield item

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None
