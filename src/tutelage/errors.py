"""The error tree: everything a user can cause says what was wrong, the value seen, and the fix.

Every class has a builtin as its second base, so code that catches `ValueError` or `FileNotFoundError` keeps working.
An `assert` elsewhere in the package means a bug of ours, never of the user's.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable


class TutelageError(Exception):
    """Base of every error a user can cause.

    what: one sentence with the value seen.  fix: one sentence that says what to change; shown on its own line.
    """

    def __init__(self, what: str, *, fix: str = "") -> None:
        self.what = what
        self.fix = fix
        super().__init__(f"{what}\n  fix: {fix}" if fix else what)


class ConfigError(TutelageError, ValueError):
    """A recipe or an override holds a key or a value that cannot be used."""


class DataError(TutelageError, ValueError):
    """A data source cannot be read, recognised or used."""


class ModelError(TutelageError, ValueError):
    """A model or tokenizer cannot be loaded or does not fit its role."""


class ModelNotFoundError(ModelError, FileNotFoundError):
    """A model folder does not exist or is not a model folder."""


class ShapeError(TutelageError, ValueError):
    """Tensors that must agree in shape do not."""


class RewardError(TutelageError, ValueError):
    """A reward source returned the wrong number of scores, NaN, or raised."""


class RolloutError(TutelageError, ValueError):
    """A generation request cannot be served as asked."""


class TrainingError(TutelageError, RuntimeError):
    """Training cannot go on: a loss or gradient that is not finite, a budget that was crossed."""


class ClusterError(TutelageError, RuntimeError):
    """A cluster does not answer, cannot place a pool, or lost a rank.

    pool: the pool that lost a rank and can be started again; empty where nothing was lost.
    """

    pool: str = ""


class PreemptedError(TutelageError, RuntimeError):
    """The run was asked to end, wrote a checkpoint and left."""


class CheckpointError(TutelageError, OSError):
    """A checkpoint cannot be written, read or resumed from."""


class PendingError(TutelageError, RuntimeError):
    """A result was touched before it was gathered."""


class MissingExtraError(TutelageError, ImportError):
    """An optional dependency is not installed."""


def installed(package: str) -> bool:
    """Whether the package can be imported whole.

    A folder of its name on the path without an `__init__.py` is not it (a clone of its repository, a folder of tests):
    Python finds that one as a namespace package, and everything in it is missing.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def closest(name: str, known: Iterable[str]) -> str:
    """` Did you mean X?` for the closest known name, or an empty string when nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]}?" if near else ""
