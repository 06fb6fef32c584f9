"""Episodes with sharded weights: ranks whose episodes take different numbers of turns wait for nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from spmd_kit import run_ranks
from transformers import AutoTokenizer

from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.data.chat import ChatTemplate
from tutelage.engines.engine import ModelEngine
from tutelage.engines.mesh import RankMeshes
from tutelage.engines.ranks import MeshRanks
from tutelage.layout import Layout
from tutelage.models.load import load_causal_lm
from tutelage.protocols import Turn
from tutelage.rollout.environments.driver import EpisodeLimits, EpisodeRollout, HeldContext
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams
from tutelage.types import Prompts


class Turns:
    """As many as it is told."""

    def __init__(self, count: int) -> None:
        self.left = count

    def reset(self, messages: Any, truth: Any, seed: int) -> None: ...

    def step(self, tokens: Any, text: str) -> Turn:
        self.left -= 1
        return Turn("and?", 1.0, done=self.left == 0)


def episodes(folder: Path, engine: ModelEngine, turns: int) -> list[list[int]]:
    template = ChatTemplate(AutoTokenizer.from_pretrained(folder))
    params = SamplingParams(max_new_tokens=6, stop_token_ids=tuple(range(4, 80)))
    held: Callable[[], AbstractContextManager[Any]] = HeldContext(engine.forward_context)
    model: Any = engine.model
    rollout = InProcessRollout(model.model, template.tokenizer, template.eos_ids, params, seed=0, forward_context=held)
    limits = EpisodeLimits(total_tokens=160, turn_tokens=6, context=512)
    made = EpisodeRollout(
        rollout, rollout.complete, params, template, {"turns": lambda: Turns(turns)}, limits, seed=0, held=held
    )
    messages = ({"role": "user", "content": "Hi"},)
    prompts = Prompts((tuple(template.encode_prompt(messages)),), (f"p{turns}",), (None,), (messages,), n=2)
    return made.generate(prompts).sequences.response_rows()


def on_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    ranks = MeshRanks(RankMeshes().of(Layout(shard=2)))
    policy = load_causal_lm(ModelConfig(path=str(folder)), sharding=ranks.sharding())
    engine = ModelEngine(policy, OptimConfig(), ranks=ranks)
    rows = episodes(folder, engine, 1 + 3 * rank)
    sharded = all(p.to_local().numel() < p.numel() for p in policy.module.parameters())
    return {"rows": rows, "sharded": sharded, "again": episodes(folder, engine, 1 + 3 * rank) == rows}


def test_ranks_take_different_numbers_of_turns_and_agree_with_one_process(tiny_llama_folder: Path) -> None:
    alone = ModelEngine(load_causal_lm(ModelConfig(path=str(tiny_llama_folder))), OptimConfig())
    for rank, one in enumerate(run_ranks(on_rank, 2, tiny_llama_folder)):
        assert one["rows"] == episodes(tiny_llama_folder, alone, 1 + 3 * rank)
        assert one["sharded"]
        assert one["again"]


def test_a_held_context_is_entered_once_and_again_after_it_was_left() -> None:
    entered: list[str] = []

    @contextmanager
    def context() -> Iterator[None]:
        entered.append("in")
        try:
            yield
        finally:
            entered.append("out")

    held = HeldContext(context)
    with held(), held():
        assert entered == ["in"]
    assert entered == ["in", "out"]
    with pytest.raises(KeyError), held():
        raise KeyError
    with held():
        assert entered == ["in", "out"] * 2 + ["in"]
