"""Log-probabilities and entropy over the vocabulary, from logits or straight from the hidden states.

Shapes: N flat tokens, V vocabulary, H hidden. Everything is computed in float32 at least (float64 stays float64), also
for bfloat16 logits, and in nats. Temperature divides the logits, so the distribution is the one that was sampled from.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tutelage.errors import ConfigError, ShapeError
from tutelage.math.masking import at_least_float32


def _require_temperature(temperature: float) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError(
            f"temperature is {temperature}, which is not a finite number above 0",
            fix="greedy decoding has no distribution to train on; use a temperature above 0",
        )


def scaled_log_softmax(logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) over the last dimension, in float32 at least. Raises ConfigError."""
    _require_temperature(temperature)
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


def head_logprobs(
    hidden_NH: Tensor,
    targets_N: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(logp_N, entropy_N or None) of the targets under head(hidden), without ever holding (N, V) logits.

    The head runs on `chunk_tokens` rows at a time. Where gradients are recorded, each chunk's logits are dropped after
    the forward pass and computed again in the backward pass: at most one chunk of logits, (chunk_tokens, V), is alive
    at any moment, for one more evaluation of the head. Both outputs carry gradient to the hidden states and to whatever
    the head holds, equal to the gradients of the unchunked computation.

    The head is called with (n, H), n <= chunk_tokens, and returns (n, V); also once with n = 0 when N is 0, so that its
    parameters stay part of the graph. Values are in nats. Raises ConfigError for a temperature that is not above 0 or a
    chunk below 1 token, ShapeError when shapes do not fit.
    """
    _require_temperature(temperature)
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens is {chunk_tokens}", fix="use at least 1 token; 1024 is the default")
    if hidden_NH.dim() != 2 or targets_N.shape != hidden_NH.shape[:1]:
        raise ShapeError(
            f"hidden {tuple(hidden_NH.shape)} does not fit targets {tuple(targets_N.shape)}",
            fix="pass hidden states (N, H) and targets (N,)",
        )

    def chunk_outputs(hidden_nH: Tensor, targets_n: Tensor) -> tuple[Tensor, ...]:
        logp_nV = scaled_log_softmax(head(hidden_nH), temperature)
        logp_n = _gather_targets(logp_nV, targets_n)
        return (logp_n, _entropy_of(logp_nV)) if with_entropy else (logp_n,)

    # split, not slices: the backward of a slice allocates a full (N, H) gradient for every chunk.
    outputs: list[tuple[Tensor, ...]] = []
    for hidden_nH, targets_n in zip(hidden_NH.split(chunk_tokens), targets_N.split(chunk_tokens), strict=True):
        if torch.is_grad_enabled():
            outputs.append(checkpoint(chunk_outputs, hidden_nH, targets_n, use_reentrant=False))
        else:
            outputs.append(chunk_outputs(hidden_nH, targets_n))
    columns = [torch.cat(column) for column in zip(*outputs, strict=True)]
    return columns[0], columns[1] if with_entropy else None
