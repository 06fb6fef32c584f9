"""Runs whose roles stand on one base: numbers of separate copies, exact resume, what `check` refuses."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tutelage.build import RunResult, check_recipe, resume_run
from tutelage.build.data import batch_maker, stage_data
from tutelage.build.stages import build_stage
from tutelage.config import load_checked
from tutelage.errors import ConfigError, ModelError
from tutelage.layout import Place
from tutelage.reports.metrics_log import read_events, read_metrics

VOLATILE = ("time", "memory/")
LORA = ("model.lora_rank=4", "model.shared_base=true")
RULES = ("reward.model=null", "reward.rules=[{function: length_range(low=2)}]")


@pytest.fixture(scope="session")
def adapter_reward(run, files, sft_run) -> RunResult:
    """A reward model that is an adapter on the policy of `ppo_overrides`."""
    return run(
        "reward_model",
        f"model.path={sft_run.best_model}",
        f"data.train={files['preferences']}",
        "model.lora_rank=3",
        "reward_model.batch_size=8",
        "optim.lr=3e-3",
        "max_steps=6",
    )


@pytest.fixture(scope="session")
def overrides(ppo_overrides, adapter_reward) -> list[str]:
    return [*ppo_overrides, f"reward.model={adapter_reward.best_model}", "model.lora_rank=4"]


def lasting(folder: Path) -> list[dict[str, Any]]:
    """Metrics by step without what depends on the clock or the machine."""
    rows = read_metrics(folder)
    return [{k: v for k, v in row.items() if not k.startswith(VOLATILE)} for row in rows]


def notes(folder: Path) -> str:
    return "\n".join(event["message"] for event in read_events(folder))


def states(folder: Path, step: int) -> dict[str, dict[str, torch.Tensor]]:
    found = folder / f"checkpoints/step_{step:06d}"
    return {role: load_file(found / role / "rank_00000.safetensors") for role in ("actor", "critic")}


@pytest.fixture
def refused(tmp_path) -> Callable[..., str]:
    """What `check` says of a recipe that it refuses."""

    def say(algorithm: str, *given: str) -> str:
        (tmp_path / "recipe.yaml").write_text(f"algorithm: {algorithm}\n")
        last = {text.split("=", 1)[0]: text for text in given}
        with pytest.raises((ConfigError, ModelError)) as error:
            check_recipe(load_checked(str(tmp_path / "recipe.yaml"), list(last.values()))[0])
        return str(error.value)

    return say


# ---- the same numbers


def test_with_rules_every_metric_and_weight_is_that_of_separate_copies(run, overrides):
    """The critic starts from the policy, so all that is computed is the same to the bit."""
    both = [run("ppo", *overrides, *RULES, "max_steps=3", *extra) for extra in ((), LORA)]
    apart, shared = both
    assert lasting(shared.folder) == lasting(apart.folder)
    assert shared.summary["after"] == apart.summary["after"]
    for role, weights in states(shared.folder, 3).items():
        theirs = states(apart.folder, 3)[role]
        assert weights.keys() == theirs.keys()
        assert all(torch.equal(weights[name], theirs[name]) for name in weights)
    assert "one frozen base of" in notes(shared.folder)
    assert "for actor, reference, critic" in notes(shared.folder)


def test_with_a_reward_adapter_the_numbers_are_those_of_its_merged_model(run, overrides):
    """base + adapter in place of merged weights: the same up to rounding."""
    init = "critic.init=policy"
    apart, shared = (run("ppo", *overrides, init, "max_steps=3", *extra) for extra in ((), LORA))
    mine, theirs = lasting(shared.folder), lasting(apart.folder)
    assert [row.keys() for row in mine] == [row.keys() for row in theirs]
    for key in ("policy/loss", "value/loss", "reward/score_mean", "kl/sequence", "policy/grad_norm"):
        pairs = [(a[key], b[key]) for a, b in zip(mine, theirs, strict=True) if key in a]
        assert pairs, key
        assert all(a == pytest.approx(b, abs=1e-4) for a, b in pairs), key
    for role, weights in states(shared.folder, 3).items():
        other = states(apart.folder, 3)[role]
        for name in (n for n in weights if n.startswith("weights/")):
            torch.testing.assert_close(weights[name], other[name], atol=1e-5, rtol=0)
    said = notes(shared.folder)
    assert "a model of its own" not in said
    assert "for actor, reference, critic, reward model" in said


@pytest.mark.parametrize("extra", [(), ("model.gradient_checkpointing=true",)], ids=["stored", "recomputed"])
def test_a_resumed_run_repeats_the_rest_exactly(run, overrides, extra):
    """The critic is a copy of the reward model's adapter and head."""
    result = run("ppo", *overrides, *LORA, "checkpoint.every=2", *extra)
    assert "critic starts from the reward model's adapter and head, copied" in notes(result.folder)
    metrics, weights = lasting(result.folder), states(result.folder, 4)
    shutil.rmtree(result.folder / "checkpoints" / "step_000004")
    shutil.rmtree(result.folder / "checkpoints" / "best")
    (result.folder / "summary.json").unlink()
    again = resume_run(result.folder, "plain")
    assert again.summary["after"] == result.summary["after"]
    assert lasting(result.folder) == metrics
    for role, before in weights.items():
        after = states(result.folder, 4)[role]
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


# ---- the base stays


def test_the_bytes_of_the_base_never_change(overrides, tmp_path):
    """Over generation, scores, values, updates of both roles, export and state."""
    from tutelage.algorithms import ppo
    from tutelage.transport.local import LocalTransport
    from tutelage.transport.roleset import RoleSet

    (tmp_path / "recipe.yaml").write_text("algorithm: ppo\n")
    last = {text.split("=", 1)[0]: text for text in [*overrides, *LORA]}
    cfg: Any = load_checked(str(tmp_path / "recipe.yaml"), list(last.values()))[0].config
    data = stage_data(cfg)
    stage = build_stage(cfg, data)
    built = stage.builder(stage.names, Place())
    transport = LocalTransport()
    roles = RoleSet({name: transport.handle(name, role) for name, role in built.roles.items()})
    actor, critic = built.roles["actor"].engine, built.roles["critic"].engine
    judge = built.roles["reward"].mix.sources[0].scorer.__self__
    base = {n: p for n, p in actor.model.model.named_parameters() if ".lora_" not in n}
    for other in (critic.model.backbone, judge.model.backbone):
        assert all(p is base[f"model.{n}"] for n, p in other.named_parameters() if ".lora_" not in n)
    frozen = {n: p.detach().clone() for n, p in judge.model.named_parameters()}

    def hashes() -> dict[str, str]:
        return {n: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for n, p in base.items()}

    before, state = hashes(), ppo.initial_state(cfg)
    for step in range(3):
        prompts = batch_maker(data.prepared.train, cfg)(torch.arange(8), step)
        collected = ppo.collect(transport.put(prompts), roles, cfg).gather()
        ready, state, _ = ppo.advantages(collected, state, cfg)
        for update in ppo.learn(ready, roles, cfg, state):
            assert {role: s.gather()["grad_norm"].total > 0 for role, s in update.items()} == {
                "actor": True,
                "critic": True,
            }
        for name, role in built.roles.items():
            if name in ("actor", "critic"):
                role.save_state(tmp_path / f"{step}-{name}")
                role.save_pretrained(tmp_path / f"{step}-{name}-model")
                role.load_state(tmp_path / f"{step}-{name}")
    assert hashes() == before
    assert all(torch.equal(p, frozen[n]) for n, p in judge.model.named_parameters())
    moved = {n: p for n, p in actor.model.model.named_parameters() if "lora_B" in n}
    assert all(bool(p.any()) for p in moved.values())


# ---- other stages


def test_grpo_scores_with_an_adapter_on_the_policys_base(run, overrides):
    given = [text for text in overrides if not text.startswith("ppo.")]
    result = run("grpo", *given, *LORA, "rollout.samples_per_prompt=2", "max_steps=2")
    assert "for actor, reference, reward model" in notes(result.folder)
    assert result.summary["steps"] == 2


def test_of_an_ensemble_those_that_are_adapters_stand_on_the_base(run, overrides, adapter_reward, reward_run):
    given = [*overrides, "reward.model=null", f"reward.ensemble=[{adapter_reward.best_model}, {reward_run.best_model}]"]
    result = run("ppo", *given, *LORA, "max_steps=1")
    said = notes(result.folder)
    assert f"reward model {reward_run.best_model} is a model of its own: it has no adapter/ folder" in said
    assert f"for actor, reference, critic, reward model {adapter_reward.best_model}" in said
    assert "critic starts from the base with a new adapter and a new head (there is no reward model)" in said


def test_a_reward_model_of_another_kind_stays_a_model_of_its_own(run, overrides, reward_run):
    """Where the recipe does not ask for the base, it is named with the reason; where it does, the run is refused."""
    result = run("ppo", *overrides, *LORA, f"reward.model={reward_run.best_model}", "max_steps=1")
    said = notes(result.folder)
    assert "is a model of its own: it has no adapter/ folder" in said
    assert "critic starts from the base with a new adapter and a new head (the reward model is not an adapter" in said


def test_an_adapter_on_another_base_is_refused_where_the_recipe_asks_for_the_base(
    run, overrides, files, tiny_llama_folder
):
    """The policy before its fine-tuning: another base of the same shape."""
    other = run(
        "reward_model",
        f"model.path={tiny_llama_folder}",
        f"data.train={files['preferences']}",
        "model.lora_rank=3",
        "max_steps=1",
    )
    given = [*overrides, *LORA, f"reward.model={other.best_model}", "max_steps=1"]
    with pytest.raises(ModelError, match=r"trained on another base: .* differs from the policy's"):
        run("ppo", *given, "reward.shared_base=true")
    result = run("ppo", *given)
    assert "is a model of its own: it was trained on another base" in notes(result.folder)


# ---- what `check` says


def test_a_reward_model_that_cannot_be_an_adapter_is_refused_before_loading(refused, overrides, reward_run):
    said = refused("ppo", *overrides, *LORA, "reward.shared_base=true", f"reward.model={reward_run.best_model}")
    assert "cannot be an adapter on the policy's base: it has no adapter/ folder" in said
    assert "train the reward model on model.path with model.lora_rank above 0" in said


def test_another_tokenizer_is_refused(refused, overrides, adapter_reward, tiny_gpt2_folder, tmp_path):
    folder = shutil.copytree(adapter_reward.best_model, tmp_path / "reward")
    for file in (*folder.glob("tokenizer*"), *folder.glob("*vocab*"), *folder.glob("merges*")):
        file.unlink()
    for file in tiny_gpt2_folder.glob("*token*"):
        shutil.copy(file, folder / file.name)
    said = refused("ppo", *overrides, *LORA, "reward.shared_base=true", f"reward.model={folder}")
    assert "it has another tokenizer than the policy" in said


def test_keys_without_effect_are_refused(refused, overrides):
    assert "model.shared_base has no effect in this run" in refused(
        "ppo", *overrides, "model.lora_rank=0", "model.shared_base=true"
    )
    assert "reward.shared_base has no effect in this run" in refused("ppo", *overrides, "reward.shared_base=false")
    grpo = [text for text in overrides if not text.startswith("ppo.")]
    assert "model.shared_base has no effect in this run" in refused("grpo", *grpo, *LORA, *RULES)


def test_a_critic_from_a_folder_cannot_stand_on_the_base(refused, overrides, reward_run):
    said = refused("ppo", *overrides, *LORA, f"critic.init={reward_run.best_model}")
    assert "a critic on the shared base starts from it" in said


def test_a_critic_cannot_start_from_a_reward_model_of_another_base(run, overrides, reward_run):
    with pytest.raises(ModelError, match="the reward model is not an adapter on the policy's base"):
        run("ppo", *overrides, *LORA, f"reward.model={reward_run.best_model}", "critic.init=reward")


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        (("cluster.pools={a: {}, b: {}}", "cluster.place={critic: b}"), "critic is in pool b, the actor in a"),
        (("cluster.pools={a: {}, b: {}}", "cluster.place={reward: b}"), "reward is in pool b, the actor in a"),
        (
            ("cluster.pools={a: {devices: 2}}", "cluster.layout={default: {shard: 2}}"),
            "the layout of actor is shard 2: FSDP and the other cuts own the weights",
        ),
        (
            ("cluster.pools={a: {devices: 2}}", "cluster.layout={actor: {tensor: 2}, critic: {}}"),
            "the layout of actor is tensor 2",
        ),
        (
            ("cluster.pools={a: {devices: 2}}", "cluster.layout={critic: {context: 2}}"),
            "the layout of critic is context 2, the actor's replicate 2: ranks that share weights are arranged alike",
        ),
    ],
)
def test_roles_that_share_weights_share_processes_and_cut_nothing(refused, overrides, cluster, said):
    pytest.importorskip("ray")
    assert said in refused("ppo", *overrides, *LORA, "cluster.transport=ray", *cluster)


def test_a_reward_model_of_its_own_may_be_elsewhere(overrides, tmp_path):
    pytest.importorskip("ray")
    from tutelage.build.shared_base import require_shared_base

    (tmp_path / "recipe.yaml").write_text("algorithm: ppo\n")
    place = ("cluster.transport=ray", "cluster.pools={a: {}, b: {}}", "cluster.place={reward: b}")
    given = {text.split("=", 1)[0]: text for text in [*overrides, *LORA, *place, "reward.shared_base=false"]}
    cfg = load_checked(str(tmp_path / "recipe.yaml"), list(given.values()))[0].config
    require_shared_base(cfg, ("actor", "critic", "reference", "reward"))
