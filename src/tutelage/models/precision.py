"""Float32 master weights, with a bfloat16 copy that computes.

The module's own parameters are the copy: forward, backward and generation read them, so a weight is cast once per
update and not once per forward pass. After every backward pass the gradient of a parameter is added, in float32, to
its master's, so that accumulation over micro-batches does not round. The optimiser sees masters alone; `publish` casts
them back. In float32 a master is the parameter itself and there is no copy.

Only parameters are cast: buffers (rotary frequencies) keep their precision.

A sharded module has no copy: its parameters are this rank's parts in float32, which FSDP casts as it gathers them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tutelage.models.quantize import dense, packed
from tutelage.models.sharding import local

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class MasterWeights:
    """The trainable parameters of a module in float32, by name; a tied parameter has one name and one master.

    module  in float32; its parameters are cast in place to `dtype`, except those of the children named in `keep`, and
            packed ones (`quantize`), which have no precision to change.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, keep: Collection[str] = ()) -> None:
        self.module = module
        self.dtype = dtype
        self.masters: dict[str, nn.Parameter] = {}
        self._casts: dict[str, tuple[nn.Parameter, torch.utils.hooks.RemovableHandle]] = {}
        for name, parameter in module.named_parameters():
            cast = dtype != torch.float32 and name.split(".")[0] not in keep and not packed(parameter)
            if parameter.requires_grad:
                # the master takes over the float32 values, and the module's parameter gets others below
                self.masters[name] = nn.Parameter(parameter.data) if cast else parameter
            if cast:
                _cast(parameter, dtype)
            if cast and parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(_add_to(self.masters[name]))
                self._casts[name] = (parameter, handle)

    def add(self, prefix: str, module: nn.Module) -> None:
        """A float32 module beside this one is trained too, under the names PREFIX.NAME."""
        for name, parameter in module.named_parameters():
            self.masters[f"{prefix}.{name}"] = parameter

    def freeze(self, frozen: Collection[str]) -> None:
        """These parameters are trained no more; their masters are dropped."""
        for name, parameter in self.module.named_parameters():
            if name in frozen:
                parameter.requires_grad_(False)
                self.masters.pop(name, None)
                if name in self._casts:
                    self._casts.pop(name)[1].remove()

    @torch.no_grad()
    def publish(self) -> None:
        """The computing copy becomes the masters, rounded."""
        for name, (parameter, _) in self._casts.items():
            parameter.copy_(self.masters[name])

    def zero_grad(self) -> None:
        for master in self.masters.values():
            master.grad = None

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Copy saved masters in, of a sharded one this rank's part; the names must be the same (the caller checks)."""
        for name, master in self.masters.items():
            local(master).copy_(weights[name])
        self.publish()

    def full_precision(self) -> dict[str, Tensor]:
        """Every parameter under each of its names: the master where there is one, else what computes, in float32."""
        first = {id(parameter): name for name, parameter in self.module.named_parameters()}
        wide = {name: self.wide(name, parameter) for name, parameter in self.module.named_parameters()}
        names = self.module.named_parameters(remove_duplicate=False)
        return {name: wide[first[id(parameter)]] for name, parameter in names}

    def wide(self, name: str, parameter: nn.Parameter) -> Tensor:
        """One parameter of the module: its master where there is one, else what computes, in float32."""
        return self.masters[name].detach() if name in self.masters else dense(parameter).detach().float()


def _cast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """In place.  New data would change the type that a distributed tensor says it has, and not that of its part."""
    if isinstance(parameter.data, DTensor):
        narrow = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, narrow)
    else:
        parameter.data = parameter.data.to(dtype)


def _add_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook
