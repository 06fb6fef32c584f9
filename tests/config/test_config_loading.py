"""Recipes and overrides: what is read, and what every kind of mistake says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tutelage.config import (
    PPOConfig,
    RewardModelConfig,
    SFTConfig,
    dump_config,
    load_checked,
    load_recipe,
    load_resolved,
    shipped_recipes,
)
from tutelage.errors import ConfigError

GOOD = """\
algorithm: ppo
model:
  path: models/policy
data:
  train: prompts.jsonl
  columns: {question: prompt}
kl:
  coef: 1e-3
reward:
  rules:
    - {function: "rules:length", weight: 2}
"""

Write = Callable[..., str]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write recipes/mine.yaml under the working folder and return its relative path."""
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()

    def write(text: str = GOOD, more: str = "") -> str:
        Path("recipes/mine.yaml").write_text(text + more)
        return "recipes/mine.yaml"

    return write


def message(recipe_path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_recipe(recipe_path, overrides)
    return str(error.value)


def test_values_defaults_and_sources(recipe: Write) -> None:
    loaded = load_recipe(recipe(), ["ppo.lam=0.9", "seed=1e3", "rollout.stop=[END, '\\n']", "data.columns.x=y"])
    config = loaded.config
    assert isinstance(config, PPOConfig)
    assert (config.kl.coef, config.ppo.lam, config.seed) == (0.001, 0.9, 1000)
    assert config.rollout.stop == ["END", "\\n"]
    assert config.ppo.gamma == 1.0
    assert config.reward.rules[0].weight == 2.0
    assert str(loaded.sources["kl.coef"]) == "recipes/mine.yaml:8"
    assert str(loaded.sources["ppo.lam"]) == "override ppo.lam=0.9"
    assert "ppo.gamma" not in loaded.sources
    assert loaded.raw["kl"] == {"coef": 0.001}
    assert loaded.recipe_path == Path("recipes/mine.yaml")


def test_an_override_wins_over_the_recipe(recipe: Write) -> None:
    loaded = load_recipe(recipe(), ["kl.coef=0.5", "kl={budget: 3}"])
    assert isinstance(loaded.config, PPOConfig)
    assert (loaded.config.kl.coef, loaded.config.kl.budget) == (0.5, 3.0)
    assert str(loaded.sources["kl.coef"]) == "override kl.coef=0.5"
    assert str(loaded.sources["kl.budget"]) == "override kl={budget: 3}"


def test_one_key_of_a_free_mapping_can_be_overridden(recipe: Write) -> None:
    loaded = load_recipe(recipe(), ["data.columns.answer=completion"])
    assert loaded.config.data.columns == {"question": "prompt", "answer": "completion"}


@pytest.mark.parametrize(("text", "name"), [("name=12", "12"), ("name=true", "true"), ("name=1e-5", "1e-5")])
def test_a_text_setting_takes_what_was_typed(recipe: Write, text: str, name: str) -> None:
    assert load_recipe(recipe(), [text]).config.name == name


def test_an_unknown_key_names_value_line_and_closest_key(recipe: Write) -> None:
    assert message(recipe(more="ppo:\n  clip_lo: 0.1\n")) == (
        "ppo.clip_lo is not a setting (recipes/mine.yaml:13, value 0.1). Did you mean ppo.clip_low?"
    )


@pytest.mark.parametrize(
    ("override", "closest"),
    [
        ("kl.ceof=1", "kl.coef"),
        ("lr=1", "optim.lr"),
        ("ppo.temperature=1", "rollout.temperature"),
        ("sample_per_prompt=2", "rollout.samples_per_prompt"),
        ("rolout.temperature=1", "rollout.temperature"),
        ("algoritm=ppo", "algorithm"),
        ("ppo.gae_lambda=1", "ppo.lam"),
        ("learning_rate=1", "optim.lr"),
        ("target_kl=1", "kl.target"),
        ("evaluations={every: 1}", "evaluation"),
    ],
)
def test_the_closest_key_is_found_anywhere(recipe: Write, override: str, closest: str) -> None:
    said = message(recipe(), override)
    assert f"(override {override}, value " in said
    assert said.endswith(f"Did you mean {closest}?")


def test_nothing_is_suggested_for_a_key_like_no_other(recipe: Write) -> None:
    assert message(recipe(), "zzz.qqq=1") == "zzz.qqq is not a setting (override zzz.qqq=1, value 1)."


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("ppo.epochs=four", 'ppo.epochs must be a valid integer (override ppo.epochs=four, value "four")'),
        ("ppo.epochs=1.5", "ppo.epochs must be a valid integer (override ppo.epochs=1.5, value 1.5)"),
        ("ppo.epochs=true", "ppo.epochs must be a valid integer (override ppo.epochs=true, value true)"),
        ("ppo.epochs=0", "ppo.epochs must be greater than or equal to 1 (override ppo.epochs=0, value 0)"),
        ("ppo.gamma=1.5", "ppo.gamma must be less than or equal to 1 (override ppo.gamma=1.5, value 1.5)"),
        ("ppo.gamma=.nan", "ppo.gamma must be a finite number"),
        ("ppo.whiten_rewards=1", "ppo.whiten_rewards must be a valid boolean (override ppo.whiten_rewards=1, value 1)"),
        ("model.dtype=float23", 'value "float23"). Did you mean float32?'),
        ("tracking=[tensorbord]", "tracking[0] must be 'tensorboard' or 'wandb' (override tracking=[tensorbord]"),
        ("kl=3", "kl is a section with the keys coef, placement"),
        ("kl.coef.deeper=3", "kl.coef.deeper is not a setting"),
        ("rollout.top_k=5", "rollouts sample from the whole distribution"),
        ("rollout.stop=[", "override rollout.stop=[: the value cannot be read"),
        ("nonsense", "override nonsense is not of the form key=value"),
        ("=3", "override =3 is not of the form key=value"),
        ("reward.rules=[{function: a:b, wieght: 1}]", "Did you mean reward.rules[0].weight?"),
        ("reward.rules=[{weight: 1}]", "reward.rules[0].function is required and is not set"),
    ],
)
def test_what_a_wrong_value_says(recipe: Write, override: str, said: str) -> None:
    assert said in message(recipe(), override)


def test_a_number_for_a_text_setting_in_a_recipe_asks_for_quotes(recipe: Write) -> None:
    said = message(recipe(more="name: 12\n"))
    assert said == 'name must be a valid string (recipes/mine.yaml:12, value 12). Write it in quotes: "12"'


def test_duplicates_missing_and_unknown_are_reported_together(recipe: Write) -> None:
    text = "algorithm: sft\ndata:\n  limit: 1\n  limit: 2\nsft: {batch: 1}\noptim: {lr: -1}\n"
    said = message(recipe(text), "optim.eps=a", "seed=1", "seed=2")
    assert said.startswith("7 problems in recipes/mine.yaml:\n")
    for part in (
        "data.limit is set twice (recipes/mine.yaml:3 and recipes/mine.yaml:4)",
        "seed is set twice (override seed=1 and override seed=2)",
        "sft.batch is not a setting (recipes/mine.yaml:5, value 1). Did you mean sft.batch_size?",
        "model.path is required and is not set (recipes/mine.yaml)",
        "data.train is required and is not set (recipes/mine.yaml)",
        "optim.lr must be greater than 0 (recipes/mine.yaml:6, value -1)",
        "optim.eps must be a valid number (override optim.eps=a",
    ):
        assert said.count(f"\n  - {part}") == 1


def test_dotted_keys_in_a_recipe_are_refused_with_the_nested_form(recipe: Write) -> None:
    said = message(recipe(more="kl.budget: 3\n"))
    assert said.startswith("kl.budget must be written in a section (recipes/mine.yaml:12, value 3)")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "recipes/mine.yaml is empty"),
        ("[1, 2]", "recipes/mine.yaml holds [1, 2]"),
        ("a: [1\nb: 2", "recipes/mine.yaml:2 is not YAML that can be read"),
        ("name: x", "algorithm is required and recipes/mine.yaml does not set it; known: sft, reward_model, dpo, kto"),
        ("algorithm: pp", 'algorithm "pp" is not known (recipes/mine.yaml). Did you mean ppo?'),
        ("a: !!python/name:os.system ''", "is not YAML that can be read"),
    ],
)
def test_what_a_document_that_is_no_recipe_says(recipe: Write, text: str, said: str) -> None:
    assert said in message(recipe(text))


def test_a_missing_recipe_names_the_closest_shipped_one(recipe: Write) -> None:
    recipe()
    assert "there is no recipe hh_ppp. Did you mean hh_ppo?" in message("hh_ppp")
    assert "recipes is a folder, not a recipe file." in message("recipes")


def test_every_shipped_recipe_loads_and_makes_sense() -> None:
    assert shipped_recipes()
    for name in shipped_recipes():
        loaded, _ = load_checked(name)
        assert str(loaded.sources["algorithm"]).startswith(f"recipes/{name}.yaml:")


@pytest.mark.parametrize(
    "config",
    [
        SFTConfig(model={"path": "1e-5"}, data={"train": "yes"}, name="null"),
        RewardModelConfig(model={"path": "m"}, data={"train": "t", "columns": {"a": "b"}}, max_steps=3),
        PPOConfig(
            model={"path": "m", "lora_rank": 4, "lora_alpha": 3.0},
            data={"train": "t", "eval": "e"},
            kl={"coef": 1e-7, "controller": "adaptive", "target": 2.5},
            reward={"model": "r", "rules": [{"function": "a:b", "weight": -0.5}]},
            rollout={"stop": ["\n", "Human:"]},
            optim={"lr": 3e-5},
        ),
    ],
    ids=["sft", "reward_model", "ppo"],
)
def test_a_dumped_config_loads_equal_and_passes_the_effect_check(
    recipe: Write, config: SFTConfig | RewardModelConfig | PPOConfig
) -> None:
    loaded, _ = load_checked(recipe(dump_config(config)), ["reward.weight=1.0"] if config.algorithm == "ppo" else [])
    assert loaded.config == config


def test_the_config_of_a_run_folder_is_read_back(recipe: Write) -> None:
    config = SFTConfig(model={"path": "m"}, data={"train": "t"}, seed=3)
    assert load_resolved(Path(recipe(dump_config(config)))) == config
    with pytest.raises(ConfigError, match=r"runs/x/config\.yaml does not exist"):
        load_resolved(Path("runs/x/config.yaml"))


def test_a_dump_keeps_a_value_without_effect_that_is_not_the_default() -> None:
    config = SFTConfig(model={"path": "m", "lora_alpha": 3.0}, data={"train": "t"})
    assert "lora_alpha: 3.0" in dump_config(config)
    assert "lora_alpha" not in dump_config(SFTConfig(model={"path": "m"}, data={"train": "t"}))
