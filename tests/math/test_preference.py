"""Every preference loss against a float64 reference written from its paper, by hand, and against its relatives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tutelage.config.dpo import COUPLED, DIVERGENCE, LOSS_READS, NEEDS_SMOOTHING, REFERENCE, SMOOTHING
from tutelage.errors import ConfigError, ShapeError
from tutelage.math.preference import PREFERENCE_LOSSES, PreferenceInputs, PreferenceSettings, PreferenceTerms
from tutelage.math.preference.divergences import DIVERGENCES, score_limits
from tutelage.math.preference.losses import combined, require_separable, users_terms
from tutelage.math.preference.weighing import pair_weights, public_weights
from tutelage.math.preference.without_reference import log1mexp

P = 7
FULL = PreferenceSettings(beta=0.4, label_smoothing=0.1, gamma=0.3, alpha=0.25, tau=0.5)


def made(dtype: torch.dtype = torch.float64, seed: int = 0) -> PreferenceInputs:
    """Pairs of answers of 3 to 12 tokens, near and far from the reference."""
    random = torch.Generator().manual_seed(seed)
    lens = [torch.randint(3, 13, (P,), generator=random).to(dtype) for _ in range(2)]
    logp = [-n * (0.3 + torch.rand(P, generator=random, dtype=dtype)) for n in lens]
    ref = [x + 2.0 * torch.randn(P, generator=random, dtype=dtype) for x in logp]
    return PreferenceInputs.of(logp[0], logp[1], ref[0], ref[1], *lens, delta=0.2)


# ---- the papers' equations, one pair at a time, in Python floats


def sg(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def nls(z: float) -> float:
    return -math.log(sg(z))


Pair = dict[str, float]


def ratios(p: Pair) -> tuple[float, float]:
    return p["c"] - p["rc"], p["r"] - p["rr"]


def odds(mean: float) -> float:
    return math.log(math.exp(mean) / (1 - math.exp(mean)))


def smooth(z: float, s: float) -> float:
    return (1 - s) * nls(z) + s * nls(-z)


def ref_sigmoid(p: Pair, k: PreferenceSettings) -> float:
    w, r = ratios(p)
    return smooth(k.beta * (w - r), k.label_smoothing)


def ref_sigmoid_norm(p: Pair, k: PreferenceSettings) -> float:
    w, r = ratios(p)
    return smooth(k.beta * (w / p["nc"] - r / p["nr"]), k.label_smoothing)


def ref_robust(p: Pair, k: PreferenceSettings) -> float:
    w, r = ratios(p)
    z, e = k.beta * (w - r), k.label_smoothing
    return ((1 - e) * nls(z) - e * nls(-z)) / (1 - 2 * e)


def ref_exo(p: Pair, k: PreferenceSettings) -> float:
    w, r = ratios(p)
    weights = [math.exp(k.beta * w), math.exp(k.beta * r)]  # softmax over the two answers, then KL(q || p)
    q = [x / sum(weights) for x in weights]
    target = [1 - k.label_smoothing, k.label_smoothing]
    return sum(a * math.log(a / b) for a, b in zip(q, target, strict=True))


def ref_discopop(p: Pair, k: PreferenceSettings) -> float:
    w, r = ratios(p)
    z = k.beta * (w - r)
    m = sg(z / k.tau)
    return (1 - m) * nls(z) + m * math.exp(-z)


def ref_nca(p: Pair, k: PreferenceSettings) -> float:
    w, r = (k.beta * x for x in ratios(p))
    return nls(w) + 0.5 * nls(-w) + 0.5 * nls(-r)


def ref_bco(p: Pair, k: PreferenceSettings) -> float:
    w, r = (k.beta * x for x in ratios(p))
    return nls(w - 0.2) + nls(-(r - 0.2))


def ref_sppo(p: Pair, k: PreferenceSettings) -> float:
    w, r = ratios(p)
    eta = 1 / k.beta
    return (w - eta * (1 - 0.5)) ** 2 + (r - eta * (0 - 0.5)) ** 2


def ref_apo_zero(p: Pair, k: PreferenceSettings) -> float:
    w, r = (k.beta * x for x in ratios(p))
    return (1 - sg(w)) + sg(r)


def ref_apo_down(p: Pair, k: PreferenceSettings) -> float:
    w, r = (k.beta * x for x in ratios(p))
    return sg(w) + (1 - sg(w - r))


def ref_hinge(p: Pair, k: PreferenceSettings) -> float:
    w, r = ratios(p)
    return max(0.0, 1 - k.beta * (w - r))


def ref_ipo(p: Pair, k: PreferenceSettings) -> float:
    w, r = ratios(p)
    return (w / p["nc"] - r / p["nr"] - 1 / (2 * k.beta)) ** 2


def ref_ipo_sum(p: Pair, k: PreferenceSettings) -> float:
    w, r = ratios(p)
    return (w - r - 1 / (2 * k.beta)) ** 2


def ref_orpo(p: Pair, k: PreferenceSettings) -> float:
    return k.beta * nls(odds(p["c"] / p["nc"]) - odds(p["r"] / p["nr"]))


def ref_cpo(p: Pair, k: PreferenceSettings) -> float:
    return smooth(k.beta * p["c"] - k.beta * p["r"], k.label_smoothing)


def ref_simpo(p: Pair, k: PreferenceSettings) -> float:
    return smooth(k.beta / p["nc"] * p["c"] - k.beta / p["nr"] * p["r"] - k.gamma, k.label_smoothing)


def ref_alphapo(p: Pair, k: PreferenceSettings) -> float:
    w, r = ((1 - (math.exp(p[x]) ** (1 / p[n])) ** (-k.alpha)) / k.alpha for x, n in (("c", "nc"), ("r", "nr")))
    return smooth(k.beta * w - k.beta * r - k.gamma, k.label_smoothing)


ONE_PAIR: dict[str, Callable[[Pair, PreferenceSettings], float]] = {
    "sigmoid": ref_sigmoid,
    "sigmoid_norm": ref_sigmoid_norm,
    "robust": ref_robust,
    "hinge": ref_hinge,
    "ipo": ref_ipo,
    "ipo_sum": ref_ipo_sum,
    "exo_pair": ref_exo,
    "discopop": ref_discopop,
    "nca_pair": ref_nca,
    "bco_pair": ref_bco,
    "sppo_hard": ref_sppo,
    "apo_zero": ref_apo_zero,
    "apo_down": ref_apo_down,
    "orpo": ref_orpo,
    "cpo": ref_cpo,
    "simpo": ref_simpo,
    "alphapo": ref_alphapo,
}


def one_at_a_time(x: PreferenceInputs) -> list[Pair]:
    names = {"c": "chosen_logp", "r": "rejected_logp", "rc": "ref_chosen_logp", "rr": "ref_rejected_logp"}
    names |= {"nc": "chosen_len", "nr": "rejected_len"}
    return [{short: getattr(x, name)[p].item() for short, name in names.items()} for p in range(P)]


def ref_sorted(x: PreferenceInputs, k: PreferenceSettings, paired: bool) -> float:
    """The value of the loss over the mini-batch: quantile against quantile."""
    rows = one_at_a_time(x)
    if paired:
        first, second = [p["c"] - p["r"] for p in rows], [p["rc"] - p["rr"] for p in rows]
    else:
        first, second = [p["c"] - p["rc"] for p in rows], [p["r"] - p["rr"] for p in rows]
    gaps = [a - b for a, b in zip(sorted(first), sorted(second), strict=True)]
    return sum(smooth(k.beta * gap, k.label_smoothing) for gap in gaps) / P


def test_every_loss_has_a_reference_here_and_a_place_in_the_schema() -> None:
    assert set(PREFERENCE_LOSSES) == set(LOSS_READS)
    assert set(PREFERENCE_LOSSES) == {*ONE_PAIR, "aot", "aot_unpaired"}


@pytest.mark.parametrize("name", ONE_PAIR)
@pytest.mark.parametrize("smoothing", [0.1, 0.3])
def test_against_the_paper_in_float64(name: str, smoothing: float) -> None:
    x, settings = made(), replace(FULL, label_smoothing=smoothing)
    ours = PREFERENCE_LOSSES[name](x, settings).loss
    assert ours.dtype == torch.float64
    assert ours.tolist() == pytest.approx([ONE_PAIR[name](p, settings) for p in one_at_a_time(x)], rel=1e-10)


@pytest.mark.parametrize(("name", "paired"), [("aot", True), ("aot_unpaired", False)])
def test_sorted_losses_against_the_paper(name: str, paired: bool) -> None:
    x = made()
    ours = PREFERENCE_LOSSES[name](x, FULL).loss
    assert ours.mean().item() == pytest.approx(ref_sorted(x, FULL, paired), rel=1e-12)
    order = torch.tensor([3, 1, 6, 0, 2, 5, 4])
    shuffled = PreferenceInputs.from_columns(x.columns()[order])
    assert PREFERENCE_LOSSES[name](shuffled, FULL).loss.mean().item() == pytest.approx(ours.mean().item(), rel=1e-12)


def with_logps(x: PreferenceInputs, chosen: Tensor, rejected: Tensor) -> PreferenceInputs:
    return replace(x, chosen_logp=chosen, rejected_logp=rejected)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_gradients_by_finite_differences(name: str) -> None:
    x = made()  # no value of `hinge` or of the sorts lies within 1e-3 of a kink
    leaves = (x.chosen_logp.clone().requires_grad_(True), x.rejected_logp.clone().requires_grad_(True))
    function = PREFERENCE_LOSSES[name]
    assert torch.autograd.gradcheck(lambda c, r: function(with_logps(x, c, r), FULL).loss.mean(), leaves)
    rewards = function(with_logps(x, *leaves), FULL)
    assert not rewards.reward_chosen.requires_grad
    assert not rewards.reward_rejected.requires_grad


def test_ipo_summed_and_normalised_on_one_input() -> None:
    # log ratios +2 over 10 tokens and +0.5 over 5 tokens; beta 0.1, so the target is 5
    x = PreferenceInputs.of(*(torch.tensor([v]) for v in (-10.0, -8.0, -12.0, -8.5, 10.0, 5.0)))
    settings = PreferenceSettings(beta=0.1)
    assert PREFERENCE_LOSSES["ipo_sum"](x, settings).loss.item() == pytest.approx((1.5 - 5) ** 2)  # 12.25
    assert PREFERENCE_LOSSES["ipo"](x, settings).loss.item() == pytest.approx((0.2 - 0.1 - 5) ** 2, abs=1e-5)  # 24.01


def test_initial_values_where_the_policy_is_the_reference() -> None:
    logp = (torch.tensor([-30.0, -4.0]), torch.tensor([-12.0, -44.0]))
    x = PreferenceInputs.of(*logp, *logp, torch.tensor([9.0, 3.0]), torch.tensor([4.0, 20.0]))
    settings, log2 = PreferenceSettings(beta=0.1, label_smoothing=0.01), math.log(2)
    kl = 0.5 * math.log(0.5 / 0.99) + 0.5 * math.log(0.5 / 0.01)
    wanted = {"sigmoid": log2, "sigmoid_norm": log2, "robust": log2, "hinge": 1.0, "ipo": 25.0, "ipo_sum": 25.0}
    wanted |= {"exo_pair": kl, "discopop": 0.5 * log2 + 0.5, "nca_pair": 2 * log2, "bco_pair": 2 * log2}
    wanted |= {"sppo_hard": 50.0, "apo_zero": 1.0, "apo_down": 1.0, "aot": log2, "aot_unpaired": log2}
    assert set(wanted) == {name for name, found in LOSS_READS.items() if REFERENCE in found}
    for name, value in wanted.items():
        found = PREFERENCE_LOSSES[name](x, settings)
        assert found.loss.tolist() == pytest.approx([value] * 2, abs=2e-6 * max(1.0, value)), name
        assert found.reward_chosen.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(PREFERENCE_LOSSES, 2)))
def test_no_two_names_are_the_same_loss(first: str, second: str) -> None:
    """On one mini-batch; with the smoothing that robust and exo_pair need, and without it where neither is one."""
    x = made()
    for settings in (FULL, replace(FULL, label_smoothing=0.0)):
        if settings.label_smoothing == 0.0 and {first, second} & set(NEEDS_SMOOTHING):
            continue
        values = [PREFERENCE_LOSSES[name](x, settings).loss.mean().item() for name in (first, second)]
        assert abs(values[0] - values[1]) > 1e-3, values


@pytest.mark.parametrize("name", [n for n, found in LOSS_READS.items() if SMOOTHING in found])
def test_label_smoothing_changes_the_loss_and_its_optimum(name: str) -> None:
    """Without it a gap is pulled apart without end; with it the slope turns round past the log odds.

    Not robust's: that falls for ever, by e / (1 - 2 e) a unit.
    """
    x = made()
    lighter, heavier = (PREFERENCE_LOSSES[name](x, replace(FULL, label_smoothing=s)).loss.mean() for s in (0.1, 0.3))
    assert abs(float(lighter - heavier)) > 1e-3
    far = torch.full((1,), -40.0, dtype=torch.float64, requires_grad=True)  # of the rejected answer: a large gap
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    PREFERENCE_LOSSES[name](PreferenceInputs.of(zero, far, zero, zero, one, one), FULL).loss.sum().backward()
    assert far.grad is not None
    if name == "robust":
        assert float(far.grad) == pytest.approx(FULL.beta * 0.1 / (1 - 0.2), rel=1e-6)
    else:
        assert float(far.grad) < 0


def test_robust_is_unbiased_over_flipped_labels() -> None:
    x, flip = made(), 0.2
    other = replace(
        x,
        chosen_logp=x.rejected_logp,
        rejected_logp=x.chosen_logp,
        ref_chosen_logp=x.ref_rejected_logp,
        ref_rejected_logp=x.ref_chosen_logp,
    )
    settings = replace(FULL, label_smoothing=flip)
    seen, flipped = (PREFERENCE_LOSSES["robust"](side, settings).loss for side in (x, other))
    clean = PREFERENCE_LOSSES["sigmoid"](x, replace(FULL, label_smoothing=0.0)).loss
    assert ((1 - flip) * seen + flip * flipped).tolist() == pytest.approx(clean.tolist(), rel=1e-10)


def test_exo_without_smoothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="exo_pair"):
        PREFERENCE_LOSSES["exo_pair"](made(), replace(FULL, label_smoothing=0.0))


def test_extreme_values_stay_finite_and_have_finite_gradients() -> None:
    far = torch.tensor([400.0, -400.0, 0.0])
    for name, function in PREFERENCE_LOSSES.items():
        negative = torch.tensor([-1e-9, -800.0, -400.0])
        if REFERENCE not in LOSS_READS[name]:
            leaves = [negative.clone().requires_grad_(True), negative.flip(0).clone().requires_grad_(True)]
            x = PreferenceInputs.of(leaves[0], leaves[1], None, None, torch.full((3,), 40.0), torch.full((3,), 40.0))
        else:
            leaves = [far.clone().requires_grad_(True), far.flip(0).clone().requires_grad_(True)]
            x = PreferenceInputs.of(leaves[0], leaves[1])
        loss = function(x, replace(FULL, tau=0.05)).loss
        assert bool(loss.isfinite().all()), name
        loss.sum().backward()
        assert all(bool(leaf.grad.isfinite().all()) for leaf in leaves if leaf.grad is not None), name


def test_half_precision_is_widened() -> None:
    x = made(torch.float32)
    half = PreferenceInputs.of(x.chosen_logp.half(), x.rejected_logp.bfloat16(), None, None)
    assert PREFERENCE_LOSSES["sigmoid"](half, FULL).loss.dtype == torch.float32


def test_log1mexp_at_both_ends() -> None:
    for value in (-1e-9, -0.1, -0.7, -5.0, -60.0):
        ours = log1mexp(torch.tensor([value], dtype=torch.float64))
        assert ours.item() == pytest.approx(math.log(-math.expm1(value)), rel=1e-12)


# ---- f-divergences


def f_prime(name: str, u: float, a: float) -> float:
    """By a central difference of f itself (Wang et al. 2023, table 1), less its value at u = 1."""
    f: dict[str, Callable[[float], float]] = {
        "reverse_kl": lambda t: t * math.log(t),
        "forward_kl": lambda t: -math.log(t),
        "js_divergence": lambda t: t * math.log(t) - (t + 1) * math.log((t + 1) / 2),
        "alpha_divergence": lambda t: (t ** (1 - a) - (1 - a) * t - a) / (a * (a - 1)),
    }
    slope = [(f[name](t + 1e-6) - f[name](t - 1e-6)) / 2e-6 for t in (u, 1.0)]
    return slope[0] - slope[1]


@pytest.mark.parametrize("name", DIVERGENCES)
def test_scores_are_the_derivative_of_the_divergence(name: str) -> None:
    log_ratio = torch.tensor([-1.2, -0.1, 0.0, 0.4, 1.5], dtype=torch.float64)
    ours = DIVERGENCES[name](log_ratio, 0.4)
    assert ours.tolist() == pytest.approx([f_prime(name, math.exp(v), 0.4) for v in log_ratio.tolist()], abs=1e-6)
    leaf = log_ratio.clone().requires_grad_(True)
    assert torch.autograd.gradcheck(lambda v: DIVERGENCES[name](v, 0.4), (leaf,))


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(DIVERGENCES, 2)))
@pytest.mark.parametrize("loss", [n for n, found in LOSS_READS.items() if DIVERGENCE in found])
def test_no_two_divergences_are_the_same_under_any_loss_of_a_gap(loss: str, first: str, second: str) -> None:
    values = [
        PREFERENCE_LOSSES[loss](made(), replace(FULL, divergence=name)).loss.mean().item() for name in (first, second)
    ]
    assert abs(values[0] - values[1]) > 1e-3


def test_alpha_divergence_has_its_neighbours_as_limits() -> None:
    log_ratio = torch.tensor([-0.5, 0.8], dtype=torch.float64)
    near_zero, one = DIVERGENCES["alpha_divergence"](log_ratio, 1e-7), DIVERGENCES["alpha_divergence"](log_ratio, 1.0)
    assert near_zero.tolist() == pytest.approx(log_ratio.tolist(), abs=1e-5)
    assert one.tolist() == pytest.approx(DIVERGENCES["forward_kl"](log_ratio, 0.0).tolist())


def test_a_score_past_the_limit_is_finite_and_counted() -> None:
    x = PreferenceInputs.of(torch.tensor([-200.0, -1.0]), torch.tensor([-1.0, -2.0]))
    settings = PreferenceSettings(divergence="forward_kl")
    assert score_limits(x, settings).tolist() == [True, False]
    assert bool(PREFERENCE_LOSSES["sigmoid"](x, settings).loss.isfinite().all())
    assert score_limits(x, PreferenceSettings()).tolist() == [False, False]


def test_an_unknown_divergence_is_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean forward_kl"):
        PREFERENCE_LOSSES["sigmoid"](made(), PreferenceSettings(divergence="forwad_kl"))


# ---- weights, several losses, a user's own


def test_length_desensitised_weights_by_hand() -> None:
    position, public = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([2, 2, 2, 2, 2])
    assert public_weights(position, public, 0.3).tolist() == pytest.approx([1.0, 1.0, 0.3, 1.0, 1.0])


def test_pair_weights_with_and_without_alignment() -> None:
    # means -0.5 and -0.25; collisions log sum p^2 per token -0.4 and -0.1
    sums = [torch.tensor([v], requires_grad=True) for v in (-1.0, -1.0)]
    lens = [torch.tensor([2.0]), torch.tensor([4.0])]
    plain = pair_weights(*sums, *lens)
    assert plain.item() == pytest.approx(math.exp(-0.75))
    aligned = pair_weights(*sums, *lens, torch.tensor([-0.8]), torch.tensor([-0.4]))
    assert aligned.item() == pytest.approx(math.exp(-0.1 - 0.15))
    assert not plain.requires_grad


def test_aligned_weights_are_one_for_a_uniform_policy() -> None:
    logp, collision = torch.tensor([-3 * math.log(50)]), torch.tensor([3 * -math.log(50)])  # sum_v 1/50^2 = 1/50
    three = torch.tensor([3.0])
    assert pair_weights(logp, logp, three, three, collision, collision).item() == pytest.approx(1.0)


def test_several_losses_the_nll_and_the_weights_add_up() -> None:
    x = replace(made(), weight=torch.linspace(0.1, 2.0, P, dtype=torch.float64))
    first, second = PREFERENCE_LOSSES["sigmoid"], PREFERENCE_LOSSES["apo_zero"]
    terms = combined([(first, 0.8), (second, 0.5)], 0.25, x, FULL)
    wanted = [
        (0.8 * ref_sigmoid(p, FULL) + 0.5 * ref_apo_zero(p, FULL)) * w + 0.25 * -p["c"] / p["nc"]
        for p, w in zip(one_at_a_time(x), x.weight.tolist(), strict=True)
    ]
    assert terms.loss.tolist() == pytest.approx(wanted, rel=1e-10)
    assert torch.equal(terms.reward_chosen, first(x, FULL).reward_chosen)


def test_columns_survive_the_way_through_one_tensor() -> None:
    x = made()
    back = PreferenceInputs.from_columns(x.columns(), 0.2)
    for name in PREFERENCE_LOSSES:
        torch.testing.assert_close(
            PREFERENCE_LOSSES[name](back, FULL).loss, PREFERENCE_LOSSES[name](x, FULL).loss, rtol=0, atol=0
        )


def own_loss(x: PreferenceInputs, cfg: PreferenceSettings) -> Tensor:
    return torch.exp(-cfg.beta * (x.log_ratio_chosen - x.log_ratio_rejected))


def test_a_function_of_the_users_own() -> None:
    require_separable(own_loss, FULL, "mine:own_loss")
    terms = users_terms(own_loss, made(), FULL)
    assert isinstance(terms, PreferenceTerms)
    assert torch.equal(terms.reward_chosen, FULL.beta * made().log_ratio_chosen)


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda x, cfg: own_loss(x, cfg) - own_loss(x, cfg).mean(), ConfigError, "depends on the other pairs"),
        (lambda x, cfg: own_loss(x, cfg).detach(), ConfigError, "does not depend on the policy"),
        (lambda x, cfg: own_loss(x, cfg).mean(), ShapeError, "not their mean"),
        (lambda x, cfg: 3.0, ShapeError, "returned a float"),
    ],
)
def test_a_function_that_is_no_loss_of_a_pair_is_refused(function: Any, error: Any, words: str) -> None:
    with pytest.raises(error) as caught:
        require_separable(function, FULL, "mine")
    assert words in str(caught.value)


@pytest.mark.parametrize("name", [name for name in PREFERENCE_LOSSES if name not in COUPLED])
def test_losses_of_one_pair_are_what_they_are_called(name: str) -> None:
    require_separable(PREFERENCE_LOSSES[name], FULL, name)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_sorted_losses_are_not_of_one_pair(name: str) -> None:
    with pytest.raises(ConfigError, match="other pairs"):
        require_separable(PREFERENCE_LOSSES[name], FULL, name)
