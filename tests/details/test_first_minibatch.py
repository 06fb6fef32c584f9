"""Before the first update old and new logprobs are one distribution: every ratio is 1, at the rollouts' temperature."""

from __future__ import annotations

import pytest
import torch
from details_kit import plain, plain_logprobs

from tutelage.algorithms import ppo


class WithRatios:
    """The policy loss, keeping the ratio of every token it sees."""

    def __init__(self, loss):
        self.loss = loss
        self.ratios = []

    outputs = property(lambda self: self.loss.outputs)

    def weights(self, batch):
        return self.loss.weights(batch)

    def items(self, out, batch):
        self.ratios.append((out.logp.detach() - batch.column("old_logp").flat).exp())
        return self.loss.items(out, batch)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_every_ratio_is_one_on_the_first_mini_batch_at_temperature_0_7(lora_rank, make_ppo, tiny_llama_folder):
    built = make_ppo(model={"lora_rank": lora_rank})
    batch = built.scored()
    loss = WithRatios(ppo.PolicyLoss(built.cfg, 0.0))
    stats = built.engine("actor").step(batch, loss)
    ratio = torch.cat(loss.ratios)
    assert len(loss.ratios) > 1, "the mini-batch must be cut otherwise than the forward pass of the old logprobs"
    assert ratio.shape == batch.rollout_logp.flat.shape
    assert float((ratio - 1).abs().max()) < 1e-5
    assert stats["clip_fraction"].mean == 0
    assert float((batch.old_logp.flat - batch.rollout_logp.flat).abs().max()) < 1e-5


def test_policy_and_reference_divide_their_logits_by_the_temperature(make_ppo, tiny_llama_folder):
    built = make_ppo()
    batch = built.collect()
    expected = plain_logprobs(plain(tiny_llama_folder), batch.sequences, 0.7)
    assert float((plain_logprobs(plain(tiny_llama_folder), batch.sequences, 1.0) - expected).abs().max()) > 0.1
    torch.testing.assert_close(batch.old_logp.flat, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.ref_logp.flat, expected, atol=1e-5, rtol=0)


def test_the_entropy_bonus_is_that_of_the_sampled_distribution(make_ppo, tiny_llama_folder):
    built = make_ppo()
    batch = built.scored()
    stats = built.engine("actor").step(batch, ppo.PolicyLoss(built.cfg, 0.0))
    total, model = 0.0, plain(tiny_llama_folder)
    for row, prompt in zip(batch.sequences.tokens.rows(), batch.sequences.prompt_lens.tolist(), strict=True):
        with torch.no_grad():
            p = torch.softmax(model(input_ids=row[None]).logits[0, prompt - 1 : -1].double() / 0.7, dim=-1)
        total -= float((p * p.log()).sum())
    assert stats["entropy"].mean == pytest.approx(total / len(batch.rollout_logp.flat), abs=1e-4)
