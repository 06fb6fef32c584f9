"""How a token is drawn: the parameters of a request, and one vectorised sampler for all rows of a decode step.

Shapes: B draws, U rows of logits, V vocabulary, n blocks of the vocabulary, k tokens of a block.

The sampled distribution is softmax(logits / temperature), then optionally cut to a subset of the vocabulary and
renormalised: top-k (Fan et al. 2018), then top-p (Holtzman et al. 2020), then min-p (Nguyen et al. 2024), each
on what the one before it kept. A token is drawn by inverting the cumulative distribution at a keyed uniform number, so
a draw depends on its key and counter alone, never on the rows beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tutelage.errors import RolloutError
from tutelage.math.keyed import keyed_uniform
from tutelage.math.logprobs import scaled_log_softmax
from tutelage.math.masking import at_least_float32

TRAINING_PURPOSE = "rollout"
"""The purpose of rollouts that a policy is trained on; other purposes may truncate the distribution."""

_CHUNK_ELEMENTS = {"cpu": 1 << 18}
"""Rows * V that the sampler works on at a time: on a CPU what stays in its cache from one pass to the next."""

_CHUNK_ELEMENTS_ELSEWHERE = 1 << 26
"""On other devices: a bound on memory (two float32 tensors of 256 MiB)."""

_BLOCK = 256
"""Tokens whose probabilities are summed before the search inside a block."""


@dataclass(frozen=True)
class SamplingParams:
    """What one generation request asks for.

    temperature     divides the logits; above 0.
    top_k           keep the k most likely tokens; ties go to the lower token id.
    top_p           keep the fewest most likely tokens whose probabilities sum to at least p, in (0, 1].
    min_p           keep tokens whose probability is at least min_p times that of the most likely one, in [0, 1].
    max_new_tokens  length limit of a response; reaching it without a stop means truncated.
    stop            strings that end a response when they appear in its text; that text is kept.
    stop_token_ids  tokens that end a response besides the EOS tokens; the token is kept.
    greedy          take the most likely token (the lowest id among equals) instead of drawing.
    n               responses per prompt.
    seed            replaces the engine's seed for this request.

    Raises RolloutError for a value out of range, and for greedy together with a truncation that could not matter.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    greedy: bool = False
    n: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        rules = (
            ("temperature", math.isfinite(self.temperature) and self.temperature > 0, "a finite number above 0"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1, or None"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1, or None"),
            ("min_p", self.min_p is None or 0 <= self.min_p <= 1, "from 0 to 1, or None"),
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("n", self.n >= 1, "at least 1"),
            ("stop", not isinstance(self.stop, str) and all(self.stop), "a tuple of strings that are not empty"),
        )
        for name, holds, wanted in rules:
            if not holds:
                hint = "; greedy=True takes the most likely token" if name == "temperature" else ""
                raise RolloutError(f"{name} is {getattr(self, name)!r}", fix=f"make it {wanted}{hint}")
        if self.greedy and self.truncates:
            raise RolloutError(
                f"greedy decoding with {self.truncation}: a truncation never removes the most likely token",
                fix="drop the truncation, or set greedy=False",
            )

    @property
    def truncates(self) -> bool:
        """Whether the distribution is cut to a subset of the vocabulary."""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1) or bool(self.min_p)

    @property
    def truncation(self) -> str:
        """The truncation as text: `top_k=50, min_p=0.1`."""
        names = ("top_k", "top_p", "min_p")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names if getattr(self, name) is not None)

    def with_greedy(self) -> SamplingParams:
        """The same request answered greedily, without truncation."""
        return replace(self, greedy=True, top_k=None, top_p=None, min_p=None)


def require_trainable(params: SamplingParams, purpose: str) -> None:
    """Refuse a truncated distribution where a policy is trained on the samples.

    The trainer's logprobs are of the whole softmax; samples from a cut one would give every ratio a bias.
    """
    if purpose == TRAINING_PURPOSE and params.truncates:
        raise RolloutError(
            f"{params.truncation} in rollouts that a policy is trained on",
            fix="train without top_k, top_p and min_p; truncate in evaluation and chat only",
        )


def sampled_logprobs(logits_BV: Tensor, params: SamplingParams) -> Tensor:
    """(B, V) float32: log of the distribution that a token is drawn from; minus infinity where truncation removed it.

    logp = log softmax(logits / temperature), and after a truncation to the set K: logp - log sum_{v in K} exp(logp_v).
    `greedy` is not looked at. Logits of lower precision are computed in float32.
    """
    logp_BV = scaled_log_softmax(logits_BV, params.temperature)
    if not params.truncates:
        return logp_BV
    logp_BV = logp_BV.masked_fill(~_kept(logp_BV, params), -torch.inf)
    return logp_BV - logp_BV.logsumexp(dim=-1, keepdim=True)


def _kept(logp_BV: Tensor, params: SamplingParams) -> Tensor:
    """(B, V) bool: tokens that survive top-k, top-p and min-p, each on the renormalised rest of the one before."""
    sorted_BV, order_BV = logp_BV.sort(dim=-1, descending=True, stable=True)
    p_BV = sorted_BV.double().exp()
    keep_BV = torch.ones_like(p_BV, dtype=torch.bool)
    if params.top_k is not None:
        keep_BV[:, params.top_k :] = False
        p_BV = p_BV * keep_BV
    if params.top_p is not None and params.top_p < 1:
        before_BV = p_BV.cumsum(dim=-1) - p_BV
        keep_BV &= before_BV < params.top_p * p_BV.sum(dim=-1, keepdim=True)
        keep_BV[:, 0] = True
    if params.min_p:
        keep_BV &= p_BV >= params.min_p * p_BV[:, :1]
    return torch.zeros_like(keep_BV).scatter_(1, order_BV, keep_BV)


def sample_tokens(
    logits_UV: Tensor, keys_B: Tensor, counter_B: Tensor, params: SamplingParams, source_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(token_B int64, logp_B float32): one token per draw and its logprob under the sampled distribution.

    token = the smallest v with sum_{w <= v} p_w > u * sum p, where u = keyed_uniform(key, counter): the inverse
    cumulative distribution, summed in float64.  The search has two levels: sums of blocks of tokens, then the tokens of
    one block, so that no cumulative sum over the vocabulary is made.  A token of probability 0 is never drawn.
    Greedy takes the argmax; its logprob is that of softmax(logits / temperature).

    source_B: row of logits of each draw, ascending, on the CPU; None: draw b is from row b.  What is computed per row
    is computed once for all its draws.
    Rows whose logits are not finite give a NaN logprob and no error here. Rows go through in chunks of bounded memory.
    """
    if not params.truncates:
        source_b = None if source_B is None else source_B.to(logits_UV.device)
        return _draw(logits_UV, keys_B, counter_B, params.temperature, params.greedy, source_b)
    rows = _rows_at_a_time(logits_UV)
    parts = logits_UV.split(rows)
    if source_B is None:
        ends = [*range(rows, len(parts) * rows, rows), logits_UV.shape[0]]
    else:
        ends = torch.searchsorted(source_B, torch.arange(1, len(parts) + 1) * rows).tolist()
    found, first = [], 0
    for number, (logits_uV, end) in enumerate(zip(parts, ends, strict=True)):
        source_b = None if source_B is None else (source_B[first:end] - number * rows).to(logits_UV.device)
        logp_uV = sampled_logprobs(logits_uV, params)
        found.append(_draw(logp_uV, keys_B[first:end], counter_B[first:end], 1.0, False, source_b))
        first = end
    return torch.cat([token for token, _ in found]), torch.cat([logp for _, logp in found])


def _rows_at_a_time(x_UV: Tensor) -> int:
    elements = _CHUNK_ELEMENTS.get(x_UV.device.type, _CHUNK_ELEMENTS_ELSEWHERE)
    return max(1, elements // max(1, x_UV.shape[1]))


def _draw(
    scores_UV: Tensor, keys_B: Tensor, counter_B: Tensor, temperature: float, greedy: bool, source_B: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(token_B, logp_B) from softmax(scores / temperature), by weights w = exp((score - best score) / temperature)."""
    size = scores_UV.shape[1]
    best_U1, sums_Un = _weights_of_blocks(scores_UV, temperature)
    if source_B is None:
        source_B = torch.arange(scores_UV.shape[0], device=scores_UV.device)
    cdf_Bn = sums_Un.cumsum(dim=-1)[source_B]
    best_B1 = best_U1[source_B]
    if greedy:
        token_B = scores_UV.argmax(dim=-1)[source_B]
    else:
        # u is at most 1 - 2^-53, so u * total stays below the total after rounding too; the clamps are for NaN alone.
        target_B1 = keyed_uniform(keys_B, counter_B)[:, None] * cdf_Bn[:, -1:]
        block_B1 = torch.searchsorted(cdf_Bn, target_B1, right=True).clamp_(max=cdf_Bn.shape[1] - 1)
        before_B1 = torch.where(block_B1 > 0, cdf_Bn.gather(1, (block_B1 - 1).clamp(min=0)), 0.0)
        column_Bk = block_B1 * _BLOCK + torch.arange(_BLOCK, device=scores_UV.device)
        chosen_Bk = at_least_float32(scores_UV[source_B[:, None], column_Bk.clamp(max=size - 1)])
        w_Bk = ((chosen_Bk - best_B1) / temperature).exp().masked_fill(column_Bk >= size, 0.0)
        inside_Bk = w_Bk.cumsum(dim=-1, dtype=torch.float64)
        within_B1 = torch.searchsorted(inside_Bk, target_B1 - before_B1, right=True)
        # Rounding may leave the rest of the target at the block's end: its last token that has weight is the one.
        last_B1 = torch.searchsorted(inside_Bk, inside_Bk[:, -1:].contiguous())
        token_B = (block_B1 * _BLOCK + torch.minimum(within_B1, last_B1))[:, 0].clamp_(max=size - 1)
    score_B = at_least_float32(scores_UV[source_B, token_B])
    logp_B = (score_B - best_B1[:, 0]) / temperature - cdf_Bn[:, -1].log()
    return token_B, logp_B.to(score_B.dtype)


def _weights_of_blocks(scores_UV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Best score (U, 1) of each row, and the sum (U, n) float64 of the weights of each block of its tokens."""
    rows, size = _rows_at_a_time(scores_UV), scores_UV.shape[1]
    blocks = -(-size // _BLOCK)
    best, sums = [], []
    w_uV: Tensor | None = None
    for part_uV in scores_UV.split(rows):
        wide_uV = at_least_float32(part_uV)
        if w_uV is None:
            w_uV = wide_uV.new_zeros((wide_uV.shape[0], blocks * _BLOCK))
        best.append(wide_uV.amax(dim=-1, keepdim=True))
        used_uV = w_uV[: wide_uV.shape[0]]
        inner_uV = used_uV[:, :size]
        torch.sub(wide_uV, best[-1], out=inner_uV)
        if temperature != 1.0:
            inner_uV.div_(temperature)
        inner_uV.exp_()
        sums.append(used_uV.view(-1, blocks, _BLOCK).sum(dim=-1, dtype=torch.float64))
    return torch.cat(best), torch.cat(sums)
