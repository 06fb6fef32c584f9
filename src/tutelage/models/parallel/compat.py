"""The single-tensor collectives under one name for every torch that is supported.

torch 2.13 renamed `all_gather_into_tensor` to `all_gather_single` and `reduce_scatter_tensor` to
`reduce_scatter_single`, and warns for the old names; torch before it has the old names alone
(https://docs.pytorch.org/docs/stable/distributed.html).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_RENAMED = hasattr(dist, "all_gather_single") and hasattr(dist, "reduce_scatter_single")


def all_gather(out: Tensor, part: Tensor, group: ProcessGroup) -> None:
    """out (ranks * n, ...) of parts (n, ...)."""
    call: Any = dist.all_gather_single if _RENAMED else dist.all_gather_into_tensor
    call(out, part, group=group)


def reduce_scatter(out: Tensor, parts: Tensor, group: ProcessGroup) -> None:
    """out (n, ...), the sum over ranks of this rank's part of parts (ranks * n, ...)."""
    call: Any = dist.reduce_scatter_single if _RENAMED else dist.reduce_scatter_tensor
    call(out, parts, group=group)
