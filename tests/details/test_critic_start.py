"""Where the critic starts: as the reward model, head included, where shapes allow; else as the policy, near 0."""

from __future__ import annotations

import json
import shutil

import pytest
import torch


def last_values(built, batch):
    return torch.stack([row[-1] for row in batch.value.rows()])


def test_a_critic_from_the_reward_model_says_what_the_reward_model_says(make_ppo, llama_reward_folder):
    built = make_ppo(reward={"model": str(llama_reward_folder), "rules": []})
    batch = built.collect()
    assert float(batch.score.total.std()) > 0.1
    torch.testing.assert_close(last_values(built, batch), batch.score.total, atol=1e-5, rtol=0)
    assert "starts from the reward model" in " ".join(built.stage.notes)


@pytest.mark.parametrize("why", ["an encoder", "another vocabulary", "no reward model", "the recipe says so"])
def test_else_it_starts_from_the_policy_with_values_near_zero(
    why, make_ppo, tiny_gpt2_folder, bert_reward_folder, llama_reward_folder
):
    reward = {
        "an encoder": {"model": str(bert_reward_folder), "rules": []},
        "another vocabulary": {"model": str(llama_reward_folder), "rules": []},
        "no reward model": {},
        "the recipe says so": {"model": str(llama_reward_folder), "rules": []},
    }[why]
    folder = (tiny_gpt2_folder,) if why == "another vocabulary" else ()
    built = make_ppo(*folder, reward=reward, critic={"init": "policy" if why == "the recipe says so" else "auto"})
    batch = built.collect()
    assert float(batch.value.flat.abs().max()) < 0.1
    critic, actor = built.engine("critic").model, built.engine("actor").model
    hidden = actor.trunk.hidden(batch.sequences.tokens)
    torch.testing.assert_close(critic.trunk.hidden(batch.sequences.tokens), hidden, atol=1e-5, rtol=0)
    assert "starts from the policy" in " ".join(built.stage.notes)


@pytest.mark.parametrize("source", ["reward", "policy"])
def test_the_critic_is_trained_head_included_and_its_source_is_not(source, make_ppo, llama_reward_folder):
    built = make_ppo(reward={"model": str(llama_reward_folder), "rules": []}, critic={"init": source})
    batch = built.scored()
    critic = built.engine("critic").model
    before = {name: p.detach().clone() for name, p in critic.named_parameters()}
    built.update(batch)
    still = {name for name, p in critic.named_parameters() if torch.equal(p, before[name])}
    # the first update has a gradient for every weight but embeddings of tokens that do not occur
    assert still == set()
    again = built.roles.reward.score(batch).gather()
    assert torch.equal(again.total, batch.score.total)


def test_a_reward_model_of_another_head_kind_is_not_read_as_one(make_ppo, llama_reward_folder, tmp_path):
    """Mean pooling: the head never saw the hidden state of a single token."""
    shutil.copytree(llama_reward_folder, tmp_path / "mean")
    about = json.loads((tmp_path / "mean" / "tutelage_head.json").read_text())
    (tmp_path / "mean" / "tutelage_head.json").write_text(json.dumps({**about, "pooling": "mean"}))
    built = make_ppo(reward={"model": str(tmp_path / "mean"), "rules": []})
    assert "starts from the policy with a new head (its head was trained on mean pooling" in " ".join(built.stage.notes)
