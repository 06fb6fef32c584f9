"""What travels between driver and ranks besides values: a task, references to earlier results, and a report."""

from __future__ import annotations

import io
import pickle
import traceback
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tutelage.errors import TrainingError, TutelageError
from tutelage.layout import Dispatch
from tutelage.transport.ray.rows import Rows
from tutelage.transport.ray.split import Part


@dataclass(frozen=True)
class Task:
    """One call for one rank.

    part     its rows, where the driver made the plan; None where the rank makes it.
    planned  the payload holds this rank's arguments as they are to be used.
    """

    id: int
    role: str
    method: str
    dispatch: Dispatch
    planned: bool
    part: Part | None = None

    @property
    def name(self) -> str:
        return f"{self.role}.{self.method}"


@dataclass(frozen=True)
class Given:
    """An argument that the driver held: its value."""

    value: Any
    columns: dict[str, Given | Parts] = field(default_factory=dict)


@dataclass(frozen=True)
class Parts:
    """An argument that is an earlier result.

    refs     the value of each part; fetched only by ranks that need its rows.
    reports  numbers of the parts' reports among those sent with the task.
    each     the result is the list of all ranks' replies.
    columns  results to be added to it, each with its own parts.
    """

    refs: list[Any]
    reports: tuple[int, ...]
    each: bool
    columns: dict[str, Given | Parts] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """An error on its way: pickled, with the traceback as text, whether it only echoes a peer's, and when it rose."""

    error: bytes
    trace: str
    echo: bool
    at: float

    @classmethod
    def of(cls, error: BaseException, at: float) -> Failure:
        trace = "".join(traceback.format_exception(error))
        return cls(_pickled(error, trace), trace, is_echo(error), at)

    def restored(self) -> BaseException:
        """The error itself; one that is no TutelageError has the rank's traceback in a note."""
        try:
            error: BaseException = pickle.loads(self.error)
        except Exception:  # its class cannot be imported here, whatever the reason
            return TrainingError(f"a rank failed with an error that cannot be read here:\n{self.trace.rstrip()}")
        if not isinstance(error, TutelageError):
            error.add_note(f"Traceback on the rank:\n{self.trace.rstrip()}")
        return error


@dataclass(frozen=True)
class Report:
    """What the driver and the ranks of other roles read of a reply without its value.

    rows     of the value, or None.
    places   (b,) where its rows stand in the whole result; None for a result that is not split.
    seconds  inside the role's method.     busy: with fetching and assembling its arguments.
    skipped  an argument had failed, nothing ran.
    """

    rows: Rows | None = None
    places: Tensor | None = None
    seconds: float = 0.0
    busy: float = 0.0
    failure: Failure | None = None
    skipped: bool = False


def _pickled(error: BaseException, trace: str) -> bytes:
    """The pickled error, or that of a TrainingError with its words where it cannot be pickled and read again."""
    try:
        buffer = io.BytesIO()
        pickle.Pickler(buffer).dump(error)
        again = pickle.loads(buffer.getvalue())
        if type(again) is type(error) and str(again) == str(error):
            return buffer.getvalue()
    except Exception:  # any error of a foreign __reduce__ or __init__ means the same: it does not travel
        trace = f"{trace}\n(the error could not be sent as it is)"
    return pickle.dumps(TrainingError(f"{type(error).__name__}: {error}\n{trace}"))


ECHOES = (
    "gloo",
    "nccl",
    "closed by peer",
    "connection reset",
    "timed out waiting",
    "wait timeout",
    "socket timeout",
    "application timeout",
)


def is_echo(error: BaseException) -> bool:
    """Whether an error is what a rank sees when a peer of its collective is gone or late."""
    if isinstance(error, TutelageError):
        return False
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"DistBackendError", "DistNetworkError", "DistStoreError", "DistError"}:
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in ECHOES)
