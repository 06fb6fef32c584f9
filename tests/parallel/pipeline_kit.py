"""Engines whose blocks are on pipeline stages, beside the one-process engine that is their oracle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
import engine_kit as kit
import ranks_kit

from tutelage.config.common import ModelConfig
from tutelage.engines.engine import ModelEngine
from tutelage.engines.ranks import MeshRanks
from tutelage.layout import Layout
from tutelage.models.load import load_causal_lm, load_scalar_model

LAYOUTS = {
    "pipeline 2": Layout(pipeline=2),
    "pipeline 4": Layout(pipeline=4),
    "pipeline 2 x replicate 2": Layout(pipeline=2, replicate=2),
    "pipeline 2 x shard 2": Layout(pipeline=2, shard=2),
    "pipeline 2 x tensor 2": Layout(pipeline=2, tensor=2),
    "pipeline 2 x sequence 2": Layout(pipeline=2, sequence=2),
    "pipeline 2 x context 2": Layout(pipeline=2, context=2),
}
CASES = ("tokens", "sorted", "values", "pairs")


def save_llama(folder: Path, tokenizer: PreTrainedTokenizerBase, *, tied: bool, layers: int = 4) -> Path:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=tied,
        initializer_range=0.15,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(21)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def mesh_ranks(layout: str) -> MeshRanks:
    return ranks_kit.mesh_ranks(LAYOUTS[layout])


def make(case: str, folder: Path, layout: str | None, settings: dict | None = None, **own: Any) -> tuple:
    """(engine, batch, loss); layout None: one process."""
    ranks = None if layout is None else mesh_ranks(layout)
    sharding = None if ranks is None else ranks.sharding()
    cfg = ModelConfig(path=str(folder), **(settings or {}))
    changes = {k: own.pop(k) for k in ("max_grad_norm", "lr") if k in own}
    if case in ("tokens", "sorted", "nan"):
        model = load_causal_lm(cfg, sharding=sharding)
        loss = {"tokens": kit.TokenLoss(), "nan": kit.TokenLoss(bad=True), "sorted": kit.SortedLoss()}[case]
    else:
        model = load_scalar_model(cfg, "value" if case == "values" else "reward", sharding=sharding)
        loss = kit.ValueLoss() if case == "values" else kit.PairLoss()
    batch = kit.pairs() if case == "pairs" else kit.batch()
    return ModelEngine(model, kit.optim(**changes), ranks=ranks, **own), batch, loss


def two_steps(case: str, folder: Path, layout: str | None, settings: dict | None = None, **own: Any) -> dict:
    """The gradient, the loss before, the statistics of two updates, and the weights after them."""
    engine, batch, loss = make(case, folder, layout, settings, **own)
    gradients = engine.gradients(batch, loss)
    before = engine.evaluate(batch, loss)
    stats = [engine.step(batch, loss) for _ in range(2)]
    return {"gradients": gradients, "before": before, "stats": stats, "weights": engine.state()["weights"]}


def on_rank(rank: int, world: int, runs: list[tuple[str, Path, dict | None, dict]], layout: str) -> list[dict]:
    """Several runs in one start of the ranks."""
    torch.manual_seed(rank)
    return [two_steps(case, folder, layout, settings, **own) for case, folder, settings, own in runs]


# ---- what ranks are asked beside two steps ----

UNEVEN = ((3, 14), (1, 1), (1, 2), (2, 1), (1, 1))
"""One long row for one data rank, several micro-batches of short ones for another."""


def uneven_batch(count: int = 5) -> Any:
    seqs = kit.sequences(3, UNEVEN[:count])
    return kit.Demonstrations(seqs, tuple(str(i) for i in range(count)))


def uneven(rank: int, world: int, folder: Path, layout: str | None) -> list[dict]:
    """Data ranks with other numbers of micro-batches than their peers, and with none."""
    found = []
    for case in ("tokens", "sorted"):
        for count in (5, 1):
            engine, _, loss = make(case, folder, layout, tokens_per_micro_batch=4)
            batch = uneven_batch(count)
            stats = engine.step(batch, loss)
            found.append({"stats": stats, "weights": engine.state()["weights"]})
    return found


def part_of(rows: Any, ranks: MeshRanks | None, cuts: tuple[int, ...]) -> tuple[Any, tuple[int, int]]:
    """The rows of this rank's data part, and which of all they are."""
    if ranks is None:
        return rows, (0, len(rows))
    part = ranks.mesh.data_part
    return rows.select(torch.arange(cuts[part], cuts[part + 1])), (cuts[part], cuts[part + 1])


def inference(rank: int, world: int, folder: Path, layout: str | None) -> dict:
    """Unequal parts of the rows, of which one may be empty."""
    ranks = None if layout is None else mesh_ranks(layout)
    rows = kit.sequences(4)
    found: dict[str, Any] = {"shares": []}
    for cuts in ((0, 5, 8), (0, 8, 8)):
        part, where = part_of(rows, ranks, cuts if ranks is None or ranks.mesh.layout.data > 1 else (0, 8))
        found["shares"].append(where)
        policy = make("tokens", folder, layout, tokens_per_micro_batch=12, temperature=0.7)[0]
        found.setdefault("logprobs", []).append(policy.logprobs(part, 0.7).rows())
        found.setdefault("values", []).append(
            make("values", folder, layout, tokens_per_micro_batch=12)[0].values(part).rows()
        )
        reward = make("pairs", folder, layout, tokens_per_micro_batch=12)[0]
        found.setdefault("scores", []).append(reward.scores(part))
        with reward.shifted_bias(2.0):
            found.setdefault("shifted", []).append(reward.scores(part))
        found.setdefault("frozen", []).append(policy.snapshot().logprobs(part, 0.7).rows())
    return found


def held(rank: int, world: int, folder: Path, layout: str, settings: dict | None) -> dict:
    """What a rank has after two steps: its own weights, whether all have storage, and how it generates."""
    engine, batch, loss = make("tokens", folder, layout, settings, tokens_per_micro_batch=20)
    for _ in range(2):
        engine.step(batch, loss)
    own = {n: p.detach().clone() for n, p in engine.model.module.named_parameters()}
    refusals = {}
    for name, work in (
        ("generate", lambda: engine.forward_context()),
        ("train_layers", lambda: make("tokens", folder, layout, train_layers=1)),
        ("schedule", lambda: make("tokens", folder, layout, schedule="1f2b")),
    ):
        try:
            work()
        except Exception as error:
            refusals[name] = (type(error).__name__, str(error))
    return {"own": own, "refusals": refusals, "bytes": engine.checkpoint_bytes()}


class BrokenError(Exception):
    """Raised by a stage."""


def failures(rank: int, world: int, folder: Path, layout: str) -> dict:
    """Texts of what every rank raises, the weights after it, and a step that works afterwards."""
    found: dict[str, Any] = {}
    for case in ("nan", "scalars", "stage", "loss"):
        engine, batch, loss = make(
            "sorted" if case == "scalars" else "tokens", folder, layout, tokens_per_micro_batch=20
        )
        good, states = loss, engine.model.trunk.states
        before = engine.state()["weights"]
        if case == "nan":
            loss = kit.TokenLoss(bad=True)
        elif case == "scalars":
            loss = NanScalars()
        elif case == "loss":
            loss = RaisingLoss()
        elif rank == 0:
            object.__setattr__(engine.model.trunk, "states", broken)
        try:
            engine.step(batch, loss)
            found[case] = ("nothing", "")
        except Exception as error:
            found[case] = (type(error).__name__, str(error))
        object.__setattr__(engine.model.trunk, "states", states)
        after = engine.state()["weights"]
        found[f"{case} unchanged"] = all(torch.equal(before[n], after[n]) for n in before)
        found[f"{case} then"] = engine.step(batch, good)["loss"].mean
    return found


def broken(tokens: Any) -> Any:
    raise BrokenError("out of order")


class RaisingLoss(kit.TokenLoss):
    def items(self, out: Any, batch: Any) -> Any:
        raise BrokenError("no loss today")


class NanScalars(kit.SortedLoss):
    def scalars(self, out: Any, batch: Any) -> Any:
        return super().scalars(out, batch) * float("nan")


def saved(rank: int, world: int, folder: Path, layout: str, home: Path, settings: dict | None) -> dict:
    """A step, a state and an export; then a step from the state that one process wrote."""
    engine, batch, loss = make("tokens", folder, layout, settings, tokens_per_micro_batch=20)
    engine.step(batch, loss)
    engine.save_state(home / "stages_state")
    engine.save_pretrained(home / "stages_model")
    named = {n: t.clone() for n, t in engine.named_weights()}
    adapter = {n: t.clone() for n, t in engine.named_weights(adapter_only=True)}
    base = engine.logprobs(batch.sequences, 1.0, adapter=False).flat if settings else None
    other, _, _ = make("tokens", folder, layout, settings, tokens_per_micro_batch=20)
    other.load_state(home / "one_state")
    stats = other.step(batch, loss)
    return {"named": named, "adapter": adapter, "base": base, "stats": stats, "weights": other.state()["weights"]}


def saved_values(rank: int, world: int, folder: Path, layout: str, home: Path) -> dict:
    engine, batch, loss = make("values", folder, layout, tokens_per_micro_batch=20)
    engine.step(batch, loss)
    engine.save_pretrained(home / "stages_critic")
    return {"named": {n: t.clone() for n, t in engine.named_weights()}}


def architectures(rank: int, world: int, folders: dict[str, Path], layout: str | None) -> dict:
    """Gradients and logprobs of every kind of decoder."""
    found = {}
    for kind, folder in folders.items():
        try:
            engine, batch, loss = make("tokens", folder, layout, tokens_per_micro_batch=20)
            found[kind] = {
                "logprobs": engine.logprobs(batch.sequences, 1.0).flat,
                "gradients": engine.gradients(batch, loss),
            }
        except Exception as error:
            raise AssertionError(kind) from error
    return found


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma2": {"sliding_window": 6, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 32},
    "gpt2": {},
    "gpt_neox": {},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "llama": {},
    "mistral": {},
    "phi3": {"bos_token_id": 1, "tie_word_embeddings": False},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {},
    "starcoder2": {},
}


def save_kind(folder: Path, kind: str, tokenizer: PreTrainedTokenizerBase, **changes: Any) -> Path:
    """A tiny decoder of three blocks; biases and norms moved, so that each of them matters."""
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    if kind in ("gpt2", "gpt_neox"):
        common = {k: v for k, v in common.items() if k not in ("head_dim", "num_key_value_heads")}
    if kind == "gpt2":
        del common["intermediate_size"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(31)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**common, **changes}))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim < 2:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def config_of(folder: Path) -> Any:
    return AutoConfig.from_pretrained(folder)
