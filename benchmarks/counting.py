"""Model FLOPs of a pass, by counting multiplications with weight matrices.

Shapes: B sequences, N tokens, R positions that go through the output layer, H hidden, V vocabulary.

A token times a matrix of W weights is 2 W FLOPs (a multiplication and an addition for each weight). A forward pass is

    2 * trunk * N + 2 * head * R

with `trunk` the weights of the matrices in the blocks (embeddings are looked up, not multiplied) and `head` = H * V.
Forward and backward together are three forward passes: the backward pass multiplies by each matrix for the gradient of
its input and again for that of its weights. Not counted: attention scores, norms, activations, heads with one output,
the optimiser, and whatever is computed twice (the output layer in the backward pass). So the FLOP/s are those of useful
work, and a share of the matrix multiply rate is a lower bound of what the machine did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

TRAINING = 3
"""Forward passes that a forward and a backward pass are worth."""


@dataclass(frozen=True)
class Weights:
    """trunk: matrix weights in the blocks; head: of the output layer, also where it is tied to the embeddings."""

    trunk: int
    head: int


def count_weights(trunk: nn.Module, head: nn.Module | None) -> Weights:
    """Parameters of two or more dimensions, without those of embeddings."""
    embeddings = {id(p) for m in trunk.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    matrices = [p for p in trunk.parameters() if p.ndim >= 2 and id(p) not in embeddings]
    output = 0 if head is None else sum(p.numel() for p in head.parameters() if p.ndim >= 2)
    return Weights(sum(p.numel() for p in matrices), output)


def forward_flops(weights: Weights, tokens: int, head_positions: int) -> int:
    """2 trunk N + 2 head R."""
    return 2 * weights.trunk * tokens + 2 * weights.head * head_positions


def update_flops(weights: Weights, tokens: int, head_positions: int) -> int:
    """Forward and backward of one pass over a mini-batch."""
    return TRAINING * forward_flops(weights, tokens, head_positions)


def ppo_step_flops(weights: Weights, prompt_lens: Sequence[int], new_tokens: int, epochs: int) -> int:
    """A PPO step whose every response has `new_tokens` tokens, with four models of this size.

    Generation: prompts through the trunk and one position of each through the head; then `new_tokens` - 1 steps, since
    the prefill gives the first token. Four passes without gradient, two of them with the output layer (policy and
    reference) and two without (critic and reward model). Then `epochs` updates of actor and critic.
    """
    rows = len(prompt_lens)
    steps, responses = rows * (new_tokens - 1), rows * new_tokens
    tokens = sum(prompt_lens) + responses
    generation = forward_flops(weights, sum(prompt_lens), rows) + forward_flops(weights, steps, steps)
    scoring = 2 * forward_flops(weights, tokens, responses) + 2 * forward_flops(weights, tokens, 0)
    return generation + scoring + epochs * (update_flops(weights, tokens, responses) + update_flops(weights, tokens, 0))


def padding_share(lens: Sequence[int]) -> float:
    """The share of a right-padded (B, longest) batch that is padding."""
    return 1 - sum(lens) / (len(lens) * max(lens))


def predicted_padding_ratio(weights: Weights, lens: Sequence[int], head_positions: int) -> float:
    """FLOPs of a padded pass over those of a packed one: the trunk runs on padding too, the output layer does not."""
    padded = forward_flops(weights, len(lens) * max(lens), head_positions)
    return padded / forward_flops(weights, sum(lens), head_positions)
