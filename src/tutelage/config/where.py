"""Where the user set a key, as messages say it."""

from __future__ import annotations

from collections.abc import Mapping


def at(name: str, where: Mapping[str, object]) -> str:
    """` (recipe.yaml:8)` for a key that was set, an empty string for one that was not."""
    return f" ({where[name]})" if name in where else ""
