"""Functions of the user's own that fail, and qualities that are no numbers: told, never a bare traceback."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tutelage.checkpoints import Checkpoints
from tutelage.errors import ConfigError
from tutelage.named import load_function


@pytest.fixture
def own(tmp_path) -> str:
    path = tmp_path / "loss.py"
    path.write_text("NUMBER = 3\ndef raises(x, cfg):\n    raise RuntimeError('boom')\ndef right(x):\n    return 2 * x\n")
    return str(path)


def test_what_a_function_raises_names_the_function(own):
    with pytest.raises(ConfigError, match=r"preference loss .*loss\.py:raises failed: RuntimeError: boom"):
        load_function(f"{own}:raises", "preference loss")(1, 2)
    with pytest.raises(ConfigError, match=r"failed: TypeError: right\(\) takes 1 positional argument"):
        load_function(f"{own}:right", "preference loss")(1, 2)
    assert load_function(f"{own}:right", "preference loss")(4) == 8


def test_what_cannot_be_called_is_refused_when_it_is_loaded(own):
    with pytest.raises(ConfigError, match="is a int"):
        load_function(f"{own}:NUMBER", "policy loss")


class Role:
    """Exports a folder with the number of the export in it."""

    def __init__(self) -> None:
        self.exports = 0

    def save_pretrained(self, folder: Path) -> Any:
        self.exports += 1
        folder.mkdir(parents=True)
        (folder / "number").write_text(str(self.exports))
        return self

    def gather(self) -> None:
        return None


def test_a_quality_that_is_no_number_is_above_none(tmp_path):
    checkpoints, role = Checkpoints(tmp_path, "actor", 1), Role()
    kept = [checkpoints.save_best(step, role, quality, "gold") for step, quality in enumerate((math.nan, math.nan))]
    assert kept == [True, False]  # something must be kept; the second is no better
    assert checkpoints.save_best(2, role, -5.0, "gold")
    assert not checkpoints.save_best(3, role, math.nan, "gold")
    assert json.loads((tmp_path / "best" / "quality.json").read_text())["step"] == 2
    assert checkpoints.save_best(4, role, -4.0, "gold")
