"""One update by hand, the learning rate, what is frozen, and what is refused."""

from __future__ import annotations

import itertools
import math

import engine_kit as kit
import pytest
import torch

from tutelage.algorithms.reward_model import PairLoss
from tutelage.algorithms.sft import SFTLoss
from tutelage.config.common import OptimConfig
from tutelage.engines.engine import ModelEngine
from tutelage.engines.optim import learning_rate, make_optimizer
from tutelage.errors import ModelError, TrainingError
from tutelage.models.load import load_scalar_model
from tutelage.types import Ragged


def schedule(kind: str, warmup: int, total: int) -> list[float]:
    cfg = OptimConfig(lr=1.0, schedule=kind, warmup_steps=warmup)
    return [learning_rate(cfg, u, total) for u in range(total)]


def test_learning_rates_by_hand():
    assert schedule("linear", 0, 4) == [1.0, 0.75, 0.5, 0.25]
    assert schedule("linear", 1, 5) == [0.5, 1.0, 0.75, 0.5, 0.25]
    assert schedule("constant", 3, 5) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert schedule("cosine", 0, 4) == pytest.approx([1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])
    assert learning_rate(OptimConfig(lr=1.0, schedule="constant"), 99, 4) == 1.0
    with pytest.raises(TrainingError, match="update 5 of a linear learning-rate schedule of 4 updates"):
        learning_rate(OptimConfig(lr=1.0), 4, 4)


def test_the_engine_follows_the_schedule_by_updates(tiny_llama_folder):
    engine = kit.policy_engine(tiny_llama_folder, schedule="linear", lr=4e-3, total_updates=4)
    rates = [engine.step(kit.batch(), kit.TokenLoss())["lr"].mean for _ in range(4)]
    assert rates == pytest.approx([4e-3, 3e-3, 2e-3, 1e-3])
    with pytest.raises(TrainingError, match="update 5"):
        engine.step(kit.batch(), kit.TokenLoss())


def test_two_updates_equal_adamw_written_out(tiny_llama_folder):
    """m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, w -= lr (m^ / (sqrt(v^) + eps) + decay w); float64, clipped g."""
    engine = kit.policy_engine(tiny_llama_folder, lr=3e-3, weight_decay=0.1, max_grad_norm=0.5)
    masters = engine.model.masters.masters
    w = {n: p.detach().double().clone() for n, p in masters.items()}
    m = {n: torch.zeros_like(x) for n, x in w.items()}
    v = {n: torch.zeros_like(x) for n, x in w.items()}
    for t in (1, 2):
        g = {n: x.double() for n, x in engine.gradients(kit.batch(), kit.TokenLoss()).items()}
        norm = math.sqrt(sum(float(x.square().sum()) for x in g.values()))
        assert norm > 0.5
        stats = engine.step(kit.batch(), kit.TokenLoss())
        assert stats["grad_norm"].mean == pytest.approx(norm, rel=1e-5)
        for n in w:
            clipped = g[n] * 0.5 / norm
            m[n] = 0.9 * m[n] + 0.1 * clipped
            v[n] = 0.999 * v[n] + 0.001 * clipped**2
            decay = 0.1 if w[n].ndim >= 2 else 0.0
            w[n] *= 1 - 3e-3 * decay
            w[n] -= 3e-3 * (m[n] / (1 - 0.9**t)) / ((v[n] / (1 - 0.999**t)).sqrt() + 1e-5)
        for n in w:
            torch.testing.assert_close(masters[n].detach().double(), w[n], atol=2e-6, rtol=0, msg=n)


def test_adam_epsilon_and_decay_groups_come_from_the_settings(tiny_gpt2_folder):
    engine = kit.policy_engine(tiny_gpt2_folder)
    optimizer = make_optimizer(OptimConfig(weight_decay=0.3), engine.model.masters.masters)
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in plain["params"]} == {1}
    assert OptimConfig().eps == 1e-5
    assert optimizer.defaults["eps"] == 1e-5


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_ratio_is_one_on_the_first_mini_batch_at_temperature_0_7(model, tiny_llama_folder, tiny_gpt2_folder):
    folder = tiny_llama_folder if model == "llama" else tiny_gpt2_folder
    engine = kit.policy_engine(folder, temperature=0.7, tokens_per_micro_batch=25)
    old = engine.logprobs(kit.sequences(), 0.7)
    seen = []

    class Watch(kit.TokenLoss):
        def items(self, out, batch):
            index = torch.tensor([int(i) for i in batch.ids])
            seen.append((out.logp.detach() - old.select(index).flat).exp())
            return super().items(out, batch)

    engine.tokens_per_micro_batch = 11  # another cut than the one that old logprobs were computed in
    engine.step(kit.batch(), Watch())
    ratio = torch.cat(seen)
    assert len(ratio) == len(old.flat)
    assert float((ratio - 1).abs().max()) < 1e-5


def test_logprobs_at_another_temperature_than_training_are_refused(tiny_llama_folder):
    with pytest.raises(TrainingError, match=r"at temperature 0\.7, the policy is trained at 1\.0"):
        kit.policy_engine(tiny_llama_folder).logprobs(kit.sequences(), 0.7)


def test_logprobs_values_and_scores_do_not_depend_on_the_budget(tiny_llama_folder):
    seqs = kit.sequences()
    policy = kit.policy_engine(tiny_llama_folder)
    critic, reward = kit.scalar_engine(tiny_llama_folder, "value"), kit.scalar_engine(tiny_llama_folder, "reward")
    for run, lens in (
        (lambda: policy.logprobs(seqs, 1.0), seqs.response_lens),
        (lambda: critic.values(seqs), seqs.response_lens + 1),
        (lambda: Ragged(reward.scores(seqs), torch.ones_like(seqs.response_lens)), torch.ones_like(seqs.response_lens)),
    ):
        found = []
        for budget in (1, 25, 10_000):
            for engine in (policy, critic, reward):
                engine.tokens_per_micro_batch = budget
            found.append(run())
            assert torch.equal(found[-1].lens, lens)
        torch.testing.assert_close(found[0].flat, found[2].flat, atol=1e-5, rtol=0)
        torch.testing.assert_close(found[1].flat, found[2].flat, atol=1e-5, rtol=0)


def test_a_loss_that_is_not_finite_is_refused_before_a_weight_moves(tiny_llama_folder):
    engine = kit.policy_engine(tiny_llama_folder, tokens_per_micro_batch=20)
    engine.step(kit.batch(), kit.TokenLoss())
    before = engine.state()
    with pytest.raises(TrainingError, match=r"TokenLoss is not finite at update 2, first in item 3 of the mini-batch"):
        engine.step(kit.batch(), kit.TokenLoss(bad=True))
    after = engine.state()
    assert after["updates"] == 1
    for part in ("weights", "moments"):
        for name, value in before[part].items():
            values = value if isinstance(value, dict) else {"": value}
            others = after[part][name] if isinstance(value, dict) else {"": after[part][name]}
            assert all(torch.equal(values[k], others[k]) for k in values)
    assert all(m.grad is None for m in engine.model.masters.masters.values())


class HugeGradient(kit.TokenLoss):
    def items(self, out, batch):
        items, stats = super().items(out, batch)
        return torch.where(items > 0, items - items.detach() + (out.logp - out.logp.detach()) * 3e38 * 10, items), stats


def test_a_gradient_that_is_not_finite_is_refused_before_a_weight_moves(tiny_llama_folder):
    engine = kit.policy_engine(tiny_llama_folder)
    before = engine.state()["weights"]
    with pytest.raises(TrainingError, match=r"gradient of HugeGradient is not finite at update 1"):
        engine.step(kit.batch(), HugeGradient())
    assert all(torch.equal(before[n], w) for n, w in engine.state()["weights"].items())


class NanScalars(kit.SortedLoss):
    def scalars(self, out, batch):
        scalars = super().scalars(out, batch)
        bad = torch.tensor([i == "5" for i in batch.ids])
        return torch.where(bad[:, None], float("nan"), scalars)


def test_a_coupled_loss_names_its_item_too(tiny_llama_folder):
    with pytest.raises(TrainingError, match="first in item 5"):
        kit.policy_engine(tiny_llama_folder, tokens_per_micro_batch=15).step(kit.batch(), NanScalars())


def test_training_lowers_the_loss_and_evaluate_changes_nothing(tiny_llama_folder):
    engine, batch, loss = kit.policy_engine(tiny_llama_folder), kit.batch(), SFTLoss("token_mean")
    first = engine.evaluate(batch, loss)["loss"].mean
    assert first == pytest.approx(-float(engine.logprobs(batch.sequences, 1.0).flat.mean()), rel=1e-5)
    assert engine.updates == 0
    for _ in range(5):
        engine.step(batch, loss)
    assert engine.evaluate(batch, loss)["loss"].mean < 0.5 * first


@pytest.mark.parametrize("budget", [15, 10_000])
def test_evaluate_serves_a_coupled_loss_and_leaves_no_gradient(budget, tiny_llama_folder):
    engine, batch = kit.policy_engine(tiny_llama_folder, tokens_per_micro_batch=budget), kit.batch()
    before = engine.state()["weights"]
    rows = [row.double() for row in engine.logprobs(batch.sequences, 1.0).rows()]
    sums = sorted(float(row.sum()) for row in rows)
    gaps = [high - low for low, high in itertools.pairwise(sums)]
    mean = sum(float(row.mean()) for row in rows) / len(rows)
    found = engine.evaluate(batch, kit.SortedLoss())
    assert found["loss"].mean == pytest.approx(sum(g**2 for g in gaps) + mean**2, rel=1e-5)
    assert found["gap"].mean == pytest.approx(sum(gaps) / len(gaps), rel=1e-5)
    assert engine.updates == 0
    assert all(m.grad is None for m in engine.model.masters.masters.values())
    assert all(torch.equal(before[n], w) for n, w in engine.state()["weights"].items())


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_only_the_topmost_blocks_and_the_head_are_trained(kind, tiny_llama_folder, tiny_bert_folder):
    folder = tiny_llama_folder if kind == "llama" else tiny_bert_folder
    for layers, prefix in ((0, ()), (1, ("layers.1.", "encoder.layer.1."))):
        engine = kit.scalar_engine(folder, "reward", train_layers=layers)
        before = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
        graphs = []
        block = next(m for n, m in engine.model.named_modules() if n.endswith(("layers.0", "layer.0")))
        block.register_forward_hook(lambda *a, graphs=graphs: graphs.append(torch.as_tensor(a[2][0]).requires_grad))
        engine.step(kit.pairs(), PairLoss(0.0, False))
        moved = {n for n, p in engine.model.named_parameters() if not torch.equal(p, before[n])}
        assert "score.weight" in moved
        assert all(n.startswith("score.") or n.removeprefix("backbone.").startswith(prefix) for n in moved)
        assert len(moved) > 2 or layers == 0
        assert graphs == [False], "the frozen part records no gradient"
    with pytest.raises(ModelError, match="train_layers is 3, the model has 2 blocks"):
        kit.scalar_engine(folder, "reward", train_layers=3)


def test_a_frozen_engine_has_no_step(tiny_llama_folder):
    reference = kit.policy_engine(tiny_llama_folder).snapshot()
    with pytest.raises(TrainingError, match="frozen"):
        reference.step(kit.batch(), kit.TokenLoss())
    assert not any(p.requires_grad for p in reference.model.module.parameters())


def test_the_snapshot_stays_while_the_policy_moves(tiny_llama_folder):
    engine, seqs = kit.policy_engine(tiny_llama_folder), kit.sequences()
    reference, before = engine.snapshot(), engine.logprobs(seqs, 1.0).flat
    assert torch.equal(reference.logprobs(seqs, 1.0).flat, before)
    engine.step(kit.batch(), kit.TokenLoss())
    assert float((engine.logprobs(seqs, 1.0).flat - before).abs().max()) > 1e-3
    assert torch.equal(reference.logprobs(seqs, 1.0).flat, before)


def test_with_lora_the_reference_is_the_untouched_model_after_updates_too(tiny_llama_folder):
    plain, seqs = kit.policy_engine(tiny_llama_folder), kit.sequences()
    engine = kit.policy_engine(tiny_llama_folder, {"lora_rank": 2})
    expected = plain.logprobs(seqs, 1.0).flat
    for _ in range(2):
        engine.step(kit.batch(), kit.TokenLoss())
        assert torch.equal(engine.logprobs(seqs, 1.0, adapter=False).flat, expected)
        assert float((engine.logprobs(seqs, 1.0).flat - expected).abs().max()) > 1e-3
    with pytest.raises(ModelError, match="no adapter"):
        plain.logprobs(seqs, 1.0, adapter=False)


def test_shifting_the_bias_moves_every_score_and_is_saved(tiny_bert_folder, tmp_path):
    engine, seqs = kit.scalar_engine(tiny_bert_folder, "reward"), kit.sequences(vocabulary=60)
    before = engine.scores(seqs)
    engine.shift_bias(-1.5)
    torch.testing.assert_close(engine.scores(seqs), before - 1.5, atol=1e-5, rtol=0)
    engine.save_pretrained(tmp_path / "rm")
    again = ModelEngine.frozen(load_scalar_model(kit.ModelConfig(path=str(tmp_path / "rm")), "reward"))
    assert torch.equal(again.scores(seqs), engine.scores(seqs))


def test_a_role_is_not_asked_for_what_it_does_not_compute(tiny_llama_folder):
    critic = kit.scalar_engine(tiny_llama_folder, "value")
    with pytest.raises(ModelError, match="a reward was asked of a value model"):
        critic.scores(kit.sequences())
    with pytest.raises(ModelError, match="has no logprobs"):
        critic.logprobs(kit.sequences(), 1.0)
    with pytest.raises(ModelError, match="a value was asked of a language model"):
        kit.policy_engine(tiny_llama_folder).values(kit.sequences())


@pytest.mark.filterwarnings("ignore:this processor has no bfloat16")
def test_in_bfloat16_the_computing_copy_follows_masters_that_hold_smaller_steps(tiny_llama_folder):
    engine = kit.policy_engine(tiny_llama_folder, {"dtype": "bfloat16"}, lr=1e-2)
    before = engine.logprobs(kit.sequences(), 1.0).flat
    for _ in range(2):
        engine.step(kit.batch(), kit.TokenLoss())
        computing = dict(engine.model.model.named_parameters())
        for name, master in engine.model.masters.masters.items():
            assert torch.equal(computing[name], master.to(torch.bfloat16)), name
    assert float((engine.logprobs(kit.sequences(), 1.0).flat - before).abs().max()) > 0.05
    tiny = kit.policy_engine(tiny_llama_folder, {"dtype": "bfloat16"}, lr=1e-6)
    start = tiny.state()["weights"]
    tiny.step(kit.batch(), kit.TokenLoss())
    moved = [bool((tiny.model.masters.masters[n] != w).any()) for n, w in start.items()]
    assert all(moved), "a step below the resolution of bfloat16 is not lost"
