"""The output layer that is one matrix: values, gradients and memory, against a float64 softmax of the whole logits."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tutelage.errors import ConfigError, ShapeError
from tutelage.math import linear_head
from tutelage.math.logprobs import Asked, head_outputs

N, H, V, CHUNK = 23, 6, 40, 5
ROW = V * 8  # bytes of a row of float64 logits


class Matrix:
    """A head that says that it is one matrix, and must then never be called."""

    def __init__(self, weight_VH: Tensor, bias_V: Tensor | None = None) -> None:
        self.weight_VH, self.bias_V = weight_VH, bias_V

    def __call__(self, hidden_nH: Tensor) -> Tensor:
        raise AssertionError("the matrix itself is read")

    def linear(self) -> tuple[Tensor, Tensor | None]:
        return self.weight_VH, self.bias_V

    def opaque(self) -> Any:
        """The same head, which does not say what it is made of."""
        return lambda hidden_nH: nn.functional.linear(hidden_nH, self.weight_VH, self.bias_V)


def case(dtype: torch.dtype = torch.float64, *, bias: bool = True, rows: int = N) -> tuple[Tensor, Tensor, Matrix]:
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, H, dtype=torch.float64, generator=random).to(dtype).requires_grad_(True)
    weight = torch.randn(V, H, dtype=torch.float64, generator=random).to(dtype).requires_grad_(True)
    offset = torch.randn(V, dtype=torch.float64, generator=random).to(dtype).requires_grad_(True)
    targets = torch.randint(0, V, (rows,), generator=random)
    return hidden, targets, Matrix(weight, offset if bias else None)


def factors(rows: int = N) -> Tensor:
    return torch.randn(2, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def whole(hidden: Tensor, targets: Tensor, head: Matrix, temperature: float) -> tuple[Tensor, Tensor]:
    """logp and entropy from a softmax of all logits."""
    z = hidden @ head.weight_VH.T
    z = (z if head.bias_V is None else z + head.bias_V) / temperature
    p = torch.softmax(z, dim=-1)
    return p.log()[torch.arange(len(targets)), targets], -(p * p.log()).sum(-1)


def leaves(hidden: Tensor, head: Matrix) -> list[Tensor]:
    return [hidden, head.weight_VH] if head.bias_V is None else [hidden, head.weight_VH, head.bias_V]


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan():
    """What is read before it is written shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.fixture(params=["wide", "narrow", "small"])
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Blocks of the whole vocabulary; of some of its columns for more tokens at a time; of 9 tokens and 7 columns, also
    where all logits are kept."""
    if request.param != "wide":
        monkeypatch.setattr(linear_head, "FEWEST_COLUMNS", 7)
    if request.param == "small":
        monkeypatch.setitem(linear_head.BLOCK_BYTES, "cpu", 9 * 7 * 8)
    return str(request.param)


BUDGETS = [
    pytest.param(1000 * ROW, id="kept"),
    pytest.param(N * ROW, id="kept-exactly"),
    pytest.param(CHUNK * ROW, id="chunks"),
    1,
]


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("asked", ["logp", "entropy", "both", "entropy unused"])
def test_values_and_gradients_are_those_of_the_whole_softmax(
    budget: int, bias: bool, temperature: float, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(linear_head.TILE_BYTES, "cpu", 3 * V * 4)  # tiles of 3 rows, and a smaller one in each chunk
    hidden, targets, head = case(bias=bias)
    by_logp, by_entropy = factors()
    found = head_outputs(
        hidden, targets, head, Asked(entropy=asked != "logp"), temperature=temperature, chunk_bytes=budget
    )
    logp, entropy = whole(hidden, targets, head, temperature)

    def loss(logp_N: Tensor, entropy_N: Tensor) -> Tensor:
        used = {"entropy": [by_entropy * entropy_N], "both": [by_logp * logp_N, by_entropy * entropy_N]}
        return torch.stack(used.get(asked, [by_logp * logp_N])).sum()

    torch.testing.assert_close(found["logp"], logp, rtol=0, atol=1e-12)
    if asked != "logp":
        torch.testing.assert_close(found["entropy"], entropy, rtol=0, atol=1e-12)
    ours = torch.autograd.grad(loss(found["logp"], found.get("entropy", entropy)), leaves(hidden, head))
    theirs = torch.autograd.grad(loss(logp, entropy), leaves(hidden, head))
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("budget", [1000 * ROW, 3 * ROW])
def test_gradcheck(budget: int) -> None:
    hidden, targets, head = case(rows=4)
    assert head.bias_V is not None

    def of(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor) -> tuple[Tensor, Tensor]:
        matrix = Matrix(weight_VH, bias_V)
        found = head_outputs(hidden_NH, targets, matrix, Asked(entropy=True), temperature=0.7, chunk_bytes=budget)
        return found["logp"], found["entropy"]

    assert torch.autograd.gradcheck(of, (hidden, head.weight_VH, head.bias_V))


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("budget", [1 << 30, 7 * V * 4])
def test_in_float32_it_is_the_head_that_says_nothing_of_itself(budget: int) -> None:
    hidden, targets, head = case(torch.float32)
    weights = factors().float()
    results = []
    for used in (head, head.opaque()):
        found = head_outputs(hidden, targets, used, Asked(entropy=True), temperature=0.7, chunk_bytes=budget)
        loss = (weights[0] * found["logp"] + weights[1] * found["entropy"]).sum()
        results.append([found["logp"], found["entropy"], *torch.autograd.grad(loss, leaves(hidden, head))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6 * float(theirs.detach().abs().max()))


def test_two_tokens_by_hand() -> None:
    """p = (3/4, 1/4) by h = log 3, W = (1, 0): d logp_0 / dh = 1 - 3/4, and d entropy / dh = -p0 p1 log(p0 / p1)."""
    hidden = torch.tensor([[math.log(3.0)]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    found = head_outputs(hidden, torch.tensor([0]), Matrix(weight), Asked(entropy=True))
    assert found["logp"].item() == pytest.approx(math.log(0.75))
    assert found["entropy"].item() == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    (by_logp,) = torch.autograd.grad(found["logp"].sum(), hidden, retain_graph=True)
    (by_entropy,) = torch.autograd.grad(found["entropy"].sum(), hidden)
    assert float(by_logp) == pytest.approx(0.25)
    assert float(by_entropy) == pytest.approx(-0.75 * 0.25 * math.log(3))


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("budget", [1 << 20, 1])
def test_excluded_tokens_count_as_zero_in_value_and_gradient(budget: int) -> None:
    hidden, targets, head = case()
    assert head.bias_V is not None
    without = torch.tensor([v for v in range(V) if v not in (0, V - 1)])
    with torch.no_grad():
        head.bias_V[[0, V - 1]] = -math.inf
        targets.clamp_(1, V - 2)
    short = Matrix(head.weight_VH[without].detach().requires_grad_(True), head.bias_V[without].detach())
    by_logp, by_entropy = factors()
    results = []
    for used, aim in ((head, targets), (short, targets - 1)):
        found = head_outputs(hidden, aim, used, Asked(entropy=True), chunk_bytes=budget)
        loss = (by_logp * found["logp"] + by_entropy * found["entropy"]).sum()
        results.append([found["logp"], found["entropy"], *torch.autograd.grad(loss, [hidden, used.weight_VH])])
    assert not results[0][3][[0, V - 1]].any()
    results[0][3] = results[0][3][without]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("budget", [1 << 20, 0.5])
def test_no_tokens_still_give_a_gradient_of_zero(budget: float) -> None:
    hidden, _, head = case(rows=0)
    budget = max(int(budget), 1)
    found = head_outputs(hidden, torch.zeros(0, dtype=torch.int64), head, Asked(entropy=True), chunk_bytes=budget)
    assert found["logp"].shape == found["entropy"].shape == (0,)
    grads = torch.autograd.grad(found["logp"].sum() + found["entropy"].sum(), leaves(hidden, head))
    assert [tuple(g.shape) for g in grads] == [(0, H), (V, H), (V,)]
    assert not any(bool(g.any()) for g in grads)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("budget", [1 << 20, 4 * ROW])
def test_a_graph_can_be_walked_twice(budget: int) -> None:
    hidden, targets, head = case()
    logp = head_outputs(hidden, targets, head, chunk_bytes=budget)["logp"]
    first = torch.autograd.grad(logp.sum(), leaves(hidden, head), retain_graph=True)
    second = torch.autograd.grad(logp.sum(), leaves(hidden, head))
    for one, two in zip(first, second, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("narrow")
def test_micro_batches_add_up_also_where_the_matrix_is_the_embedding_too() -> None:
    targets = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(1))
    grads = []
    for parts in ([N], [4, 10, 9]):
        embedding = case()[2].weight_VH.detach().clone().requires_grad_(True)
        for part in targets.split(parts):
            hidden = torch.tanh(nn.functional.embedding(part.flip(0), embedding))
            head_outputs(hidden, part, Matrix(embedding), chunk_bytes=3 * ROW)["logp"].sum().backward()
        assert embedding.grad is not None
        grads.append(embedding.grad)
    embedding = case()[2].weight_VH.detach().clone().requires_grad_(True)
    start = 0
    for count in [4, 10, 9]:
        part = targets[start : start + count]
        hidden, start = torch.tanh(embedding[part.flip(0)]), start + count
        torch.log_softmax(hidden @ embedding.T, -1)[torch.arange(count), part].sum().backward()
    assert embedding.grad is not None
    torch.testing.assert_close(grads[1], embedding.grad, rtol=0, atol=1e-12)
    assert float((grads[0] - grads[1]).abs().max()) > 1e-3  # another input: the flip is within a part


def test_a_frozen_matrix_gets_no_gradient_and_frozen_states_neither() -> None:
    hidden, targets, head = case(bias=False)
    head_outputs(hidden, targets, Matrix(head.weight_VH.detach()))["logp"].sum().backward()
    assert hidden.grad is not None
    before = hidden.grad.clone()
    head_outputs(hidden.detach(), targets, head)["logp"].sum().backward()
    assert head.weight_VH.grad is not None
    torch.testing.assert_close(hidden.grad, before, rtol=0, atol=0)
    assert not head_outputs(hidden.detach(), targets, Matrix(head.weight_VH.detach()))["logp"].requires_grad


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1 << 20, 4 * V * 2])
def test_bfloat16_rounds_logits_and_their_gradient_and_nothing_else(budget: int, narrow: str) -> None:
    """The softmax is of the rounded logits in float32, and what is rounded of the gradient is 1{v = y} - p as a whole:
    also where p is close to 1, and both are close to each other."""
    hidden, targets, head = case(torch.bfloat16, bias=False)
    with torch.no_grad():
        hidden *= 4.0
        targets[:] = (hidden @ head.weight_VH.T).argmax(-1)
    found = head_outputs(hidden, targets, head, Asked(entropy=True), chunk_bytes=budget)
    assert found["logp"].dtype == found["entropy"].dtype == torch.float32
    logits = (hidden.detach() @ head.weight_VH.detach().T).double().requires_grad_(True)  # rounded to bfloat16
    p = torch.softmax(logits, -1)
    logp = p.log()[torch.arange(N), targets]
    torch.testing.assert_close(found["logp"].double(), logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(found["entropy"].double(), -(p * p.log()).sum(-1), rtol=0, atol=1e-5)
    assert float(p.detach().amax()) > 0.999
    (by_logits,) = torch.autograd.grad(logp.sum(), logits)
    by_hidden, by_weight = torch.autograd.grad(found["logp"].sum(), [hidden, head.weight_VH])
    # a product rounds the gradient by the logits to bfloat16 (2^-9 relative), and its result: of the weight after each
    # chunk, of the states for each block; the sum of several in float32 is rounded once more.  1 - p itself is of
    # float32, so that a p next to 1 is off by 2^-23
    weight, states = head.weight_VH.detach().double(), hidden.detach().double()
    of_states = 2 if narrow == "wide" else 3
    cases = [(by_hidden, by_logits, weight, of_states), (by_weight, by_logits.T, states, 1 + math.ceil(N / 4))]
    for got, left, right, roundings in cases:
        error, size = (got.double() - left @ right).abs(), left.abs() @ right.abs()
        assert bool((error <= roundings * 2**-9 * size + 2**-23 * len(right) * float(right.abs().max())).all())
        assert float(size.max()) > 1.0


# --- memory -----------------------------------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """The number of elements of all storages that were made inside and are alive, of `least` elements or more."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.most = least, 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if not isinstance(x, Tensor):
                continue
            storage = x.untyped_storage()
            elements, key = storage.nbytes() // x.element_size(), storage._cdata
            if elements >= self.least and key not in known and key not in self.sizes:
                self.sizes[key] = elements
                weakref.finalize(storage, self.sizes.pop, key, None)
                self.most = max(self.most, sum(self.sizes.values()))
        return out


def most_alive(budget: int, head: Any, hidden: Tensor, targets: Tensor, least: int) -> int:
    with Alive(least) as alive:
        found = head_outputs(hidden, targets, head, Asked(entropy=True), chunk_tokens=CHUNK, chunk_bytes=budget)
        (found["logp"] + found["entropy"]).sum().backward()
    return alive.most


def test_columns_of_a_block_bound_what_is_alive_for_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens at once, 8 columns at a time: as many logits as of CHUNK tokens over the whole vocabulary."""
    monkeypatch.setitem(linear_head.TILE_BYTES, "cpu", 1)
    monkeypatch.setattr(linear_head, "FEWEST_COLUMNS", 8)
    hidden, targets, head = case(bias=False)
    frozen = Matrix(head.weight_VH.detach())
    assert most_alive(CHUNK * ROW, frozen, hidden, targets, N * 8) == N * 8
    monkeypatch.setitem(linear_head.BLOCK_BYTES, "cpu", N * 2 * 8)
    monkeypatch.setattr(linear_head, "FEWEST_COLUMNS", 2)
    assert most_alive(CHUNK * ROW, frozen, hidden, targets, N * 8) == 0  # the device's own bound: 2 columns


def test_one_buffer_of_one_chunk_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """H, N < a chunk's logits, so that what is counted are logits; a tile is one row."""
    monkeypatch.setitem(linear_head.TILE_BYTES, "cpu", 1)
    hidden, targets, head = case(bias=False)
    frozen = Matrix(head.weight_VH.detach())  # a gradient of the weight would be counted
    row = V
    assert most_alive(CHUNK * ROW, frozen, hidden, targets, CHUNK * row) == CHUNK * row
    assert most_alive(N * ROW, frozen, hidden, targets, CHUNK * row) == N * row  # kept, and written over
    assert (
        most_alive(N * ROW, frozen.opaque(), hidden, targets, CHUNK * row) >= 3 * CHUNK * row
    )  # the measure sees them
    # with the gradient of the weight: that of the whole (V, H) once, whatever the number of chunks
    assert most_alive(CHUNK * ROW, head, hidden, targets, CHUNK * row) == CHUNK * row + V * H


def test_nothing_of_the_size_of_the_logits_is_kept_beyond_the_budget() -> None:
    hidden, targets, head = case(bias=False)
    with Alive(V) as alive:
        found = head_outputs(hidden, targets, head, Asked(entropy=True), chunk_bytes=N * ROW - 1)
        assert not [size for size in alive.sizes.values() if size >= CHUNK * V]
    with Alive(V) as alive:
        kept = head_outputs(hidden, targets, head, Asked(entropy=True), chunk_bytes=N * ROW)
        assert N * V in alive.sizes.values()
    torch.testing.assert_close(found["logp"], kept["logp"], rtol=0, atol=1e-12)


def test_a_caller_with_several_forwards_before_a_backward_keeps_none() -> None:
    hidden, targets, head = case(bias=False)
    with Alive(CHUNK * V) as alive:
        found = [head_outputs(hidden, targets, head, chunk_bytes=N * ROW, keep_logits=False) for _ in range(3)]
        assert not alive.sizes
    kept = head_outputs(hidden, targets, head, chunk_bytes=N * ROW)
    torch.testing.assert_close(found[0]["logp"], kept["logp"], rtol=0, atol=0)


def test_a_second_derivative_is_refused() -> None:
    hidden, targets, head = case(bias=False)
    hidden.requires_grad_(True)
    frozen = Matrix(head.weight_VH.detach())
    found = head_outputs(hidden, targets, frozen, chunk_bytes=N * ROW)["logp"]
    factor = torch.ones_like(found, requires_grad=True)
    (first,) = torch.autograd.grad((found * factor).sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


def test_without_gradients_a_chunk_is_alive_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linear_head.TILE_BYTES, "cpu", 1)
    hidden, targets, head = case(bias=False)
    with torch.no_grad(), Alive(CHUNK * V) as alive:
        found = head_outputs(hidden, targets, head, Asked(entropy=True), chunk_bytes=CHUNK * ROW)
        assert not alive.sizes
    assert alive.most == CHUNK * V
    torch.testing.assert_close(found["logp"], whole(hidden, targets, head, 1.0)[0].detach(), rtol=0, atol=1e-12)


def test_bad_arguments_are_refused() -> None:
    hidden, targets, head = case()
    with pytest.raises(ConfigError, match="chunk_bytes is 0"):
        head_outputs(hidden, targets, head, chunk_bytes=0)
    with pytest.raises(ConfigError, match="chunk_tokens is 0"):
        head_outputs(hidden, targets, head, chunk_tokens=0)
    with pytest.raises(ConfigError, match="temperature"):
        head_outputs(hidden, targets, head, temperature=0.0)
    with pytest.raises(ShapeError):
        head_outputs(hidden, targets[:-1], head)
    for wrong in (-100, V):  # no id is skipped
        with pytest.raises(ShapeError, match=f"target {wrong} is no token of a vocabulary of {V}"):
            head_outputs(hidden, torch.full_like(targets, wrong), head)
