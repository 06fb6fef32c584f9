"""Logprobs and other readings of the distribution where every rank holds a slice of the vocabulary.

Shapes: R flat response tokens, r of one chunk, H hidden, V vocabulary, v of one rank, C candidate tokens.

With z the logits less their largest over all ranks, and sums over all ranks:

    log Z = log sum_v exp z_v        logp = z_target - log Z        entropy = log Z - sum_v p_v z_v,  p = exp(z) / Z
    log sum_v p_v^2 = log sum_v exp 2 z_v - 2 log Z

(Shoeybi et al. 2019, arXiv:1909.08053, section 3).  No rank ever holds (r, V); a few numbers a token travel, one more
for each candidate.  The likeliest tokens of the whole are among the likeliest of the slices.  All ranks hold the same
loss, which counts once (`collectives.reduced`).  Float32 at least, in nats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from tutelage.errors import ModelError
from tutelage.math.logprobs import LOGPROB_ALONE, Asked, in_chunks, require_enough, require_temperature
from tutelage.math.masking import at_least_float32
from tutelage.models.parallel.collectives import gathered, reduced


@dataclass(frozen=True, eq=False)
class VocabularyParallel:
    """group: the tensor ranks.  start: the first token id of this rank's slice."""

    group: ProcessGroup
    start: int

    def outputs(
        self,
        hidden_RH: Tensor,
        targets_R: Tensor,
        head: Callable[[Tensor], Tensor],
        asked: Asked = LOGPROB_ALONE,
        *,
        temperature: float = 1.0,
        chunk_tokens: int = 1024,
    ) -> dict[str, Tensor]:
        """As `math.logprobs.head_outputs`: the same on every rank.

        head(hidden_rH) gives logits as a DTensor cut along the vocabulary. Chunks are computed again in the backward
        pass. Every rank must bring the same R. Raises ConfigError and ShapeError.
        """
        require_temperature(temperature)

        def of_chunk(hidden_rH: Tensor, targets_r: Tensor, asked_r: Asked) -> dict[str, Tensor]:
            logits_rv = at_least_float32(_local(head(hidden_rH)))
            logits_rv = logits_rv if temperature == 1.0 else logits_rv / temperature
            return vocabulary_outputs(logits_rv, targets_r, self.start, self.group, asked_r)

        return in_chunks(of_chunk, hidden_RH, targets_R, asked, chunk_tokens)


def vocabulary_outputs(
    logits_rv: Tensor, targets_r: Tensor, start: int, group: ProcessGroup, asked: Asked = LOGPROB_ALONE
) -> dict[str, Tensor]:
    """As `math.logprobs.distribution_outputs`, of the softmax over the logits of all ranks.

    targets_r and candidates: token ids of the whole vocabulary.  start: the first one of this rank's slice.
    A logit of minus infinity counts 0 in the entropy and in its gradient.  Raises ShapeError for more likeliest tokens
    than there are.
    """
    top_r = logits_rv.detach().amax(-1) if logits_rv.shape[1] else logits_rv.new_full(logits_rv.shape[:1], -torch.inf)
    dist.all_reduce(top_r, op=dist.ReduceOp.MAX, group=group)
    z_rv = logits_rv - top_r[:, None]
    exp_rv = z_rv.exp()
    sums = {"total": exp_rv.sum(-1), "logp": _here(z_rv, targets_r[:, None], start).squeeze(1)}
    if asked.entropy:
        # 0 log 0 is 0: a token of probability 0 must give 0, and a gradient of 0, not NaN.
        sums["entropy"] = (exp_rv * z_rv.masked_fill(exp_rv == 0, 0.0)).sum(-1)
    if asked.log_collision:
        sums["log_collision"] = exp_rv.detach().square().sum(-1)
    rows = [*sums.values()]
    if asked.candidates is not None:
        rows += _here(z_rv, asked.candidates, start).unbind(1)
    whole = reduced(torch.stack(rows), group)
    found = dict(zip(sums, whole.unbind(0), strict=False))
    total_r = found.pop("total")
    log_total_r = total_r.log()
    found["logp"] = found["logp"] - log_total_r
    if asked.entropy:
        found["entropy"] = log_total_r - found["entropy"] / total_r
    if asked.log_collision:
        found["log_collision"] = (found["log_collision"].log() - 2 * log_total_r).detach()
    if asked.candidates is not None:
        found["candidate_logp"] = whole[len(sums) :].T - log_total_r[:, None]
    if asked.top:
        z_rt, found["top_ids"] = _likeliest(z_rv.detach(), start, group, asked)
        found["top_logp"] = z_rt - log_total_r.detach()[:, None]
    return found


def _here(z_rv: Tensor, ids_rC: Tensor, start: int) -> Tensor:
    """(r, C) z of these tokens where this rank has them, 0 elsewhere."""
    if not z_rv.shape[1]:
        return z_rv.new_zeros(ids_rC.shape)
    local_rC = ids_rC - start
    here_rC = (local_rC >= 0) & (local_rC < z_rv.shape[1])
    return torch.where(here_rC, z_rv.gather(1, torch.where(here_rC, local_rC, 0)), 0.0)


def _likeliest(z_rv: Tensor, start: int, group: ProcessGroup, asked: Asked) -> tuple[Tensor, Tensor]:
    """(r, top) z and ids of the likeliest tokens of all slices, likeliest first."""
    within_rv = z_rv if asked.below is None else z_rv[:, : max(asked.below - start, 0)]
    held = torch.tensor(within_rv.shape[1], device=z_rv.device)
    dist.all_reduce(held, group=group)
    require_enough(asked.top, int(held))
    count = min(asked.top, within_rv.shape[1])
    best_rt = z_rv.new_full((z_rv.shape[0], asked.top), -torch.inf)
    ids_rt = torch.zeros(best_rt.shape, dtype=torch.int64, device=z_rv.device)
    best_rt[:, :count], found_rt = within_rv.topk(count, dim=-1)
    ids_rt[:, :count] = found_rt + start
    every_rk = gathered(best_rt, group).transpose(0, 1).flatten(1)
    place_rt = every_rk.topk(asked.top, dim=-1).indices
    return every_rk.gather(1, place_rt), gathered(ids_rt, group).transpose(0, 1).flatten(1).gather(1, place_rt)


def _local(logits: Tensor) -> Tensor:
    if not isinstance(logits, DTensor):
        raise ModelError(
            f"the output layer gave logits {tuple(logits.shape)} that are not cut along the vocabulary",
            fix="apply tensor_parallel to the model before it runs",
        )
    return logits.to_local()
