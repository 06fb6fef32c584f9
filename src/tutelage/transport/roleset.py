"""The roles of a run as an algorithm file sees them: attributes, and one `update` for all learners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tutelage.errors import ConfigError, closest


class RoleSet:
    """`roles.actor.generate(...)`; `roles.update(mb, actor=loss, critic=loss)` returns one pending result per role."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        self._handles = dict(handles)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._handles:
            raise AttributeError(f"no role {name}; the roles are {', '.join(self._handles)}")
        return self._handles[name]

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    def names(self) -> tuple[str, ...]:
        return tuple(self._handles)

    def update(self, batch: Any, **losses: Any) -> dict[str, Any]:
        """One optimiser update of each named role on the same mini-batch."""
        for name in losses:
            if name not in self._handles:
                raise ConfigError(f"{name} is not a role of this run.{closest(name, self._handles)}")
        return {name: self._handles[name].step(batch, loss) for name, loss in losses.items()}
