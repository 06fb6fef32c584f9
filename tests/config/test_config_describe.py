"""Help: every key is there, with a meaning; a stage stays small."""

from __future__ import annotations

import io

import pytest
from pydantic import BaseModel
from rich.console import Console

from tutelage.config import SCHEMAS, GeneratingConfig, PPOConfig
from tutelage.config.describe import keys_table, keys_text, sections, walk
from tutelage.config.loading import Source

BOUNDS = {"sft": 60, "reward_model": 60, "dpo": 60, "kto": 60, "ppo": 86, "grpo": 83}
OTHERS = 80
OUTSIDE = {
    "cluster.": 30,
    "rollout.vllm.": 30,
    "policy_loss.": 30,
    "reward.": 20,
    "environment.": 10,
    "evaluation.": 15,
}
"""Sections of a machine, or with a schema of their own in all stages; their keys are counted apart."""


def leaves(value: object) -> int:
    """Settings in an instance, counted without our own walk: what is not a section, and entries of lists."""
    if isinstance(value, list | dict):
        entries = value.values() if isinstance(value, dict) else value
        return 1 + sum(leaves(entry) for entry in entries if isinstance(entry, BaseModel))
    if not isinstance(value, BaseModel):
        return 1
    return sum(leaves(item) for item in vars(value).values())


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_stage_stays_within_its_number_of_keys(name: str) -> None:
    more = {"reward": {"rules": [{"function": "a:b"}]}} if issubclass(SCHEMAS[name], GeneratingConfig) else {}
    if more:
        more["evaluation"] = {"rules": [{"name": "exact", "function": "a:b"}]}
    more |= {"teacher": {"path": "t"}} if name == "distill" else {}
    config = SCHEMAS[name](model={"path": "m"}, data={"train": "t"}, cluster={"layout": {"actor": {}}}, **more)
    keys = list(walk(SCHEMAS[name]))
    assert len(keys) == leaves(config)
    apart = {section: sum(key.name.startswith(section) for key in keys) for section in OUTSIDE}
    assert len(keys) - sum(apart.values()) <= BOUNDS.get(name, OTHERS)
    assert {section: count for section, count in apart.items() if count > OUTSIDE[section]} == {}


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_key_and_section_has_a_meaning(name: str) -> None:
    assert [key.name for key in walk(SCHEMAS[name]) if len(key.meaning) < 5] == []
    assert [section for section, meaning in sections(SCHEMAS[name]).items() if not meaning] == []


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_help_text_holds_every_key_with_meaning_default_and_condition(name: str) -> None:
    text = keys_text(SCHEMAS[name])
    for key in walk(SCHEMAS[name]):
        (line,) = (row for row in text.splitlines() if row.startswith(f"  {key.name} "))
        assert key.meaning in line
        assert key.default_text in line
        assert key.condition is None or key.condition.text in line


def test_a_key_is_described_as_its_schema_says() -> None:
    keys = {key.name: key for key in walk(PPOConfig)}
    assert keys["kl.target"].kind_text == "number > 0; only if kl.controller is adaptive"
    assert keys["ppo.gamma"].kind_text == "number > 0, <= 1"
    assert keys["ppo.clip_value"].kind_text == "number or null > 0"
    assert keys["model.path"].default_text == "required"
    assert keys["rollout.stop"].default_text == "[]"
    assert keys["reward.rules"].type == "list of {function, settings, seconds, concurrency, weight}"
    assert keys["reward.rules[].weight"].default == 1.0


def test_values_and_marks_stand_beside_the_defaults() -> None:
    config = PPOConfig(
        model={"path": "m"}, data={"train": "t"}, kl={"coef": 0.2}, reward={"rules": [{"function": "a:b"}]}
    )
    sources = {"kl.coef": Source("mine.yaml", 4)}
    lines = {line.split()[1]: line for line in keys_text(PPOConfig, config, sources).splitlines() if " = " in line}
    assert lines["kl.coef"].startswith("* kl.coef = 0.2  (mine.yaml:4; default 0.05; number >= 0)")
    assert [line for line in keys_text(PPOConfig, config, sources).splitlines() if line.startswith("*")] == [
        lines["kl.coef"]
    ]
    assert "  ppo.gamma = 1.0  (default; " in keys_text(PPOConfig, config, sources)
    assert 'reward.rules = [{"function": "a:b", "settings": {}' in keys_text(PPOConfig, config, sources)
    out = io.StringIO()
    Console(file=out, width=160).print(keys_table(PPOConfig, config, sources))
    (row,) = (line for line in out.getvalue().splitlines() if "kl.coef" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")][:3] == ["* kl.coef", "0.2", "0.05"]
