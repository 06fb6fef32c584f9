"""Every policy loss and its gradient against loops over tokens in plain Python, written from the papers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tutelage.config.policy_loss import KINDS, PolicyLossConfig
from tutelage.errors import ConfigError, ShapeError
from tutelage.math.masking import aggregation_weights
from tutelage.math.policy_loss import PolicyTerms, policy_terms
from tutelage.math.policy_losses import COUPLED_POLICY_LOSSES, POLICY_LOSSES
from tutelage.math.policy_losses.trust_region import binary_kl

EVERY = POLICY_LOSSES | COUPLED_POLICY_LOSSES
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5},
    "gspo": {"clip_low": 0.1, "clip_high": 0.15, "form": "token"},
    "gspo sequence": {"clip_low": 0.1, "clip_high": 0.15, "form": "sequence"},
    "sapo": {"temperature_positive": 1.0, "temperature_negative": 1.7},
    "cispo": {"clip_low": 0.3, "clip_high": 0.5},
    "gmpo": {"clip_low": 0.3, "clip_high": 0.4},
    "dppo_tv": {"low": 0.05, "high": 0.1, "ratio_cap": 1.6},
    "dppo_kl": {"low": 0.02, "high": 0.04, "ratio_cap": 1.6},
    "reinforce": {},
    "clip_cov": {"clip_low": 0.4, "clip_high": 0.6, "fraction": 0.2, "cov_low": 0.05, "cov_high": 1.0},
    "kl_cov": {"fraction": 0.2, "coef": 0.7, "estimator": "abs"},
    "kl_cov k3": {"fraction": 0.2, "coef": 0.7, "estimator": "k3"},
}
CASES = list(SETTINGS)


def run(case: str, logp: Tensor, old: Tensor, adv: Tensor, mask: Tensor, order: Tensor, **other: Any) -> PolicyTerms:
    name = case.split()[0]
    extra = (order,) if name in COUPLED_POLICY_LOSSES else ()
    return EVERY[name](logp, old, adv, mask, *extra, **{**SETTINGS[case], **other})


def example(
    rows: int = 6, width: int = 5, seed: int = 0, flat_advantage: bool = False, spread: float = 1.0
) -> tuple[Tensor, ...]:
    """logp, old, advantage, mask (with holes, an empty row and ragged ends), order; float64."""
    random = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.rand(rows, width, dtype=torch.float64, generator=random)

    old = -0.05 - 2.0 * spread * draw()
    logp = (old + 1.6 * spread * (draw() - 0.5)).clamp(max=-0.01)
    adv = 3.0 * (draw() - 0.5)
    if flat_advantage:
        adv = adv[:, :1].expand(rows, width).clone()
    mask = draw() < 0.8
    mask[-1] = False
    mask[0] = True
    return logp, old, adv, mask, draw()


# ---- the papers, token by token


def ppo_item(r: float, a: float, low: float, high: float, dual: float | None = None) -> tuple[float, float]:
    """(loss, d loss / d log r)"""
    if (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low):
        return -a * (1 + high if a > 0 else 1 - low), 0.0
    if dual is not None and a < 0 and r > dual:
        return -a * dual, 0.0
    return -a * r, -a * r


def bernoulli_kl(q: float, p: float) -> float:
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def of_token(name: str, lp: float, old: float, a: float, s: dict[str, Any]) -> tuple[float, float]:
    """Losses that see one token: (loss, gradient)."""
    r, p, q = math.exp(lp - old), math.exp(lp), math.exp(old)
    if name == "ppo":
        return ppo_item(r, a, s["clip_low"], s["clip_high"], s["dual_clip"])
    if name == "reinforce":
        return -a * lp, -a
    if name == "cispo":
        weight = min(max(r, 1 - s["clip_low"]), 1 + s["clip_high"])
        return -weight * a * lp, -weight * a
    if name == "sapo":
        tau = s["temperature_positive"] if a > 0 else s["temperature_negative"]
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        return -a * gate * 4 / tau, -a * 4 * gate * (1 - gate) * r
    far = abs(p - q) if name == "dppo_tv" else bernoulli_kl(q, p)
    if (a > 0 and r > 1 and far > s["high"]) or (a < 0 and r < 1 and far > s["low"]):
        return 0.0, 0.0
    return -a * min(r, s["ratio_cap"]), -a * min(r, s["ratio_cap"])


def of_row(case: str, lps: list[float], olds: list[float], advs: list[float], s: dict[str, Any]) -> list[Any]:
    """Losses that see a response: [(loss, gradient of the sum of the row's losses)] of its tokens."""
    n, mean_a = len(lps), sum(advs) / len(advs)
    logs = [lp - old for lp, old in zip(lps, olds, strict=True)]
    if case == "gmpo":
        cut = [min(d, s["clip_high"]) if mean_a > 0 else max(d, -s["clip_low"]) for d in logs]
        g = math.exp(sum(cut) / n)
        return [(-mean_a * g, -mean_a * g if c == d else 0.0) for c, d in zip(cut, logs, strict=True)]
    ratio = math.exp(sum(logs) / n)
    own = advs if case == "gspo" else [mean_a] * n
    return [ppo_item(ratio, a, s["clip_low"], s["clip_high"]) for a in own]


def of_batch(case: str, tokens: list[tuple[float, float, float, float]], s: dict[str, Any]) -> list[Any]:
    """Losses that see all tokens, each (logp, old, advantage, order): [(loss, gradient, selected)]."""
    n = len(tokens)
    mean_lp, mean_a = sum(t[0] for t in tokens) / n, sum(t[2] for t in tokens) / n
    cov = [(a - mean_a) * (lp - mean_lp) for lp, _, a, _ in tokens]
    count = max(1, int(s["fraction"] * n))
    if case == "clip_cov":
        plain = [ppo_item(math.exp(lp - old), a, s["clip_low"], s["clip_high"]) for lp, old, a, _ in tokens]
        free = [i for i, (_, slope) in enumerate(plain) if slope != 0.0]
        drawn = sorted((i for i in free if s["cov_low"] < cov[i] < s["cov_high"]), key=lambda i: tokens[i][3])[:count]
        return [(0.0, 0.0, True) if i in drawn else (*plain[i], False) for i in range(n)]
    largest = sorted(range(n), key=lambda i: -cov[i])[:count]
    out = []
    for i, (lp, old, a, _) in enumerate(tokens):
        r, d = math.exp(lp - old), lp - old
        penalty = (abs(d), math.copysign(1.0, d)) if s["estimator"] == "abs" else (r - 1 - d, r - 1)
        weight = s["coef"] if i in largest else 0.0
        out.append((-a * r + weight * penalty[0], -a * r + weight * penalty[1], i in largest))
    return out


def reference(case: str, logp: Tensor, old: Tensor, adv: Tensor, mask: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, gradient of the sum of all losses), both 0 under the mask."""
    s, name = SETTINGS[case], case.split()[0]
    loss, slope = torch.zeros_like(logp), torch.zeros_like(logp)
    places = [(b, t) for b, t in itertools.product(range(len(logp)), range(logp.shape[1])) if mask[b, t]]
    if name in COUPLED_POLICY_LOSSES:
        found = of_batch(name, [tuple(float(x[at]) for x in (logp, old, adv, order)) for at in places], s)  # type: ignore[misc]
        results = dict(zip(places, found, strict=True))
    elif name in ("gspo", "gmpo"):
        results = {}
        for b in range(len(logp)):
            own = [at for at in places if at[0] == b]
            if own:
                lists = [[float(x[at]) for at in own] for x in (logp, old, adv)]
                results.update(zip(own, of_row(case, *lists, s), strict=True))
    else:
        results = {at: of_token(name, float(logp[at]), float(old[at]), float(adv[at]), s) for at in places}
    for at, result in results.items():
        loss[at], slope[at] = result[0], result[1]
    return loss, slope


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_are_the_papers_with_holes_and_nothing_under_the_mask_is_read(case: str, seed: int) -> None:
    logp, old, adv, mask, order = example(seed=seed)
    wanted, slope = reference(case, logp, old, adv, mask, order)
    poisoned = [x.masked_fill(~mask, math.nan) for x in (logp, old, adv)]
    leaf = poisoned[0].requires_grad_(True)
    terms = run(case, leaf, *poisoned[1:], mask, order)
    torch.testing.assert_close(terms.loss.detach(), wanted, rtol=1e-10, atol=1e-12)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), leaf)
    torch.testing.assert_close(gradient, slope, rtol=1e-10, atol=1e-12)


def test_the_examples_reach_every_branch() -> None:
    """A reference that never clips would prove nothing: each case holds tokens back and lets others go."""
    for case in set(CASES) - {"reinforce", "sapo"}:
        held = passed = 0
        for seed in range(4):
            terms = run(case, *example(seed=seed))
            mask = example(seed=seed)[3]
            flags = terms.clipped | terms.dual_clipped
            flags = flags if terms.selected is None else flags | terms.selected
            held, passed = held + int(flags[mask].sum()), passed + int((~flags)[mask].sum())
        assert held >= 3, case
        assert passed >= 3, case


# ---- numbers worked out on paper


def one(name: str, logp: float, old: float, a: float, **settings: Any) -> float:
    tensors = [torch.tensor([[x]], dtype=torch.float64) for x in (logp, old, a)]
    extra = (torch.zeros(1, 1),) if name in COUPLED_POLICY_LOSSES else ()
    return EVERY[name](*tensors, torch.ones(1, 1), *extra, **settings).loss.item()


def test_tokens_by_hand() -> None:
    half, quarter = math.log(0.5), math.log(0.25)
    assert one("reinforce", half, quarter, 2.0) == pytest.approx(2 * math.log(2))
    assert one("cispo", half, quarter, 2.0, clip_low=1.0, clip_high=0.5) == pytest.approx(1.5 * 2 * math.log(2))
    assert one("cispo", quarter, half, 1.0, clip_low=1.0, clip_high=0.5) == pytest.approx(0.5 * 2 * math.log(2))
    sigmoid_1, sigmoid_2 = 0.7310585786300049, 0.8807970779778823
    tau = {"temperature_positive": 1.0, "temperature_negative": 2.0}
    assert one("sapo", half, quarter, 3.0, **tau) == pytest.approx(-3 * 4 * sigmoid_1)
    assert one("sapo", half, quarter, -3.0, **tau) == pytest.approx(3 * 2 * sigmoid_2)
    tv = {"low": 0.2, "ratio_cap": 20.0}
    assert one("dppo_tv", half, quarter, 1.0, **tv, high=0.24) == 0.0  # 0.25 -> 0.5
    assert one("dppo_tv", half, quarter, 1.0, **tv, high=0.26) == pytest.approx(-2.0)
    assert one("dppo_tv", half, quarter, -1.0, **tv, high=0.1) == pytest.approx(2.0)  # it came nearer by itself
    kl = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)  # 0.1308
    assert one("dppo_kl", half, quarter, 1.0, low=1.0, high=kl - 1e-6) == 0.0
    assert one("dppo_kl", half, quarter, 1.0, low=1e-9, high=kl + 1e-6) == pytest.approx(-2.0)


def test_a_response_by_hand() -> None:
    """Ratios 4 and 1, advantage 1: the geometric mean is 2."""
    logp, old = torch.log(torch.tensor([[0.8, 0.5]])), torch.log(torch.tensor([[0.2, 0.5]]))
    ones = torch.ones(1, 2)
    open_range = {"clip_low": 0.9, "clip_high": 9.0}
    for form in ("token", "sequence"):
        terms = EVERY["gspo"](logp, old, ones, ones, **open_range, form=form)
        assert terms.loss.tolist() == [pytest.approx([-2.0, -2.0])]
        assert terms.ratio.tolist() == [pytest.approx([2.0, 2.0])]
        cut = EVERY["gspo"](logp, old, ones, ones, clip_low=0.1, clip_high=0.5, form=form)
        assert cut.loss.tolist() == [pytest.approx([-1.5, -1.5])]
        assert cut.clipped.all(), "a response is clipped as a whole"
    terms = EVERY["gmpo"](logp, old, ones, ones, clip_low=0.4, clip_high=0.4)
    assert terms.loss.tolist() == [pytest.approx([-math.exp(0.2)] * 2)]  # (0.4 + 0) / 2
    assert terms.clipped.tolist() == [[True, False]], "gmpo clips tokens"


def test_selection_by_covariance_by_hand() -> None:
    """Four tokens: mean advantage 0, mean logprob -2; covariances 2, 2, 0, -4 (the last two of another sign)."""
    logp = torch.tensor([[-1.0, -3.0], [-2.0, -2.0]])
    adv = torch.tensor([[2.0, -2.0], [1.0, -1.0]])
    mask, order = torch.ones(2, 2), torch.tensor([[0.9, 0.1], [0.2, 0.3]])
    wide = {"clip_low": 1.0, "clip_high": 1.0}
    one_of_two = EVERY["clip_cov"](logp, logp, adv, mask, order, **wide, fraction=0.25, cov_low=1.0, cov_high=5.0)
    assert one_of_two.selected.tolist() == [[False, True], [False, False]], (
        "the smaller order of both with covariance 2"
    )
    assert one_of_two.loss.tolist() == [pytest.approx([-2.0, 0.0]), pytest.approx([-1.0, 1.0])]
    none = EVERY["clip_cov"](logp, logp, adv, mask, order, **wide, fraction=0.25, cov_low=2.5, cov_high=5.0)
    assert not none.selected.any()
    both = EVERY["kl_cov"](logp, logp - 0.5, adv, mask, order, fraction=0.5, coef=1.0, estimator="abs")
    assert both.selected.tolist() == [[True, True], [False, False]]
    r = math.exp(0.5)
    assert both.loss.tolist() == [pytest.approx([-2 * r + 0.5, 2 * r + 0.5]), pytest.approx([-r, r])]
    first = EVERY["kl_cov"](logp, logp, adv, mask, order, fraction=0.25, coef=1.0)
    assert first.selected.tolist() == [[False, True], [False, False]], "equal covariances: the smaller order"


# ---- where all must agree, and where none may


@pytest.mark.parametrize("case", CASES)
def test_at_ratio_one_every_loss_has_the_gradient_of_the_plain_policy_gradient(case: str) -> None:
    logp, _, adv, mask, order = example(flat_advantage=True)
    leaf = logp.clone().requires_grad_(True)
    terms = run(case, leaf, logp, adv, mask, order)
    weights = aggregation_weights(mask, "seq_mean_token_mean").double()
    (gradient,) = torch.autograd.grad((terms.loss * weights).sum(), leaf)
    expected = -adv * weights
    if terms.selected is not None and case == "clip_cov":
        assert terms.selected.any()
        expected = expected.masked_fill(terms.selected, 0.0)
    torch.testing.assert_close(gradient, expected)
    assert terms.ratio[mask].tolist() == [1.0] * int(mask.sum())
    assert terms.approx_kl.abs().max() == 0
    assert not terms.clipped.any()
    value = float((terms.loss.detach() * weights).sum())
    mean = float((adv * weights).sum())
    if case in ("ppo", "gspo", "gspo sequence", "gmpo", "dppo_tv", "dppo_kl", "kl_cov", "kl_cov k3"):
        assert value == pytest.approx(-mean, abs=1e-12), "the value starts at minus the mean advantage"


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(KINDS, 2)))
def test_no_two_names_are_one_loss(first: str, second: str) -> None:
    """With the recipe's defaults, but gspo's range widened so that not everything is clipped.

    One token goes from 0.01 to 0.14: within 0.15 in total variation, beyond 0.05 nats.
    """
    defaults = PolicyLossConfig()
    logp, old, adv, mask, order = example(rows=12, seed=5, flat_advantage=True, spread=2.0)
    logp[0, 0], old[0, 0] = math.log(0.14), math.log(0.01)
    adv = 3 * adv
    adv[0] = 1.0
    weights = aggregation_weights(mask, "seq_mean_token_mean").double()
    found = []
    for kind in (first, second):
        section = getattr(defaults, kind, None)
        settings = {"clip_low": 0.2, "clip_high": 0.2} if section is None else section.model_dump()
        settings = {} if kind == "reinforce" else settings
        settings |= {"clip_low": 0.2, "clip_high": 0.2} if kind == "gspo" else {}
        leaf = logp.clone().requires_grad_(True)
        extra = (order,) if kind in COUPLED_POLICY_LOSSES else ()
        loss = (EVERY[kind](leaf, old, adv, mask, *extra, **settings).loss * weights).sum()
        found.append((float(loss.detach()), torch.autograd.grad(loss, leaf)[0]))
    (a, gradient_a), (b, gradient_b) = found
    assert float((gradient_a - gradient_b).abs().max()) > 1e-3
    assert abs(a - b) > 1e-3


def test_every_kind_of_the_recipe_is_a_loss_and_takes_what_its_section_holds() -> None:
    assert set(KINDS) == set(EVERY)
    for kind in set(KINDS) - {"ppo", "reinforce"}:
        logp, old, adv, mask, order = example()
        extra = (order,) if kind in COUPLED_POLICY_LOSSES else ()
        EVERY[kind](logp, old, adv, mask, *extra, **getattr(PolicyLossConfig(), kind).model_dump())


CHANGED = [
    ("gspo", {"clip_low": 0.02}),
    ("gspo", {"clip_high": 0.02}),
    ("gspo", {"form": "sequence"}),
    ("sapo", {"temperature_positive": 3.0}),
    ("sapo", {"temperature_negative": 3.0}),
    ("cispo", {"clip_low": 0.1}),
    ("cispo", {"clip_high": 0.1}),
    ("gmpo", {"clip_low": 0.1}),
    ("gmpo", {"clip_high": 0.1}),
    ("dppo_tv", {"low": 0.2}),
    ("dppo_tv", {"high": 0.3}),
    ("dppo_tv", {"ratio_cap": 1.1}),
    ("dppo_kl", {"low": 0.2}),
    ("dppo_kl", {"high": 0.2}),
    ("dppo_kl", {"ratio_cap": 1.1}),
    ("clip_cov", {"clip_low": 0.1}),
    ("clip_cov", {"clip_high": 0.1}),
    ("clip_cov", {"fraction": 0.6}),
    ("clip_cov", {"cov_low": 0.4}),
    ("clip_cov", {"cov_high": 0.1}),
    ("kl_cov", {"fraction": 0.6}),
    ("kl_cov", {"coef": 1.0}),
    ("kl_cov", {"estimator": "k3"}),
]


@pytest.mark.parametrize(("case", "change"), CHANGED)
def test_every_setting_has_an_effect(case: str, change: dict[str, Any]) -> None:
    arguments = example(rows=12, seed=3)
    before, after = run(case, *arguments).loss, run(case, *arguments, **change).loss
    assert float((before - after).abs().max()) > 1e-3


# ---- gradients, shapes, errors


@pytest.mark.parametrize("case", ["ppo", "gspo sequence", "sapo", "gmpo", "clip_cov", "kl_cov", "kl_cov k3"])
def test_gradcheck_of_the_losses_without_a_stopped_gradient(case: str) -> None:
    """The others have another gradient than that of their value, by design; the loops above hold it."""
    logp, old, adv, mask, order = example()
    leaf = logp.clone().requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: run(case, x, old, adv, mask, order).loss.sum(), leaf)


@pytest.mark.parametrize("case", CASES)
def test_only_logp_gets_gradient_and_only_through_the_loss(case: str) -> None:
    logp, old, adv, mask, order = example()
    leaves = [x.clone().requires_grad_(True) for x in (logp, old, adv)]
    terms = run(case, *leaves, mask, order)
    terms.loss.sum().backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is None
    assert leaves[2].grad is None
    for name, value in vars(terms).items():
        assert value is None or name == "loss" or not value.requires_grad, name


@pytest.mark.parametrize("case", CASES)
def test_far_ratios_half_precision_and_rows_without_tokens_stay_finite(case: str) -> None:
    logp = torch.tensor([[0.0, -1000.0, -3.0], [-1.0, -1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-1000.0, 0.0, -3.0], [-1.0, -1.0, -1.0]])
    adv = torch.tensor([[-1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[True, True, True], [False, False, False]])
    terms = run(case, logp, old, adv, mask, torch.rand(2, 3))
    terms.loss.sum().backward()
    assert terms.loss.isfinite().all()
    assert logp.grad.isfinite().all()
    assert terms.loss[1].tolist() == [0.0, 0.0, 0.0]
    assert logp.grad[1].tolist() == [0.0, 0.0, 0.0]
    assert run(case, logp.bfloat16(), old.bfloat16(), adv, mask, torch.rand(2, 3)).loss.dtype == torch.float32


@pytest.mark.parametrize("case", sorted(set(CASES) - {"clip_cov", "kl_cov", "kl_cov k3"}))
def test_a_row_does_not_see_its_neighbours_or_the_padding(case: str) -> None:
    logp, old, adv, mask, order = example()
    whole = run(case, logp, old, adv, mask, order).loss
    for b in range(len(logp)):
        wide = [torch.nn.functional.pad(x[b : b + 1], (0, 2)) for x in (logp, old, adv, mask, order)]
        torch.testing.assert_close(run(case, *wide).loss[:, :-2], whole[b : b + 1])


@pytest.mark.parametrize("case", ["clip_cov", "kl_cov"])
def test_what_is_selected_does_not_depend_on_the_order_of_the_rows(case: str) -> None:
    arguments = example(rows=9, seed=2)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    there, here = run(case, *(x[order] for x in arguments)), run(case, *arguments)
    assert torch.equal(there.selected, here.selected[order])
    torch.testing.assert_close(there.loss, here.loss[order])


def test_the_kl_of_two_coins_at_the_edges() -> None:
    logs = [math.log(x) for x in (1e-6, 0.3, 0.999999)] + [0.0, -1000.0]
    for q, p in itertools.product(logs, repeat=2):
        found = float(binary_kl(torch.tensor([q], dtype=torch.float64), torch.tensor([p], dtype=torch.float64)))
        assert not math.isnan(found)
        assert found >= -1e-12
        if q == p:
            assert found == pytest.approx(0.0, abs=1e-12)
    zero, most = torch.tensor([0.0]), torch.tensor([math.log(0.9)])
    assert float(binary_kl(most, zero)) == math.inf
    assert float(binary_kl(zero, most)) == pytest.approx(-math.log(0.9))
    assert float(binary_kl(torch.tensor([1e-6]), most)) == pytest.approx(-math.log(0.9), rel=1e-4), "rounding above 0"


def test_a_loss_of_ones_own_gets_the_other_terms() -> None:
    logp, old, adv, _, _ = example()
    terms = policy_terms(-adv * logp, logp, old)
    assert torch.equal(terms.ratio, (logp - old).exp())
    assert not terms.clipped.any()
    assert terms.selected is None
    with pytest.raises(ShapeError, match="ratio"):
        policy_terms(-adv * logp, logp, old, ratio=adv[:, :1])


BAD = [
    ("gspo", {"form": "tokens"}, "Did you mean token"),
    ("gspo", {"clip_low": -0.1}, "lower clip range"),
    ("sapo", {"temperature_positive": 0.0}, "temperature_positive is 0"),
    ("sapo", {"temperature_negative": math.nan}, "temperature_negative is nan"),
    ("cispo", {"clip_low": 1.5}, "clip_low is 1.5"),
    ("cispo", {"clip_high": -1.0}, "clip_high is -1"),
    ("gmpo", {"clip_low": 0.0}, "clip_low is 0"),
    ("dppo_tv", {"low": 0.0}, "low is 0"),
    ("dppo_tv", {"ratio_cap": 0.5}, "ratio_cap is 0.5"),
    ("dppo_kl", {"high": -1.0}, "high is -1"),
    ("clip_cov", {"cov_low": 2.0}, "cov_low is 2"),
    ("clip_cov", {"fraction": 0.0}, "share of selected tokens is 0"),
    ("kl_cov", {"fraction": 1.5}, "share of selected tokens is 1.5"),
    ("kl_cov", {"coef": 0.0}, "coef is 0"),
    ("kl_cov", {"estimator": "k3_"}, "k3_.*Did you mean k3"),
]


@pytest.mark.parametrize(("case", "change", "said"), BAD)
def test_bad_settings_are_refused(case: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(case, *example(), **change)


@pytest.mark.parametrize("case", CASES)
def test_shapes_that_differ_are_refused(case: str) -> None:
    logp, old, adv, mask, order = example()
    with pytest.raises(ShapeError, match="advantage"):
        run(case, logp, old, adv[:, :1], mask, order)
    with pytest.raises(ShapeError, match="logp"):
        run(case, logp[0], old[0], adv[0], mask[0], order[0])
