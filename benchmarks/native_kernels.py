"""What compiled CPU kernels and ordered weights give: a decode step, an update and logprobs in bfloat16, with and
without, interleaved in one process.

    python benchmarks/native_kernels.py --model FOLDER    a Hugging Face folder, such as SmolLM2-135M-Instruct
    python benchmarks/native_kernels.py                   a tiny model, built offline

torch      torch's operators, as on a machine without a compiler, and attention's backward pass segment by segment
together   the same, attention's backward pass for responses of one prompt together
kernels    beside that the compiled kernels
ordered    beside that, in decode steps, weights in the order in which oneDNN multiplies
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
from stages import at_least_two, positive
from transformers.utils.logging import disable_progress_bar
from workload import build_tiny_folder

from tutelage.config.common import ModelConfig
from tutelage.math.keyed import sample_key
from tutelage.models import attention, packed_products
from tutelage.models.forward import token_logprobs
from tutelage.models.language_model import LanguageModel
from tutelage.models.load import load_causal_lm
from tutelage.native import build, ops
from tutelage.rollout.inprocess.admission import Request
from tutelage.rollout.inprocess.engine import InProcessRollout, evaluation_mode
from tutelage.rollout.sampling import SamplingParams
from tutelage.types import Sequences

SETTINGS = ("torch", "together", "kernels", "ordered")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, or a Hugging Face model folder (default: tiny)")
    parser.add_argument("--repeat", type=positive, default=5, help="rounds after the first, which is not counted")
    parser.add_argument("--prompts", type=positive, default=8, help="of the decode steps")
    parser.add_argument("--groups", type=positive, default=2, help="prompts of the update")
    parser.add_argument("--samples", type=at_least_two, default=8, help="responses of a prompt")
    parser.add_argument("--prompt-tokens", type=at_least_two, default=110)
    parser.add_argument("--new-tokens", type=at_least_two, default=64, help="of a response; ordered weights from 32 on")
    parser.add_argument("--seed", type=int, default=0, help="of the token ids")
    return parser.parse_args(argv)


def within(setting: str) -> ExitStack:
    """The parts of Tutelage that the setting leaves out are switched off inside."""
    stack = ExitStack()
    at = SETTINGS.index(setting)
    if at < SETTINGS.index("ordered"):
        stack.enter_context(patch.object(packed_products, "_supported", lambda: False))
    if at < SETTINGS.index("kernels"):
        stack.enter_context(patch.object(ops, "kernels", lambda: build.Found(None, "switched off")))
    if at < SETTINGS.index("together"):
        stack.enter_context(patch.object(attention, "_half_row_fits", lambda *given: False))
    return stack


class Work:
    """The three things that are timed, on one model and the same random tokens."""

    def __init__(self, model: LanguageModel, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        draw = torch.Generator().manual_seed(args.seed)
        vocabulary = model.module.config.vocab_size

        def tokens(count: int) -> list[int]:
            return torch.randint(0, vocabulary, (count,), generator=draw).tolist()

        prompts = [tuple(tokens(args.prompt_tokens)) for _ in range(args.prompts)]
        places = [(at, sample) for at in range(args.prompts) for sample in range(args.samples)]
        self.requests = [
            Request(prompts[at], sample_key(args.seed, 0, str(at), sample, "rollout"), str(at)) for at, sample in places
        ]
        rows = [prompt for _ in range(args.groups) for prompt in [tokens(args.prompt_tokens)] * args.samples]
        self.sequences = Sequences.build(rows, [tokens(args.new_tokens) for _ in rows])
        params = SamplingParams(max_new_tokens=args.new_tokens)
        self.engine = InProcessRollout(model.module, model.tokenizer, (), params, seed=args.seed)

    def decode(self) -> float:
        """The median step, after the prefill and the first step, in which weights are ordered."""
        batch = self.engine.start(self.requests, self.engine.params)
        times = []
        with torch.no_grad(), evaluation_mode(self.engine.model):
            while batch.busy:
                times.append(seconds(batch.step))
        return statistics.median(times[2:])

    def update(self) -> float:
        return seconds(lambda: token_logprobs(self.model, self.sequences)[0].mean().backward())

    def logprobs(self) -> float:
        with torch.no_grad():
            return seconds(lambda: token_logprobs(self.model, self.sequences))


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        path = build_tiny_folder(Path(folder)) if args.model == "tiny" else Path(args.model)
        work = Work(load_causal_lm(ModelConfig(path=str(path), dtype="bfloat16")), args)
    found = build.kernels()
    print(f"kernels: {found.why or 'compiled'}; ordered weights: {packed_products._supported()}; ", end="")
    print(f"{torch.get_num_threads()} threads; {args}")
    parts = {"decode step": work.decode, "update": work.update, "logprobs": work.logprobs}
    times: dict[tuple[str, str], list[float]] = {(part, setting): [] for part in parts for setting in SETTINGS}
    for round_ in range(args.repeat + 1):
        for setting in SETTINGS:
            with within(setting):
                for part, run in parts.items():
                    taken = run()
                    if round_:
                        times[part, setting].append(taken)
        print(f"round {round_} of {args.repeat} done", flush=True)
    print("| part | " + " | ".join(f"{setting} ms (least - most)" for setting in SETTINGS) + " |")
    print("| --- |" + " ---: |" * len(SETTINGS))
    for part in parts:
        cells = [times[part, setting] for setting in SETTINGS]
        print(f"| {part} | " + " | ".join(shown(cell) for cell in cells) + " |")


def shown(times: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(times):.1f} ({1e3 * min(times):.1f} - {1e3 * max(times):.1f})"


if __name__ == "__main__":
    main()
