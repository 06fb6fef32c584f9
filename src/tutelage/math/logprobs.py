"""Log-probabilities and entropy over the vocabulary, from logits or straight from the hidden states.

Shapes: N flat tokens, n of one chunk, V vocabulary, H hidden, C candidate tokens.

Everything is computed in float32 at least (float64 stays float64), also for bfloat16 logits, and in nats. Temperature
divides the logits, so the distribution is the one that was sampled from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tutelage.errors import ConfigError, ShapeError
from tutelage.math.linear_head import LinearHead, linear_outputs
from tutelage.math.masking import at_least_float32


def require_temperature(temperature: float) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(
            f"temperature is {temperature}, which is not a finite number above 0",
            fix="greedy decoding has no distribution to train on; use a temperature above 0",
        )


def scaled_log_softmax(logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) over the last dimension, in float32 at least. Raises ConfigError."""
    require_temperature(temperature)
    wide_NV = at_least_float32(logits_NV)
    return torch.log_softmax(wide_NV if temperature == 1.0 else wide_NV / temperature, dim=-1)


def _gather_targets(logp_NV: Tensor, targets_N: Tensor) -> Tensor:
    if logp_NV.shape[:-1] != targets_N.shape:
        raise ShapeError(
            f"logits {tuple(logp_NV.shape)} do not fit targets {tuple(targets_N.shape)}",
            fix="pass one row of logits for each target",
        )
    return logp_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)


def _entropy_of(logp_NV: Tensor) -> Tensor:
    p_NV = logp_NV.exp()
    # 0 log 0 is 0: a token of probability 0 (a logit of minus infinity) must give 0, and a gradient of 0, not NaN.
    return -(p_NV * logp_NV.masked_fill(p_NV == 0, 0.0)).sum(dim=-1)


def logprobs_from_logits(logits_NV: Tensor, targets_N: Tensor, temperature: float = 1.0) -> Tensor:
    """logp_N = logits[target] / temperature - logsumexp(logits / temperature), in nats.

    logits_NV: (..., V); targets_N: (...) token ids, all in [0, V): there is no id that is skipped, -100 fails.
    Raises ConfigError for a temperature that is not above 0, ShapeError when the shapes do not fit.
    """
    return _gather_targets(scaled_log_softmax(logits_NV, temperature), targets_N)


def entropy_from_logits(logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """entropy_N = - sum_v p_v log p_v in nats, p = softmax(logits / temperature); between 0 and log V.

    Logits of minus infinity contribute 0 to the value and to the gradient. Raises ConfigError.
    """
    return _entropy_of(scaled_log_softmax(logits_NV, temperature))


@dataclass(frozen=True, eq=False)
class Asked:
    """What is read of the distribution before each target, besides the logprob of the target.

    entropy        - sum_v p_v log p_v.
    log_collision  log sum_v p_v^2, without gradient.
    candidates     (N, C) token ids whose logprobs are read.
    top            number of the likeliest tokens, whose ids and logprobs are read, without gradient; 0: none.
    below          those are looked for among ids 0 .. below - 1; None: among all.
    """

    entropy: bool = False
    log_collision: bool = False
    candidates: Tensor | None = None
    top: int = 0
    below: int | None = None


LOGPROB_ALONE = Asked()
CHUNK_BYTES = 256 << 20
"""Of the logits that are alive at once, where the head is one matrix."""


def distribution_outputs(logp_NV: Tensor, targets_N: Tensor, asked: Asked) -> dict[str, Tensor]:
    """By name, of logprobs over the whole vocabulary: logp (N,), and what is asked for.

    entropy, log_collision (N,);  candidate_logp (N, C);  top_ids (N, top) int64 and top_logp (N, top), likeliest first.
    Raises ShapeError when shapes do not fit, or for more likeliest tokens than there are.
    """
    found = {"logp": _gather_targets(logp_NV, targets_N)}
    if asked.entropy:
        found["entropy"] = _entropy_of(logp_NV)
    if asked.log_collision:
        found["log_collision"] = torch.logsumexp(2 * logp_NV.detach(), dim=-1)
    if asked.candidates is not None:
        found["candidate_logp"] = logp_NV.gather(-1, asked.candidates)
    if asked.top:
        within_NV = logp_NV.detach()[:, : asked.below]
        require_enough(asked.top, within_NV.shape[1])
        found["top_logp"], found["top_ids"] = within_NV.topk(asked.top, dim=-1)
    return found


def require_enough(top: int, tokens: int) -> None:
    if top > tokens:
        raise ShapeError(
            f"the {top} likeliest of {tokens} tokens were asked for", fix="ask for at most the whole vocabulary"
        )


def head_outputs(
    hidden_NH: Tensor,
    targets_N: Tensor,
    head: Callable[[Tensor], Tensor],
    asked: Asked = LOGPROB_ALONE,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    chunk_bytes: int = CHUNK_BYTES,
    keep_logits: bool = True,
) -> dict[str, Tensor]:
    """`distribution_outputs` under head(hidden) / temperature, without holding more than a bound of (N, V) logits.

    A head that is one matrix (`linear_head.LinearHead`), asked for logp and entropy: `linear_head.linear_outputs`, a
    block of the vocabulary at a time, with at most `chunk_bytes` of logits alive; three products of the head instead of
    four where all logits fit into it.
    keep_logits False: never held until the backward pass, for a caller with several forward passes before it.

    Any other head runs on `chunk_tokens` rows at a time. Where gradients are recorded, each chunk's logits are dropped
    after the forward pass and computed again in the backward pass: at most one chunk of logits, (chunk_tokens, V), is
    alive at any moment, for one more evaluation of the head. logp, entropy and candidate_logp carry gradient to the
    hidden states and to whatever the head holds, equal to the gradients of the unchunked computation.

    The head is called with (n, H), n <= chunk_tokens, and returns (n, V); also once with n = 0 when N is 0, so that its
    parameters stay part of the graph. Values are in nats. Raises ConfigError for a temperature that is not above 0, a
    chunk below 1 token or 1 byte, ShapeError when shapes do not fit.
    """
    require_temperature(temperature)
    require_chunks(hidden_NH, targets_N, chunk_tokens)
    if chunk_bytes < 1:
        raise ConfigError(f"chunk_bytes is {chunk_bytes}", fix=f"use at least 1 byte; {CHUNK_BYTES} is the default")
    plain = head.linear() if isinstance(head, LinearHead) else None
    if plain is not None and asked.candidates is None and not (asked.log_collision or asked.top):
        weight_VH, bias_V = plain
        return linear_outputs(
            hidden_NH,
            targets_N,
            weight_VH,
            bias_V,
            entropy=asked.entropy,
            temperature=temperature,
            chunk_bytes=chunk_bytes,
            keep_logits=keep_logits,
        )

    def of_chunk(hidden_nH: Tensor, targets_n: Tensor, asked_n: Asked) -> dict[str, Tensor]:
        return distribution_outputs(scaled_log_softmax(head(hidden_nH), temperature), targets_n, asked_n)

    return in_chunks(of_chunk, hidden_NH, targets_N, asked, chunk_tokens)


def require_chunks(hidden_NH: Tensor, targets_N: Tensor, chunk_tokens: int) -> None:
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens is {chunk_tokens}", fix="use at least 1 token; 1024 is the default")
    if hidden_NH.dim() != 2 or targets_N.shape != hidden_NH.shape[:1]:
        raise ShapeError(
            f"hidden {tuple(hidden_NH.shape)} does not fit targets {tuple(targets_N.shape)}",
            fix="pass hidden states (N, H) and targets (N,)",
        )


OfChunk = Callable[[Tensor, Tensor, Asked], dict[str, Tensor]]


def in_chunks(
    of_chunk: OfChunk, hidden_NH: Tensor, targets_N: Tensor, asked: Asked, chunk_tokens: int
) -> dict[str, Tensor]:
    """of_chunk on `chunk_tokens` rows at a time, computed again in the backward pass; its results after each other.

    Raises ConfigError for a chunk below 1 token, ShapeError when shapes do not fit.
    """
    require_chunks(hidden_NH, targets_N, chunk_tokens)
    candidates_NC = asked.candidates
    if candidates_NC is not None and (candidates_NC.dim() != 2 or candidates_NC.shape[0] != targets_N.shape[0]):
        raise ShapeError(
            f"candidates {tuple(candidates_NC.shape)} do not fit {targets_N.shape[0]} targets",
            fix="pass candidate ids (N, C)",
        )
    # split, not slices: the backward of a slice allocates a full (N, H) gradient for every chunk.
    hidden, targets = hidden_NH.split(chunk_tokens), targets_N.split(chunk_tokens)
    candidates = [None] * len(hidden) if candidates_NC is None else candidates_NC.split(chunk_tokens)
    found: list[dict[str, Tensor]] = []
    for hidden_nH, targets_n, candidates_nC in zip(hidden, targets, candidates, strict=True):
        asked_n = replace(asked, candidates=candidates_nC)
        if torch.is_grad_enabled():
            found.append(checkpoint(of_chunk, hidden_nH, targets_n, asked_n, use_reentrant=False))
        else:
            found.append(of_chunk(hidden_nH, targets_n, asked_n))
    return {name: torch.cat([chunk[name] for chunk in found]) for name in found[0]}
