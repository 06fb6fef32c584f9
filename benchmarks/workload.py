"""The stages that are measured: the package's own engines, losses and rollouts on synthetic tokens.

Shapes: B sequences, N tokens, R response tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from counting import Weights, count_weights, forward_flops, ppo_step_flops, update_flops
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tutelage.algorithms import ppo
from tutelage.algorithms.ppo import PolicyLoss, ValueLoss
from tutelage.algorithms.reward_model import PairLoss
from tutelage.algorithms.sft import SFTLoss
from tutelage.build.device import device
from tutelage.config import PPOConfig, RewardModelConfig
from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.demo.language import every_sentence
from tutelage.demo.tokenizer import build_tokenizer
from tutelage.engines.engine import ModelEngine
from tutelage.errors import ModelError
from tutelage.models.attention import NAME as PACKED_ATTENTION
from tutelage.models.language_model import LanguageModel
from tutelage.models.load import load_causal_lm, load_config, load_scalar_model
from tutelage.models.trunk import Trunk
from tutelage.protocols import Loss
from tutelage.rewards.mix import RewardMix
from tutelage.roles.actor import Actor
from tutelage.roles.critic import Critic
from tutelage.roles.reference import Reference
from tutelage.roles.reward import Reward
from tutelage.rollout.inprocess.engine import InProcessRollout
from tutelage.rollout.sampling import SamplingParams
from tutelage.schedules import Synchronous
from tutelage.transport.local import LocalTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Demonstrations, Pairs, Prompts, Ragged, Rollout, Sequences

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Sizes:
    """Lengths are drawn uniformly, both ends included.

    sequences   B of every stage; the reward model's update has B / 2 pairs.
    new_tokens  of every sampled response: nothing ends one early, so that a step's work is known.
    ragged      lengths of the `ragged_sequences` that are run packed and padded, the longest and the shortest included.
    """

    sequences: int = 16
    prompt: tuple[int, int] = (20, 60)
    response: tuple[int, int] = (30, 90)
    new_tokens: int = 48
    ragged: tuple[int, int] = (20, 400)
    ragged_sequences: int = 16
    seed: int = 0


@dataclass(frozen=True)
class Stage:
    """run: once; tokens: real tokens of a run; flops: its model FLOPs (see `counting`).

    less: what runs before it, and whose time is subtracted from its own.
    positions: tokens that the output layer would see if all of a pass went through it at once; 0 where it has none.
    """

    name: str
    run: Callable[[], object]
    tokens: int
    flops: int
    less: Callable[[], object] | None = None
    positions: int = 0


def build_tiny_folder(dest: Path, hidden: int = 128, layers: int = 4) -> Path:
    """The demo's tokenizer and a Llama with random weights (0.9 M at the default size: twice the demo's depth and
    width), with a context of 1024."""
    tokenizer = build_tokenizer(every_sentence())
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(dest)
    tokenizer.save_pretrained(dest)
    return dest


class TokenScores:
    """A reward model of the policy's size on the policy's own tokens; implements `RewardSource`."""

    name = "reward_model"

    def __init__(self, engine: ModelEngine) -> None:
        self.engine = engine

    def score(self, rollout: Rollout) -> Tensor:
        return self.engine.scores(rollout.sequences).cpu()


class Workload:
    """Every model is loaded when a stage first needs it, so a process that runs one stage holds what that one needs."""

    def __init__(self, folder: Path, sizes: Sizes, dtype: Dtype = "float32") -> None:
        self.sizes = sizes
        self.model_cfg = ModelConfig(path=str(folder), dtype=dtype)
        self.optim = OptimConfig(lr=1e-6, schedule="constant")
        self.largest_logits = [0, 0]
        """Rows and columns of the largest output of the policy's output layer so far."""
        self.cfg = PPOConfig(
            model=self.model_cfg,
            data={"train": "synthetic"},
            reward={"model": str(folder)},
            rollout={"prompts_per_step": sizes.sequences, "max_new_tokens": sizes.new_tokens},
            ppo={"epochs": 1, "minibatches": 1},
            optim=self.optim,
        )

    # ---- models ----

    @cached_property
    def policy(self) -> ModelEngine:
        model = load_causal_lm(self.model_cfg, device=device())
        head, largest = model.model.get_output_embeddings(), self.largest_logits

        def watch(module: Any, args: Any, logits: Tensor) -> None:
            rows, columns = logits.numel() // logits.shape[-1], logits.shape[-1]
            if rows * columns > largest[0] * largest[1]:
                largest[:] = rows, columns

        head.register_forward_hook(watch)
        return ModelEngine(model, self.optim)

    @property
    def language_model(self) -> LanguageModel:
        assert isinstance(self.policy.model, LanguageModel)
        return self.policy.model

    @cached_property
    def critic(self) -> ModelEngine:
        return ModelEngine(load_scalar_model(self.model_cfg, "value", "last", device=device()), self.optim)

    @cached_property
    def reward_in_training(self) -> ModelEngine:
        return ModelEngine(load_scalar_model(self.model_cfg, "reward", "last", device=device()), self.optim)

    @cached_property
    def roles(self) -> RoleSet:
        """The four roles of PPO, through the local transport."""
        policy = self.policy
        frozen = ModelEngine.frozen(load_scalar_model(self.model_cfg, "reward", "last", device=device()), self.optim)
        roles = {
            "actor": Actor(policy, self.rollouts(self.sizes.new_tokens), 1.0, lambda folder: nullcontext()),
            "critic": Critic(self.critic),
            "reference": Reference(policy.snapshot(), 1.0, adapter=True),
            "reward": Reward(RewardMix([TokenScores(frozen)], [1.0])),
        }
        return RoleSet({name: self.transport.handle(name, role) for name, role in roles.items()})

    @cached_property
    def transport(self) -> LocalTransport:
        return LocalTransport()

    def rollouts(self, new_tokens: int) -> InProcessRollout:
        model, params = self.language_model, SamplingParams(max_new_tokens=new_tokens)
        context: Callable[[], AbstractContextManager[Any]] = self.policy.forward_context
        return InProcessRollout(model.model, model.tokenizer, (), params, seed=self.sizes.seed, forward_context=context)

    @cached_property
    def config(self) -> Any:
        return load_config(self.model_cfg.path)

    @cached_property
    def weights(self) -> Weights:
        """Counted on a model without storage."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config)
        return count_weights(model.base_model, model.get_output_embeddings())

    # ---- batches ----

    def _uniform(self, bounds: tuple[int, int], count: int, salt: int) -> list[int]:
        generator = torch.Generator().manual_seed(1000 * self.sizes.seed + salt)
        return torch.randint(bounds[0], bounds[1] + 1, (count,), generator=generator).tolist()

    def _sequences(self, prompt_lens: list[int], response_lens: list[int], salt: int) -> Sequences:
        generator = torch.Generator().manual_seed(1000 * self.sizes.seed + salt)

        def row(length: int) -> list[int]:
            return torch.randint(0, self.config.vocab_size, (length,), generator=generator).tolist()

        return Sequences.build([row(n) for n in prompt_lens], [row(n) for n in response_lens])

    def sequences(self, salt: int = 0) -> Sequences:
        """The batch of every stage: B prompts with responses; other responses to the same prompts for another salt."""
        count = self.sizes.sequences
        prompts = self._uniform(self.sizes.prompt, count, 1)
        return self._sequences(prompts, self._uniform(self.sizes.response, count, 2 + salt), 3 + salt)

    def demonstrations(self) -> Demonstrations:
        sequences = self.sequences()
        return Demonstrations(sequences, tuple(str(i) for i in range(len(sequences))))

    def ragged_demonstrations(self) -> Demonstrations:
        """Sequences of very different lengths, a quarter of each a prompt."""
        (low, high), count = self.sizes.ragged, self.sizes.ragged_sequences
        lens = [low, high, *self._uniform((low, high), count - 2, 4)]
        prompts = [max(1, n // 4) for n in lens]
        sequences = self._sequences(prompts, [n - p for n, p in zip(lens, prompts, strict=True)], 5)
        return Demonstrations(sequences, tuple(str(i) for i in range(count)))

    def pairs(self) -> Pairs:
        """B / 2 pairs, so that B sequences are run."""
        half = torch.arange(self.sizes.sequences // 2)
        chosen, rejected = self.sequences().select(half), self.sequences(salt=10).select(half)
        return Pairs(chosen, rejected, torch.zeros(len(half)), tuple(str(int(i)) for i in half))

    def prompts(self) -> Prompts:
        rows = self.sequences().prompt_rows()
        ids = tuple(str(i) for i in range(len(rows)))
        return Prompts(tuple(map(tuple, rows)), ids, (None,) * len(rows), ((),) * len(rows))

    def scored_rollout(self) -> Rollout:
        """Responses as a policy update finds them; what was computed on them is drawn at random."""
        sequences = self.sequences()
        count, lens = len(sequences), sequences.response_lens
        generator = torch.Generator().manual_seed(1000 * self.sizes.seed + 6)

        def column(extra: int = 0, scale: float = 1.0) -> Ragged:
            size = int((lens + extra).sum())
            return Ragged(scale * torch.randn(size, generator=generator), lens + extra)

        old_logp = Ragged(torch.full((int(lens.sum()),), -float(torch.tensor(self.config.vocab_size).log())), lens)
        return Rollout(
            sequences=sequences,
            rollout_logp=old_logp,
            finished=torch.ones(count, dtype=torch.bool),
            prompt_ids=tuple(str(i) for i in range(count)),
            samples=torch.zeros(count, dtype=torch.int64),
            group=torch.arange(count),
            truths=(None,) * count,
            messages=((),) * count,
            texts=("",) * count,
            weights_version=torch.zeros(count, dtype=torch.int64),
            old_logp=old_logp,
            ref_logp=old_logp,
            value=column(extra=1, scale=0.1),
            advantage=column(),
            ret=column(),
        )

    # ---- stages ----

    def _update(self, name: str, engine: ModelEngine, batch: Any, loss: Loss, head: bool) -> Stage:
        sequences: Sequences = batch.sequences
        tokens = int(sequences.tokens.lens.sum())
        flops = update_flops(self.weights, tokens, int(sequences.response_lens.sum()) if head else 0)
        return Stage(name, lambda: engine.step(batch, loss), tokens, flops, positions=tokens if head else 0)

    def sft(self) -> Stage:
        return self._update("sft", self.policy, self.demonstrations(), SFTLoss("token_mean"), head=True)

    def reward_model(self) -> Stage:
        cfg = RewardModelConfig(model=self.model_cfg, data={"train": "synthetic"})
        return self._update("reward_model", self.reward_in_training, self.pairs(), PairLoss.of(cfg), head=False)

    def actor(self) -> Stage:
        return self._update("actor", self.policy, self.scored_rollout(), PolicyLoss(self.cfg, 0.05), head=True)

    def critic_update(self) -> Stage:
        return self._update("critic", self.critic, self.scored_rollout(), ValueLoss(self.cfg), head=False)

    def prefill(self) -> Stage:
        """Prompts into the cache, and one token sampled for each."""
        prompts, engine = self.prompts(), self.rollouts(1)
        tokens = sum(map(len, prompts.tokens))
        return Stage(
            "prefill", lambda: engine.generate(prompts), tokens, forward_flops(self.weights, tokens, len(prompts))
        )

    def decode(self) -> Stage:
        """Every token after the first: a whole generation less its prefill."""
        prompts, whole, first = self.prompts(), self.rollouts(self.sizes.new_tokens), self.rollouts(1)
        tokens = len(prompts) * (self.sizes.new_tokens - 1)
        flops = forward_flops(self.weights, tokens, tokens)
        return Stage("decode", lambda: whole.generate(prompts), tokens, flops, less=lambda: first.generate(prompts))

    def logprobs(self) -> Stage:
        engine, sequences = self.policy, self.sequences()
        tokens, responses = int(sequences.tokens.lens.sum()), int(sequences.response_lens.sum())
        flops = forward_flops(self.weights, tokens, responses)
        return Stage("logprobs", lambda: engine.logprobs(sequences, 1.0), tokens, flops, positions=tokens)

    def ppo_step(self) -> Stage:
        """Rollouts, logprobs of policy and reference, values, scores, and one update of actor and critic."""
        prompts, roles, cfg = self.prompts(), self.roles, self.cfg
        schedule, state = Synchronous(ppo, self.transport, roles, cfg), ppo.initial_state(cfg)
        prompt_lens = [len(p) for p in prompts.tokens]
        new = self.sizes.new_tokens
        flops = ppo_step_flops(self.weights, prompt_lens, new, cfg.ppo.epochs)
        return Stage("ppo_step", lambda: schedule.step(prompts, state), sum(prompt_lens) + len(prompts) * new, flops)

    def sft_packed(self) -> Stage:
        """The ragged batch as the engine runs it."""
        if self.language_model.trunk.layout != "packed":
            raise ModelError(
                "this architecture cannot be packed", fix="leave out --stage sft_packed and --stage sft_padded"
            )
        return self._update("sft_packed", self.policy, self.ragged_demonstrations(), SFTLoss("token_mean"), head=True)

    def sft_padded(self) -> Stage:
        """The same batch as right-padded rows through the model's own attention; tokens and FLOPs are the real ones."""
        packed = self.sft_packed()

        def run() -> None:
            with padded_layout(self.language_model.trunk):
                packed.run()

        return Stage("sft_padded", run, packed.tokens, packed.flops, positions=packed.positions)


@contextmanager
def padded_layout(trunk: Trunk) -> Iterator[None]:
    trunk.layout = "padded"
    trunk.model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        trunk.layout = "packed"
        trunk.model.set_attn_implementation(PACKED_ATTENTION)


STAGES: dict[str, Callable[[Workload], Stage]] = {
    "sft": Workload.sft,
    "reward_model": Workload.reward_model,
    "prefill": Workload.prefill,
    "decode": Workload.decode,
    "logprobs": Workload.logprobs,
    "actor": Workload.actor,
    "critic": Workload.critic_update,
    "ppo_step": Workload.ppo_step,
    "sft_packed": Workload.sft_packed,
    "sft_padded": Workload.sft_padded,
}
