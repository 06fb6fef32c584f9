"""Engine state: bit-for-bit resumption through safetensors and JSON, and what does not fit."""

from __future__ import annotations

import json

import engine_kit as kit
import pytest
import torch
from safetensors.torch import load_file, save_file

from tutelage.engines.state import flatten, unflatten
from tutelage.errors import CheckpointError


def through_files(state, folder):
    tensors, plain = flatten(state)
    save_file(tensors, folder / "state.safetensors")
    (folder / "state.json").write_text(json.dumps(plain))
    return unflatten(load_file(folder / "state.safetensors"), json.loads((folder / "state.json").read_text()))


@pytest.mark.filterwarnings("ignore:this processor has no bfloat16")
@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2}, {"dtype": "bfloat16"}], ids=["float32", "lora", "bfloat16"])
def test_two_updates_then_two_after_a_resume_equal_four_bit_for_bit(settings, tiny_llama_folder, tmp_path):
    def engine():
        return kit.policy_engine(tiny_llama_folder, settings, schedule="linear", total_updates=4, weight_decay=0.01)

    whole, first = engine(), engine()
    stats = [whole.step(kit.batch(i), kit.TokenLoss()) for i in range(4)]
    for i in range(2):
        first.step(kit.batch(i), kit.TokenLoss())
    second = engine()
    second.load_state(through_files(first.state(), tmp_path))
    assert second.updates == 2
    resumed = [second.step(kit.batch(i), kit.TokenLoss()) for i in (2, 3)]
    assert resumed == stats[2:]
    for name, weight in whole.state()["weights"].items():
        assert torch.equal(weight, second.state()["weights"][name]), name
    seqs = kit.sequences()
    assert torch.equal(whole.logprobs(seqs, 1.0).flat, second.logprobs(seqs, 1.0).flat)


def test_a_state_before_the_first_update_can_be_saved(tiny_llama_folder, tmp_path):
    engine = kit.policy_engine(tiny_llama_folder)
    again = through_files(engine.state(), tmp_path)
    assert again["moments"] == {}
    engine.load_state(again)
    assert engine.updates == 0


def test_state_is_a_copy(tiny_llama_folder):
    engine = kit.policy_engine(tiny_llama_folder)
    state = engine.state()
    kept = {n: w.clone() for n, w in state["weights"].items()}
    engine.step(kit.batch(), kit.TokenLoss())
    assert all(torch.equal(kept[n], w) for n, w in state["weights"].items())
    engine.load_state(state)
    engine.step(kit.batch(), kit.TokenLoss())
    assert all(torch.equal(kept[n], w) for n, w in state["weights"].items())


def test_a_state_of_other_settings_is_refused(tiny_llama_folder, tiny_gpt2_folder):
    state = kit.policy_engine(tiny_llama_folder).state()
    for other in (
        kit.policy_engine(tiny_gpt2_folder),
        kit.policy_engine(tiny_llama_folder, {"lora_rank": 2}),
        kit.policy_engine(tiny_llama_folder, train_layers=1),
    ):
        with pytest.raises(CheckpointError, match="does not fit the model"):
            other.load_state(state)
    wrong = {**state, "weights": {n: w.flatten()[:1] for n, w in state["weights"].items()}}
    with pytest.raises(CheckpointError, match="does not fit the model"):
        kit.policy_engine(tiny_llama_folder).load_state(wrong)


def test_flatten_takes_tensors_and_json_apart_and_puts_them_together():
    a, b = torch.arange(3), torch.tensor(2.0)
    state = {"a": a, "deep": {"b": b, "n": 1, "none": None, "empty": {}}, "list": [1, "x", [True]]}
    tensors, plain = flatten(state)
    assert sorted(tensors) == ["a", "deep/b"]
    assert plain == {"deep": {"n": 1, "none": None, "empty": {}}, "list": [1, "x", [True]]}
    again = unflatten(tensors, json.loads(json.dumps(plain)))
    assert torch.equal(again["a"], a)
    assert torch.equal(again["deep"]["b"], b)
    assert {**again["deep"], "b": None} == {"n": 1, "none": None, "empty": {}, "b": None}


@pytest.mark.parametrize("state", [{"a/b": 1}, {3: 1}, {"a": object()}, {"a": [torch.ones(1)]}, {"a": {"b": {1, 2}}}])
def test_what_cannot_be_saved_without_pickle_is_refused(state):
    with pytest.raises(CheckpointError):
        flatten(state)


def test_a_tensor_below_a_plain_value_is_refused():
    with pytest.raises(CheckpointError, match="lies below"):
        unflatten({"a/b": torch.ones(1)}, {"a": 3})
