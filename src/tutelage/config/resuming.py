"""The config of a run that goes on: as it began, with another cluster section where one is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tutelage.config.checks import check_effect, check_sense
from tutelage.config.loading import Loaded, load_recipe, load_resolved
from tutelage.config.stages import AnyConfig
from tutelage.errors import ConfigError

CLUSTER = "cluster"


def load_to_resume(path: Path, overrides: Sequence[str] = ()) -> tuple[AnyConfig, list[str]]:
    """The config of a run folder, and what an override of the cluster section changed in it.

    A cluster is not part of what is trained: a checkpoint fits any number of ranks.  Everything else is.
    Raises ConfigError for an override of another section, one without effect, and a cluster that cannot work.
    """
    before = load_resolved(path)
    others = [text for text in overrides if text.partition("=")[0].strip().split(".")[0] != CLUSTER]
    if others:
        raise ConfigError(
            f"{', '.join(others)} cannot be changed in a run that goes on: its steps so far were taken without it",
            fix="start a new run for it; on resume only keys of cluster can be set, such as cluster.address=auto",
        )
    if not overrides:
        return before, []
    loaded = load_recipe(str(path), overrides)
    given = {name: source for name, source in loaded.sources.items() if source.override}
    check_effect(Loaded(loaded.config, loaded.raw, given, loaded.recipe_path))
    check_sense(loaded.config, given)
    then, now = (dict(_flat(config.cluster.model_dump(), CLUSTER)) for config in (before, loaded.config))
    changes = [
        f"{name} is {now.get(name, 'not set')}, it was {then.get(name, 'not set')}"
        for name in dict.fromkeys([*then, *now])
        if now.get(name) != then.get(name)
    ]
    return loaded.config, changes


def _flat(values: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.{key}")
        else:
            yield f"{name}.{key}", value
