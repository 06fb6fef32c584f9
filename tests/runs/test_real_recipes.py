"""The hh recipes on real data and real small models, one step each: what the results pages ran for longer."""

from __future__ import annotations

import pytest

from tutelage.build import run_recipe
from tutelage.config import load_checked

pytestmark = [pytest.mark.shared, pytest.mark.slow]


@pytest.fixture(scope="module")
def real(shared_data, small_models, tmp_path_factory):
    """run(recipe, overrides...) on the real pairs, in one folder."""
    folder = tmp_path_factory.mktemp("real")
    data = shared_data / "hh-rlhf" / "harmless-base" / "train.jsonl.gz"

    def start(recipe, *overrides):
        common = [f"output_dir={folder}", f"data.train={data}", "data.max_bad_fraction=1.0", "max_steps=1"]
        loaded, _ = load_checked(recipe, [*common, *overrides])
        return run_recipe(loaded, "plain")

    start.smollm2 = str(small_models / "smollm2-135m-instruct")
    start.minilm = str(small_models / "minilm-l6")
    return start


@pytest.fixture(scope="module")
def reward_model(real):
    return real(
        "hh_reward_model",
        f"model.path={real.minilm}",
        "reward_model.keep_layers=2",
        "data.max_prompt_tokens=32",
        "data.max_response_tokens=32",
        "data.limit=80",
        "evaluation.max_rows=8",
    )


def test_sft_on_real_dialogues(real):
    short = ("data.max_prompt_tokens=48", "data.max_response_tokens=32", "data.limit=300", "sft.batch_size=4")
    result = real("hh_sft", f"model.path={real.smollm2}", "model.chat_template=chatml", *short, "evaluation.max_rows=4")
    assert result.summary["after"]["eval/loss"] < 5


def test_reward_model_on_real_pairs(reward_model):
    assert 0 <= reward_model.summary["after"]["eval/accuracy"] <= 1
    assert (reward_model.best_model / "tutelage_head.json").is_file()


def test_ppo_on_real_prompts_with_another_tokenizer_in_the_reward_model(real, reward_model):
    result = real(
        "hh_ppo",
        f"model.path={real.smollm2}",
        "model.chat_template=chatml",
        "model.lora_rank=4",
        f"reward.model={reward_model.best_model}",
        "data.max_prompt_tokens=40",
        "data.limit=400",
        "rollout.prompts_per_step=4",
        "rollout.max_new_tokens=8",
        "ppo.epochs=1",
        "ppo.minibatches=2",
        "evaluation.prompts=4",
    )
    assert result.summary["steps"] == 1
    assert result.summary["before"]["eval/kl_sequence"] == pytest.approx(0, abs=1e-3)
