"""A reference whose logprobs are in a file: made once by a reference, then read, and no model is held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from tutelage.data.reference_cache import ReferenceTable
from tutelage.errors import TrainingError
from tutelage.layout import Dispatch
from tutelage.roles.reference import Reference
from tutelage.types import Ragged


class CachedReference:
    """inner     computes until there is a table; None: the table is there from the start.
    progress  called with rows done, while `inner` computes.
    """

    DISPATCH: ClassVar[dict[str, Dispatch]] = {"logprobs": Dispatch.ROWS}

    def __init__(
        self,
        inner: Reference | None = None,
        table: ReferenceTable | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        self.inner = inner
        self.table = table
        self.progress = progress
        self.done = 0

    def logprobs(self, batch: Any) -> Ragged:
        """(R,) of the response tokens of `batch.sequences`.  Raises DataError for a row that the table lacks."""
        if self.table is not None:
            return self.table.lookup(batch.sequences)
        if self.inner is None:
            raise TrainingError("this reference has neither a model nor a table", fix="give it one of them")
        found = self.inner.logprobs(batch)
        self.done += len(batch)
        self.progress(self.done)
        return found

    def use_table(self, path: str) -> None:
        """From here on the file answers, and the model is let go."""
        self.table, self.inner = ReferenceTable.read(Path(path)), None
