"""Held-out answers: pass@k, intervals of accuracies, several answers, greedy answers, answers without a score."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rewards_kit import text_rollout

from tutelage.errors import DataError
from tutelage.evals.answers import HeldOutAnswers, Judging
from tutelage.evals.unscored import UnscoredResponses
from tutelage.evals.verifiable import change, interval, paired_proportions, pass_at_k
from tutelage.math.stats import mean_interval, wilson_interval
from tutelage.transport.local import LocalTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Prompts, Scores


@pytest.mark.parametrize("answers", [1, 2, 5])
def test_pass_at_k_is_the_share_of_the_draws_that_hold_a_right_answer(answers):
    for right in range(answers + 1):
        for k in range(1, answers + 1):
            draws = list(itertools.combinations([True] * right + [False] * (answers - right), k))
            assert pass_at_k(answers, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@settings(deadline=None, max_examples=50)
@given(answers=st.integers(1, 30), data=st.data())
def test_pass_at_1_is_the_mean(answers, data):
    right = data.draw(st.integers(0, answers))
    assert pass_at_k(answers, right, 1) == pytest.approx(right / answers)


@pytest.mark.parametrize(("answers", "right", "k"), [(4, 2, 5), (4, 5, 1), (4, 2, 0)])
def test_pass_at_k_of_what_cannot_be_is_refused(answers, right, k):
    with pytest.raises(DataError, match="pass@"):
        pass_at_k(answers, right, k)


def test_an_accuracy_has_wilsons_interval_and_other_means_students():
    rate = interval([0.0] * 50)
    assert (rate["low"], rate["high"]) == (0, pytest.approx(3.8415 / 53.8415, abs=1e-4))  # z^2 / (n + z^2)
    assert interval([0.5, 1.0, None, 0.0])["low"] == mean_interval([0.5, 1.0, 0.0])[1]
    assert interval([0.5]) == {"mean": 0.5}
    assert math.isnan(interval([None])["mean"])


def test_paired_proportions_by_hand():
    # a = 20, b = 12, c = 2, d = 16 of 50: p1 = .64, p2 = .44; phi's numerator 20*16 - 12*2 - 25 = 271, its
    # denominator sqrt(32 * 18 * 22 * 28) = 595.66, phi = 0.45496.
    first = [1.0] * 32 + [0.0] * 18
    second = [1.0] * 20 + [0.0] * 12 + [1.0] * 2 + [0.0] * 16
    (_, l1, u1), (_, l2, u2) = wilson_interval(32, 50), wilson_interval(22, 50)
    phi = 0.45496
    low = 0.2 - math.sqrt((0.64 - l1) ** 2 - 2 * phi * (0.64 - l1) * (u2 - 0.44) + (u2 - 0.44) ** 2)
    high = 0.2 + math.sqrt((u1 - 0.64) ** 2 - 2 * phi * (u1 - 0.64) * (0.44 - l2) + (0.44 - l2) ** 2)
    assert paired_proportions(first, second) == pytest.approx((0.2, low, high), abs=1e-5)
    assert 0.05 < low < 0.2 < high < 0.35


def test_no_difference_on_few_prompts_is_not_certainty():
    _, low, high = paired_proportions([0.0] * 30, [0.0] * 30)
    assert (low, high) == (pytest.approx(-high), pytest.approx(0.11, abs=0.02))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=40))
def test_the_paired_interval_holds_its_difference_and_turns_with_its_sides(pairs):
    first, second = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    mean, low, high = paired_proportions(first, second)
    assert -1 - 1e-9 <= low <= mean + 1e-12 <= high + 2e-12 <= 1 + 1e-9
    assert paired_proportions(second, first) == pytest.approx((-mean, -high, -low), abs=1e-9)


def test_change_leaves_out_prompts_without_both():
    assert change([1.0, None, 0.5], [0.0, 1.0, None]) is None
    found = change([1.0, None, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0])
    assert found is not None
    assert found["mean"] == pytest.approx(0.5)


class Actor:
    """Answers prompt p, sample s with the text `p.s`."""

    def generate(self, prompts: Prompts):
        self.asked = prompts
        texts = [f"{p}.{s}" for p in range(len(prompts)) for s in range(prompts.n)]
        ids = tuple(prompts.ids[p] for p in range(len(prompts)) for _ in range(prompts.n))
        rollout = text_rollout(*texts)
        group = torch.arange(len(prompts)).repeat_interleave(prompts.n)
        samples = torch.arange(prompts.n).repeat(len(prompts))
        return replace(rollout, group=group, samples=samples, prompt_ids=ids)

    def logprobs(self, rollout):
        return rollout.rollout_logp


class Reward:
    """NaN, with a reason, for the texts in `bad`; else 1."""

    bad: tuple[str, ...] = ()

    def score(self, rollout):
        errors = tuple("odd" if text in self.bad else "" for text in rollout.texts)
        total = torch.tensor([math.nan if error else 1.0 for error in errors])
        return Scores(total[:, None], total, ("r",), (1.0,), errors)

    def take_errors(self):
        return []


class Rule:
    """1 for the texts in `right`, NaN with a reason for those in `bad`."""

    name = "rule"

    def __init__(self, right=(), bad=()):
        self.right, self.bad = right, bad

    def score(self, rollout):
        return torch.tensor([float(text in self.right) for text in rollout.texts])

    def attempt(self, rollout):
        errors = tuple("late" if text in self.bad else "" for text in rollout.texts)
        return self.score(rollout).masked_fill(torch.tensor([bool(e) for e in errors]), math.nan), errors


def held_out(tmp_path, judging, reward=None):
    transport, actor = LocalTransport(), Actor()
    roles = {"actor": actor, "reward": reward or Reward(), "reference": actor}
    handles = RoleSet({name: transport.handle(name, role) for name, role in roles.items()})
    prompts = Prompts(((1,),) * 3, ("a", "b", "c"), (None,) * 3, (({"role": "user", "content": "q"},),) * 3)
    return HeldOutAnswers(handles, prompts, None, tmp_path, 0.1, judging), actor


def test_rules_are_reported_beside_the_proxy_by_name_and_paired(tmp_path):
    rule = Rule(right=("0.0",))
    evaluator, _ = held_out(tmp_path, Judging({"strict": rule}))
    before = evaluator.evaluate("before", 0)
    assert before.metrics["eval/rule/strict"] == pytest.approx(1 / 3)
    rule.right = ("0.0", "1.0", "2.0")
    again, _ = held_out(tmp_path, Judging({"strict": rule}))
    again.load_state(json.loads(json.dumps(evaluator.state())))
    after = again.evaluate("after", 5)
    assert after.details["rule/strict_change"]["mean"] == pytest.approx(2 / 3)
    assert after.details["rule/strict"]["mean"] == 1
    assert json.loads((tmp_path / "samples" / "after.jsonl").read_text().splitlines()[1])["rule/strict"] == 1.0


def test_several_answers_have_their_mean_and_pass_at_k(tmp_path):
    rule = Rule(right=("0.0", "0.1", "1.3"))  # 2 of 4, 1 of 4 and 0 of 4 right
    evaluator, actor = held_out(tmp_path, Judging({"strict": rule}, samples=4, pass_at=(1, 2)))
    metrics = evaluator.evaluate("before", 0).metrics
    assert actor.asked.n == 4
    assert metrics["eval/rule/strict"] == pytest.approx(3 / 12)
    assert metrics["eval/pass_at_1/strict"] == pytest.approx(3 / 12)
    # 1 - C(2,2)/C(4,2) = 5/6 and 1 - C(3,2)/C(4,2) = 1/2
    assert metrics["eval/pass_at_2/strict"] == pytest.approx((5 / 6 + 1 / 2 + 0) / 3)


def test_greedy_answers_say_nothing_of_the_kl(tmp_path):
    evaluator, actor = held_out(tmp_path, Judging(greedy=True))
    found = evaluator.evaluate("before", 0)
    assert actor.asked.greedy
    assert "eval/kl_sequence" not in found.metrics
    assert found.measured_by == "eval/proxy_mean"
    sampled, actor = held_out(tmp_path, Judging())
    assert "eval/kl_sequence" in sampled.evaluate("before", 0).metrics
    assert not actor.asked.greedy


def test_answers_without_a_score_are_left_out_counted_and_written(tmp_path):
    reward = Reward()
    reward.bad = ("0.0", "1.0", "1.1")
    evaluator, _ = held_out(tmp_path, Judging({"strict": Rule(("2.0",), ("2.1",))}, samples=2, skip=True), reward)
    found = evaluator.evaluate("before", 0)
    assert found.metrics["eval/errors"] == 4
    assert found.metrics["eval/proxy_mean"] == 1
    assert found.metrics["eval/rule/strict"] == pytest.approx((0 + 0 + 1) / 3)
    assert evaluator.before["proxy"] == [1.0, None, 1.0]
    lines = [json.loads(line) for line in (tmp_path / "samples" / "errors.jsonl").read_text().splitlines()]
    assert sorted((line["id"], line["sample"], line["error"]) for line in lines) == [
        ("a", 0, "odd"),
        ("b", 0, "odd"),
        ("b", 1, "odd"),
        ("c", 1, "late"),
    ]
    assert {(line["step"], line["phase"]) for line in lines} == {(0, "before")}
    assert len((tmp_path / "samples" / "before.jsonl").read_text().splitlines()) == 3


def test_steps_that_are_taken_again_replace_their_lines(tmp_path):
    class Ranks:
        """Two ranks that saw the same rows."""

        def __init__(self, *errors):
            self.records = [{"id": "a", "sample": 0, "error": error} for error in errors]

        def take_errors(self):
            return self

        def gather(self):
            return [self.records, self.records]

    class Roles:
        pass

    roles = Roles()
    unscored = UnscoredResponses(roles, tmp_path)
    for step, error in ((1, "one"), (2, "two"), (3, "three"), (2, "again")):
        roles.reward = Ranks(error)
        assert unscored.take(step) == 1
    roles.reward = Ranks()
    assert unscored.take(4) == 0
    lines = [json.loads(line) for line in unscored.path.read_text().splitlines()]
    assert [(line["step"], line["error"]) for line in lines] == [(1, "one"), (2, "again")]
