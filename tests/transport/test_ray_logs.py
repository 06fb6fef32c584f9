"""The last words of a rank: read where they lie, whether the node's agent has time to answer or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tutelage.transport.ray.agent import LAST_LINES, last_of, log_path
from tutelage.transport.ray.watch import Ear, Watch, Watched

RUN = "test-of-last-words"


class Deaf:
    """An agent that must not be asked."""

    @property
    def last_lines(self) -> object:
        raise AssertionError("the agent was asked for a file that lies here")


@pytest.fixture
def log() -> Iterator[Path]:
    path = log_path(RUN, "pair 1")
    path.parent.mkdir(parents=True, exist_ok=True)
    yield path
    path.unlink(missing_ok=True)
    path.parent.rmdir()


def watch() -> Watch:
    heard = Watch(RUN, lambda what, done, total: None)
    heard.ranks["pair 1"] = Watched("node", "pair 1@node")
    heard.ears["node"] = Ear(Deaf())
    return heard


def test_a_log_on_this_machine_is_read_without_its_agent(log: Path) -> None:
    log.write_text("first\nthese are my last words\nno end")
    assert watch().last_lines("pair 1") == ["first", "these are my last words", "no end"]


def test_a_log_elsewhere_is_asked_for() -> None:
    with pytest.raises(AssertionError, match="the agent was asked"):
        watch().last_lines("pair 1")


def test_the_end_of_a_long_log_is_kept(log: Path) -> None:
    log.write_text("".join(f"line {n}\n" for n in range(100)))
    assert last_of(log) == [f"line {n}" for n in range(100 - LAST_LINES, 100)]
