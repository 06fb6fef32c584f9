"""A critic as a value head on the policy's trunk: its values, the gradient of the summed losses, where it is not.

The reference is plain transformers in float64, one sequence at a time, and a backward pass for each loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import engine_kit as kit
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tutelage.algorithms.summed import SummedLoss
from tutelage.engines.held import held_bytes
from tutelage.errors import ConfigError, ModelError
from tutelage.types import Demonstrations, Outputs, Ragged, Sequences, Stat, Stats

TEMPERATURE = 0.7


@dataclass(frozen=True)
class PolicyPart:
    """logp^2 + 0.1 entropy, every token of weight 1 / B."""

    outputs: frozenset[str] = frozenset({"logp", "entropy"})

    def weights(self, batch: Demonstrations) -> Ragged:
        return kit.ValueLoss().weights(batch)

    def items(self, out: Outputs, batch: Demonstrations) -> tuple[Tensor, Stats]:
        assert out.logp is not None
        assert out.entropy is not None
        return out.logp.square() + 0.1 * out.entropy, {"logp": Stat.of(out.logp)}


@dataclass(frozen=True)
class NoisyPart(PolicyPart):
    noise_alpha: float | None = 5.0

    def noise_keys(self, batch: Demonstrations) -> Tensor:
        return torch.arange(len(batch))


BOTH = SummedLoss({"actor": PolicyPart(), "critic": kit.ValueLoss()})


def engine_with_head(folder: Path, settings: dict | None = None, *, detach: bool = False, **changes: object):
    """A head whose values are far from 0."""
    engine = kit.policy_engine(folder, settings)
    head = nn.Linear(engine.model.trunk.hidden_size, 1)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(3)))
        head.bias.fill_(0.25)
    engine.model.add_value_head(head, detach=detach)
    return type(engine)(engine.model, kit.optim(), temperature=TEMPERATURE, **changes)


def shared_batch() -> Demonstrations:
    """Four answers to each of two prompts."""
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, 90, (n,), generator=generator).tolist() for n in (5, 9)]
    answers = [torch.randint(0, 90, (n,), generator=generator).tolist() for n in (3, 1, 6, 2, 4, 2, 1, 5)]
    return Demonstrations(Sequences.build([prompts[i // 4] for i in range(8)], answers), tuple("abcdefgh"))


def reference(folder: Path, engine, seqs: Sequences) -> tuple[nn.Module, nn.Linear, list[Tensor], list[Tensor]]:
    """The plain model and head in float64; hidden states and log-softmax of each sequence alone."""
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double().eval()
    head = nn.Linear(engine.model.trunk.hidden_size, 1).double()
    head.load_state_dict({name: x.double() for name, x in engine.model.value_head.state_dict().items()})
    hidden = [plain.base_model(input_ids=row[None]).last_hidden_state[0] for row in seqs.tokens.rows()]
    return plain, head, hidden, [(plain.lm_head(h) / TEMPERATURE).log_softmax(-1) for h in hidden]


def two_backward_passes(folder: Path, engine, batch: Demonstrations, *, detach: bool) -> dict[str, Tensor]:
    seqs = batch.sequences
    plain, head, hidden, logps = reference(folder, engine, seqs)
    policy, value = [], []
    for row, p, h, logp in zip(seqs.tokens.rows(), seqs.prompt_lens.tolist(), hidden, logps, strict=True):
        for t in range(p, len(row)):
            distribution = logp[t - 1]
            policy.append(distribution[row[t]].square() - 0.1 * (distribution.exp() * distribution).sum())
            value.append((head(h[t - 1].detach() if detach else h[t - 1])[0] - (t - p)).square())
    (torch.stack(policy).sum() / len(batch)).backward(retain_graph=True)
    (torch.stack(value).sum() / len(batch)).backward()
    named = dict(plain.named_parameters()) | {f"value_head.{n}": x for n, x in head.named_parameters()}
    return {name: x.grad for name, x in named.items()}


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("detach", [False, True], ids=["through", "detached"])
@pytest.mark.parametrize("batch", [kit.batch(), shared_batch()], ids=["apart", "shared prompts"])
def test_one_backward_pass_has_the_gradient_of_two(batch, detach, model, tiny_llama_folder, tiny_gpt2_folder):
    folder = tiny_llama_folder if model == "llama" else tiny_gpt2_folder
    engine = engine_with_head(folder, detach=detach)
    wanted = two_backward_passes(folder, engine, batch, detach=detach)
    for budget in (1, 20, 10_000):
        engine.tokens_per_micro_batch = budget
        found = engine.gradients(batch, BOTH)
        assert {"value_head.weight", "value_head.bias"} <= found.keys()
        kit.require_close({name: x.double() for name, x in found.items()}, wanted, 1e-5)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("batch", [kit.batch(), shared_batch()], ids=["apart", "shared prompts"])
@pytest.mark.parametrize("budget", [16, 10_000])
def test_one_pass_says_logprobs_and_values(budget, batch, model, tiny_llama_folder, tiny_gpt2_folder):
    """The value after the last token is the head on the last hidden state."""
    folder = tiny_llama_folder if model == "llama" else tiny_gpt2_folder
    engine, seqs = engine_with_head(folder, tokens_per_micro_batch=budget), batch.sequences
    _, head, hidden, logps = reference(folder, engine, seqs)
    logp, value = engine.logprobs_and_values(seqs, TEMPERATURE)
    assert value.lens.tolist() == (seqs.response_lens + 1).tolist()
    assert logp.lens.tolist() == seqs.response_lens.tolist()
    rows = zip(seqs.tokens.rows(), seqs.prompt_lens.tolist(), hidden, logps, logp.rows(), value.rows(), strict=True)
    for row, p, h, theirs, own_logp, own_value in rows:
        wanted = torch.stack([theirs[t - 1, row[t]] for t in range(p, len(row))])
        torch.testing.assert_close(own_logp.double(), wanted, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(own_value.double(), head(h[p - 1 :])[:, 0], atol=2e-5, rtol=1e-5)
    assert torch.equal(logp.flat, engine.logprobs(seqs, TEMPERATURE).flat)


def test_with_lora_the_head_is_trained_and_the_base_is_not(tiny_llama_folder, tmp_path):
    engine, batch = engine_with_head(tiny_llama_folder, {"lora_rank": 2}), kit.batch()
    before = {name: x.detach().clone() for name, x in engine.model.module.named_parameters()}
    head = [x.detach().clone() for x in engine.model.value_head.parameters()]
    engine.step(batch, BOTH)
    changed = {n for n, x in engine.model.module.named_parameters() if not torch.equal(x, before[n])}
    assert changed
    assert all(".lora_" in name for name in changed)
    assert not any(torch.equal(a, b) for a, b in zip(head, engine.model.value_head.parameters(), strict=True))
    engine.save_pretrained(tmp_path / "out")
    assert not [name for name in load_file(tmp_path / "out/adapter/adapter_model.safetensors") if "value" in name]


def test_a_detached_value_loss_moves_the_head_alone(tiny_llama_folder):
    engine = engine_with_head(tiny_llama_folder, detach=True)
    found = engine.gradients(kit.batch(), SummedLoss({"critic": kit.ValueLoss()}))
    assert {name for name, x in found.items() if bool(x.any())} == {"value_head.weight", "value_head.bias"}


def test_the_head_is_in_no_folder_publication_or_snapshot(tiny_llama_folder, tmp_path):
    engine = engine_with_head(tiny_llama_folder)
    engine.step(kit.batch(), BOTH)
    engine.save_pretrained(tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    names = set(load_file(tmp_path / "out/model.safetensors"))
    assert names == set(load_file(tiny_llama_folder / "model.safetensors"))
    published = dict(engine.named_weights())
    assert published.keys() == set(plain.state_dict())
    assert all(torch.equal(x, published[name]) for name, x in plain.state_dict().items())
    snapshot = engine.snapshot()
    assert snapshot.model.value_head is None
    with pytest.raises(ModelError, match="the loss needs value"):
        snapshot.logprobs_and_values(kit.sequences(), TEMPERATURE)


def test_a_state_that_was_saved_goes_on_bit_for_bit(tiny_llama_folder, tmp_path):
    batch, straight = kit.batch(), engine_with_head(tiny_llama_folder)
    for _ in range(2):
        straight.step(batch, BOTH)
    straight.save_state(tmp_path / "state")
    again = engine_with_head(tiny_llama_folder)
    again.load_state(tmp_path / "state")
    for engine in (straight, again):
        engine.step(batch, BOTH)
    mine, theirs = again.state(), straight.state()
    assert {"value_head.weight", "value_head.bias"} <= mine["moments"].keys()
    assert all(torch.equal(mine["weights"][name], x) for name, x in theirs["weights"].items())
    assert all(torch.equal(mine["moments"][n][k], x) for n, own in theirs["moments"].items() for k, x in own.items())


def test_the_head_costs_its_own_bytes_alone(tiny_llama_folder):
    engine, plain = engine_with_head(tiny_llama_folder), kit.policy_engine(tiny_llama_folder)
    width = engine.model.trunk.hidden_size
    assert held_bytes(engine).weights - held_bytes(plain).weights == 4 * (width + 1)


def test_in_bfloat16_the_head_stays_float32(tiny_llama_folder):
    engine = engine_with_head(tiny_llama_folder, {"dtype": "bfloat16"})
    stats = engine.step(kit.batch(), BOTH)
    assert {x.dtype for x in engine.model.value_head.parameters()} == {torch.float32}
    assert stats["grad_norm"].mean > 0


def test_statistics_of_the_parts_are_told_apart(tiny_llama_folder):
    stats = engine_with_head(tiny_llama_folder).step(kit.batch(), BOTH)
    assert "actor/logp" in stats
    whole = stats["loss"].mean
    apart = [engine_with_head(tiny_llama_folder).evaluate(kit.batch(), p)["loss"].mean for p in BOTH.parts.values()]
    assert whole == pytest.approx(sum(apart), rel=1e-5)


@dataclass(frozen=True)
class OtherWeights(kit.ValueLoss):
    def weights(self, batch: Demonstrations) -> Ragged:
        own = super().weights(batch)
        return replace(own, flat=own.flat * 2)


def test_losses_that_cannot_be_added_are_refused(tiny_llama_folder):
    for part, said in ((kit.SortedLoss(), "whole mini-batch"), (NoisyPart(), "noise on the embeddings")):
        with pytest.raises(ConfigError, match=said):
            SummedLoss({"actor": part, "critic": kit.ValueLoss()})
    unlike = SummedLoss({"actor": PolicyPart(), "critic": OtherWeights()})
    with pytest.raises(ConfigError, match="actor and critic weigh the tokens of a mini-batch differently"):
        engine_with_head(tiny_llama_folder).step(kit.batch(), unlike)


def test_a_policy_without_a_head_has_no_values(tiny_llama_folder):
    engine = kit.policy_engine(tiny_llama_folder)
    with pytest.raises(ModelError, match="the loss needs value"):
        engine.step(kit.batch(), BOTH)
    with pytest.raises(ModelError, match="the loss needs value"):
        engine.logprobs_and_values(kit.sequences(), 1.0)
