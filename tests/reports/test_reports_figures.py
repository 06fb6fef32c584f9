from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats

from tutelage.errors import DataError
from tutelage.reports.figures import (
    build_reward_comparison,
    build_training_curves,
    centred_mean,
    reward_comparison,
    shared_bins,
    training_curves,
)
from tutelage.reports.panels import metric_names, series
from tutelage.reports.samples import Sample, pair_samples

MakeRun = Callable[..., Path]


def record(step: int, **metrics: float) -> dict[str, Any]:
    return {"step": step, "time": 0.0, **{k.replace("__", "/"): v for k, v in metrics.items()}}


def ppo(steps: int, **more: float) -> list[dict[str, Any]]:
    base = {
        "reward__score_mean": 0.1,
        "kl__sequence": 2.0,
        "policy__entropy": 1.5,
        "policy__clip_fraction": 0.1,
        "value__error": 0.3,
        "rollout__length_mean": 12.0,
    }
    return [record(s, **{k: v * s for k, v in {**base, **more}.items()}) for s in range(1, steps + 1)]


def titles(figure: Any) -> list[str]:
    return [ax.get_title(loc="left") for ax in figure.axes]


def texts(ax: Any) -> list[str]:
    return [t.get_text() for t in ax.texts]


def test_a_ppo_run_has_the_six_panels_with_units() -> None:
    figure = build_training_curves(ppo(4), {})
    assert titles(figure) == [
        "Reward (proxy)",
        "KL to the reference",
        "Policy entropy",
        "Clip fraction",
        "Value loss",
        "Response length",
    ]
    assert [ax.get_ylabel() for ax in figure.axes] == [
        "reward",
        "nats per sequence",
        "nats per token",
        "share of response tokens",
        "squared reward",
        "tokens, mean",
    ]


def test_curves_are_the_logged_numbers() -> None:
    figure = build_training_curves(ppo(4), {})
    line = figure.axes[1].lines[0]
    assert list(line.get_xdata()) == [1, 2, 3, 4]
    assert list(line.get_ydata()) == [2.0, 4.0, 6.0, 8.0]


def test_gold_has_its_own_panel_where_it_was_evaluated() -> None:
    metrics = [*ppo(4), record(2, eval__gold_mean=0.5, eval__proxy_mean=0.1), record(4, eval__gold_mean=0.4)]
    figure = build_training_curves(metrics, {})
    gold = figure.axes[titles(figure).index("Reward (gold)")]
    assert list(gold.lines[0].get_xdata()) == [2, 4]
    assert list(gold.lines[0].get_ydata()) == [0.5, 0.4]
    assert {"rollouts", "held out"} <= set(texts(figure.axes[0]))


def test_the_kl_budget_is_drawn_and_a_far_alarm_is_not() -> None:
    config = {"kl": {"budget": 6.0, "controller": "fixed"}, "alarms": {"kl": 100.0}}
    ax = build_training_curves(ppo(4), config).axes[1]
    assert "budget 6" in texts(ax)
    assert not any("alarm" in t for t in texts(ax))
    assert any(list(line.get_ydata()) == [6.0, 6.0] for line in ax.lines)
    near = build_training_curves(ppo(4), {"alarms": {"kl": 10.0}}).axes[1]
    assert "alarm 10" in texts(near)


def test_the_kl_target_is_drawn_only_for_the_adaptive_controller() -> None:
    fixed = build_training_curves(ppo(3), {"kl": {"target": 5.0, "controller": "fixed"}}).axes[1]
    adaptive = build_training_curves(ppo(3), {"kl": {"target": 5.0, "controller": "adaptive"}}).axes[1]
    assert "target 5" not in texts(fixed)
    assert "target 5" in texts(adaptive)


def test_labels_of_curves_stand_at_their_ends_and_apart() -> None:
    metrics = [record(s, reward__score_mean=1.0 * s, eval__proxy_mean=1.0 * s + 0.001) for s in range(1, 5)]
    ax = build_training_curves(metrics, {}).axes[0]
    low, high = sorted(t.get_position()[1] for t in ax.texts)
    assert high - low >= 0.089
    assert 0.8 < low < high <= 1.0


def test_a_label_stands_at_the_height_of_the_last_point() -> None:
    # down from 4 to 0, and from 4 to 2: in the middle and at the foot of axes that reach from 0 to 4 and a margin
    metrics = [record(s, reward__score_mean=4.0 - s, eval__proxy_mean=4.0 - s / 2) for s in range(5)]
    ax = build_training_curves(metrics, {}).axes[0]
    height = {t.get_text(): t.get_position()[1] for t in ax.texts}
    margin = 0.05 / 1.1
    assert height["rollouts"] == pytest.approx(margin, abs=0.01)
    assert height["held out"] == pytest.approx(0.5, abs=0.01)


def test_a_value_that_is_not_finite_is_marked() -> None:
    metrics = ppo(5)
    metrics[2]["kl/sequence"] = math.nan
    ax = build_training_curves(metrics, {}).axes[1]
    assert "× 1 not finite" in texts(ax)


def test_value_loss_over_two_decades_gets_a_log_axis() -> None:
    metrics = ppo(4)
    for i, row in enumerate(metrics):
        row["value/error"] = 10.0 ** (2 - i)
    assert build_training_curves(metrics, {}).axes[4].get_yscale() == "log"
    assert build_training_curves(ppo(4), {}).axes[4].get_yscale() == "linear"


def test_a_long_run_is_smoothed_and_says_so() -> None:
    figure = build_training_curves(ppo(100), {})
    assert "mean of 5 steps" in figure.get_suptitle()
    pale, dark = figure.axes[1].lines[:2]
    assert list(pale.get_ydata()) == [2.0 * s for s in range(1, 101)]
    # The centred mean of a straight line is the line, except for the two points at either end.
    assert list(dark.get_ydata())[2:-2] == pytest.approx([2.0 * s for s in range(3, 99)])


def test_centred_mean_by_hand() -> None:
    assert centred_mean([1.0, 2.0, 6.0, math.nan, 4.0], 3) == [1.5, 3.0, 4.0, 5.0, 4.0]


def test_sft_and_reward_model_runs_show_what_they_log() -> None:
    sft = [record(s, sft__loss=2.0 / s, sft__grad_norm=1.0, sft__lr=1e-4) for s in range(1, 4)]
    assert titles(build_training_curves([*sft, record(3, eval__loss=0.9)], {})) == [
        "Loss",
        "Gradient norm",
        "Learning rate",
    ]
    rm = [record(s, rm__loss=0.6, rm__accuracy=0.6, rm__margin=0.1 * s, rm__grad_norm=1.0) for s in range(1, 4)]
    figure = build_training_curves(rm, {})
    assert titles(figure) == ["Loss", "Accuracy", "Margin", "Gradient norm"]
    assert "chance 50%" in texts(figure.axes[1])


def test_an_unknown_kind_of_run_gets_a_panel_a_metric() -> None:
    assert titles(build_training_curves([record(1, x__y=1.0, z=2.0)], {})) == ["x/y", "z"]


def test_no_metrics_is_an_error() -> None:
    with pytest.raises(DataError, match="no metrics"):
        build_training_curves([{"step": 1, "time": 0.0}], {})


def test_a_step_logged_twice_keeps_its_last_value() -> None:
    metrics = [record(1, a=1.0), record(2, a=2.0), record(2, a=3.0), {"step": 3, "a": True, "b": "text"}]
    assert series(metrics, "a") == ([1, 2], [1.0, 3.0])
    assert metric_names(metrics[:3]) == ["a"]


def pairs_of(before: list[float], after: list[float], gold: bool = False) -> list[tuple[Sample, Sample]]:
    return [
        (
            Sample(f"p{i}", "q", "x", b, 1, gold=b if gold else None, phase="before"),
            Sample(f"p{i}", "q", "y", a, 1, gold=-a if gold else None),
        )
        for i, (b, a) in enumerate(zip(before, after, strict=True))
    ]


BEFORE = [0.1, 0.4, -0.2, 0.3, 0.0, 0.5]
AFTER = [1.1, 0.9, 0.7, 1.5, -0.1, 0.5]


def test_the_comparison_states_means_and_the_paired_difference_as_scipy_has_them() -> None:
    (ax,) = build_reward_comparison(pairs_of(BEFORE, AFTER)).axes
    difference = np.array(AFTER) - np.array(BEFORE)
    n = len(difference)
    half = scipy_stats.t.ppf(0.975, n - 1) * difference.std(ddof=1) / math.sqrt(n)
    mean = difference.mean()
    said = " ".join(texts(ax)).replace("−", "-")
    assert f"{mean:+.2f}  [{mean - half:+.2f}, {mean + half:+.2f}]" in said
    assert "4 of 6 prompts higher, 1 lower, 1 equal" in said
    low, high = scipy_stats.t.interval(0.95, n - 1, np.mean(AFTER), scipy_stats.sem(AFTER))
    assert f"after {np.mean(AFTER):.2f}  [{low:.2f}, {high:.2f}]" in said


def test_histograms_share_bins_and_count_every_answer() -> None:
    edges = shared_bins([*BEFORE, *AFTER])
    assert edges[0] == min(*BEFORE, *AFTER)
    assert edges[-1] == max(*BEFORE, *AFTER)
    assert 10 <= len(edges) - 1 <= 40
    assert sum(np.histogram(BEFORE, edges)[0]) == len(BEFORE)
    assert list(shared_bins([2.5, 2.5])[[0, -1]]) == [2.0, 3.0]
    assert list(shared_bins([-1.0, 2.0, 0.0])) == [-1.5, -0.5, 0.5, 1.5, 2.5]


def test_gold_gets_a_panel_and_its_absence_none() -> None:
    assert titles(build_reward_comparison(pairs_of(BEFORE, AFTER))) == ["Proxy reward"]
    assert titles(build_reward_comparison(pairs_of(BEFORE, AFTER, gold=True))) == ["Proxy reward", "Gold reward"]


def test_one_prompt_and_equal_rewards_can_be_drawn() -> None:
    build_reward_comparison(pairs_of([1.0], [1.0])).savefig("/dev/null", format="png")


def test_samples_pair_by_id_and_what_has_no_partner_is_counted() -> None:
    before = [Sample("a", "qa", "1", 0.0, 1), Sample("b", "qb", "2", 0.0, 1)]
    after = [Sample("c", "qc", "3", 0.0, 1), Sample("a", "qa", "4", 0.0, 1)]
    pairs, alone = pair_samples(before, after)
    assert [(b.response, a.response) for b, a in pairs] == [("1", "4")]
    assert alone == 2
    twice = [Sample("a", "qa", r, 0.0, 1) for r in "xy"]
    assert [(b.response, a.response) for b, a in pair_samples(twice, twice)[0]] == [("x", "x"), ("y", "y")]
    with pytest.raises(DataError, match="two prompts"):
        pair_samples(before, [Sample("a", "another", "4", 0.0, 1)])


def test_both_figures_of_a_run_folder_are_wide_enough_to_read(make_run: MakeRun) -> None:
    folder = make_run()
    for path in (training_curves(folder), reward_comparison(folder)):
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", data[16:24])
        assert width >= 1200
        assert height >= 600
    assert sorted(p.name for p in (folder / "figures").iterdir()) == [
        "reward_comparison.png",
        "rlhf_training_curves.png",
    ]


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path, make_run: MakeRun) -> None:
    with pytest.raises(DataError, match="neither"):
        training_curves(tmp_path)
    with pytest.raises(DataError, match="no run folder"):
        training_curves(tmp_path / "absent")
    with pytest.raises(DataError, match="before and after"):
        reward_comparison(make_run(after=[]))
