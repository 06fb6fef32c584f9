"""Logprobs and entropy against float64 loops of the definition; the chunked head against the unchunked one."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from scipy import stats as scipy_stats
from torch import Tensor, nn

from tutelage.errors import ConfigError, ShapeError
from tutelage.math.logprobs import Asked, entropy_from_logits, head_outputs, logprobs_from_logits


def softmax_row(logits: list[float], temperature: float) -> list[float]:
    top = max(logits)
    powers = [math.exp((z - top) / temperature) for z in logits]
    return [p / math.fsum(powers) for p in powers]


def random_logits(n: int, v: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(n, v, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_logprobs_and_entropy_match_the_definition(temperature: float) -> None:
    logits, targets = random_logits(6, 11), torch.tensor([0, 10, 3, 3, 7, 1])
    logp = logprobs_from_logits(logits, targets, temperature)
    entropy = entropy_from_logits(logits, temperature)
    for i, row in enumerate(logits.tolist()):
        p = softmax_row(row, temperature)
        assert logp[i].item() == pytest.approx(math.log(p[targets[i]]), abs=1e-12)
        assert entropy[i].item() == pytest.approx(float(scipy_stats.entropy(p)), abs=1e-12)


def test_two_tokens_by_hand() -> None:
    logits = torch.tensor([[math.log(3.0), 0.0]])  # p = 3/4, 1/4
    assert logprobs_from_logits(logits, torch.tensor([0])).item() == pytest.approx(math.log(0.75))
    assert entropy_from_logits(logits).item() == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    # temperature 1/2 squares the odds: 9 to 1
    assert logprobs_from_logits(logits, torch.tensor([1]), 0.5).item() == pytest.approx(math.log(0.1))


def test_limits_of_the_entropy() -> None:
    assert entropy_from_logits(torch.zeros(1, 50)).item() == pytest.approx(math.log(50))
    assert entropy_from_logits(torch.tensor([[100.0, 0.0, 0.0]])).item() == pytest.approx(0.0, abs=1e-6)


def test_excluded_tokens_count_as_zero_in_value_and_gradient() -> None:
    full = torch.tensor([[1.0, 2.0, float("-inf"), 0.5]], requires_grad=True)
    short = torch.tensor([[1.0, 2.0, 0.5]], requires_grad=True)
    (entropy_from_logits(full) + logprobs_from_logits(full, torch.tensor([1]))).sum().backward()
    (entropy_from_logits(short) + logprobs_from_logits(short, torch.tensor([1]))).sum().backward()
    torch.testing.assert_close(entropy_from_logits(full), entropy_from_logits(short))
    assert full.grad is not None
    assert short.grad is not None
    torch.testing.assert_close(full.grad[:, [0, 1, 3]], short.grad)
    assert full.grad[0, 2] == 0
    assert logprobs_from_logits(full, torch.tensor([2])).item() == float("-inf")


def test_bfloat16_logits_are_computed_in_float32() -> None:
    logits = random_logits(4, 300).bfloat16()
    targets = torch.tensor([1, 2, 3, 4])
    exact = logprobs_from_logits(logits.double(), targets, 0.7)
    logp = logprobs_from_logits(logits, targets, 0.7)
    assert logp.dtype == torch.float32
    assert entropy_from_logits(logits).dtype == torch.float32
    torch.testing.assert_close(logp.double(), exact, rtol=0, atol=2e-6)  # bfloat16 arithmetic is off by 1e-2


def test_a_large_common_offset_of_the_logits_costs_no_precision() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    exact = logprobs_from_logits(logits.double(), torch.tensor([2])).item()
    assert logprobs_from_logits(logits - 4096.0, torch.tensor([2])).item() == pytest.approx(exact, abs=1e-6)


def test_gradcheck() -> None:
    logits = random_logits(3, 5).requires_grad_(True)
    targets = torch.tensor([0, 4, 2])
    assert torch.autograd.gradcheck(lambda z: logprobs_from_logits(z, targets, 0.7), logits)
    assert torch.autograd.gradcheck(lambda z: entropy_from_logits(z, 0.7), logits)


def test_bad_temperatures_targets_and_shapes_are_refused() -> None:
    logits = torch.zeros(2, 3)
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="temperature"):
            logprobs_from_logits(logits, torch.tensor([0, 1]), temperature)
    with pytest.raises(ShapeError):
        logprobs_from_logits(logits, torch.tensor([0]))
    with pytest.raises(RuntimeError):  # no id is skipped
        logprobs_from_logits(logits, torch.tensor([0, -100]))


# --- the chunked head -------------------------------------------------------------------------------------------------

N, H, V, CHUNK = 23, 6, 40, 5


class RecordingHead:
    """A linear head that notes the size of every tensor it returns and how many of them are alive at once."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight, self.bias = weight, bias
        self.rows: list[int] = []
        self.alive: set[int] = set()
        self.most_alive = 0

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = hidden @ self.weight.T + self.bias
        self.rows.append(len(logits))
        key = len(self.rows)
        self.alive.add(key)
        self.most_alive = max(self.most_alive, len(self.alive))
        weakref.finalize(logits, self.alive.discard, key)
        return logits


def head_case() -> tuple[Tensor, Tensor, RecordingHead, Tensor]:
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, H, dtype=torch.float64, generator=random).requires_grad_(True)
    weight = torch.randn(V, H, dtype=torch.float64, generator=random).requires_grad_(True)
    bias = torch.randn(V, dtype=torch.float64, generator=random).requires_grad_(True)
    targets = torch.randint(0, V, (N,), generator=random)
    return hidden, targets, RecordingHead(weight, bias), torch.randn(2, N, dtype=torch.float64, generator=random)


def saved_elements(work: Any) -> tuple[int, int]:
    """(elements of the largest tensor autograd keeps for the backward pass, elements of all of them together)."""
    sizes: list[int] = [0]

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        work()
    return max(sizes), sum(sizes)


@pytest.mark.parametrize("chunk", [1, CHUNK, N, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_values_and_gradients_are_the_unchunked_ones(chunk: int, temperature: float) -> None:
    hidden, targets, head, weights = head_case()
    leaves = [hidden, head.weight, head.bias]
    found = head_outputs(hidden, targets, head, Asked(entropy=True), temperature=temperature, chunk_tokens=chunk)
    logp, entropy = found["logp"], found["entropy"]
    chunked = torch.autograd.grad((weights[0] * logp + weights[1] * entropy).sum(), leaves)
    logits = head(hidden)
    plain_logp = logprobs_from_logits(logits, targets, temperature)
    plain_entropy = entropy_from_logits(logits, temperature)
    plain = torch.autograd.grad((weights[0] * plain_logp + weights[1] * plain_entropy).sum(), leaves)
    torch.testing.assert_close(logp, plain_logp, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, plain_entropy, rtol=0, atol=1e-12)
    for ours, theirs in zip(chunked, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_the_head_never_returns_more_than_a_chunk_and_one_chunk_is_alive() -> None:
    hidden, targets, head, weights = head_case()
    logp = head_outputs(hidden, targets, head, chunk_tokens=CHUNK)["logp"]
    assert head.rows == [5, 5, 5, 5, 3]
    assert not head.alive  # nothing kept for the backward pass
    (weights[0] * logp).sum().backward()
    assert sorted(head.rows) == sorted([5, 5, 5, 5, 3] * 2)  # once forward, once again in backward
    assert head.most_alive == 1


def test_nothing_of_the_size_of_the_logits_is_saved_for_the_backward_pass() -> None:
    hidden, targets, head, _ = head_case()
    largest, together = saved_elements(lambda: head_outputs(hidden, targets, head, chunk_tokens=CHUNK))
    assert largest < CHUNK * V
    assert together < N * V
    largest, together = saved_elements(lambda: logprobs_from_logits(head(hidden), targets))
    assert largest >= N * V  # the measure sees logits where they are kept


def test_chunked_gradcheck_with_an_entropy_bonus() -> None:
    hidden, targets, head, _ = head_case()

    def loss(hidden_NH: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        found = head_outputs(
            hidden_NH,
            targets[:4],
            lambda h: h @ weight.T + bias,
            Asked(entropy=True),
            temperature=0.7,
            chunk_tokens=3,
        )
        return (found["logp"] + 0.1 * found["entropy"]).sum()

    assert torch.autograd.gradcheck(loss, (hidden[:4].detach().requires_grad_(True), head.weight, head.bias))


def test_without_grad_and_without_entropy() -> None:
    hidden, targets, head, _ = head_case()
    with torch.no_grad():
        found = head_outputs(hidden, targets, head, chunk_tokens=CHUNK)
    assert found.keys() == {"logp"}
    logp = found["logp"]
    assert not logp.requires_grad
    torch.testing.assert_close(logp, torch.log_softmax(head(hidden), -1)[torch.arange(N), targets].detach())


def test_no_tokens_still_reach_the_head_and_its_parameters() -> None:
    head = nn.Linear(H, V)
    found = head_outputs(torch.zeros(0, H), torch.zeros(0, dtype=torch.long), head, Asked(entropy=True))
    assert found["logp"].shape == (0,)
    (found["logp"].sum() + found["entropy"].sum()).backward()
    assert head.weight.grad is not None
    assert not head.weight.grad.any()


def test_a_bfloat16_head_gives_float32_logprobs() -> None:
    head = nn.Linear(H, V).bfloat16()
    hidden = torch.randn(7, H, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(7)
    logp = head_outputs(hidden, targets, head, chunk_tokens=7)["logp"]
    assert logp.dtype == torch.float32
    exact = torch.log_softmax(head(hidden).double(), -1)[torch.arange(7), targets]
    torch.testing.assert_close(logp.double(), exact, rtol=0, atol=1e-5)


def test_bad_arguments_of_the_head_are_refused() -> None:
    hidden, targets, head, _ = head_case()
    with pytest.raises(ConfigError, match="chunk_tokens is 0"):
        head_outputs(hidden, targets, head, chunk_tokens=0)
    with pytest.raises(ConfigError, match="temperature"):
        head_outputs(hidden, targets, head, temperature=0.0)
    with pytest.raises(ShapeError):
        head_outputs(hidden, targets[:-1], head)
