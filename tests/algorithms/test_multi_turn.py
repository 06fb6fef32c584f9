"""Episodes of several turns through the trainer: the same logprobs, no gradient from holes, rewards where they belong.

Shapes: B sequences, T response tokens.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tutelage.algorithms import grpo, ppo
from tutelage.algorithms.episodes import episode_stats
from tutelage.algorithms.policy import PolicyLoss, token_weights
from tutelage.build import resume_run, run_recipe
from tutelage.config import GRPOConfig, PPOConfig, load_checked
from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.data.chat import ChatTemplate
from tutelage.engines.engine import ModelEngine
from tutelage.errors import ConfigError, DataError
from tutelage.math.advantages import gae
from tutelage.models.load import load_causal_lm, load_scalar_model
from tutelage.protocols import Turn
from tutelage.reports.metrics_log import read_metrics
from tutelage.rewards.mix import RewardMix
from tutelage.roles.actor import Actor
from tutelage.roles.critic import Critic
from tutelage.roles.reference import Reference
from tutelage.roles.reward import Reward
from tutelage.rollout.environments.driver import EpisodeLimits, EpisodeRollout
from tutelage.rollout.environments.scoring import EpisodeErrors, EpisodeReward
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams
from tutelage.schedules import Synchronous
from tutelage.schedules.saved import packed, unpacked
from tutelage.transport.local import LocalTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Prompts, Ragged, Rollout, Scores, Sequences

TEMPERATURE = 0.8
STOPS = tuple(range(4, 60))
"""About half of the vocabulary ends a turn, so that a random model has turns of a few tokens."""


class Thrice:
    """Three turns, each paid by its length; raises in the second where the prompt's truth is "broken"."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def reset(self, messages: Sequence[Mapping[str, str]], truth: Any, seed: int) -> None:
        self.left, self.truth = self.turns, truth

    def step(self, tokens: Sequence[int], text: str) -> Turn:
        self.left -= 1
        if self.truth == "broken" and self.left == 1:
            raise ValueError("it broke")
        return Turn(f"and {self.left}?", len(tokens) / 4, done=self.left == 0, info={"tokens": float(len(tokens))})


class Tiny:
    """The tiny Llama as a policy, with an engine, and episodes on it."""

    def __init__(self, folder: Path, turns: int = 3, **limits: Any) -> None:
        self.policy = load_causal_lm(ModelConfig(path=str(folder)))
        optim = OptimConfig(lr=3e-3, schedule="constant")
        self.engine = ModelEngine(self.policy, optim, temperature=TEMPERATURE)
        self.template = ChatTemplate(AutoTokenizer.from_pretrained(folder))
        params = SamplingParams(temperature=TEMPERATURE, max_new_tokens=12, stop_token_ids=STOPS)
        self.single = InProcessRollout(
            self.policy.model, self.template.tokenizer, self.template.eos_ids, params, seed=0
        )
        bounds = EpisodeLimits(
            **{"total_tokens": 160, "turn_tokens": 12, "context": 512, "step_seconds": 60.0, **limits}
        )
        self.episodes = EpisodeRollout(
            self.single, self.single.complete, params, self.template, {"thrice": lambda: Thrice(turns)}, bounds, seed=0
        )

    def prompts(self, count: int = 3, n: int = 2, **columns: Any) -> Prompts:
        messages = tuple(({"role": "user", "content": f"the {i}"},) for i in range(count))
        return Prompts(
            tokens=tuple(tuple(self.template.encode_prompt(m)) for m in messages),
            ids=tuple(f"p{i}" for i in range(count)),
            truths=columns.pop("truths", (None,) * count),
            messages=messages,
            n=n,
            **columns,
        )


@pytest.fixture(scope="module")
def tiny(tiny_llama_folder: Path) -> Tiny:
    return Tiny(tiny_llama_folder)


@pytest.fixture(scope="module")
def rollout(tiny: Tiny) -> Rollout:
    found = tiny.episodes.generate(tiny.prompts())
    assert found.turns is not None
    assert int((found.turns == 3).sum()) >= 3, "most episodes have their three turns"
    return found


# ---- the sampler and the trainer


def test_the_trainers_logprobs_are_the_samplers_on_every_token_of_the_policy(tiny: Tiny, rollout: Rollout) -> None:
    ours, trained = tiny.engine.logprobs(rollout.sequences, TEMPERATURE), rollout.sequences.trained.flat
    assert torch.equal(ours.lens, rollout.rollout_logp.lens)
    assert float((ours.flat - rollout.rollout_logp.flat)[trained].abs().max()) < 1e-5
    assert not bool(rollout.rollout_logp.flat[~trained].any())
    assert bool((ours.flat[~trained] < 0).all()), "the trainer's own there are of no use to anybody"


def test_an_episode_is_the_same_alone_and_among_others(tiny: Tiny, rollout: Rollout) -> None:
    prompts = tiny.prompts()
    for place in range(3):
        alone = tiny.episodes.generate(prompts.select([place]))
        rows = torch.tensor([2 * place, 2 * place + 1])
        among = rollout.select(rows)
        assert alone.sequences.response_rows() == among.sequences.response_rows()
        assert alone.rollout_logp.flat.tolist() == pytest.approx(among.rollout_logp.flat.tolist(), abs=1e-5)
        assert alone.transcripts == among.transcripts
        assert alone.rewarded().tolist() == among.rewarded().tolist()


def test_turns_draw_differently_and_the_first_as_without_environments(tiny: Tiny, rollout: Rollout) -> None:
    plain = tiny.single.generate(tiny.prompts()).sequences.response_rows()
    for row, response in enumerate(rollout.sequences.response_rows()):
        assert response[: len(plain[row])] == plain[row]
    again = tiny.episodes.generate(tiny.prompts())
    assert again.sequences.response_rows() == rollout.sequences.response_rows()
    other = tiny.episodes.generate(tiny.prompts(step=1))
    assert other.sequences.response_rows() != rollout.sequences.response_rows()
    assert rollout.transcripts is not None
    said = [tuple(m["content"] for m in t if m["role"] == "assistant") for t in rollout.transcripts]
    assert any(len(set(turns)) > 1 for turns in said)


def test_greedy_episodes_need_no_key(tiny: Tiny) -> None:
    first = tiny.episodes.generate(tiny.prompts(n=1, greedy=True, purpose="evaluation"))
    second = tiny.episodes.generate(tiny.prompts(n=1, greedy=True, purpose="other", step=9))
    assert first.sequences.response_rows() == second.sequences.response_rows()


def test_episodes_generated_ahead_survive_a_checkpoint(rollout: Rollout) -> None:
    back = unpacked(packed(rollout))
    assert back.environments == rollout.environments
    assert back.transcripts == rollout.transcripts
    assert back.episode_info == rollout.episode_info
    assert back.episode_errors == rollout.episode_errors
    assert back.token_reward.flat.tolist() == rollout.token_reward.flat.tolist()
    assert Rollout.concat([back, rollout]).turns.tolist() == rollout.turns.tolist() * 2


# ---- holes


def config(schema: Any, **sections: Any) -> Any:
    base = {"model": {"path": "m"}, "data": {"train": "d"}, "rollout": {"max_new_tokens": 160}}
    return schema.model_validate({**base, **sections})


def with_columns(rollout: Rollout, tiny: Tiny) -> Rollout:
    """Advantages, old logprobs, values and returns that are drawn at random."""
    lens = rollout.sequences.response_lens
    generator = torch.Generator().manual_seed(1)
    draw = lambda: Ragged(torch.randn(int(lens.sum()), generator=generator), lens)  # noqa: E731
    value = Ragged(torch.randn(int((lens + 1).sum()), generator=generator), lens + 1)
    old = tiny.engine.logprobs(rollout.sequences, TEMPERATURE)
    return rollout.adding(
        old_logp=old.with_flat(old.flat + 0.1 * draw().flat), advantage=draw(), ret=draw(), value=value, ref_logp=old
    )


def in_holes(column: Ragged, rollout: Rollout, by: float) -> Ragged:
    hole = ~rollout.sequences.trained.flat
    return column.with_flat(torch.where(hole, column.flat + by, column.flat))


def test_nothing_in_a_hole_moves_the_policy(tiny: Tiny, rollout: Rollout) -> None:
    cfg = config(PPOConfig, kl={"placement": "loss", "estimator": "k2", "coef": 0.1}, ppo={"entropy_coef": 0.01})
    batch = with_columns(rollout, tiny)
    changed = batch.adding(
        advantage=in_holes(batch.column("advantage"), batch, 50.0),
        old_logp=in_holes(batch.column("old_logp"), batch, -3.0),
        ref_logp=in_holes(batch.column("ref_logp"), batch, 4.0),
        rollout_logp=in_holes(batch.rollout_logp, batch, -9.0),
    )
    loss = PolicyLoss(cfg, 0.1)
    plain, other = (tiny.engine.gradients(b, loss) for b in (batch, changed))
    assert plain.keys() == other.keys()
    assert all(torch.equal(plain[name], other[name]) for name in plain)
    assert any(bool(grad.any()) for grad in plain.values())
    moved = batch.adding(advantage=batch.column("advantage").with_flat(batch.column("advantage").flat + 1.0))
    assert any(not torch.equal(plain[n], g) for n, g in tiny.engine.gradients(moved, loss).items())
    stats = [tiny.engine.evaluate(b, loss) for b in (batch, changed)]
    assert {n: s.total for n, s in stats[0].items()} == pytest.approx({n: s.total for n, s in stats[1].items()})


def test_nothing_in_a_hole_moves_the_critic(tiny: Tiny, rollout: Rollout, tiny_llama_folder: Path) -> None:
    critic = ModelEngine(load_scalar_model(ModelConfig(path=str(tiny_llama_folder)), "value"), OptimConfig(lr=1e-3))
    batch = with_columns(rollout, tiny)
    hole = ~rollout.sequences.trained.flat
    lens = rollout.sequences.response_lens
    rows = [torch.cat([h, torch.tensor([False])]) for h in Ragged(hole, lens).rows()]
    value = batch.column("value")
    changed = batch.adding(
        ret=in_holes(batch.column("ret"), batch, 70.0),
        value=value.with_flat(torch.where(torch.cat(rows), value.flat - 30.0, value.flat)),
    )
    plain, other = (critic.gradients(b, ppo.ValueLoss(config(PPOConfig))) for b in (batch, changed))
    assert all(torch.equal(plain[name], other[name]) for name in plain)


def test_holes_weigh_nothing_and_are_in_no_denominator(rollout: Rollout) -> None:
    trained = rollout.sequences.trained
    own_B = torch.tensor([float(row.sum()) for row in trained.rows()])
    for kind, wanted in (
        ("token_mean", lambda b: 1 / float(own_B.sum())),
        ("seq_mean_token_mean", lambda b: 1 / (len(own_B) * float(own_B[b]))),
        ("seq_mean_token_sum", lambda b: 1 / len(own_B)),
        ("constant_horizon", lambda b: 1 / (len(own_B) * 160)),
    ):
        weights = token_weights(rollout, config(PPOConfig, ppo={"aggregation": kind}))
        for b, (row, mask) in enumerate(zip(weights.rows(), trained.rows(), strict=True)):
            assert row[mask].tolist() == pytest.approx([wanted(b)] * int(mask.sum()), rel=1e-5), kind
            assert not bool(row[~mask].any())


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.5), (1.0, 0.0)])
def test_gae_across_holes_is_gae_without_them(rollout: Rollout, gamma: float, lam: float) -> None:
    mask_BT = rollout.sequences.trained.padded()
    generator = torch.Generator().manual_seed(2)
    reward_BT, value_BT = (torch.randn(mask_BT.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    bootstrap_B = torch.randn(len(mask_BT), generator=generator, dtype=torch.float64)
    advantage_BT, return_BT = gae(reward_BT, value_BT, mask_BT, gamma, lam, bootstrap_B)
    for b, mask_T in enumerate(mask_BT):
        kept = [x[b][mask_T][None] for x in (reward_BT, value_BT)]
        whole = torch.ones_like(kept[0], dtype=torch.bool)
        alone, ret = gae(*kept, whole, gamma, lam, bootstrap_B[b : b + 1])
        assert advantage_BT[b][mask_T].tolist() == pytest.approx(alone[0].tolist())
        assert return_BT[b][mask_T].tolist() == pytest.approx(ret[0].tolist())
        assert not bool(advantage_BT[b][~mask_T].any())


# ---- rewards


def by_hand() -> Rollout:
    """Two episodes to one prompt: turns of 2 and 1 tokens with a hole of 2 between them; one turn of 2 tokens."""
    trained = [[True, True, False, False, True], [True, True]]
    lens = torch.tensor([5, 2])
    logp = Ragged(torch.tensor([-1.0, -1.0, -7.0, -7.0, -1.0, -1.0, -1.0]), lens)
    total = torch.tensor([0.25, 0.0])
    return Rollout(
        sequences=Sequences.build([[1], [1]], [[5, 6, 7, 8, 9], [5, 6]], trained),
        rollout_logp=Ragged(torch.tensor([-1.0, -1.0, 0.0, 0.0, -1.0, -1.0, -1.0]), lens),
        finished=torch.tensor([True, False]),
        prompt_ids=("p", "p"),
        samples=torch.arange(2),
        group=torch.zeros(2, dtype=torch.int64),
        truths=(None, None),
        messages=((), ()),
        texts=("", ""),
        weights_version=torch.zeros(2, dtype=torch.int64),
        old_logp=logp,
        ref_logp=Ragged(torch.tensor([-1.0, -1.0, 3.0, 3.0, -1.0, -1.0, -1.0]), lens),
        value=Ragged(torch.tensor([0.1, 0.2, 9.0, 9.0, 0.3, 5.0, 0.4, 0.5, 6.0]), lens + 1),
        score=Scores(total[:, None], total, ("rule",), (1.0,)),
        token_reward=Ragged(torch.tensor([0.0, 0.5, 0.0, 0.0, 2.0, 0.0, -1.0]), lens),
        environments=("a", "b"),
        turns=torch.tensor([2, 1]),
        episode_info=({"errors": 2.0}, {}),
        episode_errors=("", ""),
    )


def test_ppo_returns_are_the_rewards_of_the_turns_to_come() -> None:
    cfg = config(PPOConfig, ppo={"whiten_advantages": False, "gamma": 1.0, "lam": 1.0}, kl={"coef": 0.0})
    batch, _, stats = ppo.advantages(by_hand(), ppo.initial_state(cfg), cfg)
    assert [row.tolist() for row in batch.ret.rows()] == [
        pytest.approx([2.75, 2.75, 0.0, 0.0, 2.25]),
        pytest.approx([-1.0, -1.0]),
    ]
    assert [row.tolist() for row in batch.advantage.rows()] == [
        pytest.approx([2.65, 2.55, 0.0, 0.0, 1.95]),
        pytest.approx([-1.4, -1.5]),
    ]
    assert stats["kl/sequence"].mean == 0.0, "old and reference logprobs differ in the hole alone"
    assert stats["policy/logp_gap"].mean == 0.0
    td = config(PPOConfig, ppo={"whiten_advantages": False, "gamma": 0.5, "lam": 0.0}, kl={"coef": 0.0})
    batch, _, _ = ppo.advantages(by_hand(), ppo.initial_state(td), td)
    wanted = [0.5 * 0.2, 0.5 + 0.5 * 0.3, 0.0, 0.0, 2.25]
    assert batch.ret.rows()[0].tolist() == pytest.approx(wanted), "the hole takes no discount and holds no value"


def test_grpo_compares_what_whole_episodes_earned() -> None:
    cfg = config(GRPOConfig, grpo={"std_eps": 1e-4})
    batch, _, _ = grpo.advantages(by_hand(), grpo.initial_state(cfg), cfg)
    earned = torch.tensor([0.25 + 2.5, -1.0], dtype=torch.float64)
    a = ((earned - earned.mean()) / (earned.std() + 1e-4)).tolist()
    assert [row.tolist() for row in batch.advantage.rows()] == [
        pytest.approx([a[0], a[0], 0.0, 0.0, a[0]], abs=1e-5),
        pytest.approx([a[1], a[1]], abs=1e-5),
    ]
    assert by_hand().rewarded().tolist() == [2.75, -1.0]


def test_statistics_of_each_environment_apart() -> None:
    stats = {name: stat.mean for name, stat in episode_stats(by_hand()).items()}
    assert stats == {
        "environment/a/episodes": 1.0,
        "environment/a/failed": 0.0,
        "environment/a/reward": 2.5,
        "environment/a/turns": 2.0,
        "environment/a/truncated_fraction": 0.0,
        "environment/a/errors": 2.0,
        "environment/b/episodes": 1.0,
        "environment/b/failed": 0.0,
        "environment/b/reward": -1.0,
        "environment/b/turns": 1.0,
        "environment/b/truncated_fraction": 1.0,
    }
    one = by_hand().adding(environments=("a", "a"), episode_errors=("", "it broke"))
    stats = {name: stat.mean for name, stat in episode_stats(one).items()}
    assert stats["environment/a/reward"] == 2.5, "a failed episode is in no mean"
    assert (stats["environment/a/episodes"], stats["environment/a/failed"]) == (2.0, 1.0)
    assert episode_stats(by_hand().adding(environments=None)) == {}


def test_a_failed_episode_has_no_score_and_no_place_in_its_group() -> None:
    mix = EpisodeErrors(RewardMix([EpisodeReward()], [0.0]))
    assert mix.score(by_hand()).total.tolist() == [0.0, 0.0]
    assert mix.score(by_hand()).values.tolist() == [[2.5], [-1.0]]
    four = Rollout.concat([by_hand(), by_hand()]).adding(group=torch.zeros(4, dtype=torch.int64))
    broken = four.adding(
        episode_errors=("", "", "", "turn 1: it broke"),
        sequences=Sequences.build(
            [[1]] * 4,
            four.sequences.response_rows(),
            [*[r.tolist() for r in four.sequences.trained.rows()[:3]], [False] * 2],
        ),
    )
    scores = mix.score(broken)
    assert scores.errors == ("", "", "", "environment b: turn 1: it broke")
    assert scores.valid.tolist() == [True, True, True, False]
    assert scores.total[:3].tolist() == [0.0] * 3
    assert scores.total[3:].isnan().tolist() == [True]
    cfg = config(GRPOConfig)
    batch, _, _ = grpo.advantages(broken.adding(score=scores), grpo.initial_state(cfg), cfg)
    earned = torch.tensor([2.5, -1.0, 2.5], dtype=torch.float64)
    a = ((earned - earned.mean()) / (earned.std() + 1e-4)).tolist()
    assert [float(row[0]) for row in batch.advantage.rows()[:3]] == pytest.approx(a, abs=1e-5)
    assert not bool(batch.advantage.rows()[3].any())


# ---- whole steps


def roles_of(tiny: Tiny, folder: Path, names: Sequence[str]) -> tuple[RoleSet, LocalTransport]:
    value = load_scalar_model(ModelConfig(path=str(folder)), "value")
    objects = {
        "actor": Actor(tiny.engine, tiny.episodes, TEMPERATURE, lambda folder: nullcontext()),
        "reference": Reference(tiny.engine.snapshot(), TEMPERATURE, adapter=True),
        "reward": Reward(EpisodeErrors(RewardMix([EpisodeReward()], [0.0]))),
        "critic": Critic(ModelEngine(value, OptimConfig(lr=1e-3))),
    }
    transport = LocalTransport()
    return RoleSet({name: transport.handle(name, objects[name]) for name in names}), transport


@pytest.mark.parametrize("algorithm", [ppo, grpo], ids=["ppo", "grpo"])
def test_steps_run_with_a_failed_episode_among_them(algorithm: Any, tiny_llama_folder: Path) -> None:
    tiny = Tiny(tiny_llama_folder)
    name = algorithm.__name__.rpartition(".")[2]
    schema = PPOConfig if name == "ppo" else GRPOConfig
    rollout = {"max_new_tokens": 160, "temperature": TEMPERATURE, "prompts_per_step": 3, "samples_per_prompt": 4}
    cfg = config(schema, rollout=rollout, **{name: {"epochs": 1, "minibatches": 1}})
    roles, transport = roles_of(tiny, tiny_llama_folder, algorithm.ROLES)
    before = {n: w.detach().clone() for n, w in tiny.policy.model.named_parameters()}
    prompts = tiny.prompts(n=4, truths=(None, "broken", None))
    result = Synchronous(algorithm, transport, roles, cfg).step(prompts, algorithm.initial_state(cfg))
    stats = {n: s.mean for n, s in result.stats.items()}
    assert stats["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert stats["policy/logp_gap"] < 1e-5
    assert stats["kl/sequence"] == pytest.approx(0.0, abs=1e-4)
    errors = result.batch.episode_errors
    assert errors is not None
    assert any(errors)
    assert all(bool(error) <= (place // 4 == 1) for place, error in enumerate(errors))
    failed = torch.tensor([bool(error) for error in errors])
    assert not bool(result.batch.sequences.trained.select(failed.nonzero().squeeze(1)).flat.any())
    after = dict(tiny.policy.model.named_parameters())
    assert any(not torch.equal(before[n], after[n]) for n in before)
    assert all(bool(w.isfinite().all()) for w in after.values())


# ---- recipes


def recipe(folder: Path, *lines: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text("algorithm: grpo\nname: episodes\n" + "\n".join(lines) + "\n")
    return str(path)


ROWS = [{"prompt": f"the {i} of {j}", "truth": i, "environment": "sums" if i % 2 else "game"} for i in range(4)
        for j in range(3)]  # fmt: skip


def overrides(folder: Path, model: Path, rows: Sequence[Mapping[str, Any]] = ROWS) -> list[str]:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"output_dir={folder}",
        f"model.path={model}",
        f"data.train={data}",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=2",
        "rollout.max_new_tokens=64",
        "environment.turn_tokens=6",
        "environment.max_turns=2",
        "rollout.stop=['e','a','t','o']",
        "evaluation.prompts=3",
        "max_steps=2",
    ]


BOTH = "environment.functions={sums: calculator(role='user'), game: 'number_guessing(low=0, high=9)'}"


def test_a_mixture_runs_from_a_recipe_with_no_other_reward(tmp_path: Path, tiny_llama_folder: Path) -> None:
    settings = [*overrides(tmp_path, tiny_llama_folder), BOTH]
    loaded, _ = load_checked(recipe(tmp_path), settings)
    result = run_recipe(loaded, "plain")
    steps = [m for m in read_metrics(result.folder) if "policy/loss" in m]
    assert len(steps) == 2
    assert all("reward/source/environment" in m for m in steps)
    assert all(m["policy/logp_gap"] < 1e-4 for m in steps)


def test_a_mixture_goes_on_one_step_off_after_a_resume(tmp_path: Path, tiny_llama_folder: Path) -> None:
    """Episodes that were begun ahead are in the checkpoint with their columns: the rest is the same to the bit."""
    more = ["schedule.kind=one_step_off", "checkpoint.every=1", "checkpoint.keep=3"]
    settings = {s.partition("=")[0]: s for s in [*overrides(tmp_path, tiny_llama_folder), BOTH, *more]}
    loaded, _ = load_checked(recipe(tmp_path), list(settings.values()))
    folder = run_recipe(loaded, "plain").folder
    metrics = lasting(folder)
    assert [row["step"] for row in metrics if "policy/loss" in row] == [1, 2]
    weights = load_file(folder / "checkpoints/step_000002/actor/rank_00000.safetensors")
    shutil.rmtree(folder / "checkpoints/step_000002")
    shutil.rmtree(folder / "checkpoints" / "best", ignore_errors=True)
    (folder / "summary.json").unlink()
    assert resume_run(folder, "plain").summary["steps"] == 2
    assert lasting(folder) == metrics
    after = load_file(folder / "checkpoints/step_000002/actor/rank_00000.safetensors")
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], weights[name]) for name in weights)


def lasting(folder: Path) -> list[dict[str, Any]]:
    """Metrics without what depends on the clock or the machine."""
    return [{k: v for k, v in row.items() if not k.startswith(("time", "memory"))} for row in read_metrics(folder)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["schedule.kind=asynchronous", "schedule.partial_tokens=8"], "cannot be cut in the middle of an episode"),
        (["environment.turn_tokens=65"], "limits the whole episode"),
        (["environment.functions={'a.b': calculator}"], r"has the name 'a\.b'"),
        (["grpo.estimator=remax"], "not in the score of a greedy response"),
    ],
)
def test_what_cannot_work_with_episodes_is_refused(
    change: list[str], said: str, tmp_path: Path, tiny_llama_folder: Path
) -> None:
    settings = {s.partition("=")[0]: s for s in [*overrides(tmp_path, tiny_llama_folder), BOTH, *change]}
    with pytest.raises(ConfigError, match=said):
        load_checked(recipe(tmp_path), list(settings.values()))


def test_settings_of_episodes_have_no_effect_without_an_environment(tmp_path: Path, tiny_llama_folder: Path) -> None:
    settings = [*overrides(tmp_path, tiny_llama_folder), "reward.rules=[{function: 'length_range(low=2)'}]"]
    with pytest.raises(ConfigError, match=r"environment\.(turn_tokens|max_turns) has no effect"):
        load_checked(recipe(tmp_path), settings)


@pytest.mark.parametrize(
    ("rows", "functions", "said"),
    [
        (
            ROWS,
            "environment.functions={sum: calculator}",
            r"6 of \d+ rows name the environment '(game|sums)'|rows name",
        ),
        ([{"prompt": f"p{i}"} for i in range(9)], BOTH, "rows name no environment"),
        (ROWS, "environment.functions={sums: calculater}", r"Did you mean calculator\?"),
    ],
)
def test_rows_and_environments_must_fit_before_a_model_is_loaded(
    rows: list[dict[str, Any]], functions: str, said: str, tmp_path: Path, tiny_llama_folder: Path
) -> None:
    loaded, _ = load_checked(recipe(tmp_path), [*overrides(tmp_path, tiny_llama_folder, rows), functions])
    with pytest.raises((DataError, ConfigError), match=said):
        run_recipe(loaded, "plain")


def test_rows_that_name_an_environment_need_one(tmp_path: Path, tiny_llama_folder: Path) -> None:
    settings = [s for s in overrides(tmp_path, tiny_llama_folder) if not s.startswith("environment.")]
    loaded, _ = load_checked(recipe(tmp_path), [*settings, "reward.rules=[{function: 'length_range(low=2)'}]"])
    with pytest.raises(DataError, match=r"environment\.functions is empty"):
        run_recipe(loaded, "plain")


def test_with_one_environment_every_row_is_its() -> None:
    from tutelage.build.environments import with_environments
    from tutelage.data.prepare import Prepared

    prompts = Prompts(((1,), (2,)), ("a", "b"), (1, 2), (({"role": "user", "content": "x"},),) * 2)
    prepared: Any = Prepared(prompts, None, None, "", [], [])  # type: ignore[arg-type]
    cfg = config(GRPOConfig, environment={"functions": {"sums": "calculator"}})
    assert with_environments(cfg, prepared).train.environments == ("sums", "sums")
    assert with_environments(config(GRPOConfig), prepared).train.environments is None
