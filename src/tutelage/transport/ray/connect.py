"""Reaching a Ray cluster: the one on this machine that is started for a run, or one that exists."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import ray

from tutelage.config.cluster import ClusterConfig
from tutelage.errors import ClusterError

PROBE = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='error'); ray.shutdown()"

WANTS_TOKEN = "InvalidAuthToken"
"""What Ray says where a cluster was started with token authentication."""


@dataclass(frozen=True)
class Connection:
    """own: this process connected, so it disconnects.  local: the instance was started for this run."""

    own: bool
    local: bool

    def close(self) -> None:
        if self.own:
            ray.shutdown()


def connect(cluster: ClusterConfig) -> Connection:
    """Connect within `start_timeout`; a connection that this process has already is used as it is.

    Raises ClusterError, with the address, for a cluster that does not answer, that has another version of Ray or
    Python, or that is not the one to which this process is connected already.
    """
    address = cluster.address
    if ray.is_initialized():
        require_same(address)
        return Connection(own=False, local=False)
    if address is not None and address != "auto":
        require_listener(address, cluster.start_timeout)
        require_ray(address, cluster.start_timeout)
    options: dict[str, Any] = {"log_to_driver": False, "runtime_env": dict(cluster.runtime_env)}
    if address is None or not address.startswith("ray://"):
        options["logging_level"] = logging.CRITICAL  # what goes wrong arrives as an error
    if address is None:
        options["include_dashboard"] = False
    try:
        ray.init(address=address or "local", **options)
    except Exception as error:  # Ray raises bare Exception too, for a node that does not come up in time
        raise refused(address, str(error)) from error
    return Connection(own=True, local=address is None)


def require_same(address: str | None) -> None:
    """Raises ClusterError where `address` names another cluster than the one this process is connected to.

    ray:// names the port of Ray's client server, which cannot be compared with the address of the head.
    """
    if address is None or address == "auto":
        return
    asked = host_and_port(address)
    if address.startswith("ray://"):
        return
    here = str(ray.get_runtime_context().gcs_address)
    wanted = endpoints(*asked)
    if any(ip_address(host).is_loopback for host, _ in wanted if host[:1].isdigit() or ":" in host):
        wanted.add((str(ray.util.get_node_ip_address()), asked[1]))  # what Ray calls this machine
    if wanted.isdisjoint(endpoints(*host_and_port(here))):
        raise ClusterError(
            f"cluster.address is {address}, and this process is connected to the Ray at {here}",
            fix="call ray.shutdown() before the run, or leave cluster.address out to use that one",
        )


def endpoints(host: str, port: int) -> set[tuple[str, int]]:
    """Every (IP address, port) that the name stands for; the name itself where it cannot be resolved."""
    try:
        return {(str(found[4][0]), port) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return {(host, port)}


def host_and_port(address: str) -> tuple[str, int]:
    """Raises ClusterError for anything but HOST:PORT and ray://HOST:PORT."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(
            f"cluster.address is {address!r}", fix="give auto, HOST:PORT or ray://HOST:PORT, such as 10.0.0.1:6379"
        )
    return host.strip("[]"), int(port)


def require_listener(address: str, seconds: float) -> None:
    """Raises ClusterError where nothing accepts a connection."""
    host, port = host_and_port(address)
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(
            f"nothing answers at cluster.address {address}: {error}",
            fix="start a head node there (ray start --head --port=PORT), or open the port between the machines",
        ) from error


def require_ray(address: str, seconds: float) -> None:
    """Raises ClusterError where something listens that is not a Ray of this version.

    Tried in another process: Ray's own start neither keeps a deadline nor always returns.
    """
    try:
        done = subprocess.run([sys.executable, "-c", PROBE, address], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace")
        if WANTS_TOKEN in said:
            raise refused(address, said) from error
        raise ClusterError(
            f"{address} accepts connections, but no Ray cluster answered within {seconds:g} s (cluster.start_timeout)",
            fix="check that the port is Ray's (6379 for HOST:PORT, 10001 for ray://) and not taken by something else",
        ) from error
    if done.returncode:
        raise refused(address, done.stderr)


def refused(address: str | None, text: str) -> ClusterError:
    """Ray's own words, shortened to what names the cause."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "version mismatch" in text.lower():
        start = next(i for i, line in enumerate(lines) if "version mismatch" in line.lower())
        words, fix = " ".join(lines[start : start + 5]), "install the cluster's versions of ray and Python here"
    elif WANTS_TOKEN in text:
        words = "it asks for a token, and this process sends none or another"
        fix = "set RAY_AUTH_MODE=token here, with the cluster's token in ~/.ray/auth_token (Ray's default where one is "
        fix += "there), or start the nodes with RAY_AUTH_MODE=disabled"
    elif address == "auto":
        words, fix = lines[-1] if lines else "no answer", "start one on this machine: ray start --head"
    else:
        words = lines[-1] if lines else "no answer"
        fix = "see `ray status` on the head node" if address else "free memory, disk and ports on this machine"
    where = f"the Ray cluster at {address}" if address else "a Ray instance on this machine"
    return ClusterError(f"{where} cannot be used: {words}", fix=fix)
