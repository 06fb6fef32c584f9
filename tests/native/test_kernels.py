"""The compiled kernels beside sums written out in float64, and to the bit beside torch where both round alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from native_kit import needs_compiler
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tutelage.errors import ShapeError
from tutelage.models import fused
from tutelage.models.decoding import _native_fits
from tutelage.native import ops
from tutelage.native.build import kernels

BF16 = torch.bfloat16
TYPES = [pytest.param(torch.float32, 2e-6, id="float32"), pytest.param(BF16, 2**-7, id="bfloat16")]
NORM_EPS = 1e-3

pytestmark = needs_compiler


@pytest.fixture(autouse=True, params=[1, 2], ids=["one thread", "two threads"])
def threads(request: Any) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    with ops.in_decoding():
        yield request.param
    torch.set_num_threads(before)


def drawn(*shape: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(salt)).to(dtype)


def assert_near(found: Tensor | None, right: Tensor, bound: float) -> None:
    assert found is not None
    assert float((found.double() - right).norm() / right.norm()) < bound


@pytest.mark.parametrize(("dtype", "bound"), TYPES)
@pytest.mark.parametrize("shape", [(1, 3), (3, 17), (2, 5, 64), (70, 577)])
def test_a_norm_and_its_gradients_are_the_sums_of_the_formula(shape, dtype, bound) -> None:
    x, w, by = drawn(*shape, dtype=dtype), drawn(shape[-1], dtype=dtype, salt=1), drawn(*shape, dtype=dtype, salt=2)
    exact = [t.double().requires_grad_(True) for t in (x, w)]
    inverse = 1 / (exact[0].square().sum(-1, keepdim=True) / shape[-1] + NORM_EPS).sqrt()
    right = exact[1] * exact[0] * inverse
    found, kept = ops.rms_norm(x, w, NORM_EPS, inverse=True)
    assert found.dtype == dtype
    assert_near(found, right.detach(), bound)
    assert_near(kept, inverse.detach(), 1e-6)
    assert kept is not None
    expected = torch.autograd.grad(right, exact, by.double())
    for needed in [(True, True), (True, False), (False, True)]:
        got = ops.rms_norm_back(x, w, kept, by, needed)
        for one, right_one, need in zip(got, expected, needed, strict=True):
            if need:
                assert_near(one, right_one, bound)
            else:
                assert one is None


@pytest.mark.parametrize(("dtype", "bound"), TYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 17), (5, 2048)])
def test_a_gated_block_and_its_gradients_are_the_formula(shape, dtype, bound) -> None:
    gate, up, by = (drawn(*shape, dtype=dtype, salt=i) * 3 for i in range(3))
    exact = [t.double().requires_grad_(True) for t in (gate, up)]
    right = exact[0] / (1 + torch.exp(-exact[0])) * exact[1]
    assert_near(ops.swiglu(gate, up), right.detach(), bound)
    expected = torch.autograd.grad(right, exact, by.double())
    for needed in [(True, True), (True, False), (False, True)]:
        for one, right_one, need in zip(ops.swiglu_back(gate, up, by, needed), expected, needed, strict=True):
            if need:
                assert_near(one, right_one, bound)
            else:
                assert one is None


def test_the_exponential_is_right_to_the_last_places_from_end_to_end() -> None:
    gate = torch.linspace(-80, 80, 400_001)
    found = ops.swiglu(gate, torch.ones_like(gate))
    right = gate.double() / (1 + torch.exp(-gate.double()))
    off = ((found.double() - right) / right).abs()
    assert float(off[gate != 0].max()) < 3e-7
    ends = torch.tensor([-math.inf, -200.0, 0.0, 200.0, math.inf, math.nan])
    assert ops.swiglu(ends, torch.ones(6))[1:5].tolist() == [pytest.approx(0, abs=1e-30), 0.0, 200.0, math.inf]
    assert ops.swiglu(ends, torch.ones(6))[5].isnan()


def test_in_bfloat16_they_round_where_transformers_does() -> None:
    """All but a few in a thousand, in which a sum or an exponential fell on the other side, to the bit."""
    gate, up = drawn(64, 1536, dtype=BF16), drawn(64, 1536, dtype=BF16, salt=1)
    x, w = drawn(64, 576, dtype=BF16), drawn(576, dtype=BF16, salt=2)
    wide = x.float()
    normed = w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + NORM_EPS)).to(BF16)
    pairs = [(ops.swiglu(gate, up), silu(gate) * up), (ops.rms_norm(x, w, NORM_EPS)[0], normed)]
    for found, right in pairs:
        differ = found != right
        assert float(differ.double().mean()) < 4e-3
        assert float(((found - right).float() / right.float()).abs().nan_to_num().max()) <= 2**-6


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("batch", "count"), [(1, 7), (5, 1), (1, 1)])
@pytest.mark.parametrize("size", [2, 24, 64])
@pytest.mark.parametrize("layout", ["as projected", "by head"])
def test_rotary_is_that_of_transformers_to_the_bit_with_its_gradients(dtype, batch, count, size, layout) -> None:
    def states(heads: int, salt: int) -> Tensor:
        whole = drawn(batch, count, heads, size, dtype=dtype, salt=salt).transpose(1, 2)
        return (whole if layout == "as projected" else whole.contiguous()).requires_grad_(True)

    query, key = states(6, 1), states(2, 2)
    angle = drawn(batch, count, size, dtype=torch.float32, salt=3)
    cosine, sine = angle.cos().to(dtype), angle.sin().to(dtype)
    found, right = fused.rotary(query, key, cosine, sine), apply_rotary_pos_emb(query, key, cosine, sine)
    by = [drawn(*x.shape, dtype=dtype, salt=4 + i) for i, x in enumerate(right)]
    for got, expected in zip(found, right, strict=True):
        assert torch.equal(got, expected)
    for got, expected in zip(
        torch.autograd.grad(found, (query, key), by), torch.autograd.grad(right, (query, key), by), strict=True
    ):
        assert torch.equal(got, expected)
    assert not torch.equal(found[0], query)


def test_what_is_not_a_number_stays_so() -> None:
    """Every NaN there is in bfloat16: rounding one must not carry into the sign."""
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(BF16)
    every = bits[bits.isnan()]
    ones = torch.ones_like(every)
    assert len(every) == 254
    for found in (
        ops.swiglu(every, ones),
        ops.swiglu(ones, every),
        ops.rms_norm(every[:, None], ones[:1], NORM_EPS)[0],
    ):
        assert found.isnan().all()


# ---- one decode step ----


class Step:
    """Rows of two prompts in pages of 4, in no order, everything that no row reads set to NaN."""

    PAGE, POOL = 4, 24
    prompt_of_row = (0, 1, 0, 1, 1)
    prompt_lens = (9, 4)
    own_lens = (0, 3, 4, 6, 7)
    prompt_pages = ((2, 0, 5), (3,))
    own_pages = ((9,), (12,), (20, 11), (8, 10), (23, 21))
    first_own = 8

    def __init__(self, heads: int, groups: int, size: int, dtype: torch.dtype) -> None:
        shape = (self.POOL, groups, self.PAGE, size)
        self.key, self.value = (torch.full(shape, math.nan, dtype=dtype) for _ in range(2))
        self.query = drawn(len(self.own_lens), 1, heads, size, dtype=dtype).transpose(1, 2)
        salt = 10
        for length, pages in [
            *zip(self.prompt_lens, self.prompt_pages, strict=True),
            *((n + 1, pages) for n, pages in zip(self.own_lens, self.own_pages, strict=True)),
        ]:
            for at in range(length):
                for pool in (self.key, self.value):
                    pool[pages[at // self.PAGE], :, at % self.PAGE] = drawn(groups, size, dtype=dtype, salt=salt)
                    salt += 1

    def run(self, scale: float, softcap: float = 0.0) -> Tensor:
        lanes = 4
        own = [[page - self.first_own for page in (*pages, pages[-1])[:2]] for pages in self.own_pages]
        seen = [0, 0]
        lane = []
        for prompt in self.prompt_of_row:
            lane.append(prompt * lanes + seen[prompt])
            seen[prompt] += 1
        return ops.paged_attention(
            self.query,
            self.key,
            self.value,
            pages_of_prompt=torch.tensor([self.prompt_pages[0], (3, 3, 3)]),
            own_of_row=torch.tensor(own),
            lane_of_row=torch.tensor(lane),
            prompt_lens=torch.tensor([self.prompt_lens[p] for p in self.prompt_of_row]),
            own_lens=torch.tensor(self.own_lens),
            own=self.first_own,
            lanes=lanes,
            scale=scale,
            softcap=softcap,
        )

    def by_hand(self, row: int, head: int, scale: float, softcap: float = 0.0) -> Tensor:
        group = head // (self.query.shape[1] // self.key.shape[1])
        prompt = self.prompt_of_row[row]
        places = [(self.prompt_pages[prompt][i // 4], i % 4) for i in range(self.prompt_lens[prompt])]
        places += [(self.own_pages[row][i // 4], i % 4) for i in range(self.own_lens[row] + 1)]
        keys = torch.stack([self.key[page, group, at] for page, at in places]).double()
        values = torch.stack([self.value[page, group, at] for page, at in places]).double()
        scores = (keys * self.query[row, head, 0].double()).sum(-1) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        weights = torch.exp(scores - scores.max()) / torch.exp(scores - scores.max()).sum()
        return (weights[:, None] * values).sum(0)


@pytest.mark.parametrize(("dtype", "bound"), TYPES)
@pytest.mark.parametrize(("heads", "groups", "size"), [(2, 2, 5), (6, 2, 64), (4, 1, 128), (3, 3, 80)])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_a_row_attends_to_its_prompt_and_its_own_pages_and_to_nothing_else(
    heads, groups, size, dtype, bound, softcap
) -> None:
    step = Step(heads, groups, size, dtype)
    scale = size**-0.5
    found = step.run(scale, softcap)
    assert found.shape == (5, 1, heads, size)
    assert found.dtype == dtype
    for row in range(5):
        for head in range(heads):
            assert_near(found[row, 0, head], step.by_hand(row, head, scale, softcap), bound)


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    step = Step(2, 1, 64, torch.float32)
    assert_near(step.run(30.0)[3, 0, 1], step.by_hand(3, 1, 30.0), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("contiguous", [True, False])
def test_each_row_is_written_to_its_own_place_and_nowhere_else(dtype, contiguous) -> None:
    pool = torch.zeros((6, 2, 4, 24), dtype=dtype)
    x = drawn(3, 1, 2, 24, dtype=dtype).transpose(1, 2)
    x = x.contiguous() if contiguous else drawn(3, 2, 1, 48, dtype=dtype)[..., ::2]
    page, at = torch.tensor([5, 0, 3]), torch.tensor([3, 0, 2])
    ops.page_write(x, pool, page, at)
    right = torch.zeros_like(pool)
    right[page, :, at] = x[:, :, 0]
    assert torch.equal(pool, right)


def test_pools_that_a_layer_makes_of_what_it_caches_are_left_to_torch() -> None:
    """Multi-head latent attention: views of larger tensors, or values that are narrower than keys."""
    query, pool, narrow = torch.ones(5, 6, 1, 16), torch.ones(3, 2, 4, 16), torch.ones(3, 2, 4, 8)
    view = torch.ones(3, 2, 4, 32)[..., :16]
    assert _native_fits(query, pool, pool, None)
    assert _native_fits(query, pool, pool, 2.0)
    for key, value, softcap in ((pool, narrow, None), (pool, view, None), (view, pool, None), (narrow, narrow, None)):
        assert not _native_fits(query, key, value, softcap)
        with pytest.raises(ShapeError, match="no pools"):
            attended(query, key, value)
    assert not _native_fits(query, pool, pool, 0.0)
    assert attended(query, pool, pool).eq(1).all()


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    rows, zero = len(query), torch.zeros(len(query), dtype=torch.int64)
    pages = {"pages_of_prompt": zero[:1, None], "own_of_row": zero[:, None], "lane_of_row": zero}
    lens = {"prompt_lens": zero, "own_lens": zero}
    return ops.paged_attention(query, key, value, **pages, **lens, own=1, lanes=rows, scale=1.0)


# ---- which tensors they take ----


def test_where_there_is_a_compiler_there_are_kernels() -> None:
    """All other tests of theirs would be skipped where the source does not compile."""
    assert kernels().library is not None, kernels().why


def test_they_take_plain_tensors_on_a_cpu_of_one_type_that_they_know() -> None:
    x = torch.ones(2, 4, dtype=BF16)
    assert ops.takes(x, nn.Parameter(x))
    assert not ops.takes(x, x.float())
    assert not ops.takes(x.half())
    assert not ops.takes(x.double())
    assert not ops.takes(x.to("meta"))
    assert not ops.takes(x[:0])

    class Other(Tensor):
        pass

    assert not ops.takes(x.as_subclass(Other))
    with torch.autocast("cpu", dtype=BF16):
        assert not ops.takes(x)


def test_float32_is_taken_in_a_decode_step_only() -> None:
    x = torch.ones(2, 4)
    assert ops.takes(x), "the fixture is inside one"

    def elsewhere() -> list[bool]:
        """A thread that begins in the middle of a decode step is in none itself."""
        outside = ops.takes(x)
        with ops.in_decoding():
            inside = ops.takes(x)
        return [outside, inside, ops.takes(x)]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(elsewhere).result() == [False, True, False]
