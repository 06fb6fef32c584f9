"""The `policy_loss` and `off_policy` sections: keys without effect, and what makes no sense together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tutelage.config import GRPOConfig, PPOConfig, check_effect, check_sense, load_recipe
from tutelage.config.policy_loss import KINDS
from tutelage.errors import ConfigError

BASE = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"rules": [{"function": "a:b"}]}}
SHORT = {"epochs": 1, "minibatches": 1}


def ppo(**sections: Any) -> PPOConfig:
    return PPOConfig(**{**BASE, **sections})


def grpo(**sections: Any) -> GRPOConfig:
    return GRPOConfig(**{**BASE, **sections})


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(
        "algorithm: grpo\nmodel: {path: m}\ndata: {train: t}\nreward: {rules: [{function: a:b}]}\n"
    )
    return "mine.yaml"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["policy_loss.gspo.clip_low=0.001"], "policy_loss.gspo.clip_low"),
        (["policy_loss.kind=gspo", "grpo.clip_low=0.1"], "grpo.clip_low"),
        (["policy_loss.kind=cispo", "grpo.clip_high=0.1"], "grpo.clip_high"),
        (["policy_loss.kind=sapo", "grpo.dual_clip=3"], "grpo.dual_clip"),
        (
            ["policy_loss.kind=reinforce", "policy_loss.sapo.temperature_positive=2"],
            "policy_loss.sapo.temperature_positive",
        ),
        (["policy_loss.kind=dppo_tv", "policy_loss.dppo_kl.low=0.1"], "policy_loss.dppo_kl.low"),
        (["policy_loss.kind=kl_cov", "policy_loss.clip_cov.fraction=0.1"], "policy_loss.clip_cov.fraction"),
        (["policy_loss.kind=mine:loss", "policy_loss.gmpo.clip_low=0.1"], "policy_loss.gmpo.clip_low"),
        (["policy_loss.entropy_target=0.4"], "policy_loss.entropy_target"),
        (["policy_loss.entropy_step=0.4"], "policy_loss.entropy_step"),
        (["policy_loss.entropy_coef_max=0.4"], "policy_loss.entropy_coef_max"),
        (["off_policy.floor=0.5"], "off_policy.floor"),
        (["off_policy.normalize=true"], "off_policy.normalize"),
        (["off_policy.old_logprobs=rollout", "off_policy.veto=0.1"], "off_policy.veto"),
    ],
)
def test_keys_of_another_loss_are_refused(recipe: str, overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key} has no effect in this run"):
        check_effect(load_recipe(recipe, overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        ["grpo.clip_low=0.1", "grpo.clip_high=0.3", "grpo.dual_clip=3"],
        ["policy_loss.kind=gspo", "policy_loss.gspo.clip_low=0.001", "policy_loss.gspo.form=sequence"],
        ["policy_loss.kind=clip_cov", "policy_loss.clip_cov.clip_low=0.2"],
        ["policy_loss.kind=kl_cov", "policy_loss.kl_cov.estimator=k3"],
        ["policy_loss.entropy_controller=adaptive", "policy_loss.entropy_target=0.4", "grpo.entropy_coef=0.1"],
        ["off_policy.correction=geometric_masked", "off_policy.cap=1.001", "off_policy.floor=0.999"],
        ["off_policy.veto=0.0001"],
        ["kl.estimator=k3_importance"],
    ],
)
def test_keys_of_the_loss_in_use_are_allowed(recipe: str, overrides: list[str]) -> None:
    loaded = load_recipe(recipe, overrides)
    check_effect(loaded)
    assert check_sense(loaded.config, loaded.sources) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_suits_grpo_as_the_papers_have_it(kind: str) -> None:
    assert check_sense(grpo(policy_loss={"kind": kind})) == []


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"policy_loss": {"kind": "gsppo"}}, "gsppo, which is no policy loss. Did you mean gspo?"),
        ({"policy_loss": {"kind": "clip_cov", "clip_cov": {"cov_low": 5.0}}}, "no token lies between them"),
        (
            {"policy_loss": {"entropy_controller": "adaptive", "entropy_coef_max": 0.1}, "ppo": {"entropy_coef": 0.2}},
            "above its bound",
        ),
        ({"kl": {"estimator": "k3_importance"}}, "a reward is not differentiated"),
    ],
)
def test_combinations_that_cannot_work(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_sense(ppo(**sections))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (grpo(policy_loss={"kind": "gspo"}, grpo={"aggregation": "token_mean"}), "long responses weigh more"),
        (grpo(policy_loss={"kind": "gmpo"}, grpo={"aggregation": "constant_horizon"}), "long responses weigh more"),
        (
            ppo(policy_loss={"kind": "gmpo"}, ppo={"aggregation": "seq_mean_token_mean"}),
            "has one advantage per response",
        ),
        (ppo(policy_loss={"kind": "reinforce"}), "a batch is used for 16 updates"),
        (grpo(off_policy={"correction": "geometric_truncated"}), "within percents of 1"),
    ],
)
def test_what_is_not_the_papers_is_said(config: Any, said: str) -> None:
    (warning,) = check_sense(config)
    assert said in warning


def test_a_loss_of_ones_own_is_named_by_module_and_function() -> None:
    assert check_sense(grpo(policy_loss={"kind": "my.losses:mine"})) == []
    assert check_sense(ppo(policy_loss={"kind": "reinforce"}, ppo=SHORT)) == []
