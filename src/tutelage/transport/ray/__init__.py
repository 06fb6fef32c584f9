"""The transport of a Ray cluster: a role is a group of SPMD ranks (HybridFlow, Sheng et al. 2024, arXiv:2409.19256).

Everything below this file imports ray; this file does not, so that its absence is an error with a fix.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tutelage.errors import MissingExtraError, installed
from tutelage.layout import no_progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from tutelage.config.cluster import ClusterConfig
    from tutelage.transport.ray.transport import RayTransport


def ray_transport(
    cluster: ClusterConfig,
    *,
    log_dir: Path | None = None,
    progress: Callable[[str, int, int], None] = no_progress,
    event: Callable[[str, str], None] | None = None,
) -> RayTransport:
    """A transport on the cluster that `cluster` names; nothing is started yet (`RayTransport.start`).

    log_dir   folder for workers.log, the output of every rank.
    progress  (what, done, total), called while the driver waits.
    event     (kind, message): a lost rank, a restart, an error that nobody waited for.

    Raises MissingExtraError where ray is not installed.
    """
    require_installed()
    from tutelage.transport.ray.transport import RayTransport

    return RayTransport(cluster, log_dir=log_dir, progress=progress, event=event)


def require_installed() -> None:
    """Raises MissingExtraError where ray is not installed."""
    if not installed("ray"):
        raise MissingExtraError("cluster.transport is ray, and ray is not installed", fix="pip install 'tutelage[ray]'")


def connected() -> bool:
    """Whether this process is connected to a Ray cluster already."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
