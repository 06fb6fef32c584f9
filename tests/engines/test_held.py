"""What an engine holds, counted by hand from shapes; memory that two roles look at is counted once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import engine_kit as kit
import pytest
import ranks_kit
import torch
from spmd_kit import run_ranks

from tutelage.engines.engine import ModelEngine
from tutelage.engines.held import Held, engines_of, held_by_roles, held_bytes, storages
from tutelage.roles.critic import Critic
from tutelage.roles.reference import Reference
from tutelage.roles.reward import Reward

# The tiny Llama: hidden 64, 2 blocks, 2 query heads on 1 key/value head of 32, intermediate 128, 113 tokens, tied head.
EMBEDDING = 113 * 64
BLOCK = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64
PARAMETERS = EMBEDDING + 2 * BLOCK + 64
TENSORS = 1 + 2 * 9 + 1
ROTARY = 2 * 4 * 16
"""Bytes of the frequencies and of the unscaled ones: 16 float32 each."""


def test_weights_and_moments_by_hand(tiny_llama_folder) -> None:
    engine = kit.policy_engine(tiny_llama_folder)
    before = held_bytes(engine)
    assert 4 * PARAMETERS <= before.weights <= 4 * PARAMETERS + ROTARY
    assert (before.gradients, before.moments, before.shared) == (0, 0, 0)
    engine.step(kit.batch(), kit.TokenLoss())
    after = held_bytes(engine)
    assert after.weights == before.weights
    assert after.moments == 2 * 4 * PARAMETERS + 4 * TENSORS  # two moments, and a count of steps a tensor


def test_gradients_are_counted_while_they_are_there(tiny_llama_folder) -> None:
    engine = kit.policy_engine(tiny_llama_folder)
    for master in engine.model.masters.masters.values():
        master.grad = torch.zeros_like(master)
    assert held_bytes(engine).gradients == 4 * PARAMETERS


def test_masters_count_where_they_are_apart(tiny_llama_folder) -> None:
    engine = kit.policy_engine(tiny_llama_folder, {"dtype": "bfloat16"})
    assert 6 * PARAMETERS <= held_bytes(engine).weights <= 6 * PARAMETERS + ROTARY


def test_a_frozen_model_holds_weights_alone(tiny_llama_folder) -> None:
    engine = kit.policy_engine(tiny_llama_folder)
    snapshot = engine.snapshot()
    found = held_by_roles({"actor": Critic(engine), "reference": Reference(snapshot, 1.0, adapter=True)})
    assert found["reference"].weights == found["actor"].weights
    assert found["reference"].shared == 0


def test_an_engine_of_two_roles_is_counted_with_the_first(tiny_llama_folder) -> None:
    engine = kit.policy_engine(tiny_llama_folder, {"lora_rank": 2})
    engine.step(kit.batch(), kit.TokenLoss())
    alone = held_bytes(engine)
    roles = {"actor": Critic(engine), "reference": Reference(engine, 1.0, adapter=False), "rules": object()}
    found = held_by_roles(roles)
    assert found["actor"] == alone
    assert found["reference"] == Held(shared=alone.weights + alone.moments, owners=("actor",))
    assert found["rules"] == Held()


def test_storage_that_engines_share_in_part_is_counted_in_part(tiny_llama_folder) -> None:
    first = kit.policy_engine(tiny_llama_folder)
    second = ModelEngine.frozen(first.snapshot().model)
    second.model.module.get_input_embeddings().weight.data = first.model.module.get_input_embeddings().weight.data
    found = held_by_roles({"a": Critic(first), "b": Critic(second)})
    assert found["b"].shared == 4 * EMBEDDING
    assert found["b"].weights == found["a"].weights - 4 * EMBEDDING


@pytest.mark.parametrize("wrap", [lambda e: e.scores, lambda e: partial(e.scores), lambda e: {"x": [(e,)]}])
def test_engines_are_found_behind_methods_and_containers(tiny_bert_folder, wrap) -> None:
    engine = kit.scalar_engine(tiny_bert_folder, "reward")
    role = Reward(SimpleNamespace(sources=()))  # type: ignore[arg-type]
    assert engines_of(role) == []
    role.errors = [wrap(engine)]
    assert engines_of(role) == [engine]


def test_closures_and_data_are_not_searched(tiny_bert_folder) -> None:
    engine = kit.scalar_engine(tiny_bert_folder, "reward")
    assert engines_of(SimpleNamespace(export=lambda: engine)) == []
    assert engines_of(SimpleNamespace(rows=[engine] * 1001)) == []
    loop = SimpleNamespace()
    loop.self = {"again": loop}
    assert engines_of(loop) == []


def test_memory_of_tensors_that_are_made_of_others() -> None:
    inner = torch.zeros(10)

    class Wrapped:
        def __tensor_flatten__(self):
            return ["inner"], None

    wrapped = Wrapped()
    wrapped.inner = inner
    assert [s.nbytes() for s in storages(wrapped)] == [40]
    quantised = torch.nn.Parameter(torch.zeros(6, dtype=torch.uint8), requires_grad=False)
    nested = SimpleNamespace(absmax=torch.zeros(3), state2=None)
    quantised.quant_state = SimpleNamespace(absmax=torch.zeros(2, dtype=torch.uint8), name="x", state2=nested)
    assert sorted(s.nbytes() for s in storages(quantised)) == [2, 6, 12]


def held_after_a_step(rank: int, world: int, folder: Path, layout: str) -> Held:
    engine, batch, loss = ranks_kit.make("tokens", folder, ranks_kit.LAYOUTS[layout], None)
    engine.step(batch, loss)
    return held_bytes(engine)


@pytest.mark.parametrize(("layout", "world"), [("shard 2", 2), ("hsdp 2x2", 4)])
def test_a_rank_holds_its_part_of_sharded_weights_and_moments(layout: str, world: int, tiny_llama_folder: Path) -> None:
    engine, batch, loss = ranks_kit.make("tokens", tiny_llama_folder, None, None)
    engine.step(batch, loss)
    whole = held_bytes(engine)
    ranks = run_ranks(held_after_a_step, world, tiny_llama_folder, layout)
    buffers = sum(buffer.nbytes for buffer in engine.model.module.buffers())
    for held in ranks:
        assert whole.weights / 2 - 1024 <= held.weights - buffers / 2 < whole.weights
        assert whole.moments / 2 - 1024 <= held.moments < whole.moments
    assert sum(held.weights for held in ranks) >= whole.weights
