"""Methods that vLLM adds to its worker processes (`worker_extension_cls`); they run beside the model.

vLLM makes its worker class inherit from this one, so every name starts with `tutelage_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

TRANSFER_MODULE = "tutelage.rollout.vllm.transfer_engine"
GROUP_BACKEND = "tutelage_group"
EXTENSION = "tutelage.rollout.vllm.worker.WorkerExtension"


class WorkerExtension:
    """Reloading in bounded buckets, and a weight-transfer engine that is made on request."""

    vllm_config: Any
    device: Any
    model_runner: Any
    weight_transfer_engine: Any
    reload_weights: Callable[..., None]

    def tutelage_begin_load(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())

    def tutelage_add_weights(self, bucket: list[tuple[str, Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(bucket)

    def tutelage_end_load(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)
        self.model_runner.reset_lora_state()

    def tutelage_load_folder(self, folder: str) -> None:
        """A checkpoint folder in safetensors, its tied output head included (vLLM's own reload leaves the old head)."""
        from pathlib import Path

        from safetensors import safe_open

        from tutelage.rollout.vllm.manifest import Manifest

        def named() -> Iterator[tuple[str, Tensor]]:
            for file in sorted(Path(folder).glob("*.safetensors")):
                with safe_open(file, framework="pt") as held:
                    for name in held.keys():  # noqa: SIM118 - it is no dictionary
                        yield name, held.get_tensor(name)

        manifest = Manifest.of(self.vllm_config.model_config.hf_config)
        self.reload_weights(weights_iterator=manifest.checked(named()))

    def tutelage_open_transfer(self, backend: str) -> None:
        """Make the worker's weight-transfer engine: ours over a process group, or one that vLLM ships ("ipc")."""
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        if backend == GROUP_BACKEND and GROUP_BACKEND not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(GROUP_BACKEND, TRANSFER_MODULE, "GroupTransferEngine")
        if self.weight_transfer_engine is not None:
            self.weight_transfer_engine.shutdown()
        config = WeightTransferConfig(backend=backend)
        self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            config, self.vllm_config, self.device, self.model_runner.get_model()
        )

    def tutelage_received(self) -> dict[str, int]:
        """Bytes of the last transfer into this worker."""
        received: dict[str, int] = self.weight_transfer_engine.received
        return received
