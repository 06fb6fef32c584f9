"""Mistakes that other libraries had to repair, in what is trained on: prompts, masks, cuts, and the model at the start.

docs/results/traps.md lists every trap and the test that catches it; those of losses are in test_traps_losses.py.
Shapes: B sequences, T response tokens.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))

import engine_kit
from details_kit import distance, plain, plain_logprobs

from tutelage.algorithms import grpo, policy
from tutelage.algorithms.preference import preference_loss
from tutelage.algorithms.sft import SFTLoss
from tutelage.build import kit
from tutelage.build.data import batch_maker, stage_data
from tutelage.build.stages import build_stage
from tutelage.config import DPOConfig, GRPOConfig
from tutelage.config.common import DataConfig, ModelConfig
from tutelage.data.answers import prepare_labelled, prepare_steps, prepare_unpaired
from tutelage.data.chat import ChatTemplate
from tutelage.data.prepare import Prepared, prepare_demonstrations, prepare_pairs
from tutelage.errors import DataError
from tutelage.layout import Place
from tutelage.models.load import load_causal_lm
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams
from tutelage.transport.local import LocalTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Outputs, Ragged, Sequences

EOS = 2
CHATS = (
    [("user", "hi"), ("assistant", "the sea"), ("user", "and the"), ("assistant", "you")],
    [("user", "why: the you"), ("assistant", " the ")],
    [("user", "a"), ("assistant", "no"), ("user", "b"), ("assistant", "the rain"), ("user", "c"), ("assistant", "x")],
)


def turns(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in chat]


def rows_file(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ---- EOS in the prompt


def test_a_prompt_with_eos_in_it_is_answered_scored_and_trained_as_it_stands(
    tiny_llama_folder: Path, tiny_tokenizer: Any
) -> None:
    """Pad is EOS, and every chat prompt holds EOS: it neither ends a prompt nor is it masked like padding."""
    template = ChatTemplate(tiny_tokenizer)
    prompts = [template.encode_prompt(turns(chat[:-1])) for chat in CHATS]
    assert [row.count(EOS) for row in prompts] == [3, 1, 5]
    assert len({len(row) for row in prompts}) == 3, "a batch that a padding rollout would have to pad"
    engine, twin = engine_kit.policy_engine(tiny_llama_folder), plain(tiny_llama_folder)
    greedy = SamplingParams(greedy=True, max_new_tokens=6)
    found = InProcessRollout(engine.model.model, tiny_tokenizer, (EOS,), greedy, seed=0).complete(prompts, greedy)
    wanted = []
    for row in prompts:
        ids = list(row)
        while len(ids) < len(row) + 6 and (len(ids) == len(row) or ids[-1] != EOS):
            with torch.no_grad():
                ids.append(int(twin(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        wanted.append(ids[len(row) :])
    assert found.sequences.prompt_rows() == prompts
    assert found.sequences.response_rows() == wanted
    logp = engine.logprobs(found.sequences, 1.0).flat
    torch.testing.assert_close(logp, plain_logprobs(twin, found.sequences, 1.0), atol=1e-4, rtol=0)


# ---- the mask of assistant turns, packed


def assistant_positions(tokenizer: Any, ids: list[int]) -> list[int]:
    """Where a chat in ChatML has tokens that the assistant wrote, their end of turn included: read off the tokens."""
    start, opening = 1, tokenizer("assistant\n", add_special_tokens=False).input_ids
    found, at = [], 0
    while at < len(ids):
        if ids[at] == start and ids[at + 1 : at + 1 + len(opening)] == opening:
            at += 1 + len(opening)
            while ids[at] != EOS:
                found.append(at)
                at += 1
            found.append(at)
        at += 1
    return found


def test_the_mask_of_assistant_turns_survives_packing(
    tiny_llama_folder: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """Three chats in one packed forward pass: loss and gradient are those of each chat alone under transformers.

    User turns, their ends and the line break after an end of turn are not trained; the assistant's ends are.
    """
    path = rows_file(tmp_path, [{"messages": turns(chat)} for chat in CHATS])
    cfg = DataConfig(train=path, eval_fraction=0.0)
    batch = prepare_demonstrations(cfg, ChatTemplate(tiny_tokenizer), "assistant", 0).train
    twin, total, count = plain(tiny_llama_folder), torch.zeros(()), 0
    for row in batch.sequences.tokens.rows():
        trained = assistant_positions(tiny_tokenizer, row.tolist())
        assert trained[-1] == len(row) - 1, "the last end of turn ends the row"
        logp = torch.log_softmax(twin(input_ids=row[None]).logits[0], dim=-1)
        total = total - logp[torch.tensor(trained) - 1, row[trained]].sum()
        count += len(trained)
    (total / count).backward()
    theirs = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    engine = engine_kit.policy_engine(tiny_llama_folder, tokens_per_micro_batch=10_000)
    loss = SFTLoss("token_mean")
    assert distance(engine.gradients(batch, loss), theirs) < 1e-5
    stats = engine.step(batch, loss)
    assert stats["micro_batches"].mean == 1, "all of them in one pack"
    assert stats["nll"].weight == count
    assert stats["loss"].mean == pytest.approx(float(total.detach()) / count, rel=1e-5)


# ---- a cut that leaves nothing


def pair_row(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


CUT_ROWS = [pair_row("q" * size, "y" * size, "n" * size) for size in (1, 3, 6, 20)]
STEP_ROWS = [{"prompt": "q" * n, "completions": ["y" * n, "n" * n], "labels": [True, False]} for n in (1, 3, 6, 20)]
Prepare = Callable[[DataConfig, ChatTemplate, int], Prepared[Any]]
PREPARED: dict[str, Prepare] = {
    "demonstrations": lambda cfg, chat, context: prepare_demonstrations(cfg, chat, "assistant", 0, context=context),
    "pairs": lambda cfg, chat, context: prepare_pairs(cfg, chat, 0, context=context),
    "unpaired": lambda cfg, chat, context: prepare_unpaired(cfg, chat, 0, context=context),
    "labelled": lambda cfg, chat, context: prepare_labelled(cfg, chat, 0, context=context),
    "steps": lambda cfg, chat, context: prepare_steps(cfg, chat, 0, "\n", context=context),
}


def sides(batch: Any) -> list[Sequences]:
    names = ("chosen", "rejected") if hasattr(batch, "chosen") else ("answers", "mismatched")
    return [getattr(batch, name) for name in names] if hasattr(batch, names[0]) else [batch.sequences]


@pytest.mark.parametrize("kind", PREPARED)
def test_a_cut_never_leaves_an_answer_without_trained_tokens(kind: str, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Whatever the limits: a row keeps a trained token on each side, or is dropped and counted.

    The tokens that end a step are few, so that cuts do leave answers without one.
    """
    path = rows_file(tmp_path, STEP_ROWS if kind == "steps" else CUT_ROWS)
    template = ChatTemplate(tiny_tokenizer, "plain")
    answers = len(CUT_ROWS) * (2 if kind in ("unpaired", "labelled") else 1)
    dropped, cut = 0, 0
    for context in (2, 3, 4, 8, 50):
        for limits in ({}, {"max_response_tokens": 2}, {"max_response_tokens": 4}, {"max_prompt_tokens": 1}):
            cfg = DataConfig(train=path, eval_fraction=0.0, max_bad_fraction=1.0, too_long="truncate", **limits)
            if kind == "steps" and context == 2:
                with pytest.raises(DataError, match="no row"):
                    PREPARED[kind](cfg, template, context)
                continue
            found = PREPARED[kind](cfg, template, context)
            lost = found.preflight.count("empty_response")
            assert lost + len(found.train) == answers, (context, limits)
            dropped, cut = dropped + lost, cut + found.preflight.count("without_eos")
            for side in sides(found.train):
                assert all(bool(row.any()) for row in side.trained.rows()), (context, limits)
                assert int(side.tokens.lens.max()) <= context, (context, limits)
                assert int(side.prompt_lens.min()) >= 1, (context, limits)
    assert cut > 0
    assert (dropped > 0) == (kind == "steps")


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "simpo", "orpo", "cpo"])
def test_answers_cut_to_one_token_have_a_finite_loss(loss: str, tiny_tokenizer: Any, tmp_path: Path) -> None:
    cfg = DataConfig(
        train=rows_file(tmp_path, CUT_ROWS), eval_fraction=0.0, max_bad_fraction=1.0, too_long="truncate",
        max_response_tokens=1,
    )  # fmt: skip
    batch = prepare_pairs(cfg, ChatTemplate(tiny_tokenizer, "plain"), 0).train
    assert set(batch.sequences.response_lens.tolist()) == {1}
    logp = torch.full((2 * len(batch),), -0.5, requires_grad=True)
    batch = batch.adding(ref_logp=Ragged(torch.full_like(logp, -0.7).detach(), batch.sequences.response_lens))
    found = preference_loss(dpo_config("m", "d", loss=loss).dpo)
    items, _ = found.items(Outputs(logp=logp), batch)  # type: ignore[union-attr]
    items.sum().backward()
    assert logp.grad is not None
    assert bool(torch.isfinite(items).all())
    assert bool(torch.isfinite(logp.grad).all())


# ---- where training starts, with a policy that was changed in memory


def dpo_config(folder: Path | str, train: Path | str, lora_rank: int = 0, **dpo: Any) -> DPOConfig:
    base = {"model": {"path": str(folder), "lora_rank": lora_rank}, "dpo": {"batch_size": 8, **dpo}}
    return DPOConfig.model_validate({**base, "data": {"train": str(train), "eval_fraction": 0.0}})


def grpo_config(folder: Path | str, train: Path | str, lora_rank: int = 0) -> GRPOConfig:
    return GRPOConfig.model_validate(
        {
            "model": {"path": str(folder), "lora_rank": lora_rank},
            "data": {"train": str(train), "eval_fraction": 0.0},
            "rollout": {"max_new_tokens": 6, "temperature": 0.7, "prompts_per_step": 3, "samples_per_prompt": 4},
            "grpo": {"minibatches": 1},
            "kl": {"coef": 0.1},
            "off_policy": {"old_logprobs": "trainer"},
            "optim": {"tokens_per_micro_batch": 64},
            "reward": {"rules": [{"function": "length_range(low=2)"}]},
        }
    )


def started(cfg: Any) -> tuple[RoleSet, Any]:
    """The roles of a stage as a run builds them, and the batch of the first step."""
    data = stage_data(cfg)
    stage = build_stage(cfg, data)
    transport = LocalTransport()
    built = stage.builder(stage.names, Place()).roles
    train = data.prepared.train
    batch = batch_maker(train, cfg)(torch.arange(len(train)), 0)
    return RoleSet({name: transport.handle(name, role) for name, role in built.items()}), batch


@pytest.fixture
def changed_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy that a run loads is not what its folder holds: one matrix is another."""
    loaded: list[Any] = []

    def load_then_change(cfg: ModelConfig, *args: Any, **kwargs: Any) -> Any:
        model = load_causal_lm(cfg, *args, **kwargs)
        if not loaded:
            (found,) = (p for n, p in model.model.named_parameters() if "layers.0.mlp.up_proj" in n and "lora" not in n)
            with torch.no_grad():
                found.add_(0.1)
        loaded.append(model)
        return model

    monkeypatch.setattr(kit, "load_causal_lm", load_then_change)


START_PAIRS = [pair_row(f"what is {t}", f"it is {t}.", "no") for t in ("tea", "rain", "the sea", "a map")]


@pytest.mark.usefixtures("changed_in_memory")
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_dpo_as_a_run_builds_it_starts_at_log_two(lora_rank: int, tiny_llama_folder: Path, tmp_path: Path) -> None:
    cfg = dpo_config(tiny_llama_folder, rows_file(tmp_path, START_PAIRS), lora_rank)
    roles, batch = started(cfg)
    batch = batch.adding(ref_logp=roles.reference.logprobs(batch).gather())
    folder = plain_logprobs(plain(tiny_llama_folder), batch.sequences, 1.0)
    reference = torch.cat([batch.ref_chosen_logp.flat, batch.ref_rejected_logp.flat])
    assert float((folder - reference).abs().max()) > 0.1, "the folder's own model would be another reference"
    stats = roles.actor.step(batch, preference_loss(cfg.dpo)).gather()
    assert stats["loss"].mean == pytest.approx(math.log(2), abs=1e-6)
    assert stats["margin"].mean == pytest.approx(0.0, abs=1e-6)


@pytest.mark.usefixtures("changed_in_memory")
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_grpo_as_a_run_builds_it_starts_at_ratio_one_and_kl_zero(
    lora_rank: int, tiny_llama_folder: Path, tmp_path: Path
) -> None:
    """At temperature 0.7, with the KL in the loss, the mini-batch cut otherwise than the inference passes."""
    path = rows_file(tmp_path, [{"prompt": row["prompt"]} for row in START_PAIRS[:3]])
    cfg = grpo_config(tiny_llama_folder, path, lora_rank)
    roles, prompts = started(cfg)
    batch = grpo.collect(prompts, roles, cfg).gather()
    folder = plain_logprobs(plain(tiny_llama_folder), batch.sequences, 0.7)
    assert float((folder - batch.old_logp.flat).abs().max()) > 0.1
    assert torch.equal(batch.ref_logp.flat, batch.old_logp.flat)
    torch.testing.assert_close(batch.old_logp.flat, batch.rollout_logp.flat, rtol=0, atol=1e-5)
    scored, _, stats = grpo.advantages(batch, grpo.initial_state(cfg), cfg)
    assert stats["kl/sequence"].mean == 0.0
    first = roles.actor.step(scored, policy.PolicyLoss(cfg, cfg.kl.coef)).gather()
    assert first["micro_batches"].mean > 1
    assert first["ratio_mean"].mean == pytest.approx(1.0, abs=1e-6)
    assert first["clip_fraction"].mean == 0.0
    for name in ("approx_kl", "kl_loss"):
        assert 0.0 <= first[name].mean < 1e-10, name
