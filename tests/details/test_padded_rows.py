"""The layout for architectures that cannot be packed: right-padded rows, whose padding must have no influence."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel

from tutelage.models.trunk import padded_hidden
from tutelage.types import Ragged


@pytest.mark.parametrize("pad", [0, 7])
def test_padding_has_no_influence_on_an_encoder_whose_tokens_see_what_comes_after_them(pad, tiny_bert_folder):
    model = AutoModel.from_pretrained(tiny_bert_folder, add_pooling_layer=False).eval()
    model.config.pad_token_id = pad
    tokens = Ragged.from_rows([torch.tensor(row) for row in ([2, 20, pad, 3], [2, 21, 22, 23, 24, 25, 26, 3], [2, 3])])
    with torch.no_grad():
        got = padded_hidden(model, tokens)
        alone = torch.cat([model(input_ids=row[None]).last_hidden_state[0] for row in tokens.rows()])
    torch.testing.assert_close(got, alone, atol=1e-5, rtol=0)
