"""The distillation file against whole softmaxes and plain Python, through engines, and whole steps of tiny models."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tutelage.algorithms import distill
from tutelage.algorithms.distill import DivergenceLoss, SampledLoss
from tutelage.build import run_recipe
from tutelage.build.distillation import require_same_tokenizer
from tutelage.config import DistillConfig, load_checked
from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.demo.corpus import write_corpus
from tutelage.demo.model import build_model_folder
from tutelage.engines.engine import ModelEngine
from tutelage.errors import ConfigError, ModelError, ShapeError
from tutelage.evals.teacher_distance import HeldOutDistance
from tutelage.math.distillation import distillation_loss
from tutelage.math.kl import exact_kl
from tutelage.models.load import load_causal_lm
from tutelage.roles.actor import Actor
from tutelage.roles.reward import Reward
from tutelage.roles.teacher import Teacher
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams
from tutelage.schedules import OneStepOff, Synchronous
from tutelage.sharing import shares
from tutelage.transport.local import LocalTransport
from tutelage.transport.recording import RecordingTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Outputs, Prompts, Ragged, Rollout, Sequences

TEMPERATURE = 0.8
FORMS = {
    "reverse": {"divergence": "reverse_kl"},
    "forward": {"divergence": "forward_kl"},
    "jsd": {"divergence": "jsd", "beta": 0.3},
    "sampled": {"divergence": "reverse_kl", "form": "sampled"},
    "no baseline": {"divergence": "reverse_kl", "form": "sampled", "baseline": "none"},
    "minillm": {"divergence": "reverse_kl", "form": "sampled", "discount": 1.0},
}


def config(**sections: Any) -> DistillConfig:
    base = {
        "model": {"path": "m"},
        "data": {"train": "d"},
        "teacher": {"path": "t"},
        "rollout": {"max_new_tokens": 6, "temperature": TEMPERATURE},
    }
    return DistillConfig.model_validate({**base, **sections})


def rollout(seqs: Sequences, **columns: Any) -> Rollout:
    rows = len(seqs)
    whole = Rollout(
        sequences=seqs,
        rollout_logp=Ragged(torch.full((int(seqs.response_lens.sum()),), -1.0), seqs.response_lens),
        finished=torch.ones(rows, dtype=torch.bool),
        prompt_ids=tuple(map(str, range(rows))),
        samples=torch.zeros(rows, dtype=torch.int64),
        group=torch.arange(rows),
        truths=(None,) * rows,
        messages=(({"role": "user", "content": "tell"},),) * rows,
        texts=("",) * rows,
        weights_version=torch.zeros(rows, dtype=torch.int64),
    )
    return whole.adding(**columns)


def sequences() -> Sequences:
    """Five rows; one has a hole, one no trained token at all."""
    random = torch.Generator().manual_seed(4)
    lens = ((3, 4), (2, 6), (4, 1), (1, 3), (2, 2))
    rows = [torch.randint(4, 110, (p + r,), generator=random).tolist() for p, r in lens]
    trained = [[True] * r for _, r in lens]
    trained[1][2] = trained[1][3] = False
    trained[4] = [False, False]
    prompts = [row[:p] for row, (p, _) in zip(rows, lens, strict=True)]
    return Sequences.build(prompts, [row[p:] for row, (p, _) in zip(rows, lens, strict=True)], trained)


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory, tiny_llama_folder: Path) -> Path:
    """The tiny Llama with other weights, not far from its own."""
    folder = tmp_path_factory.mktemp("teacher")
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_folder)
    random = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=random))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_llama_folder).save_pretrained(folder)
    return folder


def student_engine(folder: Path, budget: int = 16) -> ModelEngine:
    optim = OptimConfig(lr=3e-3, schedule="constant")
    model = load_causal_lm(ModelConfig(path=str(folder)))
    return ModelEngine(model, optim, temperature=TEMPERATURE, tokens_per_micro_batch=budget)


def teacher_of(folder: Path) -> Teacher:
    model = load_causal_lm(ModelConfig(path=str(folder)), frozen=True)
    return Teacher(ModelEngine.frozen(model), TEMPERATURE, len(AutoTokenizer.from_pretrained(folder)))


def logits_of(folder: Path, seqs: Sequences) -> list[torch.Tensor]:
    """Per row (T, V) float64 logits before each response token, from the plain model, one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double().eval()
    rows = zip(seqs.tokens.rows(), seqs.prompt_lens.tolist(), strict=True)
    return [model(input_ids=row[None]).logits[0][prompt - 1 : len(row) - 1] for row, prompt in rows]


def gradients_of(folder: Path, seqs: Sequences, loss: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Of loss(logits of a row, number of the row) averaged over trained tokens, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double().eval()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for b, (row, prompt, trained) in enumerate(
        zip(seqs.tokens.rows(), seqs.prompt_lens.tolist(), seqs.trained.rows(), strict=True)
    ):
        own = loss(model(input_ids=row[None]).logits[0][prompt - 1 : len(row) - 1], b)
        total, tokens = total + own[trained].sum(), tokens + int(trained.sum())
    (total / tokens).backward()
    return float(total.detach()) / tokens, {n: p.grad.float() for n, p in model.named_parameters()}


def require_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], rel: float) -> None:
    size = sum(float(x.double().square().sum()) for x in theirs.values()) ** 0.5
    apart = sum(float((ours[n] - x).double().square().sum()) for n, x in theirs.items() if n in ours) ** 0.5
    assert size > 0
    assert apart <= rel * size, apart / size


# ---- through an engine ----


@pytest.mark.parametrize("form", ["reverse", "forward"])
def test_with_all_tokens_the_gradient_is_that_of_the_exact_kl(
    form: str, tiny_llama_folder: Path, teacher_folder: Path
) -> None:
    teacher = teacher_of(teacher_folder)
    cfg = config(distill={**FORMS[form], "candidates": teacher.tokens})
    seqs = sequences()
    batch = teacher.with_candidates(rollout(seqs), teacher.tokens)
    engine = student_engine(tiny_llama_folder)
    with torch.no_grad():
        theirs = logits_of(teacher_folder, seqs)

    def kl(logits_TV: torch.Tensor, b: int) -> torch.Tensor:
        pair = (logits_TV, theirs[b]) if form == "reverse" else (theirs[b], logits_TV)
        return exact_kl(*pair, TEMPERATURE)

    value, expected = gradients_of(tiny_llama_folder, seqs, kl)
    found = engine.evaluate(batch, DivergenceLoss(cfg))
    assert found["loss"].mean == pytest.approx(value, rel=1e-4)
    assert found["divergence"].mean == pytest.approx(value, rel=1e-4)
    assert found["teacher_tail"].mean < 1e-5
    require_close(engine.gradients(batch, DivergenceLoss(cfg)), expected, 1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradient_do_not_depend_on_how_the_work_is_cut(
    form: str, tiny_llama_folder: Path, teacher_folder: Path
) -> None:
    """Micro-batches, the order of the rows, and the split over two ranks."""
    teacher, cfg = teacher_of(teacher_folder), config(distill=FORMS[form])
    engine = student_engine(tiny_llama_folder, budget=10_000)
    batch = batch_for(cfg, engine, teacher)
    loss = distill.loss_of(cfg)
    whole, value = engine.gradients(batch, loss), engine.evaluate(batch, loss)["loss"].mean
    small = student_engine(tiny_llama_folder, budget=1)
    require_close(small.gradients(batch, loss), whole, 1e-5)
    assert small.evaluate(batch, loss)["loss"].mean == pytest.approx(value, rel=1e-5)
    order = torch.tensor([3, 0, 4, 2, 1])
    require_close(engine.gradients(batch.select(order), loss), whole, 1e-5)
    parts = [engine.gradients(share, loss) for share in shares(batch, loss, 2)]
    require_close({n: parts[0][n] + parts[1][n] for n in whole}, whole, 1e-5)


def batch_for(cfg: DistillConfig, engine: ModelEngine, teacher: Teacher) -> Rollout:
    """What the loss of this recipe reads, with another old policy than the present one."""
    batch = rollout(sequences())
    if not cfg.distill.from_sampled_tokens:
        return teacher.with_candidates(batch, 20)
    old = engine.logprobs(batch.sequences, TEMPERATURE)
    shifted = old.with_flat(old.flat - 0.05)
    batch = batch.adding(old_logp=shifted, teacher_logp=teacher.logprobs(batch))
    return distill.advantages(batch, distill.initial_state(cfg), cfg)[0]


def test_no_two_forms_have_one_gradient(tiny_llama_folder: Path, teacher_folder: Path) -> None:
    teacher, engine = teacher_of(teacher_folder), student_engine(tiny_llama_folder)
    found = {}
    for name, settings in FORMS.items():
        cfg = config(distill=settings)
        found[name] = engine.gradients(batch_for(cfg, engine, teacher), distill.loss_of(cfg))
    names = list(found)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            apart = sum(float((found[one][n] - found[other][n]).square().sum()) for n in found[one]) ** 0.5
            assert apart > 1e-3, (one, other)


def test_a_teachers_columns_of_rows_cut_apart_are_those_of_the_whole(teacher_folder: Path) -> None:
    """A call is split over ranks by rows, and its replies are joined."""
    teacher, batch = teacher_of(teacher_folder), rollout(sequences())
    whole = teacher.with_candidates(batch, 7)
    index = [torch.tensor([0, 3]), torch.tensor([1, 2, 4])]
    joined = Rollout.concat([teacher.with_candidates(batch.select(part), 7) for part in index])
    joined = joined.select(torch.argsort(torch.cat(index)))
    for name in ("teacher_logp", "candidate_logp"):
        torch.testing.assert_close(getattr(joined, name).flat, getattr(whole, name).flat, rtol=0, atol=1e-5)
    assert torch.equal(joined.column("candidate_ids").flat, whole.column("candidate_ids").flat)
    torch.testing.assert_close(whole.column("teacher_logp").flat, teacher.logprobs(batch).flat, rtol=0, atol=1e-6)
    assert int(whole.column("candidate_ids").flat.max()) < teacher.tokens
    with pytest.raises(ShapeError, match="likeliest"):
        teacher.with_candidates(batch, teacher.tokens + 1)


# ---- the algorithm file ----


def test_sampled_tokens_are_paid_the_log_ratio_and_the_gradient_is_reinforces() -> None:
    """r = log teacher - log old; at the start of a step the gradient by each logprob is -r / tokens."""
    cfg = config(distill=FORMS["no baseline"])
    seqs = Sequences.build([[1], [1]], [[2, 3], [4]], [[True, False], [True]])
    old, teacher = Ragged(torch.tensor([-1.0, -9.0, -2.0]), seqs.response_lens), torch.tensor([-0.4, 7.0, -5.0])
    batch = rollout(seqs, old_logp=old, teacher_logp=old.with_flat(teacher))
    scored, state, stats = distill.advantages(batch, distill.initial_state(cfg), cfg)
    assert scored.column("advantage").flat.tolist() == pytest.approx([0.6, 0.0, -3.0])
    compared = distill.advantages(batch, state, config(distill=FORMS["sampled"]))[0]
    assert compared.column("advantage").flat.tolist() == pytest.approx([3.6, 0.0, -3.6])
    assert state.step == 1
    assert stats["teacher/kl_sequence"].mean == pytest.approx(((-1 + 0.4) + (-1 + 5)) / 2), "of the sampler's logprobs"
    assert stats["teacher/kl_token"].mean == pytest.approx(((-1 + 0.4) + (-1 + 5)) / 2)
    assert "reward/score_mean" not in stats
    logp = old.flat.clone().requires_grad_()
    items, _ = SampledLoss(cfg).items(Outputs(logp=logp), scored)
    (items * SampledLoss(cfg).weights(scored).flat).sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-0.3, 0.0, 1.5])


def test_ratios_beyond_the_clip_have_no_gradient() -> None:
    cfg, seqs = config(distill={**FORMS["sampled"], "clip": 0.1}), Sequences.build([[1]], [[2, 3]])
    old = Ragged(torch.tensor([-1.0, -1.0]), seqs.response_lens)
    batch = rollout(seqs, old_logp=old, advantage=old.with_flat(torch.tensor([1.0, 1.0])))
    logp = torch.tensor([-1.0 + math.log(1.2), -1.0], requires_grad=True)
    items, stats = SampledLoss(cfg).items(Outputs(logp=logp), batch)
    items.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0.0, -1.0])
    assert stats["clip_fraction"].mean == 0.5


def test_values_under_the_mask_are_never_read() -> None:
    cfg, seqs = config(), Sequences.build([[1]], [[2, 3]], [[True, False]])
    ids = Ragged(torch.tensor([[0, 1], [0, 1]]), seqs.response_lens)
    teacher = ids.with_flat(torch.tensor([[0.6, 0.3], [math.nan, math.inf]]).log())
    batch = rollout(seqs, candidate_ids=ids, candidate_logp=teacher)
    student = torch.tensor([[0.5, 0.2], [0.4, 0.4]]).log()
    items, stats = DivergenceLoss(cfg).items(Outputs(candidate_logp=student), batch)
    expected = float(distillation_loss("reverse_kl", student[:1], teacher.flat[:1]).loss)
    assert items.tolist() == pytest.approx([expected, 0.0])
    assert stats["divergence"].mean == pytest.approx(expected)
    assert stats["tail"].mean == pytest.approx(0.3, abs=1e-6)
    assert stats["teacher_tail"].mean == pytest.approx(0.1, abs=1e-6)
    assert DivergenceLoss(cfg).weights(batch).flat.tolist() == [1.0, 0.0]


def test_recording_finds_the_data_flow_of_every_form() -> None:
    for settings, rewarded, expected in (
        (FORMS["jsd"], False, [("teacher", "with_candidates", (0,))]),
        (FORMS["sampled"], False, [("teacher", "logprobs", (0,)), ("actor", "logprobs", (0,))]),
        (FORMS["jsd"], True, [("teacher", "with_candidates", (0,)), ("reward", "score", (0,))]),
    ):
        reward = {"rules": [{"function": "exact"}]} if rewarded else {}
        cfg = config(distill={**settings, "epochs": 2}, reward=reward)
        transport = RecordingTransport()
        classes = {"actor": Actor, "teacher": Teacher, "reward": Reward}
        roles = RoleSet({n: transport.handle(n, classes[n]) for n in distill.roles_needed(cfg)})
        Synchronous(distill, transport, roles, cfg).step("prompts", distill.initial_state(cfg))
        calls = [(n.role, n.method, n.inputs) for n in transport.nodes]
        assert calls[1 : 1 + len(expected)] == expected
        assert [c[:2] for c in calls[1 + len(expected) :]] == [
            ("controller", "advantages"),
            *[("actor", "step")] * 2,
            ("actor", "publish"),
            ("controller", "merged_by_role"),
        ]


# ---- whole steps ----


def wired(student: Path, teacher: Path, settings: dict[str, Any]) -> tuple[Any, RoleSet, LocalTransport]:
    cfg = config(distill=settings)
    engine = student_engine(student, budget=4096)
    params = SamplingParams(temperature=TEMPERATURE, max_new_tokens=6)
    tokenizer = AutoTokenizer.from_pretrained(student)
    sampler = InProcessRollout(engine.model.model, tokenizer, (2,), params, seed=0, tokens_in_flight=4096)
    actor = Actor(engine, sampler, TEMPERATURE, lambda folder: nullcontext())
    transport = LocalTransport()
    objects = {"actor": actor, "teacher": teacher_of(teacher)}
    return cfg, RoleSet({n: transport.handle(n, role) for n, role in objects.items()}), transport


def prompts_of(step: int) -> Prompts:
    said = {"role": "user", "content": "tell"}
    return Prompts(((5, 6, 7), (8, 9)), (f"{step}a", f"{step}b"), (None,) * 2, ((said,),) * 2, step=step, n=8)


@pytest.mark.parametrize(
    "form", [pytest.param(name, marks=[] if name in ("reverse", "sampled") else pytest.mark.slow) for name in FORMS]
)
def test_the_student_gets_nearer_to_its_teacher(
    form: str, tiny_llama_folder: Path, teacher_folder: Path, tmp_path: Path
) -> None:
    cfg, roles, transport = wired(tiny_llama_folder, teacher_folder, FORMS[form])
    loss = None if cfg.distill.from_sampled_tokens else distill.loss_of(cfg)
    distance = HeldOutDistance(
        roles, prompts_of(0), 32, tmp_path, lambda batch, roles: distill.judged(batch, roles, cfg), loss, None
    )
    schedule, state = Synchronous(distill, transport, roles, cfg), distill.initial_state(cfg)
    before = distance.evaluate("before", 0)
    for step in range(15):
        result = schedule.step(prompts_of(step), state)
        state = result.state
    after = distance.evaluate("after", 15)
    assert after.quality > before.quality
    name = "eval/teacher_kl_sequence"
    share = 0.95 if form == "minillm" else 0.8  # returns of whole responses vary more
    assert after.metrics[name] < share * before.metrics[name], (before.metrics, after.metrics)
    assert before.quality == -before.metrics[name if loss is None else "eval/divergence"]
    assert (tmp_path / "samples" / "after.jsonl").is_file()


def test_it_runs_one_step_off(tiny_llama_folder: Path, teacher_folder: Path) -> None:
    cfg, roles, transport = wired(tiny_llama_folder, teacher_folder, FORMS["sampled"])
    schedule, state, taken = OneStepOff(distill, transport, roles, cfg), distill.initial_state(cfg), iter(range(3))
    results = []
    while (result := schedule.advance(lambda: next((prompts_of(s) for s in taken), None), state)) is not None:
        results.append(result.stats)
        state = result.state
    assert [stats["schedule/staleness_max"].mean for stats in results] == [0, 1, 1]
    assert results[2]["policy/logp_gap"].mean > 1e-4


# ---- recipes ----


@pytest.mark.slow
def test_a_student_of_the_demo_gets_nearer_to_its_own_ppo_policy(tmp_path: Path) -> None:
    """The shipped recipes, a few steps each; a rule stands in for the reward model."""
    corpus = write_corpus(tmp_path / "data", 0)
    build_model_folder(tmp_path / "model", 0)

    def run(recipe: str, *overrides: str) -> Any:
        loaded, _ = load_checked(recipe, [f"output_dir={tmp_path}", "evaluation.prompts=32", *overrides])
        return run_recipe(loaded, "plain")

    sft = run_recipe(
        load_checked(
            "demo_sft",
            [
                f"output_dir={tmp_path}",
                f"model.path={tmp_path / 'model'}",
                f"data.train={corpus.demonstrations}",
                "max_steps=60",
            ],
        )[0],
        "plain",
    )
    data = [
        f"model.path={sft.best_model}",
        f"data.train={corpus.train_prompts}",
        f"data.eval={corpus.eval_prompts}",
        "reward.model=null",
        "evaluation.gold=null",
    ]
    rules = "reward.rules=[{function: 'length_range(low=12)'}]"
    ppo = run("demo_ppo", *data, rules, "max_steps=6", "kl.coef=0", "critic.init=policy")
    teacher = ppo.folder / "checkpoints" / "step_000006" / "model"
    found = run("demo_distill", *data, f"teacher.path={teacher}", "max_steps=8")
    before, after = (found.summary[phase]["eval/divergence"] for phase in ("before", "after"))
    assert before > 0.005
    assert after < 0.5 * before
    assert (found.folder / "samples" / "after.jsonl").is_file()


def test_keys_without_effect_and_recipes_that_cannot_work_are_refused() -> None:
    cases = {
        "distill.beta=0.3": "distill.beta has no effect",
        "distill.discount=1.0": "distill.discount has no effect",
        "distill.clip=0.1": "distill.clip has no effect",
        "distill.baseline=none": "distill.baseline has no effect",
        "distill.minibatches=100": "fewer than distill.minibatches 100",
    }
    for override, text in cases.items():
        with pytest.raises(ConfigError, match=text):
            load_checked("demo_distill", [override])
    with pytest.raises(ConfigError, match=r"distill\.candidates has no effect"):
        load_checked("demo_distill", ["distill.form=sampled", "distill.candidates=8"])
    with pytest.raises(ConfigError, match=r"distill\.form has no effect"):
        load_checked("demo_distill", ["distill.divergence=jsd", "distill.form=sampled"])
    with pytest.raises(ConfigError, match=r"evaluation\.gold is given .* names no reward"):
        load_checked("demo_distill", ["reward.model=null"])
    loaded, _ = load_checked("demo_distill", ["reward.model=null", "evaluation.gold=null"])
    assert distill.roles_needed(loaded.config) == ("actor", "teacher")


def test_a_teacher_of_another_tokenizer_is_refused(tiny_llama_folder: Path, tiny_gpt2_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_folder)
    own = config(teacher={"path": str(tiny_llama_folder)})
    require_same_tokenizer(own, tokenizer)
    other = replace_teacher(own, tiny_gpt2_folder)
    with pytest.raises(ModelError, match="has another tokenizer"):
        require_same_tokenizer(other, tokenizer)


def replace_teacher(cfg: DistillConfig, folder: Path) -> DistillConfig:
    return cfg.model_copy(update={"teacher": cfg.teacher.model_copy(update={"path": str(folder)})})
