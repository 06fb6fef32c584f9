from __future__ import annotations

import pytest

from tutelage.reports.hacking import Thresholds, find_hacking, repetition_share, robust_centre
from tutelage.reports.samples import Sample

PROSE = (
    "Water the beans each morning before the sun is high. Roots drink slowly, so keep the soil damp but never "
    "soaked, and move the pots away from the wall when summer comes."
)


def answers(phase: str, count: int = 20, **changes: object) -> list[Sample]:
    base = {"proxy": 0.0 if phase == "before" else 1.0, "gold": 0.5, "finished": True, "phase": phase}
    return [
        Sample(
            **{  # type: ignore[arg-type]
                **base,
                "id": f"p{i}",
                "prompt": f"q{i}",
                "response": f"{PROSE} {i}",
                "proxy": base["proxy"] + 0.1 * (i % 3),  # type: ignore[operator]
                "gold": 0.5 + 0.1 * (i % 3),
                "length": 30 + i % 5,
                "ref_logp_per_token": -1.5 - 0.05 * (i % 4),
                **changes,
            }
        )
        for i in range(count)
    ]


def planted(**changes: object) -> list[Sample]:
    """Answers after training, of which p3 is changed and very well rewarded."""
    after = answers("after")
    fields = {**after[3].__dict__, "proxy": 5.0, **changes}
    return [*after[:3], Sample(**fields), *after[4:]]


def test_normal_answers_are_not_flagged() -> None:
    found = find_hacking(answers("before"), answers("after"))
    assert found.suspects == ()
    assert found.degenerate == 0
    assert found.answers == 20
    assert found.skipped == ()


@pytest.mark.parametrize(
    ("sign", "changes"),
    [
        ("repetition", {"response": "thank you so much! " * 12}),
        ("length", {"length": 100}),
        ("length", {"length": 5}),
        ("likelihood", {"ref_logp_per_token": -4.0}),
        ("gold", {"gold": -0.5}),
    ],
)
def test_a_planted_answer_is_found_with_its_reason(sign: str, changes: dict[str, object]) -> None:
    found = find_hacking(answers("before"), planted(**changes))
    (suspect,) = found.suspects
    assert suspect.sample.id == "p3"
    assert [reason.sign for reason in suspect.reasons] == [sign]
    assert suspect.before is not None
    assert suspect.before.phase == "before"
    assert any(ch.isdigit() for ch in suspect.reasons[0].text)


def test_one_answer_to_many_prompts_is_found() -> None:
    after = [Sample(**{**s.__dict__, "response": "Of course!"}) if i < 5 else s for i, s in enumerate(answers("after"))]
    found = find_hacking(answers("before"), after)
    assert {s.sample.id for s in found.suspects} == {f"p{i}" for i in range(5)}
    assert "5 of 20" in found.suspects[0].reasons[0].text
    # the same answer as often before training is nothing new
    before = [
        Sample(**{**s.__dict__, "response": "Of course!"}) if i < 5 else s for i, s in enumerate(answers("before"))
    ]
    assert find_hacking(before, after).suspects == ()


def test_a_degenerate_answer_that_is_not_rewarded_is_counted_but_no_suspect() -> None:
    found = find_hacking(answers("before"), planted(response="no no no no no no no", proxy=-3.0))
    assert found.degenerate == 1
    assert found.suspects == ()


def test_suspects_come_by_reward() -> None:
    after = planted(length=200)
    after[7] = Sample(**{**after[7].__dict__, "proxy": 9.0, "length": 200})
    assert [s.sample.id for s in find_hacking(answers("before"), after).suspects] == ["p7", "p3"]


def test_a_factor_under_two_is_never_unusual_however_uniform_the_answers_were() -> None:
    before = answers("before", length=30, ref_logp_per_token=-1.5)
    # 3.5 * 0.2 = 0.7: a factor of exp(0.7) = 2.01 in length, 0.7 nats in likelihood
    assert find_hacking(before, planted(length=60, ref_logp_per_token=-2.19)).suspects == ()
    assert find_hacking(before, planted(length=61)).suspects != ()
    assert find_hacking(before, planted(ref_logp_per_token=-2.21)).suspects != ()


def test_signs_without_a_comparison_are_skipped_and_said() -> None:
    few = find_hacking(answers("before", 3), planted(length=500))
    assert few.suspects == ()
    assert "8 answers" in few.skipped[0]
    blind = find_hacking(
        answers("before", gold=None, ref_logp_per_token=None), answers("after", gold=None, ref_logp_per_token=None)
    )
    assert len(blind.skipped) == 2


def test_nothing_to_look_at() -> None:
    assert find_hacking([], []).answers == 0


def test_repetition_share_by_hand() -> None:
    # a b c a b c: trigrams abc bca cab abc, one of four repeats
    assert repetition_share("a b c a b c") == 0.25
    assert repetition_share("a b c d e f") == 0.0
    assert repetition_share("no no no no") == 0.0  # too short to judge
    # one endless word counts by characters: 40 times h, 38 trigrams, 37 of them repeats
    assert repetition_share("h" * 40) == pytest.approx(37 / 38)
    assert repetition_share("A b C, a B c,") == pytest.approx(2 / 6)
    assert repetition_share(PROSE) < 0.05
    assert repetition_share("") == 0.0


def test_robust_centre_by_hand() -> None:
    # median 3; deviations 2 1 0 1 97 -> median 1 -> 1.4826
    assert robust_centre([1.0, 2.0, 3.0, 4.0, 100.0], 0.1) == (3.0, 1.4826)
    assert robust_centre([2.0, 2.0, 2.0], 0.1) == (2.0, 0.1)


def test_thresholds_can_be_moved() -> None:
    after = planted(length=45)
    assert find_hacking(answers("before"), after).suspects == ()
    assert find_hacking(answers("before"), after, Thresholds(robust_z=1.0)).suspects != ()
