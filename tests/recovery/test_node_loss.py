"""Real runs on two Ray nodes: a node is killed, the driver is asked to leave; and each ends as if nothing had been."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import two_nodes

STEPS = 4
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(short_folder: Path) -> dict[str, two_nodes.Outcome]:
    return two_nodes.show(short_folder, STEPS, list(two_nodes.CASES))


def on(out: two_nodes.Outcome, event: str) -> list[set[str]]:
    """The hosts of the ranks in each event of a kind that says where they run."""
    told = [fact for fact in out.facts if fact.startswith(f"{event}, ") and "pool main:" in fact]
    return [set(re.findall(r" on (\S+)#", fact.rpartition("pool main:")[2])) for fact in told]


def test_a_role_group_over_two_nodes_trains_and_says_where_it_ran(found):
    out = found["undisturbed"]
    assert (out.exits, out.last_step) == ([0], STEPS), out.output
    ((first, second),) = on(out, "cluster")
    assert first != second


def test_a_killed_node_is_named_and_the_run_is_resumed_on_the_other(found, short_folder):
    out = found["node_lost"]
    text = "\n".join(out.output)
    assert out.exits == [1, 1, 0], text
    lost = r"ClusterError: rank \d of pool main on 127\.0\.0\.\d#\w{6} was lost while it ran \w+\.\w+: "
    assert re.match(lost, out.message), text
    assert out.seconds is not None
    assert out.seconds < 90
    assert f"at step {two_nodes.DISTURBED + 1} of {STEPS}" in text
    assert "strategy STRICT_SPREAD: not placed within 60 s" in out.output[1]
    assert "cluster, step 2: cluster.pools.main.strategy is PACK, it was STRICT_SPREAD" in out.facts
    assert len(on(out, "cluster")[-1]) == 1
    assert out.last_step == STEPS
    assert two_nodes.equal(out), (out.metrics, out.weights)
    assert "strategy: PACK" in (short_folder / "runs/node_lost/config.yaml").read_text()


def test_with_restarts_the_group_moves_and_the_run_goes_on(found):
    out = found["restart"]
    text = "\n".join(out.output)
    assert (out.exits, out.last_step) == ([0], STEPS), text
    assert re.search(r"rank \d of pool main on 127\.0\.0\.\d#\w{6} was lost while it ran .*starts again", out.message)
    assert len(on(out, "cluster")[0]) == 2
    (after,) = on(out, "restart")
    assert len(after) == 1
    assert two_nodes.equal(out), (out.metrics, out.weights)


def test_a_driver_that_is_asked_to_leave_writes_a_checkpoint_and_is_resumed(found):
    out = found["sigterm"]
    assert out.exits == [1, 0], out.output
    assert out.message.startswith(f"PreemptedError: SIGTERM came after step {two_nodes.DISTURBED + 1} of {STEPS}")
    assert out.last_step == STEPS
    assert two_nodes.equal(out), (out.metrics, out.weights)
