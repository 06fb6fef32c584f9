"""Collision probabilities, candidates, likeliest tokens and token scores of an engine, on one rank and on several.

The oracle is the plain transformers model in float64, one unpacked sequence at a time.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import engine_kit as kit
import pytest
import ranks_kit
import torch
from spmd_kit import run_ranks
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tutelage.config.common import ModelConfig
from tutelage.data.packing import pack_by_tokens
from tutelage.engines.engine import ModelEngine
from tutelage.errors import ModelError, ShapeError, TrainingError
from tutelage.layout import Dispatch, Layout, dispatch_of
from tutelage.models.load import load_causal_lm, load_scalar_model
from tutelage.roles.actor import Actor
from tutelage.roles.learner import Learner
from tutelage.transport.local import LocalTransport
from tutelage.transport.routed import RoutedActor
from tutelage.types import Outputs, Ragged, Rollout, Sequences, Stat, Stats

TEMPERATURE, C, VOCABULARY = 0.7, 5, 116
LAYOUTS = {
    "tensor 2": Layout(tensor=2),
    "shard 2": Layout(shard=2),
    "pipeline 2": Layout(pipeline=2),
    "context 2": Layout(context=2),
    "pipeline 2 x tensor 2": Layout(pipeline=2, tensor=2),
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """Llama with a vocabulary that two tensor ranks divide, larger than the tokenizer's."""
    home = tmp_path_factory.mktemp("even")
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, bos_token_id=None, eos_token_id=2,
        pad_token_id=2, tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        LlamaForCausalLM(config).save_pretrained(home)
    tiny_tokenizer.save_pretrained(home)
    return home


def batch() -> Rollout:
    """Eight rows of different lengths with C candidates a token; one row has no response."""
    seqs = kit.sequences(0, (*kit.LENS, (3, 0)))
    rows, tokens = len(seqs), int(seqs.response_lens.sum())
    random = torch.Generator().manual_seed(9)
    ids = torch.stack([torch.randperm(VOCABULARY, generator=random)[:C] for _ in range(tokens)])
    names = tuple(map(str, range(rows)))
    return Rollout(
        sequences=seqs, rollout_logp=Ragged(torch.zeros(tokens), seqs.response_lens),
        finished=torch.ones(rows, dtype=torch.bool), prompt_ids=names, samples=torch.zeros(rows, dtype=torch.int64),
        group=torch.arange(rows), truths=(None,) * rows, messages=((),) * rows, texts=names,
        weights_version=torch.zeros(rows, dtype=torch.int64), candidate_ids=Ragged(ids, seqs.response_lens),
    )  # fmt: skip


@dataclass(frozen=True)
class CandidateLoss:
    """sum_c (c + 1) exp(candidate_logp) + logp * log_collision per token, weight 1 / R; log_collision is a constant."""

    outputs: frozenset[str] = frozenset({"candidate_logp", "log_collision"})

    def weights(self, batch: Rollout) -> Ragged:
        lens = batch.sequences.response_lens
        return Ragged(torch.full((int(lens.sum()),), 1.0 / int(lens.sum())), lens)

    def items(self, out: Outputs, batch: Rollout) -> tuple[Tensor, Stats]:
        assert out.candidate_logp is not None
        assert out.log_collision is not None
        assert out.logp is not None
        items = (out.candidate_logp.exp() * torch.arange(1, C + 1)).sum(1) + out.logp * out.log_collision
        return items, {"collision": Stat.of(out.log_collision)}


@dataclass(frozen=True)
class ScoreLoss:
    """(token score)^2 per token plus the sequence's score on its last token, weight 1."""

    outputs: frozenset[str] = frozenset({"token_score", "score"})

    def weights(self, batch: Any) -> Ragged:
        return Ragged(torch.ones(int(batch.sequences.response_lens.sum())), batch.sequences.response_lens)

    def items(self, out: Outputs, batch: Any) -> tuple[Tensor, Stats]:
        assert out.token_score is not None
        assert out.score is not None
        lens = batch.sequences.response_lens
        spread = torch.zeros_like(out.token_score).index_add(0, lens.cumsum(0) - 1, out.score)
        return out.token_score.square() + spread, {}


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double().eval()


def plain_rows(model: Any, seqs: Sequences) -> list[Tensor]:
    """Per sequence (T, V): log softmax at temperature of the position before each response token."""
    rows = []
    for row, prompt in zip(seqs.tokens.rows(), seqs.prompt_lens.tolist(), strict=True):
        logp = torch.log_softmax(model(input_ids=row[None]).logits[0] / TEMPERATURE, dim=-1)
        rows.append(logp[prompt - 1 : len(row) - 1])
    return rows


def engine(folder: Path, layout: str | None = None, **settings: Any) -> ModelEngine:
    ranks = None if layout is None else ranks_kit.mesh_ranks(LAYOUTS[layout])
    cfg = ModelConfig(path=str(folder), **settings)
    model = load_causal_lm(cfg, sharding=None if ranks is None else ranks.sharding())
    return ModelEngine(model, kit.optim(), ranks=ranks, temperature=TEMPERATURE, tokens_per_micro_batch=20)


def reward_engine(folder: Path, layout: str | None = None) -> ModelEngine:
    ranks = None if layout is None else ranks_kit.mesh_ranks(LAYOUTS[layout])
    sharding = None if ranks is None else ranks.sharding()
    model = load_scalar_model(ModelConfig(path=str(folder)), "reward", sharding=sharding)
    return ModelEngine(model, kit.optim(), ranks=ranks, tokens_per_micro_batch=20)


def measured(folder: Path, layout: str | None) -> dict[str, Any]:
    """Everything new that engines compute, for this data rank's rows; losses and gradients for all."""
    policy, rows = engine(folder, layout), batch()
    part = torch.arange(len(rows))
    if layout is not None and policy.ranks.mesh.layout.data > 1:
        part = part.tensor_split(policy.ranks.mesh.layout.data)[policy.ranks.mesh.data_part]
    seqs = rows.sequences.select(part)
    reward, scored = reward_engine(folder, layout), kit.batch()
    return {
        "part": part,
        "log_collision": policy.log_collisions(seqs, TEMPERATURE).rows(),
        "top": [column.rows() for column in policy.top_logprobs(seqs, 4, TEMPERATURE, below=100)],
        "loss": policy.evaluate(rows, CandidateLoss()),
        "gradients": policy.gradients(rows, CandidateLoss()),
        "token_scores": reward.token_scores(seqs).rows(),
        "score_gradients": reward.gradients(scored, ScoreLoss()),
    }


def on_rank(rank: int, world: int, folder: Path, layout: str) -> dict[str, Any]:
    torch.manual_seed(rank)
    return measured(folder, layout)


# ---- one rank against the plain model ----


def test_inference_is_that_of_whole_softmaxes(folder: Path) -> None:
    rows = batch()
    found = measured(folder, None)
    with torch.no_grad():
        expected = plain_rows(plain(folder), rows.sequences)
    for b, logp_TV in enumerate(expected):
        collision = torch.stack([row.exp().square().sum().log() for row in logp_TV]) if len(logp_TV) else torch.zeros(0)
        torch.testing.assert_close(found["log_collision"][b].double(), collision.double(), rtol=0, atol=2e-5)
        top, ids = logp_TV[:, :100].topk(4, dim=-1)
        torch.testing.assert_close(found["top"][2][b].double(), top, rtol=0, atol=2e-5)
        assert torch.equal(found["top"][1][b], ids)
        response = torch.tensor(rows.sequences.response_rows()[b], dtype=torch.int64)
        own = logp_TV.gather(1, response[:, None]).squeeze(1)
        torch.testing.assert_close(found["top"][0][b].double(), own, rtol=0, atol=2e-5)
    assert found["top"][1][0].dtype == torch.int64


def test_a_loss_of_candidates_has_the_value_and_gradient_of_the_plain_model(folder: Path) -> None:
    rows, model = batch(), plain(folder)
    found = measured(folder, None)
    tokens = int(rows.sequences.response_lens.sum())
    loss = torch.zeros((), dtype=torch.float64)
    logps, ids = plain_rows(model, rows.sequences), rows.column("candidate_ids").rows()
    for logp_TV, ids_TC, response in zip(logps, ids, rows.sequences.response_rows(), strict=True):
        for t, token in enumerate(response):
            for c in range(C):
                loss = loss + (c + 1) * logp_TV[t, ids_TC[t, c]].exp() / tokens
            loss = loss + logp_TV[t, token] * logp_TV[t].detach().exp().square().sum().log() / tokens
    loss.backward()
    assert found["loss"]["loss"].mean == pytest.approx(float(loss.detach()), rel=1e-5)
    theirs = {name: p.grad.float() for name, p in model.named_parameters()}
    kit.require_close(found["gradients"], theirs, 1e-5)


def test_token_scores_read_the_token_itself(folder: Path) -> None:
    rows = batch()
    reward = reward_engine(folder)
    found = reward.token_scores(rows.sequences)
    backbone, head = plain(folder).model, reward.model.score
    for row, prompt, got in zip(
        rows.sequences.tokens.rows(), rows.sequences.prompt_lens.tolist(), found.rows(), strict=True
    ):
        hidden = backbone(input_ids=row[None]).last_hidden_state[0]
        expected = hidden[prompt:] @ head.weight.double().T[:, 0] + head.bias.double()
        torch.testing.assert_close(got.double(), expected.detach(), rtol=0, atol=2e-5)
    answered = torch.arange(len(kit.LENS))  # the last token's score is the sequence's
    last = torch.stack([row[-1] for row in found.select(answered).rows()])
    torch.testing.assert_close(last, reward.scores(rows.sequences.select(answered)), rtol=0, atol=1e-6)


def test_score_and_token_score_come_from_one_pass_and_add_their_gradients(folder: Path) -> None:
    reward, rows = reward_engine(folder), kit.batch()
    calls, states = [], reward.model.trunk.states
    reward.model.trunk.states = lambda tokens: (calls.append(1), states(tokens))[1]  # type: ignore[method-assign]
    ours = reward.gradients(rows, ScoreLoss())
    reward.model.trunk.states = states  # type: ignore[method-assign]
    seqs = rows.sequences
    assert len(calls) == len(pack_by_tokens(seqs.tokens.lens, reward.tokens_per_micro_batch)) > 1
    reward.model.module.zero_grad()
    total = torch.zeros(())
    for b in range(len(seqs)):
        one = seqs.select(torch.tensor([b]))
        hidden = reward.model.trunk.hidden(one.tokens)
        scores = reward.model.scalars(hidden)
        total = total + scores[int(one.prompt_lens) :].square().sum() + scores[-1]
    total.backward()
    theirs = {name: p.grad for name, p in reward.model.module.named_parameters() if p.grad is not None}
    kit.require_close(ours, theirs, 1e-5)


def test_an_adapter_that_is_off_gives_the_collisions_of_the_base(folder: Path) -> None:
    seqs = batch().sequences
    adapted, base = engine(folder, lora_rank=2), engine(folder)
    before = base.log_collisions(seqs, TEMPERATURE).flat
    for _ in range(2):
        adapted.step(batch(), CandidateLoss())
    after = adapted.log_collisions(seqs, TEMPERATURE).flat
    assert float((after - before).abs().max()) > 1e-3
    torch.testing.assert_close(adapted.log_collisions(seqs, TEMPERATURE, adapter=False).flat, before)


def test_roles_ask_for_them_by_rows_and_at_their_own_temperature(folder: Path) -> None:
    rows = batch()
    policy = engine(folder)
    actor = Actor(policy, None, TEMPERATURE, lambda folder: nullcontext())
    assert torch.equal(actor.log_collisions(rows).flat, policy.log_collisions(rows.sequences, TEMPERATURE).flat)
    plain_engine = ModelEngine(policy.model, kit.optim())
    learner = Learner(plain_engine, lambda folder: nullcontext())
    assert torch.equal(learner.logprobs(rows).flat, plain_engine.logprobs(rows.sequences, 1.0).flat)
    assert torch.equal(learner.log_collisions(rows).flat, plain_engine.log_collisions(rows.sequences, 1.0).flat)
    assert float((learner.log_collisions(rows).flat - actor.log_collisions(rows).flat).abs().max()) > 1e-3
    asked = [(actor, "log_collisions"), (learner, "logprobs"), (learner, "log_collisions")]
    assert {dispatch_of(role, method) for role, method in asked} == {Dispatch.ROWS}
    routed = RoutedActor(LocalTransport().handle("actor", actor), None, wire=False)
    assert torch.equal(routed.log_collisions(rows).gather().flat, actor.log_collisions(rows).flat)


# ---- refusals ----


def test_candidates_that_do_not_fit_are_refused_before_anything_runs(folder: Path) -> None:
    policy, rows = engine(folder), batch()
    ids = rows.column("candidate_ids")
    lens = rows.sequences.response_lens.roll(1)
    cases = [
        (replace(rows, candidate_ids=None), "no candidate_ids"),
        (replace(rows, candidate_ids=Ragged(ids.flat, lens)), "do not fit"),
        (replace(rows, candidate_ids=Ragged(ids.flat[:, 0], ids.lens)), "do not fit"),
        (replace(rows, candidate_ids=ids.with_flat(ids.flat + VOCABULARY)), f"the model has {VOCABULARY} tokens"),
        (replace(rows, candidate_ids=ids.with_flat(ids.flat - VOCABULARY)), f"the model has {VOCABULARY} tokens"),
    ]
    for bad, text in cases:
        with pytest.raises(ShapeError, match=text):
            policy.step(bad, CandidateLoss())
    assert policy.updates == 0


def test_other_models_and_temperatures_are_refused(folder: Path) -> None:
    seqs = batch().sequences
    policy, reward = engine(folder), reward_engine(folder)
    with pytest.raises(TrainingError, match=r"temperature 1\.0"):
        policy.log_collisions(seqs, 1.0)
    with pytest.raises(TrainingError, match=r"temperature 1\.0"):
        policy.top_logprobs(seqs, 2, 1.0)
    with pytest.raises(ShapeError, match=f"the {VOCABULARY + 1} likeliest of {VOCABULARY}"):
        policy.top_logprobs(seqs, VOCABULARY + 1, TEMPERATURE)
    with pytest.raises(ModelError, match="has no logprobs"):
        reward.log_collisions(seqs, 1.0)
    with pytest.raises(ModelError, match="a reward was asked of a language model"):
        policy.token_scores(seqs)
    with pytest.raises(ModelError, match="needs score, token_score, this model computes"):
        policy.evaluate(kit.batch(), ScoreLoss())


# ---- several ranks against one ----


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[] if name in ("tensor 2", "pipeline 2") else pytest.mark.slow) for name in LAYOUTS],
)
def test_ranks_compute_what_one_process_computes(folder: Path, layout: str) -> None:
    alone = measured(folder, None)
    for found in run_ranks(on_rank, LAYOUTS[layout].size, folder, layout):
        for i, b in enumerate(found["part"].tolist()):
            for name in ("log_collision", "token_scores"):
                torch.testing.assert_close(found[name][i], alone[name][b], rtol=0, atol=1e-5)
            assert torch.equal(found["top"][1][i], alone["top"][1][b])
            for column in (0, 2):
                torch.testing.assert_close(found["top"][column][i], alone["top"][column][b], rtol=0, atol=1e-5)
        assert found["loss"]["loss"].mean == pytest.approx(alone["loss"]["loss"].mean, rel=1e-5)
        assert found["loss"]["collision"].mean == pytest.approx(alone["loss"]["collision"].mean, rel=1e-5)
        kit.require_close(found["gradients"], alone["gradients"], 5e-6)
        kit.require_close(found["score_gradients"], alone["score_gradients"], 5e-6)
