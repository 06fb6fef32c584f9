"""Sums, means and loss weights over the tokens that count.

Shapes: B sequences, T response tokens. A mask may be bool, integer or float; a token counts where the mask is not 0.
Values where the mask is 0 are never read, so NaN or infinity there has no effect. Half precision is widened to float32.
"""

from __future__ import annotations

from torch import Tensor, arange, float32, float64, full, int64, zeros_like

from tutelage.errors import ConfigError, ShapeError, closest

AGGREGATIONS: tuple[str, ...] = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_horizon")


def at_least_float32(x: Tensor) -> Tensor:
    """x itself when it is float32 or float64, else x in float32 (bool, integer, half precision)."""
    return x if x.dtype in (float32, float64) else x.to(float32)


def require_same_shape(**tensors: Tensor | None) -> None:
    """Raise ShapeError, naming every shape, unless all tensors (None left out) have one shape."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        seen = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ShapeError(f"shapes differ: {seen}", fix="pass tensors of one shape; nothing is broadcast here")


def require_matrix(**tensors: Tensor) -> None:
    """Raise ShapeError unless every tensor has the two dimensions (B, T)."""
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}", fix="pass a (B, T) tensor")


def masked_values(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """x where the mask counts and 0 elsewhere, in float32 at least; NaN under the mask does not survive."""
    require_same_shape(x=x_BT, mask=mask_BT)
    return at_least_float32(x_BT).masked_fill(mask_BT == 0, 0.0)


def masked_row_sum(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B,) sum over the tokens that count, in float32 at least."""
    return masked_values(x_BT, mask_BT).sum(dim=1)


def masked_sum(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """sum of x over the tokens that count: a scalar; 0 when none does. Any shape. Raises ShapeError."""
    return masked_values(x_BT, mask_BT).sum()


def masked_mean(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """sum of x over the tokens that count / their number: a scalar; 0 when none does. Any shape. Raises ShapeError."""
    return masked_sum(x_BT, mask_BT) / (mask_BT != 0).sum().clamp(min=1)


def masked_var(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sample variance over the tokens that count: sum (x - mean)^2 / (N - 1), a scalar; 0 when N < 2.

    Any shape. Raises ShapeError.
    """
    centred_BT = masked_values(x_BT, mask_BT) - masked_mean(x_BT, mask_BT)
    return masked_sum(centred_BT.square(), mask_BT) / ((mask_BT != 0).sum() - 1).clamp(min=1)


def weighted_sum(x_BT: Tensor, weight_BT: Tensor) -> Tensor:
    """sum of x * weight over the tokens whose weight is not 0: a scalar; x is not read where the weight is 0.

    With weights from `aggregation_weights` of the whole mini-batch, the sums of its parts add up to the loss of the
    whole, however it is cut. Any shape. Raises ShapeError.
    """
    return (masked_values(x_BT, weight_BT) * weight_BT).sum()


def last_true(mask_BT: Tensor) -> Tensor:
    """index_B (int64) of the last token with mask 1 in every row, -1 where there is none. Raises ShapeError."""
    require_matrix(mask=mask_BT)
    rows, tokens = mask_BT.shape
    if tokens == 0:
        return full((rows,), -1, dtype=int64, device=mask_BT.device)
    index_T = arange(tokens, device=mask_BT.device)
    return index_T.expand(rows, tokens).masked_fill(mask_BT == 0, -1).amax(dim=1)


def aggregation_weights(mask_BT: Tensor, kind: str, horizon: int | None = None) -> Tensor:
    """The weight of every token in a separable loss, loss = sum weight_BT * loss_BT; float32 (B, T), 0 under mask 0.

    n_b tokens count in row b, N in all rows, and B' rows have n_b > 0:

        token_mean            1 / N            sums to 1       every token alike (DAPO, Yu et al. 2025)
        seq_mean_token_mean   1 / (B' n_b)     sums to 1       every sequence alike (GRPO, Shao et al. 2024)
        seq_mean_token_sum    1 / B'           sums to N / B'  the loss of a whole sequence, as REINFORCE has it
        constant_horizon      1 / (B horizon)  sums to N / (B horizon)    (Dr. GRPO, Liu et al. 2025)

    An empty row weighs 0. The two sequence means leave it out of their denominator (B'), so filler rows change nothing.
    `constant_horizon` counts it (B): its denominator is a constant by definition, so the caller passes no filler rows.
    `horizon`, in tokens, is read by `constant_horizon` alone. All weights are 0 when no token counts.
    Compute the weights once over the global mini-batch; sum the losses of its parts (`weighted_sum`).

    Raises ConfigError for an unknown kind or a horizon that is missing or below 1, ShapeError unless mask is (B, T).
    """
    require_matrix(mask=mask_BT)
    real_BT = (mask_BT != 0).to(float32)
    tokens_B1 = real_BT.sum(dim=1, keepdim=True)
    filled_rows = (tokens_B1 > 0).sum().clamp(min=1)
    if kind == "token_mean":
        return real_BT / tokens_B1.sum().clamp(min=1)
    if kind == "seq_mean_token_mean":
        return real_BT / (tokens_B1.clamp(min=1) * filled_rows)
    if kind == "seq_mean_token_sum":
        return real_BT / filled_rows
    if kind == "constant_horizon":
        if horizon is None or horizon < 1:
            raise ConfigError(
                f"constant_horizon needs a horizon of at least 1 token, got {horizon}",
                fix="set it to the longest response a rollout may have",
            )
        return real_BT / (len(mask_BT) * horizon) if len(mask_BT) else zeros_like(real_BT)
    raise ConfigError(
        f"{kind!r} is not an aggregation.{closest(kind, AGGREGATIONS)}", fix=f"choose one of {', '.join(AGGREGATIONS)}"
    )
