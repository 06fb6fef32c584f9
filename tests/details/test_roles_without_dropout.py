"""Dropout is off in every role, also in training mode: else old and new logprobs of one policy differ."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tutelage.models.forward import sequence_scores, token_logprobs, values_with_bootstrap
from tutelage.models.heads import ScalarModel
from tutelage.types import Sequences

SEQUENCES = Sequences.build([[5, 6], [7]], [[8, 9, 10], [11, 12]])


def computed(model) -> torch.Tensor:
    if not isinstance(model, ScalarModel):
        return token_logprobs(model, SEQUENCES)[0]
    return values_with_bootstrap(model, SEQUENCES).flat if model.kind == "value" else sequence_scores(model, SEQUENCES)


@pytest.mark.parametrize("role", ["actor", "critic", "reference", "reward"])
def test_a_role_computes_the_same_twice_in_training_mode(role, make_ppo, tiny_gpt2_folder, bert_reward_folder):
    built = make_ppo(tiny_gpt2_folder, reward={"model": str(bert_reward_folder), "rules": []})
    module = built.engine(role).model.module.train()
    with_dropout = [name for name, m in module.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
    assert not with_dropout
    with torch.no_grad():
        first, second = (computed(built.engine(role).model) for _ in range(2))
    assert torch.equal(first, second)


def test_the_folders_of_this_test_have_dropout(tiny_gpt2_folder, tiny_bert_folder):
    from transformers import AutoModel

    for folder in (tiny_gpt2_folder, tiny_bert_folder):
        assert any(isinstance(m, nn.Dropout) and m.p == 0.1 for m in AutoModel.from_pretrained(folder).modules())
