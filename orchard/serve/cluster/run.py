"""`orchard serve --cluster`: the replicas, the front before them, and the same door and server as without a cluster."""

from __future__ import annotations

import asyncio

from orchard.serve.cluster.fleet import Fleet
from orchard.serve.cluster.front import Front
from orchard.serve.cluster.rays import Placement, RayCluster
from orchard.serve.security import Security
from orchard.serve.server import Ready, opened, run_app
from orchard.serve.settings import Settings


def run_cluster(
    settings: Settings,
    replicas: int,
    address: str | None = None,
    *,
    ready: Ready | None = None,
    cpus: float = 1.0,
    gpus: float | None = None,
) -> int:
    """Serve from that many replicas until a signal says to stop; returns the exit code. `address`: a Ray that runs already.

    `cpus` and `gpus`: what a replica asks of its node; None: an equal share of the GPUs of the cluster, one at most.
    """
    placement = Placement(replicas, address, cpus, gpus)
    with opened(settings) as (sockets, tls):
        cluster = RayCluster(settings, placement, port=sockets[0].getsockname()[1])
        try:
            front = Front(settings, Fleet(cluster.links, settings.limits), lambda: asyncio.to_thread(cluster.close))
            door = Security(front, settings)
            return run_app(door, settings, drain=front.drain, ready=ready, sockets=sockets, tls=tls)
        finally:
            cluster.close()
