"""The reward model source: token in, token out; rendering through another template; inputs that are too long."""

from __future__ import annotations

import pytest
import torch
from rewards_kit import make_rollout

from tutelage.errors import RewardError
from tutelage.protocols import RewardSource
from tutelage.rewards.model import RewardModelSource, keep_end, same_tokenizer
from tutelage.types import Sequences


class WordTemplate:
    """[CLS]=101, then a number per word of each message, [SEP]=102 after the response."""

    def __init__(self):
        self.prompts = 0

    def encode_prompt(self, messages):
        self.prompts += 1
        return [101, *(len(w) for m in messages for w in m["content"].split())]

    def encode_response(self, text, *, finished=True):
        return [*(len(w) for w in text.split()), *([102] if finished else [])]


class Scorer:
    """Remembers what it was shown; the score is the sum of the token ids."""

    def __call__(self, sequences: Sequences) -> torch.Tensor:
        self.shown = sequences
        return torch.tensor([float(row.sum()) for row in sequences.tokens.rows()])


def rollout():
    return make_rollout(
        prompts=[[5, 6, 7], [5]],
        responses=[[8, 9], [10, 11, 12, 13]],
        texts=["good day", "a bb ccc"],
        messages=[({"role": "user", "content": "how are you"},), ({"role": "user", "content": "hi"},)],
    )


def test_with_the_same_tokenizer_the_sampled_tokens_are_scored():
    scorer = Scorer()
    batch = rollout()
    source: RewardSource = RewardModelSource(scorer)
    assert source.score(batch).tolist() == [5 + 6 + 7 + 8 + 9, 5 + 10 + 11 + 12 + 13]
    assert scorer.shown is batch.sequences


def test_with_another_tokenizer_the_text_is_rendered_through_its_template():
    scorer = Scorer()
    RewardModelSource(scorer, WordTemplate()).score(rollout())
    assert scorer.shown.prompt_rows() == [[101, 3, 3, 3], [101, 2]]
    assert scorer.shown.response_rows() == [[4, 3, 102], [1, 2, 3, 102]]


def test_a_truncated_response_is_rendered_without_its_end():
    scorer = Scorer()
    RewardModelSource(scorer, WordTemplate()).score(rollout().adding(finished=torch.tensor([False, True])))
    assert scorer.shown.response_rows() == [[4, 3], [1, 2, 3, 102]]


def test_a_prompt_is_rendered_once_for_all_its_samples():
    batch = rollout()
    template = WordTemplate()
    source = RewardModelSource(Scorer(), template)
    source.score(batch.select(torch.tensor([0, 0, 1, 0])))
    assert template.prompts == 2
    assert source.scorer.shown.prompt_rows() == [[101, 3, 3, 3]] * 2 + [[101, 2], [101, 3, 3, 3]]


def test_too_long_inputs_lose_their_start_and_are_counted():
    scorer = Scorer()
    source = RewardModelSource(scorer, max_tokens=4)
    source.score(rollout())
    assert scorer.shown.tokens.rows()[0].tolist() == [6, 7, 8, 9]
    assert scorer.shown.prompt_lens.tolist() == [2, 0]
    assert scorer.shown.response_rows() == [[8, 9], [10, 11, 12, 13]]
    assert (source.cut, source.seen) == (2, 2)
    source.score(rollout().select(torch.tensor([0])))
    assert (source.cut, source.seen) == (3, 3)


def test_a_start_token_stays():
    scorer = Scorer()
    RewardModelSource(scorer, WordTemplate(), max_tokens=5, start_ids=[101]).score(rollout())
    assert [r.tolist() for r in scorer.shown.tokens.rows()] == [[101, 3, 4, 3, 102], [101, 1, 2, 3, 102]]
    assert scorer.shown.prompt_lens.tolist() == [2, 1]


def test_a_response_longer_than_the_context_keeps_its_end():
    sequences = Sequences.build([[101, 1]], [[2, 3, 4, 5, 6]], [[True, False, True, False, True]])
    short, cut = keep_end(sequences, 4, [101])
    assert cut == 1
    assert short.tokens.rows()[0].tolist() == [101, 4, 5, 6]
    assert short.prompt_lens.tolist() == [1]
    assert short.trained.flat.tolist() == [True, False, True]


def test_inputs_that_fit_are_the_same_object():
    sequences = Sequences.build([[1, 2]], [[3]])
    assert keep_end(sequences, 3) == (sequences, 0)


def test_nan_and_a_wrong_count_are_named():
    source = RewardModelSource(lambda s: torch.tensor([0.0, float("nan")]))
    with pytest.raises(
        RewardError, match=r"reward_model returned nan for row 1 \(prompt 'id1', sample 0, .*'a bb ccc'"
    ):
        source.score(rollout())
    with pytest.raises(RewardError, match=r"shape \(3,\) for 2 responses"):
        RewardModelSource(lambda s: torch.zeros(3)).score(rollout())


def test_a_template_needs_messages():
    batch = make_rollout([[1]], [[2]], ["x"], messages=[()])
    with pytest.raises(RewardError, match=r"row 0 .* has no messages"):
        RewardModelSource(Scorer(), WordTemplate()).score(batch)


def test_same_tokenizer_tells_tokenizers_apart(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer()
    assert same_tokenizer(tokenizer, make_tokenizer())
    assert not same_tokenizer(tokenizer, make_tokenizer(eos="<|endoftext|>"))
    more = make_tokenizer()
    more.add_tokens(["<tool>"])
    assert not same_tokenizer(tokenizer, more)
    spaced = make_tokenizer()
    from tokenizers import pre_tokenizers

    spaced.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert not same_tokenizer(tokenizer, spaced)
