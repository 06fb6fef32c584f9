"""Tutelage's side of a row: the recipe, built as a run builds it, one step or one pass for each message.

python benchmarks/peers/tutelage_side.py SPECIFICATION.json
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from wire import Job, serve

from tutelage.algorithms import algorithm_of
from tutelage.build.data import batch_maker, stage_data, training_source
from tutelage.build.device import device
from tutelage.build.functions import with_rule_paths
from tutelage.build.generation import generating_with
from tutelage.build.kit import Facts, Kit
from tutelage.build.stages import build_stage
from tutelage.config import AnyConfig, load_checked
from tutelage.layout import Place
from tutelage.math.keyed import sample_key
from tutelage.rollout.inprocess.admission import Request
from tutelage.rollout.inprocess.engine import evaluation_mode
from tutelage.schedules import make_schedule
from tutelage.transport.local import LocalTransport
from tutelage.transport.roleset import RoleSet
from tutelage.types import Stats

GENERATING = ("grpo", "ppo")


def import_all(spec: dict[str, Any]) -> None:
    torch.set_num_threads(spec["threads"])


def load(spec: dict[str, Any]) -> Job:
    if spec["work"] == "generation":
        return generation(spec)
    loaded, _ = load_checked(spec["recipe"])
    return training(spec, with_rule_paths(loaded.config, loaded.recipe_path))


def settings_of(cfg: AnyConfig) -> dict[str, Any]:
    optim: Any = cfg.optim
    said = {
        "recipe": cfg.algorithm,
        "dtype": cfg.model.dtype,
        "micro-batch": f"up to {optim.tokens_per_micro_batch} tokens, packed",
        "optimiser": f"AdamW, lr {optim.lr:g}",
    }
    if cfg.algorithm in GENERATING:
        generating: Any = cfg
        said["rollouts"] = generating.rollout.engine
    return said


def device_peak() -> int:
    return torch.cuda.max_memory_allocated() if device() == "cuda" else 0


# ---- training


def training(spec: dict[str, Any], cfg: AnyConfig) -> Job:
    """Every run learns from the same rows: one pass over `rows` of them, or one step on the same prompts."""
    data = stage_data(cfg)
    stage = build_stage(cfg, data)
    place = Place(device=device())
    roles = stage.builder(stage.names, place).roles
    if cfg.algorithm in GENERATING:
        without_eos(roles["actor"])
    transport = LocalTransport(place)
    handles = RoleSet({name: transport.handle(name, role) for name, role in roles.items()})
    algorithm = algorithm_of(cfg)
    schedule = make_schedule(algorithm, transport, handles, cfg)
    make_batch = batch_maker(data.prepared.train, cfg)
    once = {}
    if cfg.algorithm == "dpo":
        start = time.perf_counter()
        stage.spec.evaluator(cfg, data, handles, Path(spec["scratch"]))
        once["reference logprobs of all pairs"] = time.perf_counter() - start
    indices = list(training_source(cfg, len(data.prepared.train))[0])
    indices = indices[: 1 if cfg.algorithm in GENERATING else spec["rows"] // spec["batch"]]
    at: dict[str, Any] = {"state": algorithm.initial_state(cfg), "step": 0}

    def run() -> dict[str, Any]:
        losses, tokens = [], 0
        for index in indices:
            result = schedule.advance(lambda index=index: make_batch(index, at["step"]), at["state"])
            at.update(state=result.state, step=at["step"] + 1)
            losses.append(loss_of(result.stats))
            tokens += trained_tokens(result.batch)
            if cfg.algorithm in GENERATING:
                require_lengths(result.batch.sequences.response_lens.tolist(), spec["new_tokens"])
        return {"losses": losses, "tokens": tokens}

    return Job(run, settings_of(cfg), device_peak, once)


def loss_of(stats: Stats) -> float:
    """Of the first role that learned."""
    return next(stat.mean for name, stat in stats.items() if name.endswith("/loss"))


def trained_tokens(batch: Any) -> int:
    sides = [getattr(batch, name, None) for name in ("chosen", "rejected")]
    every = [batch.sequences] if None in sides else sides
    return sum(int(sequences.tokens.lens.sum()) for sequences in every)


def without_eos(actor: Any) -> None:
    """Every response gets all its tokens, so that both sides do the same work."""
    actor.rollout.eos_ids = ()


def require_lengths(found: list[int], wanted: int | list[int]) -> None:
    expected = [wanted] * len(found) if isinstance(wanted, int) else wanted
    assert found == expected, f"responses have {found} tokens, {expected} were asked for"


# ---- generation alone


def generation(spec: dict[str, Any]) -> Job:
    """The in-process rollout engine as the recipe makes it, on the policy alone.

    A request of a length of its own is one that has all but so many of the most tokens behind it: the engine then
    samples what is left, as it does for a response that was cut and is gone on with.
    """
    loaded, _ = load_checked(spec["recipe"])
    cfg: Any = loaded.config
    kit = Kit(Facts(cfg, 1), ("actor",), Place(device=device()))
    rollout = generating_with(kit, kit.policy.model, nullcontext)
    rollout.eos_ids = ()
    lengths, longest = spec["lengths"], max(spec["lengths"])
    calls = {"step": 0}

    def run() -> dict[str, Any]:
        calls["step"] += 1
        requests = [
            Request(tuple(prompt), sample_key(spec["seed"], calls["step"], str(i), 0, "rollout"), str(i), longest - n)
            for i, (prompt, n) in enumerate(zip(spec["data"], lengths, strict=True))
        ]
        with torch.no_grad(), evaluation_mode(rollout.model), rollout.forward_context():
            batch = rollout.start(requests, rollout.params)
            while batch.busy:
                batch.step()
            tokens, logp = batch.tokens.cpu(), batch.logp.cpu()
        require_lengths([n - request.done for n, request in zip(batch.lens.tolist(), requests, strict=True)], lengths)
        assert tokens.shape == logp.shape == (len(lengths), longest)
        return {"tokens": sum(lengths)}

    settings = {"dtype": cfg.model.dtype, "batch": f"{cfg.rollout.tokens_in_flight} cached tokens at most"}
    return Job(run, {**settings, "lengths": "requests with all but so many tokens done, no EOS"}, device_peak)


if __name__ == "__main__":
    serve(import_all, load, "tutelage", "torch", "transformers")
