"""Several models on one frozen base: the same weights in memory, numbers of separate copies, adapters apart."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import model_kit as kit
import pytest
import torch
from spmd_kit import run_ranks
from torch import Tensor

from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.engines.engine import ModelEngine
from tutelage.engines.mesh import RankMeshes
from tutelage.engines.ranks import Alone, MeshRanks
from tutelage.errors import ModelError
from tutelage.layout import Layout
from tutelage.models.forward import sequence_scores, token_logprobs, token_values
from tutelage.models.heads import ScalarModel
from tutelage.models.load import load_causal_lm, load_scalar_model, value_from
from tutelage.models.shared_base import SharedModels, folder_obstacle, load_shared_base, twin
from tutelage.types import Demonstrations, Outputs, Ragged, Stats

SEEN = pytest.mark.parametrize("kind", kit.DECODERS)


def settings(path: Path, **changes: object) -> ModelConfig:
    return ModelConfig(path=str(path), **{"lora_rank": 3, "lora_alpha": 6.0, **changes})


def stir(model: torch.nn.Module, seed: int, scale: float = 0.1) -> None:
    """Adapters that are no longer 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def hashes(models: SharedModels) -> dict[str, str]:
    return {
        name: hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest() for name, weight in models.base().items()
    }


@pytest.fixture
def base_folder(kind: str, tmp_path: Path) -> Path:
    kit.build(kind).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def reward_folder(base: Path, folder: Path, **changes: object) -> Path:
    """A reward model that was trained as an adapter on `base`."""
    keep = changes.pop("keep_layers", None)
    model = load_scalar_model(
        settings(base, **{"lora_rank": 2, **changes}), "reward", tokenizer=kit.WordTokenizer(), seed=4, keep_layers=keep
    )
    stir(model, 5)
    model.save_pretrained(folder)
    return folder


def start_at_reward(rewards: dict[str, ScalarModel]) -> str:
    return next(iter(rewards))


def start_at_base(rewards: dict[str, ScalarModel]) -> None:
    return None


class FitToken:
    """logp^2, or (V - 1)^2, or score^2 per item, weight 1 / items."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.outputs = frozenset({name})

    def weights(self, batch: Demonstrations) -> Ragged:
        lens = batch.sequences.response_lens if self.name != "score" else torch.ones(len(batch), dtype=torch.int64)
        return Ragged(torch.full((int(lens.sum()),), 1.0 / int(lens.sum())), lens)

    def items(self, out: Outputs, batch: Demonstrations) -> tuple[Tensor, Stats]:
        return (getattr(out, self.name) - 1.0).square(), {}


def batch(seed: int = 0) -> Demonstrations:
    sequences = kit.sequences(seed)
    return Demonstrations(sequences, tuple(str(i) for i in range(len(sequences))))


def engine(model: object, **changes: object) -> ModelEngine:
    optim = OptimConfig(lr=1e-2, schedule="constant", tokens_per_micro_batch=16)
    return ModelEngine(model, optim, **changes)


# ---- one copy


@SEEN
def test_the_base_is_in_memory_once_and_the_adapters_are_apart(kind, base_folder, tmp_path):
    reward = str(reward_folder(base_folder, tmp_path / "reward"))
    made = load_shared_base(
        settings(base_folder), kit.WordTokenizer(), rewards={reward: kit.WordTokenizer()}, critic=start_at_base
    )
    assert made.obstacles == {}
    trees = [made.policy.model.base_model, made.critic.backbone, made.rewards[reward].backbone]
    named = [dict(tree.named_parameters()) for tree in trees]
    own = [{name for name in tree if ".lora_" in name} for tree in named]
    assert own[0] == own[1] == own[2]
    for name, weight in named[0].items():
        others = [tree[name] for tree in named[1:]]
        same = [other is weight for other in others]
        assert same == ([False, False] if ".lora_" in name else [True, True]), name
    assert len({id(module) for tree in trees for module in tree.modules()}) == sum(
        len(list(tree.modules())) for tree in trees
    )
    # what is trained is the adapters and the critic's head, in two sets that do not meet
    policy, critic = (set(map(id, m.masters.masters.values())) for m in (made.policy, made.critic))
    assert policy
    assert critic
    assert not policy & critic
    assert not any(p.requires_grad for p in made.base().values())
    assert not made.rewards[reward].masters.masters


def test_a_twin_has_the_weights_and_copies_of_the_buffers():
    model = kit.build("llama")
    other = twin(model)
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    buffers = list(zip(model.buffers(), other.buffers(), strict=True))
    assert buffers
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in buffers)
    assert other.lm_head.weight is other.model.embed_tokens.weight or other.config.tie_word_embeddings is False


# ---- the numbers of separate copies


@SEEN
@pytest.mark.parametrize(
    "recomputed",
    [{}, {"gradient_checkpointing": True}, {"gradient_checkpointing": True, "activation_bytes": 60_000}],
    ids=["stored", "recomputed", "by budget"],
)
def test_three_updates_of_each_role_equal_those_of_separate_copies(kind, base_folder, tmp_path, recomputed):
    """Bit for bit, and the roles take turns, so that one model's step is between another's."""
    cfg = settings(base_folder, **recomputed)
    reward = str(reward_folder(base_folder, tmp_path / "reward"))
    made = load_shared_base(cfg, kit.WordTokenizer(), rewards={reward: None}, critic=start_at_base, seed=7)
    policy = load_causal_lm(cfg, kit.WordTokenizer(), seed=7)
    critic = value_from(policy, cfg, seed=7)
    merged = load_scalar_model(ModelConfig(path=reward), "reward", tokenizer=kit.WordTokenizer())
    shared = [engine(made.policy), engine(made.critic)]
    apart = [engine(policy), engine(critic)]
    scores = [ModelEngine.frozen(made.rewards[reward]), ModelEngine.frozen(merged)]
    before = hashes(made)
    for step in range(3):
        rows = batch(step)
        for one, other, name in zip(shared, apart, ("logp", "value"), strict=True):
            a, b = one.step(rows, FitToken(name)), other.step(rows, FitToken(name))
            assert a == b
            assert a["grad_norm"].total > 0
            assert ("recomputed_blocks" in a) == ("activation_bytes" in recomputed)
        assert torch.equal(shared[0].logprobs(rows.sequences, 1.0).flat, apart[0].logprobs(rows.sequences, 1.0).flat)
        old = [e.logprobs(rows.sequences, 1.0, adapter=False).flat for e in (shared[0], apart[0])]
        assert torch.equal(*old)
        torch.testing.assert_close(*(e.scores(rows.sequences) for e in scores), atol=1e-5, rtol=1e-5)
    for one, other in zip(shared, apart, strict=True):
        mine, theirs = one.state()["weights"], other.state()["weights"]
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert any(float(weight.abs().max()) > 1e-3 for name, weight in mine.items() if "lora_B" in name)
    assert hashes(made) == before


@SEEN
def test_a_step_of_one_role_changes_nothing_of_the_others(kind, base_folder, tmp_path):
    reward = str(reward_folder(base_folder, tmp_path / "reward"))
    made = load_shared_base(settings(base_folder), kit.WordTokenizer(), rewards={reward: None}, critic=start_at_base)
    models = {"logp": made.policy, "value": made.critic, "score": made.rewards[reward]}
    engines = {"logp": engine(made.policy), "value": engine(made.critic)}
    ModelEngine.frozen(made.rewards[reward])

    def state() -> dict[str, dict[str, Tensor]]:
        return {n: {k: p.detach().clone() for k, p in m.module.named_parameters()} for n, m in models.items()}

    for name, one in engines.items():
        before = state()
        one.step(batch(), FitToken(name))
        after = state()
        changed = {n for n in models if any(not torch.equal(before[n][k], after[n][k]) for k in before[n])}
        assert changed == {name}
        assert all(p.grad is None for m in models.values() for p in m.module.parameters())


def test_gradient_checkpointing_belongs_to_the_trained_roles(tmp_path):
    kit.build("llama").save_pretrained(tmp_path / "base")
    reward = str(reward_folder(tmp_path / "base", tmp_path / "reward"))
    for start in (start_at_base, start_at_reward):
        made = load_shared_base(
            settings(tmp_path / "base", gradient_checkpointing=True),
            kit.WordTokenizer(),
            rewards={reward: None},
            critic=start,
        )
        on = [m.is_gradient_checkpointing for m in (made.policy.model, made.critic.backbone)]
        assert on == [True, True]
        assert not made.rewards[reward].backbone.is_gradient_checkpointing


# ---- where a critic starts


@SEEN
def test_a_critic_from_the_reward_model_copies_adapter_and_head(kind, base_folder, tmp_path):
    reward = str(reward_folder(base_folder, tmp_path / "reward"))
    made = load_shared_base(settings(base_folder), kit.WordTokenizer(), rewards={reward: None}, critic=start_at_reward)
    rows = batch()
    judge = ModelEngine.frozen(made.rewards[reward])
    critic = engine(made.critic)
    scores = judge.scores(rows.sequences)
    last = torch.stack([row[-1] for row in critic.values(rows.sequences).rows()])
    assert float(scores.std()) > 0.05
    torch.testing.assert_close(last, scores, atol=1e-6, rtol=1e-6)
    copied = {n: p for n, p in made.rewards[reward].named_parameters() if ".lora_" in n}
    trained = {n: p for n, p in made.critic.masters.masters.items() if ".lora_" in n}
    assert trained.keys() == copied.keys()
    assert all(torch.equal(trained[n], p) and trained[n] is not p for n, p in copied.items())
    critic.step(rows, FitToken("value"))
    assert torch.equal(judge.scores(rows.sequences), scores)
    after = torch.stack([row[-1] for row in critic.values(rows.sequences).rows()])
    assert float((after - scores).abs().max()) > 1e-3


def test_a_reward_model_of_the_lowest_blocks_stands_on_them(tmp_path):
    kit.build("llama").save_pretrained(tmp_path / "base")
    reward = str(reward_folder(tmp_path / "base", tmp_path / "reward", keep_layers=1))
    made = load_shared_base(settings(tmp_path / "base"), kit.WordTokenizer(), rewards={reward: None})
    assert made.obstacles == {}
    assert made.critic is None
    merged = load_scalar_model(ModelConfig(path=reward), "reward", tokenizer=kit.WordTokenizer())
    rows = kit.sequences()
    with torch.no_grad():
        torch.testing.assert_close(
            sequence_scores(made.rewards[reward], rows), sequence_scores(merged, rows), atol=1e-5, rtol=1e-5
        )
        assert len(made.policy.trunk.model.layers) == 2


# ---- several ranks


def two_updates(rank: int, world: int, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Trained weights of both roles after two updates on this rank's share, and the base's hashes.  world 1: alone."""
    made = load_shared_base(settings(folder), kit.WordTokenizer(), critic=start_at_base, seed=7)
    meshes = RankMeshes()
    found = {}
    for name, model in (("logp", made.policy), ("value", made.critic)):
        ranks = Alone() if world == 1 else MeshRanks(meshes.of(Layout(replicate=world)))
        assert not isinstance(ranks, MeshRanks) or ranks.sharding() is None
        one = engine(model, ranks=ranks)
        for step in range(2):
            one.step(batch(step), FitToken(name))
        found[name] = one.state()["weights"]
    return {**found, "base": {n: p.detach().clone() for n, p in made.base().items()}}


def test_two_replicas_update_as_one_process_and_each_has_one_base(tmp_path):
    kit.build("llama").save_pretrained(tmp_path / "base")
    one = two_updates(0, 1, tmp_path / "base")
    for ours in run_ranks(two_updates, 2, tmp_path / "base"):
        for name in ("logp", "value"):
            for key, weight in one[name].items():
                # Adam may move a weight by 0.1 lr more where a gradient is near 0
                torch.testing.assert_close(ours[name][key], weight, atol=1e-3, rtol=0)
        assert all(torch.equal(ours["base"][n], p) for n, p in one["base"].items())


# ---- folders and states


@SEEN
def test_each_role_saves_its_own_merged_model_and_adapter(kind, base_folder, tmp_path):
    reward = str(reward_folder(base_folder, tmp_path / "reward"))
    made = load_shared_base(settings(base_folder), kit.WordTokenizer(), rewards={reward: None}, critic=start_at_base)
    stir(made.policy.model, 1)
    stir(made.critic, 2)
    before, rows = hashes(made), kit.sequences()
    made.policy.save_pretrained(tmp_path / "actor")
    made.critic.save_pretrained(tmp_path / "critic")
    made.rewards[reward].save_pretrained(tmp_path / "again")
    with torch.no_grad():
        actor = load_causal_lm(ModelConfig(path=str(tmp_path / "actor")), kit.WordTokenizer())
        critic = load_scalar_model(ModelConfig(path=str(tmp_path / "critic")), "value", tokenizer=kit.WordTokenizer())
        judge = load_scalar_model(ModelConfig(path=str(tmp_path / "again")), "reward", tokenizer=kit.WordTokenizer())
        for loaded, model, compute in (
            (actor, made.policy, lambda m: token_logprobs(m, rows)[0]),
            (critic, made.critic, lambda m: token_values(m, rows)),
            (judge, made.rewards[reward], lambda m: sequence_scores(m, rows)),
        ):
            torch.testing.assert_close(compute(loaded), compute(model), atol=1e-4, rtol=1e-4)
    adapters = [
        (tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in ("actor", "critic")
    ]
    assert adapters[0] != adapters[1]
    again = (tmp_path / "again" / "adapter" / "adapter_model.safetensors").read_bytes()
    assert again == (Path(reward) / "adapter" / "adapter_model.safetensors").read_bytes()
    assert hashes(made) == before
    # what is published is the actor's merged weights, and the whole of them
    published = {name: w.clone() for name, w in made.policy.named_weights()}
    saved = dict(actor.model.named_parameters(remove_duplicate=False))
    assert published.keys() == saved.keys()
    assert all(torch.allclose(published[name], saved[name], atol=1e-6) for name in saved)


def test_the_state_of_a_role_is_its_adapter_and_goes_on_bit_for_bit(tmp_path):
    kit.build("llama").save_pretrained(tmp_path / "base")

    def make() -> tuple[SharedModels, dict[str, ModelEngine]]:
        made = load_shared_base(settings(tmp_path / "base"), kit.WordTokenizer(), critic=start_at_base)
        return made, {"logp": engine(made.policy), "value": engine(made.critic)}

    made, engines = make()
    for name, one in engines.items():
        one.step(batch(), FitToken(name))
        one.save_state(tmp_path / name)
        index = json.loads((tmp_path / name / "index.json").read_text())
        assert not any("base_layer" in path or "embed" in path for path in index["tensors"])
    expected = [engines[name].step(batch(1), FitToken(name)) for name in engines]
    other, again = make()
    for name, one in again.items():
        one.load_state(tmp_path / name)
    assert [again[name].step(batch(1), FitToken(name)) for name in again] == expected
    assert hashes(other) == hashes(made)
    for name in engines:
        a, b = engines[name].state()["weights"], again[name].state()["weights"]
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_in_bfloat16_the_base_is_cast_once_and_the_adapters_are_trained_in_float32(tmp_path):
    kit.build("llama").save_pretrained(tmp_path / "base")
    cfg = settings(tmp_path / "base", dtype="bfloat16")
    reward = str(reward_folder(tmp_path / "base", tmp_path / "reward", dtype="bfloat16"))
    made = load_shared_base(cfg, kit.WordTokenizer(), rewards={reward: None}, critic=start_at_base, seed=7)
    assert made.obstacles == {}  # merged into a base that was rounded to bfloat16
    assert {weight.dtype for weight in made.base().values()} == {torch.bfloat16}
    assert made.critic.backbone.layers[0].mlp.up_proj.base_layer.weight is (
        made.policy.model.model.layers[0].mlp.up_proj.base_layer.weight
    )
    assert {p.dtype for m in (made.policy, made.critic) for p in m.masters.masters.values()} == {torch.float32}
    apart = load_causal_lm(cfg, kit.WordTokenizer(), seed=7)
    critic = value_from(apart, cfg, seed=7)
    for one, other in ((made.policy, apart), (made.critic, critic)):
        mine, theirs = one.masters.masters, other.masters.masters
        assert all(torch.equal(mine[name], theirs[name]) for name in mine if "lora_A" in name or "score" in name)


# ---- what cannot stand on the base


def obstacle(base: Path, folder: Path) -> str:
    made = load_shared_base(settings(base), kit.WordTokenizer(), rewards={str(folder): None})
    assert made.rewards == {}
    return made.obstacles[str(folder)]


def test_a_reward_model_of_another_base_is_named_with_the_weight_that_differs(tmp_path):
    kit.build("llama").save_pretrained(tmp_path / "base")
    kit.build("llama", seed=1).save_pretrained(tmp_path / "other")
    why = obstacle(tmp_path / "base", reward_folder(tmp_path / "other", tmp_path / "reward"))
    assert "it was trained on another base" in why
    assert "differs from the policy's by up to" in why


def test_a_base_that_differs_in_one_linear_layer_alone_is_seen(tmp_path):
    """As a base into which another adapter was merged: embeddings and norms are the same."""
    model = kit.build("llama")
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-3
    model.save_pretrained(tmp_path / "other")
    why = obstacle(tmp_path / "base", reward_folder(tmp_path / "other", tmp_path / "reward"))
    assert "layers.1.mlp.down_proj.weight differs from the policy's plus the adapter by up to 0.001" in why


def test_an_adapter_that_is_not_the_one_that_was_merged_is_seen(tmp_path):
    kit.build("llama").save_pretrained(tmp_path / "base")
    folder = reward_folder(tmp_path / "base", tmp_path / "reward")
    reward_folder(tmp_path / "base", tmp_path / "second", lora_alpha=8.0)
    shutil.rmtree(folder / "adapter")
    shutil.copytree(tmp_path / "second" / "adapter", folder / "adapter")
    assert "plus the adapter" in obstacle(tmp_path / "base", folder)


def test_what_shows_before_a_weight_is_read(tmp_path):
    model = kit.build("llama")
    model.save_pretrained(tmp_path / "base")
    base = model.config
    good = reward_folder(tmp_path / "base", tmp_path / "reward")
    assert folder_obstacle(str(good), base) is None
    assert "no folder here" in folder_obstacle("someone/reward", base)

    def changed(name: str) -> Path:
        shutil.copytree(good, tmp_path / name)
        return tmp_path / name

    shutil.rmtree(changed("whole") / "adapter")
    assert "no adapter/ folder" in folder_obstacle(str(tmp_path / "whole"), base)
    (changed("pickled") / "adapter" / "adapter_model.safetensors").unlink()
    assert "no adapter_model.safetensors" in folder_obstacle(str(tmp_path / "pickled"), base)
    (changed("headless") / "tutelage_head.json").unlink()
    assert "no tutelage_head.json" in folder_obstacle(str(tmp_path / "headless"), base)
    about = json.loads((changed("dora") / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "dora" / "adapter" / "adapter_config.json").write_text(json.dumps({**about, "use_dora": True}))
    assert "more than W + B A" in folder_obstacle(str(tmp_path / "dora"), base)
    kit.build("bert").save_pretrained(tmp_path / "bert")
    encoder = reward_folder(tmp_path / "bert", tmp_path / "encoder")
    assert folder_obstacle(str(encoder), base) == "it is a bert, the policy a llama"
    kit.build("llama", vocab_size=91).save_pretrained(tmp_path / "wider")
    wider = reward_folder(tmp_path / "wider", tmp_path / "wide")
    assert folder_obstacle(str(wider), base) == "its vocab_size is 91, the policy's 90"
    kit.build("llama", num_hidden_layers=3).save_pretrained(tmp_path / "deeper")
    deeper = reward_folder(tmp_path / "deeper", tmp_path / "deep")
    assert folder_obstacle(str(deeper), base) == "it has 3 blocks, the policy 2"


def test_an_adapter_of_other_matrices_is_no_adapter_of_this_base(tmp_path):
    kit.build("llama").save_pretrained(tmp_path / "base")
    kit.build("llama", intermediate_size=64).save_pretrained(tmp_path / "narrower")
    why = obstacle(tmp_path / "base", reward_folder(tmp_path / "narrower", tmp_path / "narrow"))
    assert "does not fit the policy's matrices: size mismatch" in why


def test_a_critic_folder_is_no_reward_model(tmp_path):
    kit.build("llama").save_pretrained(tmp_path / "base")
    load_scalar_model(settings(tmp_path / "base"), "value", tokenizer=kit.WordTokenizer()).save_pretrained(
        tmp_path / "critic"
    )
    assert obstacle(tmp_path / "base", tmp_path / "critic") == "it is a value model"


def test_without_an_adapter_there_is_nothing_to_share(tmp_path):
    kit.build("llama").save_pretrained(tmp_path / "base")
    with pytest.raises(ModelError, match="lora_rank is 0"):
        load_shared_base(settings(tmp_path / "base", lora_rank=0), kit.WordTokenizer())
