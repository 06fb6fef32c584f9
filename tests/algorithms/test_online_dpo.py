"""Online DPO, XPO and Nash-MD on made-up rollouts, against sums worked out in plain Python."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tutelage.algorithms import nash_md, online_dpo, xpo
from tutelage.algorithms.judged import loss_named
from tutelage.config import NashMDConfig, OnlineDPOConfig, XPOConfig, check_sense, load_recipe
from tutelage.config.checks import check_effect
from tutelage.config.online_dpo import ONLINE_LOSSES, preference_problems
from tutelage.errors import ConfigError, ShapeError
from tutelage.evals.online_alarms import PreferenceAlarms
from tutelage.math.preference import PreferenceSettings
from tutelage.types import Outputs, Ragged, Rollout, Scores, Sequences

SCHEMAS = {"online_dpo": OnlineDPOConfig, "xpo": XPOConfig, "nash_md": NashMDConfig}
#        one prompt: three answers        | a tie           | the length limit cut the better one
LOGP = [[-1.0, -2.0], [-0.5], [-1.5, -0.2], [-2.0], [-1.0, -0.1], [-3.0, -0.4], [-0.7]]
REF = [[-1.5, -1.0], [-1.5], [-1.0, -2.0], [-2.5], [-1.0, -0.3], [-0.4, -0.9], [-1.1]]
SCORES = [1.0, 4.0, 2.0, 3.0, 3.0, 5.0, 4.5]
GROUPS = [0, 0, 0, 1, 1, 2, 2]


def config(algorithm: str, rollout: dict[str, Any] | None = None, **settings: Any) -> Any:
    return SCHEMAS[algorithm].model_validate(
        {
            "algorithm": algorithm,
            "model": {"path": "m"},
            "data": {"train": "d"},
            "reward": {"rules": [{"function": "length_range(low=2)"}]},
            "rollout": rollout or {},
            algorithm: settings,
        }
    )


def flat(rows: list[list[float]]) -> Ragged:
    return Ragged.from_rows([torch.tensor(r, dtype=torch.float32) for r in rows])


def rollout(rows: list[int] | None = None, **columns: Any) -> Rollout:
    total = torch.tensor(SCORES)
    whole = Rollout(
        sequences=Sequences.build([[1]] * 7, [[10 + b] * len(r) for b, r in enumerate(LOGP)]),
        rollout_logp=flat(LOGP),
        finished=torch.tensor([True] * 5 + [False, True]),
        prompt_ids=tuple("aaabbcc"),
        samples=torch.tensor([0, 1, 2, 0, 1, 0, 1]),
        group=torch.tensor(GROUPS),
        truths=(None,) * 7,
        messages=((),) * 7,
        texts=("",) * 7,
        weights_version=torch.arange(7),
        ref_logp=flat(REF),
        score=Scores(total[:, None], total, ("model",)),
    ).adding(**columns)
    return whole if rows is None else whole.select(torch.tensor(rows))


def duel_rollout(**columns: Any) -> Rollout:
    """Three pairs, the policy's answer first: it loses, ties, and wins by less than a penalty of 1."""
    return rollout([0, 1, 3, 4, 5, 6], **columns).adding(group=torch.tensor([0, 0, 1, 1, 2, 2]))


def run(algorithm: Any, batch: Rollout, cfg: Any) -> tuple[Any, Any]:
    found, state, stats = algorithm.advantages(batch, algorithm.initial_state(cfg), cfg)
    assert state.step == 1
    assert algorithm.state_from(state.state_dict()) == state
    return found, stats


def responses(sequences: Sequences) -> list[int]:
    """The answer of each row by its number."""
    return [row[0] - 10 for row in sequences.response_rows()]


def logp_of(batch: Any, shift: float = 0.0) -> Tensor:
    """What the policy says of the rows of a batch; `shift` per token away from the sampler's."""
    return torch.tensor([x + shift * (t + 1) for b in responses(batch.sequences) for t, x in enumerate(LOGP[b])])


def ratio(b: int, shift: float = 0.0) -> float:
    return sum(x + shift * (t + 1) - r for t, (x, r) in enumerate(zip(LOGP[b], REF[b], strict=True)))


def total(loss: Any, batch: Any, shift: float = 0.0) -> float:
    out = Outputs(logp=logp_of(batch, shift), entropy=torch.zeros(int(batch.sequences.response_lens.sum())))
    items, _ = loss.items(out, batch)
    return float((items * loss.weights(batch).flat).sum())


# ---- online DPO ----


def test_the_best_answer_meets_the_worst_and_ties_weigh_nothing() -> None:
    cfg = config("online_dpo")
    pairs, stats = run(online_dpo, rollout(), cfg)
    assert responses(pairs.pairs.chosen) == [1, 3, 5]
    assert responses(pairs.pairs.rejected) == [0, 4, 6]
    assert pairs.pairs.margin.tolist() == [3.0, 0.0, 0.5]
    assert pairs.pairs.ids == ("a", "b", "c")
    assert pairs.weights_version.tolist() == [1, 3, 5, 0, 4, 6]
    assert online_dpo.PairLoss.of(cfg).weights(pairs).flat.tolist() == [0.5, 0.0, 0.5]
    assert stats["preference/tied_fraction"].mean == pytest.approx(1 / 3)
    assert stats["preference/score_margin"].mean == pytest.approx(3.5 / 3)
    assert stats["preference/unscored"].mean == 0
    assert stats["kl/sequence"].mean == pytest.approx(sum(ratio(b) for b in range(7)) / 7, rel=1e-5)
    assert stats["kl/token"].mean == pytest.approx(sum(ratio(b) for b in range(7)) / 11, rel=1e-5)
    assert stats["rollout/truncated_fraction"].mean == pytest.approx(1 / 7)
    assert stats["reward/score_mean"].mean == pytest.approx(sum(SCORES) / 7)


def test_a_truncated_answer_pays_before_it_is_compared() -> None:
    pairs, stats = run(online_dpo, rollout(), config("online_dpo", missing_eos_penalty=2.0))
    assert responses(pairs.pairs.chosen)[2] == 6
    assert responses(pairs.pairs.rejected)[2] == 5
    assert float(pairs.pairs.margin[2]) == pytest.approx(1.5)
    assert stats["reward/score_mean"].mean == pytest.approx(sum(SCORES) / 7), "the proxy is reported as it is"


@pytest.mark.parametrize("name", ["sigmoid", "ipo_sum", "ipo", "hinge"])
def test_the_loss_is_the_papers_mean_over_pairs_with_a_preference(name: str) -> None:
    cfg = config("online_dpo", loss=name, beta=0.4)
    pairs, _ = run(online_dpo, rollout(), cfg)
    wanted = 0.0
    for chosen, rejected in ((1, 0), (5, 6)):
        c, r = ratio(chosen, 0.1), ratio(rejected, 0.1)
        lens = len(LOGP[chosen]), len(LOGP[rejected])
        wanted += {
            "sigmoid": -math.log(1 / (1 + math.exp(-0.4 * (c - r)))),
            "ipo_sum": (c - r - 1 / 0.8) ** 2,
            "ipo": (c / lens[0] - r / lens[1] - 1 / 0.8) ** 2,
            "hinge": max(0.0, 1 - 0.4 * (c - r)),
        }[name] / 2
    assert total(online_dpo.PairLoss.of(cfg), pairs, 0.1) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("name", "start"), [("sigmoid", math.log(2)), ("ipo_sum", 25.0), ("hinge", 1.0)])
def test_it_starts_where_policy_and_reference_agree(name: str, start: float) -> None:
    """(1 / (2 beta))^2 = 25 at beta 0.1."""
    cfg = config("online_dpo", loss=name)
    pairs, _ = run(online_dpo, rollout(ref_logp=flat(LOGP)), cfg)
    assert total(online_dpo.PairLoss.of(cfg), pairs) == pytest.approx(start, abs=1e-5)


def test_a_step_of_ties_alone_has_loss_zero() -> None:
    cfg = config("online_dpo")
    pairs, stats = run(online_dpo, rollout([3, 4]), cfg)
    assert total(online_dpo.PairLoss.of(cfg), pairs) == 0.0
    assert stats["preference/tied_fraction"].mean == 1.0


def test_answers_whose_reward_failed_are_no_part_of_a_pair() -> None:
    values = torch.tensor([1.0, math.nan, 2.0, 3.0, 3.0, math.nan, 4.5])
    errors = ("", "late", "", "", "", "late", "")
    cfg = config("online_dpo")
    pairs, stats = run(online_dpo, rollout(score=Scores(values[:, None], values, ("model",), errors=errors)), cfg)
    assert responses(pairs.pairs.chosen)[0] == 2
    assert pairs.pairs.margin.tolist() == [1.0, 0.0, 0.0]
    assert stats["preference/unscored"].mean == 1
    assert stats["preference/tied_fraction"].mean == pytest.approx(1 / 2)
    assert stats["reward/score_mean"].mean == pytest.approx((1 + 2 + 3 + 3 + 4.5) / 5)
    assert math.isfinite(total(online_dpo.PairLoss.of(cfg), pairs))


def test_every_pair_is_in_one_mini_batch_of_every_pass() -> None:
    cfg = config("online_dpo", epochs=3, minibatches=2)
    pairs, _ = run(online_dpo, rollout(), cfg)
    every = list(pairs.minibatches(cfg, 5))
    assert len(every) == 6
    passes = [every[at : at + 2] for at in (0, 2, 4)]
    for parts in passes:
        assert sorted(name for part in parts for name in part.pairs.ids) == ["a", "b", "c"]
    again = list(pairs.minibatches(cfg, 5))
    assert [p.pairs.ids for p in again] == [p.pairs.ids for parts in passes for p in parts]
    part = next(p for p in again if "c" in p.pairs.ids).select(torch.tensor([0]))
    assert len(part.weights_version) == 2
    with pytest.raises(ShapeError, match="4 mini-batches cannot be cut from 3 pairs"):
        list(pairs.minibatches(config("online_dpo", minibatches=4), 0))


# ---- XPO ----


def test_xpo_says_which_side_won_and_whose_answer_it_was() -> None:
    pairs, stats = run(xpo, duel_rollout(), config("xpo"))
    assert responses(pairs.pairs.chosen) == [1, 3, 5]
    assert responses(pairs.pairs.rejected) == [0, 4, 6]
    assert pairs.by_reference.tolist() == [True, False, False]
    assert pairs.counted.tolist() == [True, False, True]
    assert stats["preference/policy_wins"].mean == pytest.approx(1 / 2)
    assert stats["preference/policy_lead"].mean == pytest.approx((-3.0 + 0.0 + 0.5) / 3)
    assert stats["kl/sequence"].mean == pytest.approx((ratio(0) + ratio(3) + ratio(5)) / 3, rel=1e-5)
    assert stats["rollout/tokens"].mean == 5, "the policy's own answers"
    cut, _ = run(xpo, duel_rollout(), config("xpo", missing_eos_penalty=1.0))
    assert cut.by_reference.tolist() == [True, False, True]


def test_the_xpo_loss_is_that_of_algorithm_one() -> None:
    cfg = config("xpo", beta=0.4, alpha=0.05)
    pairs, _ = run(xpo, duel_rollout(), cfg)
    wanted = 0.0
    for own, rival, lead in ((0, 1, -3.0), (3, 4, 0.0), (5, 6, 0.5)):
        gap = math.copysign(1.0, lead) * 0.4 * (ratio(own, 0.1) - ratio(rival, 0.1))
        preference = 0.0 if lead == 0 else -math.log(1 / (1 + math.exp(-gap)))
        explored = sum(x + 0.1 * (t + 1) for t, x in enumerate(LOGP[rival]))
        wanted += (preference + 0.05 * explored) / 3
    assert total(xpo.XPOLoss.of(cfg), pairs, 0.1) == pytest.approx(wanted, rel=1e-5)


# ---- Nash-MD ----


@pytest.mark.parametrize(("preference", "kl"), [("sigmoid", "sequence"), ("sigmoid", "token"), ("win", "sequence")])
def test_the_nash_md_loss_is_the_papers_policy_gradient(preference: str, kl: str) -> None:
    cfg = config("nash_md", beta=0.3, preference=preference, kl=kl)
    batch, stats = run(nash_md, duel_rollout(), cfg)
    assert responses(batch.sequences) == [0, 3, 5], "the policy's answers alone are trained on"
    wanted, chances = 0.0, []
    for own, lead in ((0, -3.0), (3, 0.0), (5, 0.5)):
        chance = (
            1 / (1 + math.exp(-lead)) if preference == "sigmoid" else (math.copysign(0.5, lead) if lead else 0) + 0.5
        )
        chances.append(chance)
        now = [x + 0.1 * (t + 1) for t, x in enumerate(LOGP[own])]
        for x, r in zip(now, REF[own], strict=True):
            paid = ratio(own, 0.1) if kl == "sequence" else x - r
            wanted -= (chance - 0.5 - 0.3 * paid) * x / 3
    assert total(nash_md.NashMDLoss.of(cfg), batch, 0.1) == pytest.approx(wanted, rel=1e-5)
    assert stats["preference/probability"].mean == pytest.approx(sum(chances) / 3)
    assert stats["preference/tied_fraction"].mean == pytest.approx(1 / 3)


def test_tokens_that_the_policy_did_not_write_are_neither_trained_nor_read() -> None:
    cfg = config("nash_md", beta=0.3)
    batch, _ = run(nash_md, duel_rollout(), cfg)
    trained = batch.sequences.trained
    hole = Sequences(
        batch.sequences.tokens,
        batch.sequences.prompt_lens,
        Ragged(torch.tensor([True, False, True, True, True]), trained.lens),
    )
    ref = batch.ref_logp.flat.clone()
    ref[1] = math.nan
    masked = batch.adding(sequences=hole, ref_logp=Ragged(ref, trained.lens))
    loss = nash_md.NashMDLoss.of(cfg)
    items, _ = loss.items(Outputs(logp=logp_of(masked), entropy=torch.zeros(5)), masked)
    chance = 1 / (1 + math.exp(3))
    assert float(items[0]) == pytest.approx(-(chance - 0.5 - 0.3 * (LOGP[0][0] - REF[0][0])) * LOGP[0][0], rel=1e-5)
    assert loss.weights(masked).flat.tolist() == pytest.approx([1 / 3, 0.0, 1 / 3, 1 / 3, 1 / 3])


def test_a_duel_without_scores_weighs_nothing() -> None:
    values = torch.tensor([1.0, math.nan, 2.0, 3.0, 3.0, 5.0, 4.5])
    errors = ("", "late", *[""] * 5)
    batch, stats = run(
        nash_md, duel_rollout(score=Scores(values[:, None], values, ("model",), errors=errors)), config("nash_md")
    )
    assert batch.counted.tolist() == [False, True, True]
    assert nash_md.NashMDLoss(0.1, True).weights(batch).flat.tolist() == pytest.approx([0, 0, 0.5, 0.5, 0.5])
    assert stats["preference/unscored"].mean == 1
    assert batch.advantage.flat.isfinite().all()


# ---- names ----


def test_no_two_names_are_aliases() -> None:
    """The same answers, scores and logprobs: every algorithm and loss gives another number."""
    found: dict[str, float] = {}
    for name in ONLINE_LOSSES:
        smoothing = {"label_smoothing": 0.2} if name in ("robust", "exo_pair") else {}
        cfg = config("online_dpo", loss=name, beta=0.4, **smoothing)
        found[name] = total(online_dpo.PairLoss.of(cfg), run(online_dpo, duel_rollout(), cfg)[0], 0.1)
    cfg = config("xpo", beta=0.4, alpha=0.05)
    found["xpo"] = total(xpo.XPOLoss.of(cfg), run(xpo, duel_rollout(), cfg)[0], 0.1)
    for preference, kl in itertools.product(("sigmoid", "win"), ("sequence", "token")):
        cfg = config("nash_md", beta=0.4, preference=preference, kl=kl)
        batch = run(nash_md, duel_rollout(), cfg)[0]
        found[f"nash_md {preference} {kl}"] = total(nash_md.NashMDLoss.of(cfg), batch, 0.1)
    for (first, a), (second, b) in itertools.combinations(found.items(), 2):
        assert abs(a - b) > 1e-3, (first, second, a, b)


def squared(x: Any, settings: PreferenceSettings) -> Tensor:
    return settings.beta * (x.log_ratio_chosen - x.log_ratio_rejected - 2.0).square()


def over_the_batch(x: Any, settings: PreferenceSettings) -> Tensor:
    return squared(x, settings) - squared(x, settings).mean()


def always(score: Tensor, rival: Tensor) -> Tensor:
    return torch.full_like(score, 0.75)


def out_of_range(score: Tensor, rival: Tensor) -> Tensor:
    return score


def test_functions_of_the_users_own() -> None:
    cfg = config("online_dpo", loss=f"{__file__}:squared", beta=0.4)
    pairs, _ = run(online_dpo, rollout(), cfg)
    gaps = [ratio(1) - ratio(0), ratio(5) - ratio(6)]
    assert total(online_dpo.PairLoss.of(cfg), pairs) == pytest.approx(sum(0.2 * (g - 2) ** 2 for g in gaps), rel=1e-5)
    with pytest.raises(ConfigError, match="depends on the other pairs"):
        loss_named(f"{__file__}:over_the_batch", PreferenceSettings())
    batch, stats = run(nash_md, duel_rollout(), config("nash_md", preference=f"{__file__}:always"))
    assert batch.advantage.flat.tolist() == [0.25] * 5
    assert stats["preference/probability"].mean == 0.75
    with pytest.raises(ConfigError, match="did not return 3 probabilities"):
        run(nash_md, duel_rollout(), config("nash_md", preference=f"{__file__}:out_of_range"))


# ---- settings ----


def loaded(tmp_path: Any, algorithm: str, *overrides: str) -> Any:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"algorithm: {algorithm}\nmodel: {{path: m}}\ndata: {{train: d}}\n")
    found = load_recipe(str(recipe), ["reward.rules=[{function: 'length_range(low=2)'}]", *overrides])
    check_effect(found)
    return found.config


@pytest.mark.parametrize(
    ("algorithm", "override", "said"),
    [
        (
            "nash_md",
            "rollout.engine=vllm",
            r"rollout.engine must be inprocess: every token is drawn from the logits of",
        ),
        ("nash_md", "schedule.kind=one_step_off", "schedule.kind must be synchronous"),
        ("xpo", "schedule.kind=asynchronous", "schedule.kind must be synchronous or one_step_off"),
        ("online_dpo", "rollout.samples_per_prompt=1", "rollout.samples_per_prompt must be greater than or equal to 2"),
        ("online_dpo", "online_dpo.loss=ipo_sun", r"must be one of sigmoid[\s\S]*ipo_sum"),
        ("online_dpo", "online_dpo.loss=aot", "must be one of sigmoid"),
        (
            "xpo",
            "xpo.loss=robust",
            r"xpo\.label_smoothing must be above 0 for the loss robust: without it robust is sigmoid \(",
        ),
        ("xpo", "xpo.tau=0.1", "xpo.tau has no effect"),
        ("nash_md", "nash_md.epochs=2", "nash_md.epochs is not a setting"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_loads(
    tmp_path: Any, algorithm: str, override: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        loaded(tmp_path, algorithm, override)


def test_rules_across_keys(tmp_path: Any) -> None:
    def problems(algorithm: str, *overrides: str) -> str:
        return " ".join(preference_problems(loaded(tmp_path, algorithm, *overrides), {}))

    assert not problems("online_dpo", "online_dpo.reference_every=5")
    assert "with LoRA the reference is the base" in problems(
        "online_dpo", "online_dpo.reference_every=5", "model.lora_rank=4"
    )
    few = ["rollout.prompts_per_step=2", "online_dpo.minibatches=3"]
    assert "a step has 2 pairs" in problems("online_dpo", *few)
    apart = ["cluster.transport=ray", "cluster.pools={a: {}, b: {}}", "cluster.place={reference: b}"]
    assert "give them one pool" in problems("nash_md", *apart)
    assert not problems("xpo", *apart)
    assert preference_problems(object(), {}) == []


def test_all_three_make_sense_as_they_are(tmp_path: Any) -> None:
    for algorithm in SCHEMAS:
        cfg = loaded(tmp_path, algorithm)
        assert cfg.algorithm == algorithm
        check_sense(cfg)
        assert preference_problems(cfg, {}) == []


def test_alarms_ring_once_and_say_what_to_change() -> None:
    alarms = PreferenceAlarms(config("xpo"))
    calm = {"kl/sequence": 1.0, "rollout/length_mean": 10.0, "preference/tied_fraction": math.nan}
    assert alarms.check(calm) == []
    loud = {"kl/sequence": 11.0, "rollout/length_mean": 21.0, "preference/tied_fraction": 0.6}
    found = {alarm.kind: alarm.message for alarm in alarms.check(loud)}
    assert sorted(found) == ["kl", "length_explosion", "ties"]
    assert "xpo.beta" in found["kl"]
    assert "2.1 times its start (10)" in found["length_explosion"]
    again = PreferenceAlarms(config("xpo"))
    again.load_state(alarms.state())
    assert again.check(loud) == []
    assert again.check(calm) == []
    assert len(again.check(loud)) == 3
