"""Mistakes that other libraries had to repair, each looked for here where no test beside its code does.

docs/results/traps.md lists every trap and the test that catches it.
Shapes: B sequences, T response tokens, N flat tokens, V vocabulary.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))

import engine_kit
import ranks_kit
from details_kit import plain, plain_logprobs
from spmd_kit import run_ranks

from tutelage.algorithms import grpo, own_samples, policy
from tutelage.algorithms.ppo import PolicyLoss, ValueLoss
from tutelage.algorithms.preference import preference_loss
from tutelage.algorithms.reward_model import PairLoss
from tutelage.algorithms.sft import SFTLoss
from tutelage.build import kit
from tutelage.build.data import batch_maker, stage_data
from tutelage.build.stages import build_stage
from tutelage.config import DPOConfig, GRPOConfig, PPOConfig, RAFTConfig, check_sense
from tutelage.config.common import DataConfig, ModelConfig
from tutelage.data.answers import prepare_labelled, prepare_steps, prepare_unpaired
from tutelage.data.chat import ChatTemplate
from tutelage.data.prepare import Prepared, prepare_demonstrations, prepare_pairs
from tutelage.engines.engine import ModelEngine
from tutelage.errors import ConfigError, DataError, ModelError
from tutelage.layout import Layout, Place
from tutelage.math.distillation import DIVERGENCES, distillation_loss
from tutelage.math.group_advantages import ESTIMATORS
from tutelage.math.kl import exact_kl, kl_k3, kl_k3_importance, kl_k3_unbiased
from tutelage.models.load import load_causal_lm
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams
from tutelage.transport.local import LocalTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Demonstrations, Outputs, Ragged, Rollout, Sequences

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


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """|ours - theirs| / |theirs| over all weights together."""
    assert ours.keys() == theirs.keys()
    size = math.sqrt(sum(float(g.double().square().sum()) for g in theirs.values()))
    assert size > 1e-4, "a gradient to compare with"
    return math.sqrt(sum(float((ours[n] - theirs[n]).double().square().sum()) for n in ours)) / size


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


# ---- truncated responses in a denominator

LENS = torch.tensor([2, 1, 3, 1, 2, 4])


def column(seed: int, lens: Tensor = LENS) -> Ragged:
    return Ragged(-3 * torch.rand(int(lens.sum()), generator=torch.Generator().manual_seed(seed)), lens)


def responses(**columns: Any) -> Rollout:
    """Six responses of which the last two are left out by the algorithm; the third has a hole."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 90, (n,), generator=generator).tolist() for n in LENS.tolist()]
    trained = [[True] * n for n in LENS.tolist()]
    trained[2][1] = False
    six = torch.zeros(6, dtype=torch.int64)
    whole = Rollout(
        sequences=Sequences.build([[5, 6]] * 6, rows, trained), rollout_logp=column(1), finished=six == 0,
        prompt_ids=tuple("aabbcc"), samples=six, group=torch.tensor([0, 0, 1, 1, 2, 2]), truths=(None,) * 6,
        messages=((),) * 6, texts=("",) * 6, weights_version=six, old_logp=column(1), ref_logp=column(2),
        advantage=Ragged(column(3).flat + 1.5, LENS), ret=column(4), value=column(5, LENS + 1),
        counted=torch.tensor([True] * 4 + [False] * 2),
    )  # fmt: skip
    return whole.adding(**columns)


BASE = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"model": "r"}}
WEIGHTS: dict[str, tuple[Any, Any]] = {
    "grpo": (GRPOConfig, policy),
    "ppo": (PPOConfig, policy),
    "raft": (RAFTConfig, own_samples),
}


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_horizon"])
@pytest.mark.parametrize("algorithm", WEIGHTS)
def test_responses_left_out_of_the_loss_are_in_no_denominator(algorithm: str, aggregation: str) -> None:
    """The weights are those of the same mini-batch without these responses."""
    made, module = WEIGHTS[algorithm]
    cfg = made.model_validate({**BASE, algorithm: {"aggregation": aggregation}, "rollout": {"max_new_tokens": 4}})
    batch, kept = responses(), torch.arange(4)
    found = module.token_weights(batch, cfg)
    alone = module.token_weights(batch.select(kept).adding(counted=None), cfg)
    torch.testing.assert_close(found.select(kept).flat, alone.flat)
    assert not found.select(torch.tensor([4, 5])).flat.any()
    nothing = module.token_weights(batch.adding(counted=torch.zeros(6, dtype=torch.bool)), cfg)
    assert not nothing.flat.any()


# ---- KL that is reported below 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_is_at_least_0_however_near_the_policies_are(dtype: torch.dtype) -> None:
    near = torch.logspace(-20, 1.3, 20_000, dtype=dtype)
    ratio = torch.cat([near, -near, torch.zeros(1, dtype=dtype)])
    logp = -5 * torch.rand(len(ratio), generator=torch.Generator().manual_seed(0), dtype=dtype)
    for one, other in ((ratio, torch.zeros_like(ratio)), (logp, logp - ratio)):
        for estimator in (kl_k3, kl_k3_unbiased, kl_k3_importance):
            assert float(estimator(one, other).min()) >= 0.0


@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-5, 1e-3])
def test_an_exact_divergence_is_at_least_0_and_right_however_near_the_models_are(noise: float) -> None:
    """In float32, where rounding of the softmax alone is larger than the divergence; against float64."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = 3 * torch.randn(500, 120, generator=generator)
    other_NV = logits_NV + noise * torch.randn(500, 120, generator=generator)
    p_NV, q_NV = (torch.softmax(x.double(), dim=-1) for x in (logits_NV, other_NV))
    wanted_N = (p_NV * (p_NV / q_NV).log() - p_NV + q_NV).sum(dim=-1)
    found_N = exact_kl(logits_NV, other_NV)
    assert float(found_N.min()) >= 0.0
    torch.testing.assert_close(found_N.double(), wanted_N, rtol=1e-2, atol=1e-10)
    logp_NV, other_logp_NV = (torch.log_softmax(x, dim=-1) for x in (logits_NV, other_NV))
    for kind in DIVERGENCES:
        for count in (120, 20):
            terms = distillation_loss(kind, logp_NV[:, :count], other_logp_NV[:, :count])
            assert float(terms.loss.min()) >= 0.0, (kind, count)


# ---- one response in a method of groups


@pytest.mark.parametrize("name", ESTIMATORS)
def test_one_response_to_a_prompt_is_refused_exactly_where_responses_are_compared(name: str) -> None:
    def recipe(samples: int) -> GRPOConfig:
        rollout = {"samples_per_prompt": samples, "prompts_per_step": 4, "max_new_tokens": 4}
        return GRPOConfig.model_validate({**BASE, "grpo": {"estimator": name, "minibatches": 1}, "rollout": rollout})

    check_sense(recipe(2))
    if name in ("reinforce_plus_plus", "remax"):
        check_sense(recipe(1))
        return
    with pytest.raises(ConfigError, match=r"rollout\.samples_per_prompt is 1"):
        check_sense(recipe(1))


# ---- the adapter that is the reference when it is off


def test_the_adapter_is_on_again_after_the_reference_was_asked_even_in_vain(tiny_llama_folder: Path) -> None:
    """Policy logprobs and gradients are the same before and after, also after a call that failed half-way."""
    engine = engine_kit.policy_engine(tiny_llama_folder, {"lora_rank": 2})
    batch, seqs = engine_kit.batch(), engine_kit.sequences()
    for _ in range(2):
        engine.step(batch, engine_kit.TokenLoss())
    before, gradient = engine.logprobs(seqs, 1.0).flat, engine.gradients(batch, engine_kit.TokenLoss())
    base = engine_kit.policy_engine(tiny_llama_folder).logprobs(seqs, 1.0).flat
    assert float((before - base).abs().max()) > 1e-2, "the adapter has learned"
    torch.testing.assert_close(engine.logprobs(seqs, 1.0, adapter=False).flat, base, rtol=0, atol=1e-6)
    with pytest.raises(ModelError):
        engine.logprobs(Sequences.build([[5] * 600], [[6]]), 1.0, adapter=False)
    assert torch.equal(engine.logprobs(seqs, 1.0).flat, before)
    assert distance(engine.gradients(batch, engine_kit.TokenLoss()), gradient) == 0.0


# ---- one loss and one gradient, however the mini-batch is cut, ordered and split

ORDER = torch.tensor([3, 0, 4, 1, 2])


def ppo_config(aggregation: str) -> PPOConfig:
    own = {"aggregation": aggregation, "entropy_coef": 0.05, "clip_value": 0.2}
    return PPOConfig.model_validate({**BASE, "ppo": own, "rollout": {"max_new_tokens": 4}})


def demonstrations() -> Demonstrations:
    """Five rows of several lengths, some tokens not trained."""
    batch = engine_kit.batch().select(torch.arange(5))
    random, trained = torch.Generator().manual_seed(4), batch.sequences.trained
    holes = torch.rand(len(trained.flat), generator=random) < 0.3
    holes[trained.offsets()[:-1]] = False
    return batch.adding(sequences=replace(batch.sequences, trained=trained.with_flat(~holes)))


def margin_pairs() -> Any:
    return engine_kit.pairs().adding(margin=torch.tensor([0.5, 0.0, 2.0, 1.0, 0.25]))


CASES: dict[str, tuple[str, Callable[[], Any], Any]] = {
    "sft nll": ("policy", demonstrations, SFTLoss("token_mean")),
    "sft by sequence": ("policy", demonstrations, SFTLoss("seq_mean_token_mean")),
    "sft dft": ("policy", demonstrations, SFTLoss("token_mean", "dft")),
    "sft noise": ("policy", demonstrations, SFTLoss("token_mean", noise_alpha=5.0, seed=1, step=2)),
    "reward": ("reward", margin_pairs, PairLoss(0.01, False)),
    "reward margin": ("reward", margin_pairs, PairLoss(0.0, True)),
    "reward scaled": ("reward", margin_pairs, PairLoss(0.01, False, True)),
    **{
        f"{name} {aggregation}": (role, lambda: responses().select(torch.arange(1, 6)), loss(ppo_config(aggregation)))
        for aggregation in ("token_mean", "seq_mean_token_mean", "constant_horizon")
        for name, role, loss in (("policy", "policy", lambda cfg: PolicyLoss(cfg, 0.1)), ("value", "value", ValueLoss))
    },
}  # fmt: skip


def engines(folder: Path, budget: int, layout: Layout | None = None) -> dict[str, ModelEngine]:
    """By role, on the ranks of a layout or in one process."""
    own = {"tokens_per_micro_batch": budget}
    found = {kind: ranks_kit.scalar(folder, kind, layout, **own) for kind in ("reward", "value")}
    return {"policy": ranks_kit.policy(folder, layout, **own), **found}


def computed(made: dict[str, ModelEngine], order: Tensor | None = None) -> dict[str, Any]:
    """(gradient, means of the statistics) of every case."""
    found = {}
    for name, (role, batch_of, loss) in CASES.items():
        batch = batch_of() if order is None else batch_of().select(order)
        stats = made[role].evaluate(batch, loss)
        found[name] = made[role].gradients(batch, loss), {key: stat.mean for key, stat in stats.items()}
    return found


def require_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name, (gradient, stats) in theirs.items():
        assert distance(ours[name][0], gradient) < 1e-5, name
        assert ours[name][1] == pytest.approx(stats, rel=1e-4, abs=1e-6), name


@pytest.fixture(scope="module")
def whole(tiny_llama_folder: Path) -> dict[str, Any]:
    """The mini-batch in one pack, in one process."""
    return computed(engines(tiny_llama_folder, 10_000))


def test_micro_batches_packing_and_order_change_neither_loss_nor_gradient(
    whole: dict[str, Any], tiny_llama_folder: Path
) -> None:
    """A budget of 1 token: every row alone, nothing is packed; 30: some are."""
    for budget, order in ((1, None), (30, ORDER), (10_000, ORDER)):
        require_equal(computed(engines(tiny_llama_folder, budget), order), whole)


def on_ranks(rank: int, world: int, folder: Path, layout: str) -> dict[str, Any]:
    return computed(engines(folder, 25, ranks_kit.LAYOUTS[layout]))


@pytest.mark.parametrize("layout", ["shard 2", pytest.param("replicate 2", marks=pytest.mark.slow)])
def test_a_split_over_two_ranks_changes_neither_loss_nor_gradient(
    layout: str, whole: dict[str, Any], tiny_llama_folder: Path
) -> None:
    for found in run_ranks(on_ranks, 2, tiny_llama_folder, layout):
        require_equal(found, whole)


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
