#!/usr/bin/env python3
"""The equality matrix: the same weights and batches under every layout give the same losses, gradients and samples.

    python scripts/equality.py [--layouts NAME ...] [--steps K] [--write docs/results/equality.md]

Rollouts and batches are recorded once, by one process; then every layout starts from identical weights and takes K
optimiser steps on them, for each stage and with and without packing.  What is compared with one process, in float32:

    loss       largest |difference| / |loss| over the steps
    gradient   ||difference|| / ||gradient|| of the first step, over all weights together
    weights    largest |difference| after K steps, in units of K lr (Adam amplifies rounding: a weight whose gradient is
               rounding noise moves by up to lr in either direction)
    samples    of 6 prompts x 2, the responses that are the same token for token

and the bytes of tensors that went through the driver while roles that run elsewhere were asked for logprobs and values.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tutelage.algorithms import ALGORITHMS
from tutelage.build.data import StageData, batch_maker, stage_data, training_source
from tutelage.build.stages import build_stage
from tutelage.build.transport import make_transport
from tutelage.config import load_checked
from tutelage.demo.tokenizer import build_tokenizer
from tutelage.layout import Built, Dispatch, Place
from tutelage.models.sharding import whole
from tutelage.reports.display import make_display
from tutelage.transport.roleset import RoleSet

LR = 1e-3
LOSS, GRADIENT, WEIGHTS = 2e-5, 2e-5, 4.0
"""Tolerances: relative, relative, in units of K lr."""
STAGES = ("sft", "reward_model", "dpo", "ppo")


@dataclass(frozen=True)
class Case:
    """A way to run: overrides of the recipe."""

    name: str
    overrides: tuple[str, ...]
    generates: bool = True


def on(devices: int, **axes: int) -> tuple[str, ...]:
    layout = "".join(f"{axis}: {size}, " for axis, size in axes.items()).rstrip(", ")
    return (
        "cluster.transport=ray",
        f"cluster.pools.main.devices={devices}",
        "cluster.pools.main.per_device=0.2",
        "cluster.start_timeout=120",
        *((f"cluster.layout={{default: {{{layout}}}}}",) if axes else ()),
    )


CASES = (
    Case("local", ()),
    Case("Ray x 1", on(1)),
    Case("Ray x 2", on(2)),
    Case("FSDP x 2", on(2, shard=2)),
    Case("FSDP x 4", on(4, shard=4)),
    Case("HSDP 2 x 2", on(4, replicate=2, shard=2)),
    Case("TP x 2", on(2, tensor=2)),
    Case("FSDP x TP 2 x 2", on(4, shard=2, tensor=2)),
    Case("Ulysses x 2", on(2, sequence=2)),
    Case("context x 2", on(2, context=2)),
    Case("PP x 2", on(2, pipeline=2), generates=False),
)


class Probe:
    """A role, and what the comparison reads of its engine."""

    DISPATCH: ClassVar[dict[str, Dispatch]] = {
        "generate": Dispatch.GENERATE,
        "logprobs": Dispatch.ROWS,
        "values": Dispatch.ROWS,
        "score": Dispatch.ROWS,
        "step": Dispatch.MINIBATCH,
        "gradients": Dispatch.MINIBATCH,
    }

    def __init__(self, role: Any) -> None:
        self.role = role
        engine = getattr(role, "engine", None)
        masters = {} if engine is None else engine.model.masters.masters
        self.initial = {name: master.detach().clone() for name, master in masters.items()}

    @torch.no_grad()
    def restart(self, budget: int) -> None:
        """The weights as they were, a new optimiser, and micro-batches of this many tokens."""
        engine = getattr(self.role, "engine", None)
        if engine is None:
            return
        for name, master in engine.model.masters.masters.items():
            master.copy_(self.initial[name])
        if engine._optimizer is not None:
            engine._optimizer.state.clear()
        engine.updates, engine.tokens_per_micro_batch = 0, budget

    def generate(self, prompts: Any) -> Any:
        return self.role.generate(prompts)

    def logprobs(self, rollout: Any) -> Any:
        return self.role.logprobs(rollout)

    def values(self, rollout: Any) -> Any:
        return self.role.values(rollout)

    def score(self, rollout: Any) -> Any:
        return self.role.score(rollout)

    def step(self, batch: Any, loss: Any) -> Any:
        return self.role.step(batch, loss)

    def gradients(self, batch: Any, loss: Any) -> dict[str, Tensor]:
        return self._everywhere(self.role.engine.gradients(batch, loss))

    def weights(self) -> dict[str, Tensor]:
        masters = self.role.engine.model.masters.masters
        return self._everywhere({name: master.detach() for name, master in masters.items()})

    def nothing(self) -> None:
        """Answers when everything sent before is done."""

    def _everywhere(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors by name, of all ranks: a pipeline stage holds its own blocks alone."""
        mine = {name: whole(tensor).clone().cpu() for name, tensor in tensors.items()}
        if not torch.distributed.is_initialized():
            return mine
        found: list[dict[str, Tensor]] = [{} for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather_object(found, mine)
        return {name: tensor for part in found for name, tensor in part.items()}


@dataclass(frozen=True)
class Probes:
    """Builds the roles of all stages in one process; roles are named STAGE.ROLE."""

    builders: dict[str, Callable[..., Built]]

    def __call__(self, names: tuple[str, ...], place: Place) -> Built:
        roles: dict[str, object] = {}
        for stage, builder in self.builders.items():
            own = tuple(name.partition(".")[2] for name in names if name.startswith(f"{stage}."))
            layouts = {role: place.layout(f"{stage}.{role}") for role in own}
            built = builder(own, Place(place.rank, place.world, place.device, layouts, place.progress))
            roles |= {f"{stage}.{role}": Probe(made) for role, made in built.roles.items()}
        return Built(roles)


@dataclass(frozen=True)
class Update:
    """One optimiser update of one role."""

    role: str
    batch: Any
    loss: Any


class Recorder:
    """Stands where an algorithm's roles stand and keeps what it is told to learn from."""

    def __init__(self) -> None:
        self.updates: list[Update] = []

    def update(self, batch: Any, **losses: Any) -> dict[str, Any]:
        self.updates += [Update(role, batch, loss) for role, loss in losses.items()]
        return {}


@dataclass
class Workload:
    """Settings, data and recorded updates of every stage."""

    configs: dict[str, Any]
    data: dict[str, StageData]
    updates: dict[str, list[Update]] = field(default_factory=dict)
    prompts: Any = None


@dataclass
class Outcome:
    """What a case did: by (stage, role) losses, first gradient, last weights; samples; bytes through the driver."""

    losses: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    gradients: dict[tuple[str, str], dict[str, Tensor]] = field(default_factory=dict)
    weights: dict[tuple[str, str], dict[str, Tensor]] = field(default_factory=dict)
    samples: list[list[int]] | None = None
    driver_bytes: int | None = None


def make_model(folder: Path) -> None:
    """4 blocks, 4 heads, 2 key/value heads, tied embeddings; weights wide enough that a wrong mask shows."""
    tokenizer = build_tokenizer(["tea cats rain bread music what is why tell me of it the a . ?"])
    config = LlamaConfig(
        vocab_size=len(tokenizer) + len(tokenizer) % 2,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.08,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_data(folder: Path) -> dict[str, Path]:
    words = ("tea", "cats", "rain", "bread", "music")
    prompts = [f"{ask} {word}" for ask in ("what is", "why", "tell me of") for word in words]
    answers = {p: (f"it is {p.split()[-1]} . " * (1 + i % 4)).strip() for i, p in enumerate(prompts)}
    rows = {
        "sft": [{"prompt": p, "completion": answers[p]} for p in prompts],
        "pairs": [{"prompt": p, "chosen": answers[p], "rejected": "me " * (1 + i % 3)} for i, p in enumerate(prompts)],
        "ppo": [{"prompt": p} for p in prompts],
    }
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    pairs = folder / "pairs.jsonl"
    return {"sft": folder / "sft.jsonl", "reward_model": pairs, "dpo": pairs, "ppo": folder / "ppo.jsonl"}


def settings(stage: str, folder: Path, steps: int, extra: tuple[str, ...]) -> Any:
    """The config of a stage."""
    own = {
        "sft": ("sft.batch_size=5",),
        "reward_model": ("reward_model.batch_size=5",),
        "dpo": ("dpo.batch_size=5",),
        "ppo": (
            "rollout.prompts_per_step=7",
            "rollout.samples_per_prompt=2",
            "rollout.max_new_tokens=12",
            "ppo.epochs=1",
            f"ppo.minibatches={steps}",
            "reward.rules=[{function: 'length_range(low=2)'}]",
        ),
    }[stage]
    recipe = folder / f"{stage}.yaml"
    recipe.write_text(f"algorithm: {stage}\n")
    data = {"sft": "sft", "reward_model": "pairs", "dpo": "pairs", "ppo": "ppo"}[stage]
    common = (
        f"model.path={folder / 'model'}",
        "model.chat_template=plain",
        f"data.train={folder / f'{data}.jsonl'}",
        "data.eval_fraction=0",
        f"optim.lr={LR}",
        "optim.schedule=constant",
    )
    return load_checked(str(recipe), [*common, *own, *extra])[0].config


def workload(folder: Path, case: Case, steps: int) -> Workload:
    configs = {stage: settings(stage, folder, steps, case.overrides) for stage in STAGES}
    return Workload(configs, {stage: stage_data(cfg) for stage, cfg in configs.items()})


def started(work: Workload) -> tuple[Any, dict[str, RoleSet]]:
    """The transport of a case, and the roles of each stage on it."""
    stages = {name: build_stage(cfg, work.data[name]) for name, cfg in work.configs.items()}
    names = tuple(f"{name}.{role}" for name, stage in stages.items() for role in stage.names)
    transport = make_transport(work.configs["ppo"], make_display("plain", 0, "equality", stream=sys.stderr))
    torch.manual_seed(0)
    handles, _ = transport.start(Probes({name: stage.builder for name, stage in stages.items()}), names)
    sets = {name: RoleSet({role: handles[f"{name}.{role}"] for role in stage.names}) for name, stage in stages.items()}
    return transport, sets


def record(work: Workload, transport: Any, roles: dict[str, RoleSet], steps: int) -> None:
    """The batches of every stage, and what the algorithm wants learned from them."""
    for name, cfg in work.configs.items():
        algorithm, state = ALGORITHMS[name], ALGORITHMS[name].initial_state(cfg)
        make, train = batch_maker(work.data[name].prepared.train, cfg), work.data[name].prepared.train
        source = iter(training_source(cfg, len(train))[0])
        recorder = Recorder()
        for step in range(1 if name == "ppo" else steps):
            batch = make(next(source), step)
            if name == "ppo":
                work.prompts = batch
            collected = algorithm.collect(transport.put(batch), roles[name], cfg)
            scored, after, _ = transport.call(algorithm.advantages, collected, state, cfg, outputs=3)
            algorithm.learn(scored.gather(), recorder, cfg, state)
            state = after.gather()
        work.updates[name] = recorder.updates


def sampled(work: Workload, transport: Any, ppo: RoleSet, out: Outcome) -> None:
    """The responses, and what passed through the driver when the whole of collect was asked for."""
    rollout = ppo.actor.generate(transport.put(work.prompts)).gather()
    out.samples = rollout.sequences.response_rows()
    before = getattr(transport, "driver_bytes", 0)
    ALGORITHMS["ppo"].collect(transport.put(work.prompts), ppo, work.configs["ppo"])
    for role in ppo.names():
        getattr(ppo, role).nothing().gather()
    out.driver_bytes = getattr(transport, "driver_bytes", 0) - before


def trained(work: Workload, roles: dict[str, RoleSet], budget: int) -> Outcome:
    """Every stage's recorded updates from the same weights; budget: tokens of a micro-batch, 1: each item alone."""
    out = Outcome()
    for stage, updates in work.updates.items():
        for role in dict.fromkeys(update.role for update in updates):
            getattr(roles[stage], role).restart(budget).gather()
        for update in updates:
            key, role = (stage, update.role), getattr(roles[stage], update.role)
            if key not in out.gradients:
                out.gradients[key] = role.gradients(update.batch, update.loss).gather()
            out.losses.setdefault(key, []).append(role.step(update.batch, update.loss).gather()["loss"].mean)
        for role in dict.fromkeys(update.role for update in updates):
            out.weights[stage, role] = getattr(roles[stage], role).weights().gather()
    return out


def relative(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys(), sorted(set(ours) ^ set(theirs))[:4]
    difference = sum(float((ours[n] - theirs[n]).double().square().sum()) for n in ours) ** 0.5
    return difference / sum(float(w.double().square().sum()) for w in theirs.values()) ** 0.5


def compare(case: Case, packed: bool, out: Outcome, base: Outcome, steps: int) -> list[dict[str, Any]]:
    rows = []
    for (stage, role), losses in out.losses.items():
        key, truth = (stage, role), base.losses[stage, role]
        loss = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(losses, truth, strict=True))
        gradient = relative(out.gradients[key], base.gradients[key])
        theirs = base.weights[key]
        moved = max(float((w - theirs[n]).abs().max()) for n, w in out.weights[key].items()) / (steps * LR)
        rows.append(
            {
                "layout": case.name,
                "packed": packed,
                "stage": stage,
                "role": role,
                "loss": loss,
                "gradient": gradient,
                "weights": moved,
                "equal": loss <= LOSS and gradient <= GRADIENT and moved <= WEIGHTS,
            }
        )
    return rows


def same_samples(out: Outcome, base: Outcome) -> str:
    if out.samples is None or base.samples is None:
        return "n/a"
    same = sum(a == b for a, b in zip(out.samples, base.samples, strict=True))
    return f"{same}/{len(base.samples)}"


def table(rows: list[dict[str, Any]], facts: list[tuple[str, str, int | None, float]]) -> str:
    lines = [
        "| layout | rows | stage.role | loss | gradient | weights / (K lr) | equal |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        how = "packed" if row["packed"] else "one by one"
        lines.append(
            f"| {row['layout']} | {how} | {row['stage']}.{row['role']} | {row['loss']:.1e} | {row['gradient']:.1e} | "
            f"{row['weights']:.3f} | {'yes' if row['equal'] else 'NO'} |"
        )
    lines += ["", "| layout | same samples | bytes through the driver in collect | seconds |", "|---|---|---|---|"]
    for name, same, moved, seconds in facts:
        lines.append(f"| {name} | {same} | {'n/a' if moved is None else moved} | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layouts", nargs="*", default=[], help=f"of {', '.join(c.name for c in CASES)}; default: all")
    parser.add_argument("--steps", type=int, default=3, help="optimiser steps of every stage")
    parser.add_argument("--write", type=Path, help="put the table into this file, below its marker line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    facts: list[tuple[str, str, int | None, float]] = []
    base: dict[bool, Outcome] = {}
    first = Outcome()
    recorded: Workload | None = None
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(folder / "model")
        write_data(folder)
        for case in CASES:
            if case.name != "local" and args.layouts and case.name not in args.layouts:
                continue
            start, out = time.perf_counter(), Outcome()
            work = workload(folder, case, args.steps)
            transport, roles = started(work)
            try:
                if recorded is None:
                    record(work, transport, roles, args.steps)
                    recorded = work
                work.updates, work.prompts = recorded.updates, recorded.prompts
                if case.generates:
                    sampled(work, transport, roles["ppo"], out)
                found = {packed: trained(work, roles, budget) for packed, budget in ((True, 4096), (False, 1))}
            finally:
                transport.close()
            if not base:
                base, first = found, out
            compared = [
                row for packed, one in found.items() for row in compare(case, packed, one, base[packed], args.steps)
            ]
            rows += compared
            facts.append((case.name, same_samples(out, first), out.driver_bytes, time.perf_counter() - start))
            bad = [f"{row['stage']}.{row['role']}" for row in compared if not row["equal"]]
            print(f"{case.name}: {bad or 'all equal'}, samples {facts[-1][1]} ({facts[-1][3]:.0f} s)", flush=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, float32"
    text = f"{args.steps} steps, lr {LR:g}, seed 0, {machine}.\n\n{table(rows, facts)}\n"
    print(text)
    if args.write:
        head = args.write.read_text().partition(MARKER)[0] if args.write.exists() else ""
        args.write.write_text(f"{head}{MARKER}\n{text}")
    alike = all(same in ("n/a", facts[0][1]) for _, same, _, _ in facts)
    return 0 if alike and all(row["equal"] for row in rows) else 1


MARKER = "<!-- written by scripts/equality.py -->"

if __name__ == "__main__":
    raise SystemExit(main())
