"""A role group over two nodes, one of which is killed; a local instance of our own, from start to end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

HERE = Path(__file__).resolve().parent
OWN = """
import sys; sys.path.insert(0, {tests!r})
import ray, ray_kit
from tutelage.errors import ClusterError
from tutelage.transport.ray import ray_transport
if __name__ == "__main__":
    pool = {{"devices": 10_000, "per_device": 1, "kind": "cpu"}}
    running = ray_transport(ray_kit.cluster(pools={{"big": pool}}, start_timeout=600))
    try:
        running.start(ray_kit.toys, ("toy",))
    except ClusterError as error:
        print("REFUSED", error.what)
    print("LEFT", ray.is_initialized())
    running = ray_transport(ray_kit.cluster(pools={{"main": 1}}))
    handles, _ = running.start(ray_kit.toys, ("toy",))
    print("RANK", handles["toy"].who().gather())
    print("PATH", handles["toy"].environment("PYTHONPATH").gather() == {tests!r})
    running.close()
    running.close()
    print("LEFT", ray.is_initialized())
"""


def said(command: list[str]) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_killed_node_is_named_and_its_group_goes_on_on_the_other(tmp_path):
    out = said([sys.executable, str(HERE / "node_loss.py"), str(tmp_path)])
    told = json.loads(re.search(r"TOLD (.*)", out)[1])
    assert (told["nodes"], told["sum"]) == (2, [2.0, 2.0])
    assert told["error"].startswith(f"{told['victim']} was lost while it ran toy.nap")
    assert told["seconds"] < 60
    assert (told["nodes_after"], told["after"]) == (1, [2.0, 2.0])
    assert told["disconnected"]


@pytest.mark.slow
def test_an_instance_of_our_own_is_started_and_ended_and_refuses_at_once_what_it_cannot_hold(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(OWN.format(tests=str(HERE.parent)))
    lines = said([sys.executable, str(script)]).splitlines()
    assert re.match(r"REFUSED pool big asks for 10000 x \(CPU 1\), strategy PACK: room for \d+; the cluster", lines[0])
    assert lines[1:] == ["LEFT False", "RANK [0]", "PATH True", "LEFT False"]
