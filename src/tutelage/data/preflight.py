"""The report on data before it is used: every row that is dropped, cut or odd is counted, with examples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tutelage.errors import DataError

EXAMPLES = 5


@dataclass(frozen=True)
class Kind:
    """A thing that can be wrong with a row.  bad: the row counts towards max_bad_fraction.  always: shown at 0 too."""

    title: str
    bad: bool = True
    always: bool = False


KINDS: dict[str, Kind] = {
    "diverging_prompts": Kind("pairs whose two answers do not share a prompt"),
    "empty_prompt": Kind("prompts without text"),
    "empty_response": Kind("responses without text", always=True),
    "no_answer": Kind("conversations without an assistant turn"),
    "identical_pair": Kind("pairs with chosen equal to rejected", always=True),
    "prompt_over_length": Kind("prompts over length", always=True),
    "response_over_length": Kind("responses over length", always=True),
    "over_context": Kind("rows longer than the context of the model"),
    "without_eos": Kind("responses cut before their EOS", always=True),
    "template_refused": Kind("rows that the chat template refuses"),
    "train_eval_overlap": Kind("rows of train whose prompt is in eval too", always=True),
    "duplicate": Kind("rows equal to an earlier one", bad=False, always=True),
    "undesirable": Kind("unpaired answers marked as not desirable", bad=False),
    "trailing_turns": Kind("conversations with turns after the last answer, which are left out", bad=False),
    "special_token_text": Kind("rows whose text spells a special token", bad=False),
}
_PAIRS_ONLY = ("identical_pair",)
_RESPONSES_ONLY = ("empty_response", "response_over_length", "without_eos")


@dataclass(frozen=True)
class Finding:
    """count rows of one kind, what was done with them (kept, truncated, dropped), and the first few row numbers."""

    kind: str
    count: int
    action: str
    rows: tuple[str, ...]
    detail: str = ""

    def line(self) -> str:
        """Plain text."""
        title = KINDS[self.kind].title
        if not self.count:
            return f"{title}: 0"
        more = ", ..." if self.count > len(self.rows) else ""
        detail = f"; {self.detail}" if self.detail else ""
        return f"{title}: {self.count} ({self.action}; rows {', '.join(self.rows)}{more}{detail})"


@dataclass(frozen=True)
class Preflight:
    """What was read, what is left, and every finding.  Rows are numbered from 1; those of an eval file as `eval:7`.

    dropped, truncated and bad_rows count rows, each once however many findings it has.
    """

    source: str
    format: str
    rows: int
    train_rows: int
    eval_rows: int
    dropped: int
    truncated: int
    bad_rows: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Findings that count towards max_bad_fraction."""
        return tuple(finding for finding in self.findings if finding.count and KINDS[finding.kind].bad)

    @property
    def bad_fraction(self) -> float:
        """Share of the rows read that have a problem."""
        return self.bad_rows / self.rows if self.rows else 0.0

    def count(self, kind: str) -> int:
        """Rows of this kind; 0 when there are none.  Raises KeyError for a kind that is not in KINDS."""
        if kind not in KINDS:
            raise KeyError(kind)
        return sum(finding.count for finding in self.findings if finding.kind == kind)

    def lines(self) -> list[str]:
        """Plain text, one fact a line."""
        head = (
            f"{self.source}: {self.rows} rows of the format {self.format}; {self.train_rows} to train on, "
            f"{self.eval_rows} held out; {self.dropped} dropped, {self.truncated} truncated"
        )
        return [head, *(f"  {finding.line()}" for finding in self.findings), *(f"  {note}" for note in self.notes)]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "source": self.source,
            "format": self.format,
            "rows": self.rows,
            "train_rows": self.train_rows,
            "eval_rows": self.eval_rows,
            "dropped": self.dropped,
            "truncated": self.truncated,
            "bad_rows": self.bad_rows,
            "findings": {
                f.kind: {"count": f.count, "action": f.action, "rows": list(f.rows), "detail": f.detail}
                for f in self.findings
            },
            "notes": list(self.notes),
        }

    def refuse(self, max_bad_fraction: float) -> None:
        """Raises DataError with every count when more than this share of the rows has a problem, or none is left."""
        report = "\n".join(self.lines())
        if self.bad_fraction > max_bad_fraction:
            raise DataError(
                f"{self.bad_rows} of {self.rows} rows ({self.bad_fraction:.1%}) have a problem, more than "
                f"data.max_bad_fraction={max_bad_fraction:g} allows\n{report}",
                fix="repair the data, or raise data.max_bad_fraction",
            )
        if not self.train_rows:
            raise DataError(f"no row is left to train on\n{report}", fix="repair the data or raise the length limits")


@dataclass
class Tally:
    """Collects findings while rows are prepared."""

    _rows: dict[str, dict[str, str]] = field(default_factory=dict)
    _lengths: dict[str, tuple[int, int]] = field(default_factory=dict)
    _reasons: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, row: str, action: str, reason: str = "") -> None:
        """One row of a kind; a second time for the same row counts nothing more. The first reason is reported."""
        assert kind in KINDS, kind
        self._rows.setdefault(kind, {})[row] = action
        self._reasons.setdefault(kind, reason)

    def too_long(self, kind: str, row: str, action: str, tokens: int, limit: int) -> None:
        """As `add`, with the number of tokens seen and allowed."""
        self.add(kind, row, action)
        self._lengths[kind] = (max(tokens, self._lengths.get(kind, (0, 0))[0]), limit)

    def dropped(self) -> set[str]:
        return {row for rows in self._rows.values() for row, action in rows.items() if action == "dropped"}

    def over_length(self) -> list[Finding]:
        """Findings about length."""
        kinds = ("prompt_over_length", "response_over_length", "over_context")
        return [self._finding(kind) for kind in kinds if kind in self._rows]

    def _finding(self, kind: str) -> Finding:
        rows = self._rows.get(kind, {})
        actions = list(dict.fromkeys(rows.values()))
        longest, limit = self._lengths.get(kind, (0, 0))
        detail = f"longest {longest} tokens, allowed {limit}" if longest else self._reasons.get(kind, "")
        return Finding(kind, len(rows), " or ".join(actions) or "kept", tuple(list(rows)[:EXAMPLES]), detail)

    def report(
        self,
        *,
        source: str,
        format_name: str,
        rows: int,
        train_rows: int,
        eval_rows: int,
        kind: str,
        notes: Iterable[str],
    ) -> Preflight:
        """kind: demonstrations, pairs or prompts; decides which counts are shown although they are 0."""
        hidden = {
            "demonstrations": _PAIRS_ONLY,
            "pairs": (),
            "prompts": (*_PAIRS_ONLY, *_RESPONSES_ONLY),
        }[kind]
        shown = [name for name, k in KINDS.items() if name in self._rows or (k.always and name not in hidden)]
        dropped = self.dropped()
        truncated = {r for at in self._rows.values() for r, action in at.items() if action == "truncated"} - dropped
        bad = {row for name, at in self._rows.items() if KINDS[name].bad for row in at}
        return Preflight(
            source=source,
            format=format_name,
            rows=rows,
            train_rows=train_rows,
            eval_rows=eval_rows,
            dropped=len(dropped),
            truncated=len(truncated),
            bad_rows=len(bad),
            findings=tuple(self._finding(name) for name in shown),
            notes=tuple(notes),
        )
