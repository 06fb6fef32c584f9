"""Group advantages against the standard library's statistics, and by hand."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch

from tutelage.errors import ConfigError, RewardError, ShapeError
from tutelage.math.group_advantages import SCALES, group_advantages, group_statistics


def reference(scores: list[float], groups: list[int], scale: str, eps: float) -> list[float]:
    out = []
    for score, name in zip(scores, groups, strict=True):
        own = [s for s, g in zip(scores, groups, strict=True) if g == name]
        if len(own) < 2:
            out.append(0.0)
            continue
        spread = statistics.stdev(own if scale == "group" else scores)
        out.append((score - statistics.mean(own)) / (spread + eps))
    return out


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("eps", [1e-4, 0.5])
def test_against_the_standard_library_with_groups_of_several_sizes_mixed(scale: str, eps: float) -> None:
    draw = random.Random(0)
    groups = [7] * 4 + [2] * 3 + [-1] + [100] * 6
    draw.shuffle(groups)
    scores = [draw.gauss(1.0, 2.0) for _ in groups]
    found = group_advantages(torch.tensor(scores, dtype=torch.float64), torch.tensor(groups), scale, eps)
    assert found.tolist() == pytest.approx(reference(scores, groups, scale, eps), abs=1e-12)


def test_by_hand() -> None:
    # group 0: 1, 3: mean 2, sd sqrt 2.  group 1: 0, 0, 3: mean 1, sd sqrt 3
    found = group_advantages(torch.tensor([1.0, 0.0, 3.0, 0.0, 3.0]), torch.tensor([0, 1, 0, 1, 1]), "group", 1e-9)
    r2, r3 = math.sqrt(2), math.sqrt(3)
    assert found.tolist() == pytest.approx([-1 / r2, -1 / r3, 1 / r2, -1 / r3, 2 / r3])
    with_eps = group_advantages(torch.tensor([0.0, 2.0]), torch.zeros(2, dtype=torch.int64), "group", 1.0)
    assert with_eps.tolist() == pytest.approx([-1 / (r2 + 1), 1 / (r2 + 1)]), "eps beside the deviation, not in a root"


def test_the_two_scales_differ_and_the_batch_scale_keeps_the_spread_of_a_group() -> None:
    scores, groups = torch.tensor([0.0, 1.0, 0.0, 10.0]), torch.tensor([0, 0, 1, 1])
    own, whole = (group_advantages(scores, groups, scale, 1e-8) for scale in SCALES)
    assert own[1].item() == pytest.approx(own[3].item())
    assert whole[3].item() == pytest.approx(10 * whole[1].item())


@pytest.mark.parametrize("scale", SCALES)
def test_equal_scores_and_a_group_of_one_say_nothing(scale: str) -> None:
    scores = torch.tensor([0.1, 0.1, 0.1, 5.0, 1.0, 2.0])
    groups = torch.tensor([0, 0, 0, 1, 2, 2])
    found = group_advantages(scores, groups, scale, 1e-12)
    assert found[:4].tolist() == [0.0] * 4
    assert found[4] < 0 < found[5]
    stats = group_statistics(scores, groups)
    assert stats.size.tolist() == [3, 3, 3, 1, 2, 2]
    assert stats.equal.tolist() == [True] * 4 + [False] * 2
    assert stats.std.tolist() == pytest.approx([0, 0, 0, 0, math.sqrt(0.5), math.sqrt(0.5)], abs=1e-6)


def test_shift_changes_nothing_order_does_not_matter_and_no_gradient() -> None:
    scores = torch.tensor([1.0, 4.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    groups = torch.tensor([0, 0, 1, 1])
    found = group_advantages(scores, groups, "group", 1e-4)
    assert not found.requires_grad
    torch.testing.assert_close(group_advantages(scores + 100, groups, "group", 1e-4), found)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(group_advantages(scores[order], groups[order], "group", 1e-4), found[order])


def test_bad_arguments_are_refused() -> None:
    x, g = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"'groups' .*Did you mean group"):
        group_advantages(x, g, "groups", 1e-4)
    with pytest.raises(ConfigError, match="eps"):
        group_advantages(x, g, "group", 0.0)
    with pytest.raises(RewardError, match="1 of 2 scores are NaN or infinite"):
        group_advantages(torch.tensor([0.0, math.nan]), g, "group", 1e-4)
    with pytest.raises(ShapeError):
        group_advantages(x, torch.zeros(3, dtype=torch.int64), "group", 1e-4)
