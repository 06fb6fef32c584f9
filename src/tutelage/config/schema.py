"""What every schema shares: frozen, strict about names, each key with a meaning and, where it applies, a condition.

Torch-free.  A key that the user set although its condition is false in this run is an error (`loading.check_effect`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Schema(BaseModel):
    """Base of every section: unknown keys are refused, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)


@dataclass(frozen=True)
class OnlyIf:
    """Condition under which a key has an effect: `text` for people, `holds(config)` for the check."""

    text: str
    holds: Callable[[Any], bool]


def setting(default: Any = ..., meaning: str = "", *, only_if: OnlyIf | None = None, **bounds: Any) -> Any:
    """A documented key. `default=...` makes it required; bounds are pydantic's (`ge`, `gt`, `min_length`...)."""
    extra = {"only_if": only_if} if only_if else None
    if callable(default):
        return Field(default_factory=default, description=meaning, json_schema_extra=extra, **bounds)  # type: ignore[arg-type]
    return Field(default, description=meaning, json_schema_extra=extra, **bounds)  # type: ignore[arg-type]
