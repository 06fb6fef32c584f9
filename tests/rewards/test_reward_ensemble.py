"""Several reward models as one source, and a process reward model's steps as one score."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from rewards_kit import make_rollout, text_rollout
from torch import Tensor

from tutelage.data.chat import ChatTemplate
from tutelage.errors import RewardError
from tutelage.rewards.ensemble import EnsembleDisagreement, EnsembleSource
from tutelage.rewards.mix import RewardMix
from tutelage.rewards.model import RewardModelSource
from tutelage.rewards.process import StepScorer
from tutelage.types import Ragged, Rollout, Sequences


class Fixed:
    """A source with the scores it was given; counts its calls."""

    def __init__(self, name: str, *scores: float) -> None:
        self.name = name
        self.scores = scores
        self.calls = 0
        self.cut = 1

    def score(self, rollout: Rollout) -> Tensor:
        self.calls += 1
        return torch.tensor(self.scores[: len(rollout)])


def test_members_are_combined_and_their_disagreement_is_a_column_of_weight_0() -> None:
    members = [Fixed("a", 1.0, 2.0), Fixed("b", 3.0, 2.0), Fixed("c", 8.0, 2.0)]
    ensemble = EnsembleSource(members, "variance_penalised", 0.5)
    mix = RewardMix([ensemble, EnsembleDisagreement(ensemble)], [2.0, 0.0])
    found = mix.score(text_rollout("x", "y"))
    values, total, names = (found.values, found.total, found.names) if hasattr(found, "total") else found[:3]
    assert names == ("reward_ensemble", "reward_ensemble_std")
    first = statistics.mean([1, 3, 8]) - 0.5 * statistics.pvariance([1, 3, 8])
    assert values[:, 0].tolist() == pytest.approx([first, 2.0])
    assert values[:, 1].tolist() == pytest.approx([statistics.pstdev([1, 3, 8]), 0.0])
    assert total.tolist() == pytest.approx([2 * first, 4.0])
    assert [member.calls for member in members] == [1, 1, 1], "scored once"
    assert ensemble.cut == 3


def test_the_disagreement_is_that_of_the_rollout_asked_for() -> None:
    ensemble = EnsembleSource([Fixed("a", 1.0, 5.0), Fixed("b", 3.0, 5.0)], "min")
    first, second = text_rollout("x", "y"), text_rollout("z")
    assert ensemble.score(first).tolist() == [1.0, 5.0]
    assert ensemble.disagreement(second).tolist() == [1.0]
    assert ensemble.disagreement(first).tolist() == [1.0, 0.0]


def test_an_ensemble_of_one_is_refused() -> None:
    with pytest.raises(RewardError, match="the ensemble has 1 reward model"):
        EnsembleSource([Fixed("a", 1.0)])


def positions(sequences: Sequences) -> Ragged:
    """Logits 1, 2, 3, ... of the tokens of each response."""
    lens = sequences.response_lens
    return Ragged(torch.cat([torch.arange(1.0, n + 1) for n in lens.tolist()]), lens)


@pytest.mark.parametrize("probabilities", [True, False])
@pytest.mark.parametrize("combine", ["min", "product", "last", "mean"])
def test_steps_are_scored_at_their_last_tokens(probabilities: bool, combine: str, tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer)
    texts = ["ab\ncd\nef", "gh"]
    responses = [template.encode_response(text) for text in texts]
    assert [len(r) for r in responses] == [9, 3]
    scorer = StepScorer(positions, tiny_tokenizer, "\n", combine, probabilities=probabilities)
    source = RewardModelSource(scorer)
    found = source.score(make_rollout([[1], [1, 1]], responses, texts)).tolist()
    ends = [[3.0, 6.0, 9.0], [3.0]]
    if probabilities:
        ends = [torch.tensor(row).sigmoid().tolist() for row in ends]
    product = [ends[0][0] * ends[0][1] * ends[0][2], ends[1][0]]
    wanted = {
        "min": [min(row) for row in ends],
        "product": product,
        "last": [row[-1] for row in ends],
        "mean": [sum(row) / len(row) for row in ends],
    }
    assert found == pytest.approx(wanted[combine], rel=1e-6)


def test_an_answer_of_several_steps_is_scored_the_same_beside_others(tiny_tokenizer: Any) -> None:
    template = ChatTemplate(tiny_tokenizer)
    scorer = StepScorer(positions, tiny_tokenizer, "\n", "mean", probabilities=False)
    rows = [template.encode_response(text) for text in ("a\nb", "longer text", "c\n\nd")]
    together = scorer(Sequences.build([[1]] * 3, rows)).tolist()
    assert together == pytest.approx([float(scorer(Sequences.build([[1]], [row]))) for row in rows])


def test_a_response_without_tokens_is_refused(tiny_tokenizer: Any) -> None:
    scorer = StepScorer(positions, tiny_tokenizer, "\n", "mean", probabilities=False)
    with pytest.raises(RewardError, match="row 1 has a response without tokens"):
        scorer(Sequences.build([[1], [1]], [[9], []]))
