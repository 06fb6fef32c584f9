"""Two Ray nodes on one machine, a role group across both, one node killed during a step.  Prints what happened.

Run in a process of its own, since a process has one connection to Ray.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ray
import ray_kit
from ray.cluster_utils import Cluster

from tutelage.errors import ClusterError
from tutelage.transport.ray import ray_transport
from tutelage.transport.ray.agent import log_path


def main() -> None:
    memory = 80_000_000
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": memory})
    second = nodes.add_node(num_cpus=1, object_store_memory=memory)
    nodes.wait_for_nodes()
    pool = {"devices": 2, "per_device": 0.5, "kind": "cpu", "strategy": "SPREAD"}
    cluster = ray_kit.cluster(
        address=nodes.address, pools={"pair": pool}, collective_timeout=120, call_timeout=120, start_timeout=60
    )
    transport = ray_transport(cluster)
    told: dict[str, object] = {}
    try:
        handles, _ = transport.start(ray_kit.toys, ("toy",))
        toy = handles["toy"]
        homes = transport.pools["pair"].homes
        told["nodes"] = len({home.node for home in homes})
        told["sum"] = toy.collective(["", ""]).gather()
        transport.require_shared(Path(sys.argv[1]))
        victim = next(rank for rank, home in enumerate(homes) if home.node == second.node_id)
        told["victim"] = f"rank {victim} of pool pair on {transport.pools['pair'].node(victim)}"
        stuck = toy.nap(300.0)  # both ranks are busy when the node goes
        killer = threading.Timer(1.0, nodes.remove_node, args=(second,), kwargs={"allow_graceful": False})
        killer.start()
        start = time.monotonic()
        try:
            stuck.gather()
        except ClusterError as error:
            told["error"], told["seconds"] = str(error), time.monotonic() - start
        killer.join()
        transport.restart("pair")  # the node that is left has room for both ranks
        told["after"] = toy.collective(["", ""]).gather()
        told["nodes_after"] = len({home.node for home in transport.pools["pair"].homes})
    finally:
        transport.close()
        told["disconnected"] = not ray.is_initialized()
        nodes.shutdown()
        shutil.rmtree(log_path(transport.run, "x").parent, ignore_errors=True)  # the killed node left its logs
    print("TOLD " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
