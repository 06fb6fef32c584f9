"""Every advantage estimator against plain loops in float64, by hand, and in the places where peers went wrong."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tutelage.config.grpo import ESTIMATORS as CONFIGURED
from tutelage.config.grpo import UNGROUPED, grouped
from tutelage.errors import ConfigError, RewardError, ShapeError
from tutelage.math.group_advantages import ESTIMATORS, Estimate, EstimatorInputs, estimate

EPS = 1e-3
GAMMA = 0.9
WEIGHTS = (1.0, -0.5, 2.0)


def inputs(seed: int = 0, groups: tuple[int, ...] = (3, 4, 2, 5), equal: tuple[int, ...] = (), **more: Any) -> Any:
    """Groups of several sizes, mixed; responses of several lengths with holes; NaN under every mask.

    equal: groups in which everything that is paid is the same for all.
    """
    draw = random.Random(seed)
    rows = [(name, size) for name, size in enumerate(groups)]
    group = [name * 7 - 3 for name, size in rows for _ in range(size)]
    draw.shuffle(group)
    same = {name * 7 - 3 for name in equal}
    count, width = len(group), 6
    mask = [[t < draw.randint(1, width) and draw.random() < 0.8 for t in range(width)] for _ in range(count)]
    for row in mask:
        row[0] = True
    values = [[0.5] * 3 if name in same else [draw.gauss(0, s) for s in (1.0, 2.0, 0.2)] for name in group]
    penalty = [0.0 if name in same else -draw.random() for name in group]
    step = [[0.0 if name in same else draw.gauss(0, 0.3) for _ in range(width)] for name in group]
    score, token = [], []
    for b in range(count):
        outcome = sum(w * v for w, v in zip(WEIGHTS, values[b], strict=True)) + penalty[b]
        last = max(t for t in range(width) if mask[b][t])
        paid = [step[b][t] + (outcome if t == last else 0.0) if mask[b][t] else math.nan for t in range(width)]
        token.append(paid)
        score.append(sum(x for x, m in zip(paid, mask[b], strict=True) if m))
    p = [[draw.uniform(0.1, 0.9) for _ in range(width)] for _ in group]
    # the rest of the probability on one other token: sum p^2 = p^2 + (1 - p)^2
    collision = [[x * x + (1 - x) ** 2 for x in row] for row in p]

    def hidden(rows_: list[list[float]]) -> Tensor:
        wide = torch.tensor(rows_, dtype=torch.float64)
        return wide.masked_fill(~torch.tensor(mask), math.nan)

    made = EstimatorInputs(
        score=torch.tensor(score, dtype=torch.float64),
        token_reward=torch.tensor(token, dtype=torch.float64),
        group=torch.tensor(group),
        mask=torch.tensor(mask),
        values=torch.tensor(values, dtype=torch.float64),
        weights=torch.tensor(WEIGHTS, dtype=torch.float64),
        shaping=torch.tensor(
            [s - sum(w * v for w, v in zip(WEIGHTS, row, strict=True)) for s, row in zip(score, values, strict=True)],
            dtype=torch.float64,
        ),
        baseline=torch.tensor([{name: draw.gauss(0, 1) for name in set(group)}[g] for g in group], dtype=torch.float64),
        old_logp=hidden(p).log(),
        log_collision=hidden(collision).log(),
        eps=EPS,
        gamma=GAMMA,
    )
    return replace(made, **more)


def run(name: str, given: EstimatorInputs, scored: Tensor | None = None) -> Estimate:
    everything = torch.ones(len(given.score), dtype=torch.bool)
    return estimate(given, ESTIMATORS[name], everything if scored is None else scored, grouped=grouped(name))


# ---- the papers in loops


def members(x: EstimatorInputs, b: int) -> list[int]:
    return [j for j in range(len(x.score)) if int(x.group[j]) == int(x.group[b])]


def spread(numbers: list[float]) -> float:
    return statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def positions(x: EstimatorInputs, b: int) -> list[int]:
    return [t for t in range(x.mask.shape[1]) if bool(x.mask[b, t])]


def of_responses(formula: Callable[[EstimatorInputs, int], float]) -> Callable[[EstimatorInputs], list[list[float]]]:
    def table(x: EstimatorInputs) -> list[list[float]]:
        rows = [formula(x, b) for b in range(len(x.score))]
        return [[a if bool(m) else 0.0 for m in x.mask[b]] for b, a in enumerate(rows)]

    return table


def r(x: EstimatorInputs, b: int) -> float:
    return float(x.score[b])


def ref_grpo(x: EstimatorInputs, b: int) -> float:
    own = [r(x, j) for j in members(x, b)]
    return (r(x, b) - statistics.mean(own)) / (spread(own) + x.eps)


def ref_dr_grpo(x: EstimatorInputs, b: int) -> float:
    return r(x, b) - statistics.mean(r(x, j) for j in members(x, b))


def ref_rloo(x: EstimatorInputs, b: int) -> float:
    return r(x, b) - statistics.mean(r(x, j) for j in members(x, b) if j != b)


def ref_opo(x: EstimatorInputs, b: int) -> float:
    lens = {j: len(positions(x, j)) for j in members(x, b)}
    return r(x, b) - sum(n * r(x, j) for j, n in lens.items()) / sum(lens.values())


def ref_gpg(x: EstimatorInputs, b: int) -> float:
    every = range(len(x.score))
    silent = sum(len({r(x, j) for j in members(x, i)}) == 1 for i in every)
    return len(x.score) / (len(x.score) - silent) * ref_dr_grpo(x, b)


def ref_passk(x: EstimatorInputs, b: int) -> float:
    """The objective with this response, less the objective without it, over the deviation."""
    own = members(x, b)
    without = max(r(x, j) for j in own if j != b)
    return (max(r(x, j) for j in own) - without) / (spread([r(x, j) for j in own]) + x.eps)


def ref_remax(x: EstimatorInputs, b: int) -> float:
    assert x.baseline is not None
    return r(x, b) - float(x.baseline[b])


def ref_gdpo(x: EstimatorInputs, b: int) -> float:
    def summed(i: int) -> float:
        total = 0.0
        columns = [(w, x.values[:, k].tolist()) for k, w in enumerate(x.weights.tolist())]
        for weight, column in [*columns, (1.0, x.shaping.tolist())]:
            own = [column[j] for j in members(x, i)]
            total += weight * (column[i] - statistics.mean(own)) / (spread(own) + x.eps)
        return total

    every = [summed(i) for i in range(len(x.score))]
    return (every[b] - statistics.mean(every)) / (spread(every) + x.eps)


def whitened(table: list[list[float]], x: EstimatorInputs) -> list[list[float]]:
    real = [a for row, m in zip(table, x.mask.tolist(), strict=True) for a, on in zip(row, m, strict=True) if on]
    mean, scale = statistics.mean(real), math.sqrt(statistics.variance(real) + 1e-8)
    return [
        [(a - mean) / scale if on else 0.0 for a, on in zip(row, m, strict=True)]
        for row, m in zip(table, x.mask.tolist(), strict=True)
    ]


def ref_reinforce_plus_plus(x: EstimatorInputs) -> list[list[float]]:
    table = [[0.0] * x.mask.shape[1] for _ in x.score]
    for b in range(len(x.score)):
        at = positions(x, b)
        for first, t in enumerate(at):
            table[b][t] = sum(x.gamma**k * float(x.token_reward[b, s]) for k, s in enumerate(at[first:]))
    return whitened(table, x)


def ref_reinforce_plus_plus_baseline(x: EstimatorInputs) -> list[list[float]]:
    return whitened(of_responses(ref_dr_grpo)(x), x)


def ref_otb(x: EstimatorInputs) -> list[list[float]]:
    assert x.old_logp is not None
    assert x.log_collision is not None
    table = [[0.0] * x.mask.shape[1] for _ in x.score]

    def step(b: int, k: int) -> tuple[float, float]:
        """Return from the k-th token of the policy on, and the energy up to it."""
        at = positions(x, b)
        energy = 0.0
        for t in at[: k + 1]:
            p = math.exp(float(x.old_logp[b, t]))
            energy += 1 - 2 * p + math.exp(float(x.log_collision[b, t]))
        return sum(float(x.token_reward[b, t]) for t in at[k:]), energy

    for b in range(len(x.score)):
        for k, t in enumerate(positions(x, b)):
            alive = [step(j, k) for j in members(x, b) if len(positions(x, j)) > k]
            table[b][t] = step(b, k)[0] - sum(g * w for g, w in alive) / sum(w for _, w in alive)
    return table


REFERENCES: dict[str, Callable[[EstimatorInputs], list[list[float]]]] = {
    "grpo": of_responses(ref_grpo),
    "dr_grpo": of_responses(ref_dr_grpo),
    "rloo": of_responses(ref_rloo),
    "reinforce_plus_plus": ref_reinforce_plus_plus,
    "reinforce_plus_plus_baseline": ref_reinforce_plus_plus_baseline,
    "remax": of_responses(ref_remax),
    "opo": of_responses(ref_opo),
    "gpg": of_responses(ref_gpg),
    "grpo_passk": of_responses(ref_passk),
    "optimal_token_baseline": ref_otb,
    "gdpo": of_responses(ref_gdpo),
}


def test_the_names_of_a_recipe_are_the_estimators_and_each_has_a_reference() -> None:
    assert tuple(ESTIMATORS) == CONFIGURED == tuple(REFERENCES)
    assert set(ESTIMATORS) >= UNGROUPED


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("seed", [0, 1])
def test_an_estimator_is_its_papers_formula(name: str, seed: int) -> None:
    given = inputs(seed)
    found = run(name, given)
    wanted = torch.tensor(REFERENCES[name](given), dtype=torch.float64)
    torch.testing.assert_close(found.advantage, wanted, rtol=1e-9, atol=1e-9)
    assert found.counted.all()
    assert float(found.advantage.abs().max()) > 1e-2


def test_gpg_makes_up_for_the_groups_without_a_gradient() -> None:
    given = inputs(equal=(1, 2))
    wanted = torch.tensor(REFERENCES["gpg"](given), dtype=torch.float64)
    torch.testing.assert_close(run("gpg", given).advantage, wanted, rtol=1e-9, atol=1e-9)
    plain = run("dr_grpo", given).advantage
    torch.testing.assert_close(run("gpg", given).advantage, 14 / 8 * plain, msg="6 of 14 responses say nothing")


def test_no_two_names_are_the_same_estimator() -> None:
    """Equal groups and holes included; the smallest of all pairwise distances is still a visible one."""
    given = inputs(3, equal=(2,))
    found = {name: run(name, given).advantage for name in ESTIMATORS}
    for first, second in itertools.combinations(ESTIMATORS, 2):
        assert float((found[first] - found[second]).abs().max()) > 1e-3, (first, second)


# ---- by hand


def plain(scores: list[float], group: list[int], lens: list[int] | None = None, **more: Any) -> EstimatorInputs:
    """Outcome rewards of one source on the last token."""
    lens = lens or [1] * len(scores)
    mask = torch.arange(max(lens))[None, :] < torch.tensor(lens)[:, None]
    score = torch.tensor(scores, dtype=torch.float64)
    token = torch.zeros(mask.shape, dtype=torch.float64)
    token[torch.arange(len(scores)), torch.tensor(lens) - 1] = score
    made = EstimatorInputs(
        score, token, torch.tensor(group), mask, score[:, None], torch.ones(1), torch.zeros(len(scores)), eps=1e-12
    )
    return replace(made, **more)


def first_column(name: str, given: EstimatorInputs) -> list[float]:
    return run(name, given).advantage[:, 0].tolist()


def test_estimators_by_hand() -> None:
    scores, group = [0.0, 3.0, 6.0], [0, 0, 0]
    assert first_column("grpo", plain(scores, group)) == pytest.approx([-1, 0, 1])
    assert first_column("dr_grpo", plain(scores, group)) == pytest.approx([-3, 0, 3])
    assert first_column("rloo", plain(scores, group)) == pytest.approx([-4.5, 0, 4.5])
    # lengths 1, 2, 3: baseline (0 + 6 + 18) / 6 = 4
    assert first_column("opo", plain(scores, group, [1, 2, 3])) == pytest.approx([-4, -1, 2])
    assert first_column("grpo_passk", plain(scores, group, scale="none")) == pytest.approx([0, 0, 3])
    assert first_column("grpo_passk", plain(scores, group)) == pytest.approx([0, 0, 1])
    assert first_column("remax", plain(scores, group, baseline=torch.tensor([1.0, 1.0, 1.0]))) == [-1, 2, 5]
    # three responses of one token: returns 0, 3, 6, whitened
    assert first_column("reinforce_plus_plus", plain(scores, group)) == pytest.approx([-1, 0, 1], abs=1e-6)


def test_whitening_weighs_a_response_by_its_length() -> None:
    # two groups, a = -1, 1 and -1, 1; lengths 1, 3, 1, 1: mean (-1 + 3 - 1 + 1) / 6 = 1/3
    given = plain([0.0, 2.0, 0.0, 2.0], [0, 0, 1, 1], [1, 3, 1, 1])
    tokens = [-1, 1, 1, 1, -1, 1]
    sd = statistics.stdev(tokens)
    found = first_column("reinforce_plus_plus_baseline", given)
    assert found == pytest.approx([(-1 - 1 / 3) / sd, (1 - 1 / 3) / sd] * 2, abs=1e-6)


def test_discounted_returns_by_hand() -> None:
    # one response of three tokens, the middle one a hole; 4 at the end: returns 4 x 0.5, hole, 4
    given = plain([4.0], [0], [3], gamma=0.5)
    given = replace(given, mask=torch.tensor([[True, False, True]]))
    found = run("reinforce_plus_plus", given).advantage[0].tolist()
    root = math.sqrt(0.5)
    assert found == pytest.approx([-root, 0.0, root], abs=1e-6), "mean 3, sample deviation sqrt 2"


def test_the_optimal_token_baseline_by_hand() -> None:
    # two responses; p = 1/2 of two tokens (w = 1 - 1 + 1/2 = 1/2) and p = 1 of one (w = 0)
    half, sure = math.log(0.5), 0.0
    given = plain([1.0, 4.0], [0, 0], [2, 2])
    given = replace(
        given,
        old_logp=torch.tensor([[half, sure], [half, half]]),
        log_collision=torch.tensor([[half, sure], [half, half]]),
    )
    # W: [1/2, 1/2] and [1/2, 1]: baselines 2.5 and (1/2 + 4) / (3/2) = 3
    found = run("optimal_token_baseline", given).advantage
    torch.testing.assert_close(found, torch.tensor([[-1.5, -2.0], [1.5, 1.0]], dtype=found.dtype))


def test_gdpo_keeps_apart_what_grpo_adds_up() -> None:
    values = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    given = plain(values.sum(dim=1).tolist(), [0, 0, 1, 1], values=values, weights=torch.tensor([1.0, 1.0]))
    # group 0: the sums agree, and each source differs, in opposite directions; group 1: both differ the same way
    root = math.sqrt(0.5)
    sums = [0.0, 0.0, -2 * root, 2 * root]
    sd = statistics.stdev(sums)
    assert first_column("gdpo", given) == pytest.approx([s / sd for s in sums])
    assert first_column("gdpo", replace(given, weights=torch.tensor([3.0, 1.0]))) == pytest.approx(
        [s / statistics.stdev(w) for w in [[2 * root, -2 * root, -4 * root, 4 * root]] for s in w]
    )


# ---- what changes nothing


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_order_of_the_rows_and_the_names_of_the_groups_do_not_matter(name: str) -> None:
    given = inputs(5, equal=(3,))
    found = run(name, given)
    order = torch.randperm(len(given.score), generator=torch.Generator().manual_seed(1))
    moved = replace(given.select(order), group=given.group[order] * -11 + 5)
    torch.testing.assert_close(run(name, moved).advantage, found.advantage[order])


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n != "reinforce_plus_plus"])
def test_a_constant_added_to_every_score_of_a_prompt_changes_nothing(name: str) -> None:
    given = plain(
        [0.0, 1.0, 5.0, 2.0, 2.5], [0, 0, 0, 1, 1], [1, 2, 3, 3, 1], baseline=torch.tensor([1.0] * 3 + [2.0] * 2)
    )
    p = torch.full(given.mask.shape, 0.4, dtype=torch.float64)
    given = replace(given, old_logp=p.log(), log_collision=(p * p + (1 - p) ** 2).log())
    added = torch.tensor([10.0] * 3 + [-20.0] * 2)
    score = given.score + added
    token = given.token_reward.clone()
    token[given.token_reward != 0] = 0
    last = given.mask.sum(dim=1) - 1
    token[torch.arange(5), last] = score
    shifted = replace(given, score=score, token_reward=token, values=score[:, None], baseline=given.baseline + added)
    torch.testing.assert_close(run(name, shifted).advantage, run(name, given).advantage, rtol=1e-6, atol=1e-6)


def test_reinforce_plus_plus_is_unmoved_only_by_a_constant_for_all() -> None:
    given = plain([0.0, 1.0, 5.0, 2.0], [0, 0, 1, 1])
    found = run("reinforce_plus_plus", given).advantage

    def shifted(by: list[float]) -> Tensor:
        moved = torch.tensor(by)
        return run(
            "reinforce_plus_plus",
            replace(given, score=given.score + moved, token_reward=given.token_reward + moved[:, None]),
        ).advantage

    torch.testing.assert_close(shifted([3.0] * 4), found)
    assert float((shifted([3.0, 3.0, 0.0, 0.0]) - found).abs().max()) > 0.1


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_lies_under_the_mask_is_not_read_and_nothing_has_a_gradient(name: str) -> None:
    given = inputs(2)
    outside = {
        n: getattr(given, n).masked_fill(~given.mask, 7.5) for n in ("token_reward", "old_logp", "log_collision")
    }
    torch.testing.assert_close(run(name, replace(given, **outside)).advantage, run(name, given).advantage)
    assert bool((run(name, given).advantage[~given.mask] == 0).all())
    wanting = replace(given, score=given.score.clone().requires_grad_(True))
    assert not run(name, wanting).advantage.requires_grad


# ---- traps


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n not in UNGROUPED])
def test_a_group_whose_rewards_are_all_equal_gets_exactly_nothing_and_counts(name: str) -> None:
    given = inputs(1, equal=(0, 3))
    same = (given.group == -3) | (given.group == 18)
    found = run(name, given)
    assert int(same.sum()) == 8
    assert bool((found.advantage[same] == 0.0).all())
    assert bool(found.advantage[~same & (given.mask.sum(dim=1) > 0)].any())
    assert bool(found.counted[same].all())
    assert found.groups.equal.tolist() == same.tolist()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_all_groups_equal_is_no_division_by_nothing(name: str) -> None:
    found = run(name, plain([2.0, 2.0, 5.0, 5.0], [0, 0, 1, 1], **extras(4)))
    if name not in UNGROUPED:
        assert not found.advantage.any()
    assert bool(torch.isfinite(found.advantage).all())


def extras(rows: int, width: int = 1) -> dict[str, Tensor]:
    half = torch.full((rows, width), math.log(0.5), dtype=torch.float64)
    return {"old_logp": half, "log_collision": half, "baseline": torch.ones(rows, dtype=torch.float64)}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_response_alone_in_its_group_weighs_nothing_where_groups_are_compared(name: str) -> None:
    given = inputs(4, groups=(3, 1, 2))
    alone = given.group == 4
    found = run(name, given)
    assert found.counted.tolist() == (torch.ones(6, dtype=torch.bool) if name in UNGROUPED else ~alone).tolist()
    if name not in UNGROUPED:
        assert not found.advantage[alone].any()
        without = run(name, given.select(torch.nonzero(~alone).squeeze(1)))
        torch.testing.assert_close(found.advantage[~alone], without.advantage, msg="it is in no statistic either")


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_row_that_has_no_score_is_in_no_statistic_and_weighs_nothing(name: str) -> None:
    given = inputs(6)
    scored = torch.ones(len(given.score), dtype=torch.bool)
    scored[[0, 5]] = False
    broken = replace(given, score=given.score.masked_fill(~scored, math.nan), values=given.values.clone())
    broken.values[0] = math.nan
    broken.token_reward[5] = math.inf
    found = run(name, broken, scored)
    assert not found.advantage[~scored].any()
    assert found.counted.tolist() == scored.tolist()
    kept = torch.nonzero(scored).squeeze(1)
    torch.testing.assert_close(found.advantage[scored], run(name, inputs(6).select(kept)).advantage)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_group_of_two_of_which_one_failed_is_a_singleton(name: str) -> None:
    given = plain([1.0, 2.0, 3.0, 5.0], [0, 0, 1, 1], **extras(4))
    found = run(name, given, torch.tensor([True, False, True, True]))
    assert found.counted.tolist() == [name in UNGROUPED, False, True, True]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_score_that_is_not_a_number_without_an_error_is_refused(name: str) -> None:
    given = inputs(0)
    given.score[2] = math.nan
    with pytest.raises(RewardError, match="1 of 14 scores are NaN or infinite"):
        run(name, given)
    given = inputs(0)
    given.values[2, 1] = math.inf
    with pytest.raises(RewardError, match="1 of 14 scores are NaN"):
        run(name, given)


def test_when_nothing_was_scored_nothing_is_learned() -> None:
    found = run("grpo", inputs(0), torch.zeros(14, dtype=torch.bool))
    assert not found.advantage.any()
    assert not found.counted.any()


def test_the_tail_of_the_longest_response_has_nothing_to_be_compared_with() -> None:
    given = plain([1.0, 4.0], [0, 0], [1, 3], **extras(2, 3))
    found = run("optimal_token_baseline", given).advantage
    torch.testing.assert_close(found, torch.tensor([[-1.5, 0, 0], [1.5, 0, 0]], dtype=found.dtype))


def test_certain_tokens_fall_back_to_the_plain_mean() -> None:
    sure = torch.zeros(3, 1, dtype=torch.float64)
    given = plain([1.0, 4.0, 7.0], [0, 0, 0], old_logp=sure, log_collision=sure)
    assert first_column("optimal_token_baseline", given) == pytest.approx([-3, 0, 3])


def test_what_an_estimator_needs_and_does_not_get_is_named() -> None:
    with pytest.raises(ShapeError, match="needs baseline"):
        run("remax", plain([1.0, 2.0], [0, 0]))
    with pytest.raises(ShapeError, match="needs log_collision"):
        run("optimal_token_baseline", plain([1.0, 2.0], [0, 0], old_logp=torch.zeros(2, 1)))
    with pytest.raises(ConfigError, match=r"'nonne' is not a scale of grpo_passk\. Did you mean none"):
        run("grpo_passk", plain([1.0, 2.0], [0, 0], scale="nonne"))
    with pytest.raises(ShapeError, match=r"shaping has shape \(3,\)"):
        run("grpo", plain([1.0, 2.0], [0, 0], shaping=torch.zeros(3)))


# ---- the user's own


def test_a_function_of_the_user_may_return_one_number_a_response_or_a_token() -> None:
    given, everything = inputs(0), torch.ones(14, dtype=torch.bool)
    one = estimate(given, lambda x: 2 * x.score, everything, grouped=False)
    torch.testing.assert_close(one.advantage, 2 * given.score[:, None] * given.mask)
    each = estimate(given, lambda x: x.score[:, None].expand_as(x.mask), everything, grouped=False)
    torch.testing.assert_close(each.advantage, given.score[:, None] * given.mask)
    with pytest.raises(ShapeError, match=r"returned \(13,\) for \(14, 6\) tokens"):
        estimate(given, lambda x: x.score[1:], everything, grouped=False)
    with pytest.raises(RewardError, match=r"advantages of .* tokens are NaN or infinite"):
        estimate(given, lambda x: x.score / 0.0, everything, grouped=False)
