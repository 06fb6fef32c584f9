"""Noise on input embeddings while a model is trained (NEFTune, Jain et al. 2023, arXiv:2310.05914).

Shapes: B sequences, N flat tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tutelage.errors import ConfigError
from tutelage.math.keyed import keyed_bits, keyed_uniform
from tutelage.models.trunk import Trunk
from tutelage.types import Ragged


def neftune_noise(lens_B: Tensor, keys_B: Tensor, alpha: float, width: int) -> Tensor:
    """(N, H): u * alpha / sqrt(L H), u uniform in [-1, 1), L the tokens of the token's own sequence, H the width.

    The draw of token t of a sequence depends on the sequence's key, t and the channel alone: never on how sequences are
    packed or spread over ranks.  Raises ConfigError unless alpha > 0.
    """
    if not alpha > 0:
        raise ConfigError(f"the noise scale alpha is {alpha}", fix="use a number above 0; 5 is usual")
    starts_B = lens_B.cumsum(0) - lens_B
    within_N = torch.arange(int(lens_B.sum())) - torch.repeat_interleave(starts_B, lens_B)
    keys_N = keyed_bits(torch.repeat_interleave(keys_B, lens_B), within_N)
    u_NH = 2.0 * keyed_uniform(keys_N[:, None], torch.arange(width)[None, :]) - 1.0
    scale_N = torch.repeat_interleave(alpha / (lens_B.double() * width).sqrt(), lens_B)
    return (u_NH * scale_N[:, None]).float()


@contextmanager
def embedding_noise(trunk: Trunk, tokens: Ragged, keys_B: Tensor, alpha: float) -> Iterator[None]:
    """Inside, the input embeddings of these sequences, run as one batch, have noise added.  Raises ConfigError.

    Refused where rows are cut over ranks: each would need its own part of the noise.
    """
    if trunk.tokens is not None:
        raise ConfigError(
            "noise on embeddings is not made for sequences that are cut over ranks",
            fix="set context and sequence to 1 in the layout, or leave sft.neftune_alpha out",
        )
    embeddings = trunk.model.get_input_embeddings()

    def add(module: Any, inputs: Any, out: Tensor) -> Tensor:
        noise_NH = neftune_noise(tokens.lens.cpu(), keys_B, alpha, out.shape[-1])
        noise = noise_NH[None] if trunk.layout == "packed" else tokens.with_flat(noise_NH).padded()
        return out + noise.to(out)

    hook = embeddings.register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()
