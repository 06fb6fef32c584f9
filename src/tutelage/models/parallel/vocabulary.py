"""Logprobs and entropy where every rank holds a slice of the vocabulary.

Shapes: R flat response tokens, r of one chunk, H hidden, V vocabulary, v of one rank.

With z the logits less their largest over all ranks, and sums over all ranks:

    log Z = log sum_v exp z_v        logp = z_target - log Z        entropy = log Z - sum_v p_v z_v,  p = exp(z) / Z

(Shoeybi et al. 2019, arXiv:1909.08053, section 3).  No rank ever holds (r, V); three numbers a token travel.  All ranks
hold the same loss, which counts once (`collectives.reduced`).  Float32 at least, in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tutelage.errors import ConfigError, ModelError, ShapeError
from tutelage.math.masking import at_least_float32
from tutelage.models.parallel.collectives import reduced


@dataclass(frozen=True, eq=False)
class VocabularyParallel:
    """group: the tensor ranks.  start: the first token id of this rank's slice."""

    group: ProcessGroup
    start: int

    def logprobs(
        self,
        hidden_RH: Tensor,
        targets_R: Tensor,
        head: Callable[[Tensor], Tensor],
        *,
        temperature: float = 1.0,
        chunk_tokens: int = 1024,
        with_entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `math.logprobs.head_logprobs`: (logp_R, entropy_R or None), the same on every rank.

        head(hidden_rH) gives logits as a DTensor cut along the vocabulary. Chunks are computed again in the backward
        pass. Every rank must bring the same R. Raises ConfigError and ShapeError.
        """
        if not (math.isfinite(temperature) and temperature > 0):
            raise ConfigError(f"temperature is {temperature}", fix="use a finite temperature above 0")
        if hidden_RH.dim() != 2 or targets_R.shape != hidden_RH.shape[:1]:
            raise ShapeError(
                f"hidden {tuple(hidden_RH.shape)} does not fit targets {tuple(targets_R.shape)}",
                fix="pass hidden states (R, H) and targets (R,)",
            )

        def chunk_outputs(hidden_rH: Tensor, targets_r: Tensor) -> tuple[Tensor, ...]:
            logits_rv = at_least_float32(_local(head(hidden_rH)))
            logits_rv = logits_rv if temperature == 1.0 else logits_rv / temperature
            logp_r, entropy_r = vocabulary_logprobs(logits_rv, targets_r - self.start, self.group, with_entropy)
            return (logp_r,) if entropy_r is None else (logp_r, entropy_r)

        outputs: list[tuple[Tensor, ...]] = []
        for hidden_rH, targets_r in zip(hidden_RH.split(chunk_tokens), targets_R.split(chunk_tokens), strict=True):
            if torch.is_grad_enabled():
                outputs.append(checkpoint(chunk_outputs, hidden_rH, targets_r, use_reentrant=False))
            else:
                outputs.append(chunk_outputs(hidden_rH, targets_r))
        columns = [torch.cat(column) for column in zip(*outputs, strict=True)]
        return columns[0], columns[1] if with_entropy else None


def vocabulary_logprobs(
    logits_rv: Tensor, local_targets_r: Tensor, group: ProcessGroup, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(logp_r, entropy_r or None) of the softmax over the logits of all ranks.

    local_targets_r: token ids less the first id of this rank's slice; outside 0..v-1 on all ranks but one.
    A logit of minus infinity counts 0 in the entropy and in its gradient.
    """
    top_r = logits_rv.detach().amax(-1) if logits_rv.shape[1] else logits_rv.new_full(logits_rv.shape[:1], -torch.inf)
    dist.all_reduce(top_r, op=dist.ReduceOp.MAX, group=group)
    z_rv = logits_rv - top_r[:, None]
    here_r = (local_targets_r >= 0) & (local_targets_r < logits_rv.shape[1])
    picked_r = z_rv.gather(1, torch.where(here_r, local_targets_r, 0)[:, None]).squeeze(1)
    picked_r = torch.where(here_r, picked_r, 0.0)
    exp_rv = z_rv.exp()
    sums = [exp_rv.sum(-1), picked_r]
    if with_entropy:
        # 0 log 0 is 0: a token of probability 0 must give 0, and a gradient of 0, not NaN.
        sums.append((exp_rv * z_rv.masked_fill(exp_rv == 0, 0.0)).sum(-1))
    total_r, target_r, *weighted = reduced(torch.stack(sums), group).unbind(0)
    log_total_r = total_r.log()
    return target_r - log_total_r, log_total_r - weighted[0] / total_r if with_entropy else None


def _local(logits: Tensor) -> Tensor:
    if not isinstance(logits, DTensor):
        raise ModelError(
            f"the output layer gave logits {tuple(logits.shape)} that are not cut along the vocabulary",
            fix="apply tensor_parallel to the model before it runs",
        )
    return logits.to_local()
