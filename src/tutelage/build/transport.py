"""Where the roles of a run live: in this process, or on a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tutelage.build.device import device
from tutelage.config import AnyConfig
from tutelage.errors import ClusterError
from tutelage.layout import Place
from tutelage.protocols import Transport
from tutelage.reports.display import Display
from tutelage.transport.local import LocalTransport

if TYPE_CHECKING:
    from tutelage.transport.ray.transport import RayTransport


def make_transport(cfg: AnyConfig, show: Display) -> Transport:
    """The transport of a recipe.  Raises MissingExtraError where Ray is asked for and not installed."""
    if cfg.cluster.transport == "local":
        return LocalTransport(Place(device=device(), progress=show.phase))
    return remote(cfg, show)


def restart_lost(transport: Transport, error: ClusterError) -> None:
    """Start every pool again that lost a rank."""
    for pool in dict.fromkeys([error.pool, *transport.lost()]):
        transport.restart(pool)


def remote(cfg: AnyConfig, show: Display) -> RayTransport:
    from tutelage.transport.ray import ray_transport

    return ray_transport(cfg.cluster, progress=show.phase, event=show.event)
