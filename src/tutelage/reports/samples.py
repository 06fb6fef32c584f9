"""Held-out answers of a run: samples/before.jsonl, samples/after.jsonl, samples/step_000010.jsonl."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tutelage.errors import DataError
from tutelage.reports.metrics_log import number, read_jsonl


@dataclass(frozen=True)
class Sample:
    """One answer to one held-out prompt.

    proxy: the training reward.  gold: the held-out quality, None where the run has none.  length: response tokens.
    finished: ended by itself, not by the length limit.  ref_logp_per_token: mean logprob of the response tokens under
    the reference, nats.  phase: before or after training.  id: stable name of the prompt.
    """

    id: str
    prompt: str
    response: str
    proxy: float
    length: int
    finished: bool = True
    gold: float | None = None
    ref_logp_per_token: float | None = None
    phase: str = "after"

    @classmethod
    def from_record(cls, record: Mapping[str, Any], where: str = "sample") -> Sample:
        """Unknown keys are ignored. Raises DataError naming a missing key."""
        known = {field.name: record[field.name] for field in fields(cls) if field.name in record}
        missing = [name for name in ("id", "prompt", "response", "proxy", "length") if name not in known]
        if missing:
            raise DataError(
                f"{where} has no {missing[0]!r}", fix="a sample holds id, prompt, response, proxy and length"
            )
        for name in ("proxy", "gold", "ref_logp_per_token"):
            known[name] = number(known.get(name))
        return cls(**known)


def samples_path(run_folder: Path | str, name: str) -> Path:
    """`name` is before, after, or step_000010."""
    return Path(run_folder) / "samples" / f"{name}.jsonl"


def read_samples(run_folder: Path | str, name: str) -> list[Sample]:
    """samples/NAME.jsonl; an empty list where the run has none. Raises DataError for a record that is not a sample."""
    path = samples_path(run_folder, name)
    return [Sample.from_record(r, f"{path} record {i}") for i, r in enumerate(read_jsonl(path), start=1)]


def pair_samples(before: Sequence[Sample], after: Sequence[Sample]) -> tuple[list[tuple[Sample, Sample]], int]:
    """(before, after) pairs on the same prompt, in the order of `before`, and how many answers have no partner.

    Pairs by id; several answers to one prompt are paired in their order. Raises DataError when an id names two prompts.
    """
    waiting: dict[str, list[Sample]] = defaultdict(list)
    for sample in reversed(after):
        waiting[sample.id].append(sample)
    pairs = []
    for first in before:
        if not waiting[first.id]:
            continue
        second = waiting[first.id].pop()
        if first.prompt != second.prompt:
            raise DataError(
                f"sample id {first.id!r} names two prompts: {first.prompt[:60]!r} and {second.prompt[:60]!r}",
                fix="evaluate before and after on the same prompts",
            )
        pairs.append((first, second))
    return pairs, len(before) + len(after) - 2 * len(pairs)
