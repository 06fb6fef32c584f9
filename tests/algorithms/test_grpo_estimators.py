"""Estimators and DAPO's parts in the GRPO file: what they are given, what they need, and what a recipe may ask for."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tutelage.algorithms import grpo
from tutelage.algorithms.policy import token_weights
from tutelage.config import GRPOConfig, check_effect, check_sense, load_recipe
from tutelage.config.grpo import refill_warnings
from tutelage.errors import ConfigError, RewardError
from tutelage.math.group_advantages import ESTIMATORS
from tutelage.roles.actor import Actor
from tutelage.roles.reference import Reference
from tutelage.roles.reward import Reward
from tutelage.schedules import OneStepOff, Synchronous
from tutelage.schedules.saved import packed, unpacked
from tutelage.transport.local import LocalTransport
from tutelage.transport.recording import RecordingTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Prompts, Ragged, Rollout, Scores, Sequences

SCORES = [1.0, 4.0, 2.0, 2.0, 9.0, 7.0]
LENS = [2, 1, 3, 1, 2, 4]
GROUPS = [0, 0, 1, 1, 2, 2]


def config(**sections: Any) -> GRPOConfig:
    base = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"model": "r"}, "kl": {"coef": 0.0}}
    sections = {"rollout": {"max_new_tokens": 4, "samples_per_prompt": 2, "prompts_per_step": 3}, **sections}
    return GRPOConfig.model_validate({**base, **sections})


def flat(value: float | list[float]) -> Ragged:
    values = [value] * sum(LENS) if isinstance(value, float) else value
    return Ragged(torch.tensor(values), torch.tensor(LENS))


def scores(values: list[list[float]], weights: tuple[float, ...], errors: tuple[str, ...] | None = None) -> Scores:
    columns = torch.tensor(values)
    names = tuple(f"s{k}" for k in range(len(weights)))
    return Scores(columns, (columns * torch.tensor(weights)).sum(dim=1), names, weights, errors)


def rollout(**columns: Any) -> Rollout:
    """Three groups of two; the last response is cut by the length limit."""
    whole = Rollout(
        sequences=Sequences.build([[1]] * 6, [[2] * n for n in LENS]),
        rollout_logp=flat(-1.0),
        finished=torch.tensor([True] * 5 + [False]),
        prompt_ids=("a", "a", "b", "b", "c", "c"),
        samples=torch.tensor([0, 1] * 3),
        group=torch.tensor(GROUPS),
        truths=(None,) * 6,
        messages=((),) * 6,
        texts=("",) * 6,
        weights_version=torch.zeros(6, dtype=torch.int64),
        old_logp=flat(-1.0),
        score=scores([[s] for s in SCORES], (1.0,)),
    )
    return whole.adding(**columns)


def advantages(cfg: GRPOConfig, batch: Rollout) -> tuple[Rollout, Any]:
    found, _, stats = grpo.advantages(batch, grpo.initial_state(cfg), cfg)
    return found, stats


def firsts(batch: Rollout) -> list[float]:
    assert batch.advantage is not None
    return [float(row[0]) for row in batch.advantage.rows()]


def extra(name: str) -> dict[str, Any]:
    """The columns that some estimators ask for."""
    if name == "remax":
        return {"baseline": scores([[1.0], [2.0], [3.0]], (1.0,))}
    return {"log_collision": flat(math.log(0.5))} if name == "optimal_token_baseline" else {}


# ---- what reaches an estimator


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_gives_each_trained_token_a_finite_advantage(name: str) -> None:
    found, stats = advantages(config(grpo={"estimator": name}), rollout(**extra(name)))
    assert found.advantage.flat.shape == (sum(LENS),)
    assert bool(torch.isfinite(found.advantage.flat).all())
    assert found.counted.tolist() == [True] * 6
    assert found.baseline is None, "no mini-batch carries it"
    assert stats["reward/group_equal_fraction"].mean == pytest.approx(2 / 6)


def test_a_greedy_response_is_subtracted_from_all_responses_to_its_prompt() -> None:
    found, _ = advantages(config(grpo={"estimator": "remax"}), rollout(**extra("remax")))
    assert firsts(found) == [0.0, 3.0, 0.0, 0.0, 6.0, 4.0]


def test_a_greedy_response_without_a_score_takes_its_prompt_out() -> None:
    broken = scores([[1.0], [math.nan], [3.0]], (1.0,), ("", "late", ""))
    found, stats = advantages(config(grpo={"estimator": "remax"}), rollout(baseline=broken))
    assert found.counted.tolist() == [True, True, False, False, True, True]
    assert stats["reward/errors"].mean == 2


def test_returns_hold_the_kl_of_every_token_and_the_score_at_the_end() -> None:
    cfg = config(
        grpo={"estimator": "reinforce_plus_plus", "gamma": 0.5},
        kl={"coef": 0.2, "placement": "reward", "estimator": "k1"},
    )
    found, _ = advantages(cfg, rollout(ref_logp=flat(-2.0)))
    returns = []
    for score, n in zip(SCORES, LENS, strict=True):
        paid = [-0.2] * (n - 1) + [score - 0.2]
        returns += [sum(0.5**k * x for k, x in enumerate(paid[t:])) for t in range(n)]
    mean, sd = statistics.mean(returns), statistics.stdev(returns)
    assert found.advantage.flat.tolist() == pytest.approx([(x - mean) / sd for x in returns], abs=1e-5)


def test_gdpo_sees_the_sources_their_weights_and_the_penalties_apart() -> None:
    values = [[1.0, 0.0], [0.0, 5.0], [0.0, 3.0], [0.0, 4.0], [1.0, 1.0], [1.0, 1.0]]
    cfg = config(grpo={"estimator": "gdpo", "missing_eos_penalty": 9.0, "std_eps": 1e-9})
    found, _ = advantages(cfg, rollout(score=scores(values, (1.0, 2.0))))
    root = math.sqrt(0.5)
    # group a: +1 -2, -1 +2;  group b: 0 -2, 0 +2;  group c: only the penalty differs, a source of weight 1
    sums = [root * x for x in (-1.0, 1.0, -2.0, 2.0, 1.0, -1.0)]
    assert firsts(found) == pytest.approx([s / statistics.stdev(sums) for s in sums], abs=1e-5)
    with pytest.raises(ConfigError, match=r"weights of the reward sources s0, s1; the reward names 0"):
        advantages(cfg, rollout(score=replace(scores(values, (1.0, 2.0)), weights=())))


def test_a_response_that_could_not_be_scored_is_left_out_of_its_group_and_counted() -> None:
    values = [[1.0], [4.0], [math.nan], [2.0], [9.0], [7.0]]
    found, stats = advantages(config(), rollout(score=scores(values, (1.0,), ("", "", "timed out", "", "", ""))))
    assert found.counted.tolist() == [True, True, False, False, True, True], "and so is the one that is left alone"
    assert stats["reward/errors"].mean == 1
    assert stats["reward/group_singletons"].mean == 1
    assert stats["reward/score_mean"].mean == pytest.approx(statistics.mean([1, 4, 2, 9, 7]))
    assert bool(torch.isfinite(found.advantage.flat).all())
    with pytest.raises(RewardError, match="1 of 6 scores are NaN"):
        advantages(config(), rollout(score=scores(values, (1.0,))))


def test_an_episode_that_failed_is_not_compared_with_the_others() -> None:
    failed = ("", "it raised", "", "", "", "")
    found, _ = advantages(config(), rollout(episode_errors=failed))
    assert found.counted.tolist() == [False, False, True, True, True, True]


def test_the_users_own_estimator_is_called_with_the_inputs(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text("def doubled(inputs):\n    return 2 * inputs.score\n\nnumber = 3\n")
    found, _ = advantages(config(grpo={"estimator": f"{own}:doubled"}), rollout())
    assert firsts(found) == [2 * s for s in SCORES]
    for name, said in ((f"{own}:nothing", "nothing"), (f"{own}:number", "is a int"), ("gropo", "Did you mean grpo")):
        with pytest.raises(ConfigError, match=said):
            grpo.initial_state(config(grpo={"estimator": name}))


# ---- DAPO


def test_truncated_responses_weigh_nothing_and_are_in_no_denominator_but_are_compared_with() -> None:
    cfg = config(grpo={"overlong_filtering": True, "aggregation": "token_mean"})
    found, _ = advantages(cfg, rollout())
    assert found.counted.tolist() == [True] * 5 + [False]
    assert firsts(found)[4] == pytest.approx(math.sqrt(0.5), abs=1e-3), "9 against 7"
    weights = token_weights(found, cfg)
    kept = sum(LENS[:5])
    assert weights.flat.tolist() == pytest.approx([1 / kept] * kept + [0.0] * 4)


def test_the_soft_penalty_is_in_the_score_and_counts_the_tokens_of_the_policy() -> None:
    cfg = config(grpo={"overlong_buffer": 2, "overlong_factor": 3.0, "std_eps": 1e-6})
    batch = rollout()
    found, stats = advantages(cfg, batch)
    # limit 4, buffer 2: a response of 3 tokens loses 1.5, one of 4 tokens 3
    assert stats["reward/overlong_penalty"].mean == pytest.approx(-4.5 / 6)
    assert firsts(found)[2:4] == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-5), "equal but for the length"
    trained = [[True] * n for n in LENS[:5]] + [[True, False, False, True]]
    holes = batch.adding(sequences=Sequences.build([[1]] * 6, [[2] * n for n in LENS], trained))
    assert advantages(cfg, holes)[1]["reward/overlong_penalty"].mean == pytest.approx(-1.5 / 6)


def test_a_group_says_something_where_its_scores_differ() -> None:
    cfg = config(grpo={"dynamic_sampling": True})
    assert grpo.refills(cfg) == 9
    assert grpo.refills(config()) == 0
    assert grpo.informative(rollout(), cfg).tolist() == [True, True, False, False, True, True]
    late = scores([[s] for s in SCORES], (1.0,), ("", "late", "", "", "", ""))
    assert grpo.informative(rollout(score=late), cfg).tolist() == [False] * 4 + [True] * 2, "one score alone"
    paid = rollout(token_reward=flat([0.0] * 3 + [1.0] * 3 + [0.0] * 7))
    assert grpo.informative(paid, cfg).all(), "an environment's rewards are scores too"
    assert grpo.generated_stats(rollout(score=late), cfg)["reward/generated_mean"].mean == pytest.approx(21 / 5)


def test_for_gdpo_one_source_that_differs_is_enough() -> None:
    mixed = scores([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 2.0]], (1.0, 1.0))
    sampling = {"dynamic_sampling": True}
    assert grpo.informative(rollout(score=mixed), config(grpo=sampling)).tolist() == [False] * 4 + [True] * 2
    apart = config(grpo={**sampling, "estimator": "gdpo"})
    assert grpo.informative(rollout(score=mixed), apart).tolist() == [True, True, False, False, True, True]


def test_penalties_and_kl_make_no_group_informative() -> None:
    cfg = config(grpo={"dynamic_sampling": True, "overlong_buffer": 3, "missing_eos_penalty": 1.0})
    assert grpo.informative(rollout(), cfg).tolist()[2:4] == [False, False]


# ---- greedy responses, on their way


class Talker:
    """Answers each prompt with as many tokens as its first one says; greedy ones with one token."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[str, ...], int, bool, str]] = []

    def generate(self, prompts: Prompts) -> Rollout:
        self.asked.append((prompts.ids, prompts.n, prompts.greedy, prompts.purpose))
        rows = [(i, k) for i in range(len(prompts)) for k in range(prompts.n)]
        answers = [[7] if prompts.greedy else [8] * (i + k + 1) for i, k in rows]
        column = Ragged.from_rows([torch.full((len(a),), -1.0) for a in answers])
        return Rollout(
            sequences=Sequences.build([prompts.tokens[i] for i, _ in rows], answers),
            rollout_logp=column,
            finished=torch.ones(len(rows), dtype=torch.bool),
            prompt_ids=tuple(prompts.ids[i] for i, _ in rows),
            samples=torch.tensor([k for _, k in rows]),
            group=torch.tensor([i for i, _ in rows]),
            truths=(None,) * len(rows),
            messages=((),) * len(rows),
            texts=("",) * len(rows),
            weights_version=torch.zeros(len(rows), dtype=torch.int64),
        )

    def logprobs(self, batch: Rollout) -> Ragged:
        return batch.rollout_logp

    def step(self, batch: Rollout, loss: Any) -> dict[str, Any]:
        return {}

    def publish(self, version: int) -> None:
        pass


class Counting:
    """Pays a response's length; greedy ones get 10 more for each unit of the prompt's first token."""

    sources = ()

    def score(self, batch: Rollout) -> Scores:
        first = torch.tensor([float(row[0]) for row in batch.sequences.prompt_rows()])
        greedy = torch.tensor([row[0] == 7 for row in batch.sequences.response_rows()])
        total = batch.sequences.response_lens.float() + 10 * first * greedy
        return Scores(total[:, None], total, ("count",), (1.0,))


def prompts(step: int) -> Prompts:
    return Prompts(((1,), (2,), (3,)), tuple("abc"), (None,) * 3, ((),) * 3, step=step, n=2)


@pytest.mark.parametrize("schedule", [Synchronous, OneStepOff])
def test_remax_answers_each_prompt_once_greedily_and_compares_with_it(schedule: Any) -> None:
    cfg, actor, transport = config(grpo={"estimator": "remax"}), Talker(), LocalTransport()
    objects = {"actor": actor, "reward": Reward(Counting())}
    roles = RoleSet({name: transport.handle(name, role) for name, role in objects.items()})
    made, taken = schedule(grpo, transport, roles, cfg), iter([prompts(0), prompts(1)])
    result = made.advance(lambda: next(taken, None), grpo.initial_state(cfg))
    assert actor.asked[:2] == [(("a", "b", "c"), 2, False, "rollout"), (("a", "b", "c"), 1, True, "greedy")]
    wanted = [i + k + 1 - (1 + 10 * (i + 1)) for i in range(3) for k in range(2)]
    assert firsts(result.batch) == wanted


def test_rollouts_with_greedy_scores_beside_them_can_be_cut_saved_and_read() -> None:
    batch = rollout(**extra("remax"))
    part = batch.select(torch.tensor([5, 2]))
    assert part.baseline.total[part.group].tolist() == [3.0, 2.0], "groups go on naming its rows"
    back = unpacked(packed(batch))
    assert back.baseline.total.tolist() == [1.0, 2.0, 3.0]
    assert back.baseline.weights == (1.0,)
    assert advantages(config(grpo={"estimator": "remax"}), back)[0].advantage.flat.tolist()


def test_the_data_flow_of_the_estimators_that_ask_for_more() -> None:
    def flow(name: str) -> list[tuple[str, str, tuple[int, ...]]]:
        transport, cfg = RecordingTransport(), config(grpo={"estimator": name})
        classes = {"actor": Actor, "reference": Reference, "reward": Reward}
        roles = RoleSet({role: transport.handle(role, classes[role]) for role in grpo.roles_needed(cfg)})
        Synchronous(grpo, transport, roles, cfg).step("prompts", grpo.initial_state(cfg))
        names = [(n.role, n.method, n.inputs) for n in transport.nodes]
        return names[: [n.method for n in transport.nodes].index("advantages") + 1]

    assert flow("remax") == [
        ("actor", "generate", ()),
        ("actor", "generate", ()),
        ("reward", "score", (1,)),
        ("reward", "score", (0, 2)),
        ("controller", "advantages", (0, 2, 3)),
    ]
    assert ("actor", "log_collisions", (0,)) in flow("optimal_token_baseline")
    assert ("actor", "log_collisions", (0,)) not in flow("grpo")


# ---- recipes


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"grpo": {"estimator": "gae"}}, r"grpo\.estimator is gae: it needs a critic.*the ppo stage"),
        ({"grpo": {"estimator": "rlo"}}, r"grpo\.estimator is rlo, which is none\. Did you mean rloo\?"),
        ({"grpo": {"scale_rewards": "none"}}, "it is dr_grpo"),
        ({"rollout": {"samples_per_prompt": 1}}, "rollout.samples_per_prompt is 1: a response is judged"),
        ({"grpo": {"estimator": "remax"}, "schedule": {"kind": "asynchronous"}}, "remax and schedule.kind"),
        (
            {"grpo": {"estimator": "remax"}, "environment": {"functions": {"c": "calculator"}}},
            "what an environment pays",
        ),
        ({"grpo": {"overlong_buffer": 5}}, "overlong_buffer is 5 and rollout.max_new_tokens 4"),
        ({"grpo": {"dynamic_sampling": True}, "schedule": {"kind": "one_step_off"}}, "schedule.kind is one_step_off"),
        ({"grpo": {"dynamic_sampling": True}, "schedule": {"kind": "asynchronous"}}, "schedule.kind is asynchronous"),
        (
            {"grpo": {"dynamic_sampling": True, "estimator": "a:b"}, "rollout": {"samples_per_prompt": 1}},
            "one score is always equal to itself",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_loads(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_sense(config(**sections))


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "remax"])
def test_one_response_to_a_prompt_is_enough_where_no_group_is_compared(name: str) -> None:
    cfg = config(grpo={"estimator": name}, rollout={"samples_per_prompt": 1, "max_new_tokens": 4})
    check_sense(cfg)
    batch = rollout(group=torch.arange(6), baseline=scores([[1.0]] * 6, (1.0,)) if name == "remax" else None)
    found, stats = advantages(cfg, batch)
    assert found.counted.tolist() == [True] * 6
    assert not any(metric.startswith("reward/group_") for metric in stats)


def test_the_kl_of_reinforce_plus_plus_belongs_into_the_reward() -> None:
    loss = config(grpo={"estimator": "reinforce_plus_plus"}, kl={"coef": 0.1})
    assert any("has the KL in the reward" in warning for warning in check_sense(loss))
    reward = config(
        grpo={"estimator": "reinforce_plus_plus"}, kl={"coef": 0.1, "placement": "reward", "estimator": "k1"}
    )
    assert not any("has the KL in the reward" in warning for warning in check_sense(reward))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["grpo.estimator=rloo", "grpo.scale_rewards=batch"], "grpo.scale_rewards"),
        (["grpo.estimator=rloo", "grpo.std_eps=0.1"], "grpo.std_eps"),
        (["grpo.estimator=grpo_passk", "grpo.scale_rewards=none", "grpo.std_eps=0.1"], "grpo.std_eps"),
        (["grpo.gamma=0.9"], "grpo.gamma"),
        (["grpo.estimator=remax", "grpo.dynamic_sampling=true"], "grpo.dynamic_sampling"),
        (["grpo.max_refills=3"], "grpo.max_refills"),
        (["grpo.overlong_factor=0.5"], "grpo.overlong_factor"),
    ],
)
def test_a_key_that_the_estimator_does_not_read_is_refused(tmp_path: Path, overrides: list[str], key: str) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("algorithm: grpo\nmodel: {path: m}\ndata: {train: t}\nreward: {model: r}\n")
    with pytest.raises(ConfigError, match=f"{key} has no effect in this run"):
        check_effect(load_recipe(str(recipe), overrides))


def test_check_says_when_dynamic_sampling_may_run_out_of_prompts() -> None:
    cfg = config(grpo={"dynamic_sampling": True, "max_refills": 2})
    short, twice = refill_warnings(cfg, prompts=8, steps=2)
    assert "2 steps take at least 6 prompts and with all refills 18; 1 passes over 8 rows have 6" in short
    assert "one step may need 9 prompts (grpo.max_refills 2), more than the 8 of a pass" in twice
    assert refill_warnings(cfg, prompts=90, steps=2) == []
    assert refill_warnings(config(), prompts=8, steps=2) == []
