"""Where the time of a PPO and a GRPO step goes: prefill, decode, sampling, each role's passes, optimiser, Python.

    python benchmarks/profile_steps.py --model SMOLLM2 --reward-model MINILM --hh HH.jsonl.gz --gsm8k GSM8K.jsonl.gz
    python benchmarks/profile_steps.py --quick

Each step runs three times: once uncounted; once with the clocks of the transport alone, which say how long every call
of a role takes; once under torch.profiler, whose events say how each call's time is shared out.  The table has the
seconds of the second run, split by the shares of the third: the profiler's own cost makes the small parts look larger.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from peers.table import markdown  # noqa: E402

from tutelage.algorithms import algorithm_of  # noqa: E402
from tutelage.build.data import batch_maker, stage_data, training_source  # noqa: E402
from tutelage.build.device import device  # noqa: E402
from tutelage.build.functions import with_rule_paths  # noqa: E402
from tutelage.build.stages import build_stage  # noqa: E402
from tutelage.config import load_checked  # noqa: E402
from tutelage.layout import Place  # noqa: E402
from tutelage.schedules import make_schedule  # noqa: E402
from tutelage.transport.local import LocalTransport  # noqa: E402
from tutelage.transport.roleset import RoleSet  # noqa: E402

CALL, PREFILL, DECODE = "call: ", "prefill", "decode"
BACKWARD, OPTIMISER, OPERATORS, PYTHON = "backward", "optimiser", "operators", "Python and other"
OPERATOR_NAMES = {"generate": "sampling and cache", "step": "forward and loss", "logprobs": "forward"}


class Ranged:
    """A role whose calls are ranges of the profiler, by name."""

    def __init__(self, name: str, role: Any) -> None:
        self._name, self._role = name, role

    def __getattr__(self, method: str) -> Any:
        found = getattr(self._role, method)
        if method.startswith("_") or not callable(found):
            return found
        label = f"{CALL}{self._name}.{method}"

        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function(label):
                return found(*args, **kwargs)

        return call


class Ranges:
    """Forward passes of generation as ranges: a pass on one token of each row is a decode step, any other prefill."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.open: list[Any] = []
        self.handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end),
        ]

    def _begin(self, module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        decoding = tokens is not None and tokens.ndim == 2 and tokens.shape[1] == 1
        self.open.append(record_function(DECODE if decoding else PREFILL))
        self.open[-1].__enter__()

    def _end(self, module: Any, args: Any, output: Any) -> None:
        self.open.pop().__exit__(None, None, None)

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


@dataclass
class Built:
    """A recipe, ready to take steps.  step: one, always on the same prompts."""

    step: Callable[[], Any]
    transport: LocalTransport
    generator: torch.nn.Module


def build(spec: Mapping[str, Any]) -> Built:
    loaded, _ = load_checked(spec["recipe"])
    cfg = with_rule_paths(loaded.config, loaded.recipe_path)
    data = stage_data(cfg)
    stage = build_stage(cfg, data)
    place = Place(device=device())
    roles: dict[str, Any] = dict(stage.builder(stage.names, place).roles)
    roles["actor"].rollout.eos_ids = ()  # every response gets all its tokens
    transport = LocalTransport(place)
    handles = RoleSet({name: transport.handle(name, Ranged(name, role)) for name, role in roles.items()})
    algorithm = algorithm_of(cfg)
    schedule = make_schedule(algorithm, transport, handles, cfg)
    index = next(iter(training_source(cfg, len(data.prepared.train))[0]))
    make_batch = batch_maker(data.prepared.train, cfg)
    at: dict[str, Any] = {"state": algorithm.initial_state(cfg), "step": 0}

    def step() -> None:
        result: Any = schedule.advance(lambda: make_batch(index, at["step"]), at["state"])
        at.update(state=result.state, step=at["step"] + 1)

    return Built(step, transport, roles["actor"].rollout.model)


# ---- sharing out


def shares(events: Sequence[Any]) -> dict[str, dict[str, float]]:
    """{role.method: {part: share}} of the calls' time, from the profiler's tree of events."""
    found: dict[str, dict[str, float]] = {}
    for call in (event for event in events if event.name.startswith(CALL)):
        parts = found.setdefault(call.name.removeprefix(CALL), defaultdict(float))
        whole, spent = call.time_range.elapsed_us(), 0.0
        for child in call.cpu_children:
            took = child.time_range.elapsed_us()
            parts[part_of(child.name)] += took
            spent += took
        parts[PYTHON] += max(0.0, whole - spent)
    return {name: {part: us / sum(parts.values()) for part, us in parts.items()} for name, parts in found.items()}


def part_of(name: str) -> str:
    if name in (PREFILL, DECODE):
        return name
    if name.startswith("autograd::engine"):
        return BACKWARD
    return OPTIMISER if name.startswith("Optimizer.step") else OPERATORS


def breakdown(
    seconds: Mapping[tuple[str, str], float], parts: Mapping[str, Mapping[str, float]], whole: float
) -> list[list[str]]:
    """Rows: call, part, seconds, share of the step; last what no call took."""
    rows, spent = [], 0.0
    for (role, method), took in sorted(seconds.items(), key=lambda item: -item[1]):
        spent += took
        split = parts.get(f"{role}.{method}", {PYTHON: 1.0})
        for part, share in sorted(split.items(), key=lambda item: -item[1]):
            if share * took / whole < 5e-4:
                continue
            name = OPERATOR_NAMES.get(method, "operators") if part == OPERATORS else part
            rows.append([f"{role}.{method}", name, f"{share * took:.3g}", f"{share * took / whole:.1%}"])
    rest = max(0.0, whole - spent)
    rows.append(["between the calls", PYTHON, f"{rest:.3g}", f"{rest / whole:.1%}"])
    return rows


def operators(profiled: Any, count: int) -> list[list[str]]:
    """The operators with the most time of their own."""
    averages = [event for event in profiled.key_averages() if "::" in event.key and "autograd" not in event.key]
    averages.sort(key=lambda event: -event.self_cpu_time_total)
    whole = sum(event.self_cpu_time_total for event in averages)
    rows = [(event.key, event.count, event.self_cpu_time_total) for event in averages[:count]]
    return [[name, str(calls), f"{us / 1e6:.3g}", f"{us / whole:.1%}"] for name, calls, us in rows]


def profiled(spec: Mapping[str, Any], count: int, trace: Path | None) -> list[str]:
    """Both tables of a step."""
    built = build(spec)
    built.step()
    built.transport.take_seconds()
    start = time.perf_counter()
    built.step()
    whole, seconds = time.perf_counter() - start, built.transport.take_seconds()
    ranges = Ranges(built.generator)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device() == "cuda" else [])]
    try:
        with profile(activities=activities, acc_events=True) as found:
            built.step()
    finally:
        ranges.close()
    if trace is not None:
        trace.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(trace / f"{spec['work']}.json.gz"))
    parts = shares(found.events())
    return [
        f"### {spec['work']}: {whole:.2f} s a step",
        "",
        *markdown(("call", "part", "s", "share of the step"), breakdown(seconds, parts, whole)),
        "",
        f"Operators with the most time of their own, under the profiler ({device()}):",
        "",
        *markdown(("operator", "calls", "s", "share"), operators(found, count)),
        "",
    ]


# ---- the command


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, help="Hugging Face folder of the policy")
    add("--reward-model", type=Path, help="folder of a BERT-like encoder: the reward of PPO")
    add("--hh", type=Path, help="rows of hh-rlhf")
    add("--gsm8k", type=Path, help="rows of GSM8K")
    add("--only", choices=("ppo", "grpo"))
    add("--grpo", type=int, nargs=3, default=[8, 8, 128], metavar=("PROMPTS", "SAMPLES", "TOKENS"))
    add("--ppo", type=int, nargs=4, default=[32, 128, 1, 4], metavar=("PROMPTS", "TOKENS", "EPOCHS", "MINIBATCHES"))
    add("--threads", type=int, default=2)
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--seed", type=int, default=0)
    add("--operators", type=int, default=15, help="rows of the table of operators")
    add("--trace", type=Path, help="folder for Chrome traces")
    add("--quick", action="store_true", help="a tiny random model, tiny sizes")
    return parser.parse_args(argv)


def source_of(args: argparse.Namespace, scratch: Path) -> Any:
    from peers.inputs import Sizes, Source

    if args.quick:
        from workload import build_tiny_folder

        model = build_tiny_folder(scratch / "tiny", hidden=64, layers=2)
        return Source(model, None, None, None, scratch, args.dtype, args.threads, args.seed, Sizes.quick())
    paths = [args.model, args.reward_model, args.hh, args.gsm8k]
    if any(path is None or not path.expanduser().exists() for path in paths):
        raise SystemExit("error: a path is missing\n  fix: give --model, --reward-model, --hh and --gsm8k, or --quick")
    model, reward, hh, gsm8k = (path.expanduser().resolve() for path in paths)
    sizes = replace(Sizes(), grpo=tuple(args.grpo), ppo=tuple(args.ppo))
    return Source(model, reward, hh, gsm8k, scratch, args.dtype, args.threads, args.seed, sizes)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as temporary:
        from peers.inputs import SPECIFICATIONS

        source = source_of(args, Path(temporary))
        for name in ("ppo", "grpo"):
            if args.only in (None, name):
                spec = json.loads(json.dumps(SPECIFICATIONS[name](source)))
                print("\n".join(profiled(spec, args.operators, args.trace)), flush=True)


if __name__ == "__main__":
    main()
