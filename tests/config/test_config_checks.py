"""Keys without effect, and combinations that cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tutelage.config import GRPOConfig, PPOConfig, SFTConfig, check_effect, check_sense, load_checked, load_recipe
from tutelage.errors import ConfigError

RECIPE = """\
algorithm: ppo
model: {path: m}
data: {train: t}
reward: {model: r}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(RECIPE)
    return "mine.yaml"


def ppo(**sections: Any) -> PPOConfig:
    return PPOConfig(**{"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"model": "r"}, **sections})


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["kl.target=6.0"], "kl.target"),
        (["kl.horizon=500"], "kl.horizon"),
        (["kl.on_budget=stop"], "kl.on_budget"),
        (["model.lora_alpha=32.0"], "model.lora_alpha"),
        (["model.activation_bytes=1000000"], "model.activation_bytes"),
        (["data.eval=e", "data.eval_fraction=0.2"], "data.eval_fraction"),
        (["reward={model: null, weight: 2.0, rules: [{function: a:b}]}"], "reward.weight"),
    ],
)
def test_a_key_without_effect_is_refused_even_at_its_default(recipe: str, overrides: list[str], key: str) -> None:
    loaded = load_recipe(recipe, overrides)
    with pytest.raises(ConfigError, match=f"^{key} has no effect in this run .override .*: it needs that "):
        check_effect(loaded)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["kl.controller=adaptive", "kl.target=3", "kl.horizon=500"],
        ["kl.budget=4", "kl.on_budget=stop"],
        ["model.lora_rank=4", "model.lora_alpha=3"],
        ["model.gradient_checkpointing=true", "model.activation_bytes=1000000"],
        ["data.eval_fraction=0.2"],
        ["reward.weight=2"],
    ],
)
def test_a_key_whose_condition_holds_is_allowed(recipe: str, overrides: list[str]) -> None:
    assert load_checked(recipe, overrides)[1] == []


def test_a_budget_of_activations_needs_blocks_that_are_trained(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("algorithm: reward_model\nmodel: {path: m}\ndata: {train: t}\n", encoding="utf8")
    keys = ["model.gradient_checkpointing=true", "model.activation_bytes=1000000"]
    check_effect(load_recipe(str(path), [*keys, "reward_model.train_layers=1"]))
    with pytest.raises(ConfigError, match=r"model.activation_bytes has no effect"):
        check_effect(load_recipe(str(path), [*keys, "reward_model.train_layers=0"]))


def test_null_takes_back_a_key_that_a_recipe_sets(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    text = "algorithm: ppo\nmodel: {path: m}\ndata: {train: t}\nreward: {model: r}\ncritic: {lr: 1.0e-4}\n"
    path.write_text(text, encoding="utf8")
    with pytest.raises(ConfigError, match=r"(?s)critic.lr has no effect.*KEY=null"):
        check_effect(load_recipe(str(path), ["critic.trunk=actor"]))
    check_effect(load_recipe(str(path), ["critic.trunk=actor", "critic.lr=null"]))


@pytest.mark.parametrize("axis", ["context", "sequence", "tensor", "pipeline"])
def test_a_budget_of_activations_is_refused_where_ranks_compute_one_layer_together(recipe: str, axis: str) -> None:
    keys = ["model.gradient_checkpointing=true", "model.activation_bytes=1000000", "cluster.transport=ray"]
    check_effect(load_recipe(recipe, [*keys, "cluster.layout.actor.shard=2"]))
    check_effect(load_recipe(recipe, [*keys, f"cluster.layout.reference.{axis}=2"]))
    with pytest.raises(ConfigError, match=r"model.activation_bytes has no effect"):
        check_effect(load_recipe(recipe, [*keys, f"cluster.layout.actor.{axis}=2"]))


def test_a_stream_is_refused_where_nothing_could_overlap(recipe: str) -> None:
    check_effect(load_recipe(recipe, ["schedule.stream=true"]))
    for other in (
        ["schedule.kind=one_step_off"],
        ["cluster.transport=ray"],
        ["rollout.engine=vllm"],
        ["environment.functions={sums: calculator}"],
        ["implementation=own.py"],
    ):
        with pytest.raises(ConfigError, match=r"schedule.stream has no effect"):
            check_effect(load_recipe(recipe, ["schedule.stream=true", *other]))


@pytest.mark.parametrize("algorithm", ["xpo", "nash_md"])
def test_a_stream_is_refused_where_answers_are_joined_before_they_are_scored(tmp_path: Path, algorithm: str) -> None:
    path = tmp_path / "own.yaml"
    text = f"algorithm: {algorithm}\nmodel: {{path: m}}\ndata: {{train: t}}\nreward: {{model: r}}\n"
    path.write_text(text, encoding="utf8")
    with pytest.raises(ConfigError, match=r"schedule.stream has no effect"):
        check_effect(load_recipe(str(path), ["schedule.stream=true"]))


def test_all_keys_without_effect_are_named_together(recipe: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_effect(load_recipe(recipe, ["kl.target=6.0", "model.lora_alpha=1"]))
    assert "2 problems" in str(error.value)
    assert "kl.target has no effect" in str(error.value)
    assert "model.lora_alpha has no effect" in str(error.value)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"ppo": {"vf_coef": 0}}, "ppo.vf_coef is 0"),
        ({"kl": {"placement": "loss"}}, "the gradient of k1 is zero in expectation"),
        ({"kl": {"estimator": "k3_unbiased"}}, "kl.estimator is k3_unbiased"),
        ({"kl": {"controller": "adaptive", "coef": 0}}, "it would stay 0"),
        ({"reward": {}}, "reward.model, reward.ensemble, reward.rules and environment.functions are all empty"),
        ({"reward": {"model": "r", "weight": 0}}, "every weight under reward is 0"),
        ({"reward": {"rules": [{"function": "a:b"}]}, "critic": {"init": "reward"}}, "critic.init is reward"),
        ({"rollout": {"prompts_per_step": 3}}, "is 3 responses, fewer than ppo.minibatches 4"),
    ],
)
def test_combinations_that_cannot_work(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_sense(ppo(**sections))
    assert said in str(error.value)


@pytest.mark.parametrize(
    "sections",
    [
        {"kl": {"placement": "loss", "estimator": "k2"}},
        {"kl": {"placement": "loss", "estimator": "k3_unbiased"}},
        {"reward": {"model": "r", "weight": 0, "rules": [{"function": "a:b", "weight": 1}]}},
        {"reward": {"rules": [{"function": "a:b"}]}, "critic": {"init": "auto"}},
        {"rollout": {"prompts_per_step": 2, "samples_per_prompt": 2}},
    ],
)
def test_neighbouring_combinations_that_do_work(sections: dict[str, Any]) -> None:
    assert check_sense(ppo(**sections)) == []


def test_problems_say_where_the_values_come_from(recipe: str) -> None:
    loaded = load_recipe(recipe, ["ppo.minibatches=100"])
    with pytest.raises(ConfigError, match=r"ppo\.minibatches 100 \(override ppo\.minibatches=100\)"):
        check_sense(loaded.config, loaded.sources)


def test_no_kl_and_no_held_out_data_warn() -> None:
    assert [w.split(":")[0] for w in check_sense(ppo(kl={"coef": 0}))] == ["kl.coef is 0"]
    config = SFTConfig(model={"path": "m"}, data={"train": "t", "eval_fraction": 0})
    assert len(check_sense(config)) == 1
    assert "nothing is held out" in check_sense(config)[0]


def grpo(**sections: Any) -> GRPOConfig:
    return GRPOConfig(**{"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"model": "r"}, **sections})


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rollout": {"samples_per_prompt": 1}}, "alone it would never be trained on"),
        ({"kl": {"coef": 0, "budget": 3}}, "without a reference no KL is measured"),
        ({"kl": {"estimator": "k1"}}, "the gradient of k1 is zero in expectation"),
        ({"reward": {}}, "reward.model, reward.ensemble, reward.rules and environment.functions are all empty"),
        ({"grpo": {"minibatches": 129}}, "is 128 responses, fewer than grpo.minibatches 129"),
        ({"schedule": {"kind": "asynchronous", "ahead": 3}}, "schedule.ahead is 3 and schedule.max_staleness is 2"),
    ],
)
def test_grpo_combinations_that_cannot_work(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_sense(grpo(**sections))
    assert said in str(error.value)


def test_grpo_has_defaults_of_its_paper_and_warns_without_kl() -> None:
    assert check_sense(grpo()) == []
    kl = grpo(kl={"coef": 0.1}).kl
    assert (kl.placement, kl.estimator) == ("loss", "k3"), "also where another key of the section is given"
    assert [w.split(":")[0] for w in check_sense(grpo(kl={"coef": 0}))] == ["kl.coef is 0"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["schedule.max_staleness=2"],
        ["schedule.kind=one_step_off", "schedule.partial_tokens=9"],
        ["off_policy.cap=3"],
        ["off_policy.old_logprobs=rollout", "off_policy.correction=token_masked"],
    ],
)
def test_schedule_keys_without_effect_are_refused(recipe: str, overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match="has no effect in this run"):
        load_checked(recipe, overrides)
