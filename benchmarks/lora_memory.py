"""Peak memory of PPO with four models: full copies, LoRA on copies, LoRA on one shared base, on one of 4 bits; beside
full SFT.

    python benchmarks/lora_memory.py                        a Llama of about 100 M random weights, built offline
    python benchmarks/lora_memory.py --model FOLDER         a Hugging Face folder, such as SmolLM2-135M-Instruct
    python benchmarks/lora_memory.py --sequences 16 --new-tokens 128 --markdown

Every row is a process of its own that imports, builds the roles of a recipe as a run does, and takes two steps; the
second is there since the optimiser's moments exist from the first update on.  Own MB is its peak resident size less its
size after imports.  On a GPU it is what was allocated there.

    predicted  bytes of weights (4), gradients (4) and Adam's two moments (8) of what is trained, and of weights (4) of
               what is frozen; counted from the shapes, before anything runs.
    rest       what the measured peak has above that: activations, logits of a chunk, cache of the rollouts, allocator.
    exported   the peak after the actor is written as a model folder besides, as a checkpoint does it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from measure import peak_rss
from transformers import AutoModelForCausalLM
from workload import build_tiny_folder

from tutelage.algorithms import ppo
from tutelage.algorithms.sft import SFTLoss
from tutelage.build.device import device
from tutelage.build.kit import Facts
from tutelage.build.roles import StageRoles
from tutelage.build.stages import STAGES
from tutelage.config import PPOConfig
from tutelage.config.common import ModelConfig, OptimConfig
from tutelage.engines.engine import ModelEngine
from tutelage.layout import Place
from tutelage.models.load import load_causal_lm, load_config, load_scalar_model
from tutelage.schedules import Synchronous
from tutelage.transport.local import LocalTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Demonstrations, Prompts, Sequences

CASES = ("sft", "packed", "shared", "copies", "full")
SAID = {
    "sft": "full SFT",
    "packed": "PPO, LoRA on one shared base in NF4",
    "shared": "PPO, LoRA on one shared base",
    "copies": "PPO, LoRA, a copy each",
    "full": "PPO, four full copies",
}
ROLES = ("actor", "critic", "reference", "reward")
STEPS = 2
PACKED_BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""Of a weight in NF4 with double quantisation; levels, 1 KB a matrix, left out."""


@dataclass(frozen=True)
class Work:
    """sequences   of a step, and of a mini-batch.
    prompt      tokens of each prompt.
    new_tokens  tokens of each response, at most.
    budget      tokens of a micro-batch.
    rank        of the adapters.
    """

    sequences: int = 8
    prompt: int = 64
    new_tokens: int = 64
    budget: int = 512
    rank: int = 16


@dataclass(frozen=True)
class Found:
    """Bytes: after imports, the peak of two steps, the peak with the actor's export.  tokens: of one step."""

    imports: int
    step: int
    exported: int
    tokens: int

    @property
    def own(self) -> int:
        return self.step - self.imports


@dataclass(frozen=True)
class Weights:
    """Numbers of weights: of the base, of one adapter on it, of the base's linear layers but the output head."""

    base: int
    adapter: int
    linear: int


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    work = Work(args.sequences, args.prompt, args.new_tokens, args.budget, args.rank)
    with tempfile.TemporaryDirectory() as name:
        folder = build_tiny_folder(Path(name) / "model", hidden=768, layers=12) if args.model == "random" else None
        print(report(folder or Path(args.model).expanduser(), Path(name), work, args.markdown))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random", help="random, or a Hugging Face model folder (default: random)")
    for key, value in asdict(Work()).items():
        parser.add_argument(f"--{key.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    return parser.parse_args(argv)


# ---- the table


def report(folder: Path, scratch: Path, work: Work, markdown: bool = False) -> str:
    """The table of all cases on the model of `folder`."""
    weights = counted(folder, work.rank)
    found = {}
    for case in CASES:
        reward = reward_folder(folder, scratch / f"reward-{case}", work.rank, packed=case == "packed")
        found[case] = measured(case, folder, reward, work)
    rows: list[tuple[str, ...]] = [
        ("work", "tokens", "predicted MB", "own MB", "rest MB", "exported MB", "of full SFT")
    ]
    for case in CASES:
        one, state = found[case], predicted(case, weights)
        exported, share = one.exported - one.imports, one.own / found["sft"].own
        sizes = (f"{size / 1e6:.0f}" for size in (state, one.own, one.own - state, exported))
        rows.append((SAID[case], str(one.tokens), *sizes, f"{share:.2f}"))
    ratio = found["full"].own / found["shared"].own
    further = found["full"].own / found["packed"].own
    told = f"four full copies take {ratio:.2f} times what LoRA on one shared base takes, {further:.2f} times with NF4"
    base = f"base {weights.base / 1e6:.1f} M weights, adapter {weights.adapter / 1e6:.2f} M (rank {work.rank})"
    lines = _markdown(rows) if markdown else _plain(rows)
    return "\n".join([f"{folder.name}: {base}, float32, {device()}; {work}", "", *lines, "", told])


def _plain(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = [[row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows]
    return ["  ".join(row) for row in cells]


def _markdown(rows: list[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|---|" + "---:|" * (len(rows[0]) - 1), *lines[1:]]


def counted(folder: Path, rank: int) -> Weights:
    """Counted on a model without storage: an adapter has rank x (inputs + outputs) of every linear layer."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(str(folder)))
    head = model.get_output_embeddings()
    linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    every = sum(p.numel() for p in model.parameters())
    return Weights(every, rank * sum(sum(w.shape) for w in linear), sum(w.numel() for w in linear))


def predicted(case: str, weights: Weights) -> int:
    """Bytes of weights, gradients and moments that are there when the first update ends.

    Roles take turns, and gradients are dropped after an update: of actor and critic the larger ones are there.  An
    untied output head belongs to the actor and the reference; heads of one output are left out.
    """
    base, adapter = weights.base, weights.adapter
    if case == "sft":
        return 16 * base
    if case == "full":
        return (12 + 12 + 4) * base + (4 + 4) * base
    if case == "copies":
        return 4 * base * 3 + (12 + 12 + 4) * adapter
    saved = weights.linear * (32 - PACKED_BITS) / 8 if case == "packed" else 0
    return 4 * base - round(saved) + (12 + 12 + 4 + 4) * adapter


# ---- one process


def reward_folder(folder: Path, target: Path, rank: int, *, packed: bool = False) -> Path:
    """A reward model that is an adapter on the model of `folder`: merged weights, and the adapter beside them."""
    cfg = ModelConfig(path=str(folder), lora_rank=rank, quantize="nf4" if packed else "none")
    model = load_scalar_model(cfg, "reward", "last")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=1e-3, generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(target)
    return target


def measured(case: str, folder: Path, reward: Path, work: Work) -> Found:
    """In a process of its own."""
    request = {"case": case, "folder": str(folder), "reward": str(reward), "work": asdict(work)}
    command = [sys.executable, str(Path(__file__).resolve()), "--request", json.dumps(request)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def peak() -> int:
    return torch.cuda.max_memory_allocated() if device() == "cuda" else peak_rss()


def own_memory(case: str, folder: str, reward: str, work: Work) -> Found:
    """In this process."""
    # Linux adds up what each processor counts a little later: a peak may be read lower than one before it
    imports = peak()
    learner, tokens = sft_steps(folder, work) if case == "sft" else ppo_steps(case, folder, reward, work)
    stepped = max(imports, peak())
    with tempfile.TemporaryDirectory() as name:
        learner.save_pretrained(Path(name) / "model")
    return Found(imports, stepped, max(stepped, peak()), tokens)


def optim(work: Work) -> OptimConfig:
    return OptimConfig(lr=1e-5, schedule="constant", tokens_per_micro_batch=work.budget)


def random_rows(folder: str, work: Work, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(load_config(folder).get_text_config().vocab_size)
    return torch.randint(0, vocabulary, (work.sequences, length), generator=generator).tolist()


def sft_steps(folder: str, work: Work) -> tuple[ModelEngine, int]:
    engine = ModelEngine(load_causal_lm(ModelConfig(path=folder), device=device()), optim(work))
    rows = random_rows(folder, work, work.prompt + work.new_tokens)
    sequences = Sequences.build([row[: work.prompt] for row in rows], [row[work.prompt :] for row in rows])
    batch = Demonstrations(sequences, tuple(str(i) for i in range(work.sequences)))
    for _ in range(STEPS):
        engine.step(batch, SFTLoss("token_mean"))
    return engine, int(sequences.tokens.lens.sum())


def ppo_config(case: str, folder: str, reward: str, work: Work) -> PPOConfig:
    """The critic starts from the policy in every case, so that the same is trained."""
    shared = case in ("shared", "packed")
    quantize = {"quantize": "nf4"} if case == "packed" else {}
    lora = {} if case == "full" else {"lora_rank": work.rank, "shared_base": shared, **quantize}
    settings: dict[str, Any] = {
        "model": {"path": folder, **lora},
        "data": {"train": "none"},
        "rollout": {"prompts_per_step": work.sequences, "max_new_tokens": work.new_tokens},
        "ppo": {"epochs": 1, "minibatches": 1},
        "critic": {"init": "policy"},
        "reward": {"model": reward, **({"shared_base": True} if shared else {})},
        "optim": optim(work).model_dump(),
    }
    return PPOConfig.model_validate(settings)


def ppo_steps(case: str, folder: str, reward: str, work: Work) -> tuple[Any, int]:
    cfg = ppo_config(case, folder, reward, work)
    built = StageRoles(Facts(cfg, updates=STEPS), STAGES["ppo"].makers)(ROLES, Place(device=device())).roles
    transport = LocalTransport()
    roles = RoleSet({name: transport.handle(name, role) for name, role in built.items()})
    schedule, state = Synchronous(ppo, transport, roles, cfg), ppo.initial_state(cfg)
    rows = random_rows(folder, work, work.prompt)
    ids = tuple(str(i) for i in range(work.sequences))
    prompts = Prompts(tuple(map(tuple, rows)), ids, (None,) * len(rows), ((),) * len(rows))
    results = [schedule.step(prompts, state) for _ in range(STEPS)]
    tokens = int(results[-1].batch.sequences.tokens.lens.sum())
    return built["actor"], tokens


if __name__ == "__main__":
    if sys.argv[1:2] == ["--request"]:
        asked = json.loads(sys.argv[2])
        work_asked = Work(**asked.pop("work"))
        print(json.dumps(asdict(own_memory(**asked, work=work_asked))))
    else:
        main()
