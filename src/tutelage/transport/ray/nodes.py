"""What the nodes of a cluster have and what of it is free, in words and numbers.

Free resources of each node have no public call; `ray._private.state.available_resources_per_node` is what `ray status`
reads (ray 2.9 to 2.60, https://github.com/ray-project/ray/blob/master/python/ray/_private/state.py).  Without it the
totals alone are told.
"""

from __future__ import annotations

from typing import Any

import ray

SHOWN = ("CPU", "GPU")


def alive() -> list[dict[str, Any]]:
    """Ray's records of the nodes that are up."""
    return [node for node in ray.nodes() if node["Alive"]]


def node_name(node_id: str, address: str) -> str:
    """Address and the start of the id, since several nodes may share a machine."""
    return f"{address}#{node_id[:6]}"


def has_gpus() -> bool:
    return ray.cluster_resources().get("GPU", 0) > 0


def free_by_node() -> dict[str, dict[str, float]]:
    """Free resources by node id; empty where this version of Ray does not tell."""
    try:
        from ray._private.state import available_resources_per_node
    except ImportError:
        return {}
    return dict(available_resources_per_node())


def described() -> str:
    """One clause a node: `10.0.0.1#3fa2c1: CPU 2 of 8 free, GPU 0 of 1 free`."""
    free = free_by_node()
    return "; ".join(f"{node_name(n['NodeID'], n['NodeManagerAddress'])}: {_amounts(n, free)}" for n in alive())


def _amounts(node: dict[str, Any], free: dict[str, dict[str, float]]) -> str:
    total, left = node["Resources"], free.get(node["NodeID"])
    if left is None:
        return ", ".join(f"{kind} {total.get(kind, 0):g}" for kind in SHOWN)
    return ", ".join(f"{kind} {left.get(kind, 0):g} of {total.get(kind, 0):g} free" for kind in SHOWN)
