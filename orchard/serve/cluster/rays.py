"""Ray itself: starting or joining it, and putting one Ray Serve application per replica on it.

A Ray that we start ourselves belongs to this machine alone: it listens on the loopback interface, wants a token that only its
own processes have, has no dashboard and sends no usage statistics. A Ray that runs already is left as it is; only our
applications are added, and taken away again.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from orchard.core.errors import MissingExtra, OrchardError, UsageError
from orchard.serve.cluster.ray_link import RayLink
from orchard.serve.cluster.replica import Replica
from orchard.serve.settings import Settings

log = logging.getLogger("orchard.serve.cluster")

STORE_BYTES = 512 << 20
"""Ray's shared memory, where large requests lie while they travel."""
SPARE = 64
"""Calls past the capacity of a replica that Ray lets through: signs of life and metrics."""
END_SECONDS = 8.0
KNOCK_SECONDS = 5.0
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # what Ray would print about dying workers; the front says it itself, on stderr
}
LOOPBACK = {
    # Ray's name for "this machine only": its processes then listen on 127.0.0.1 instead of on every interface.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
}


class NoRay(OrchardError):
    """Ray could not be started or joined."""

    code = "no-ray"
    retryable = True


@dataclass(frozen=True)
class Placement:
    """How many replicas there are, what each of them asks of its node, and which Ray they run on (None: one of our own)."""

    replicas: int
    address: str | None = None
    cpus: float = 1.0
    gpus: float | None = None

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise UsageError(f"{self.replicas} replicas serve nobody", hint="use --replicas 1 or more")
        if self.address is not None and self.address.startswith("ray://"):
            hint = "start this command on a node of the cluster, with --cluster-address HOST:PORT of its head"
            raise UsageError("answers cannot be streamed through a Ray client (ray://)", hint=hint)


class RayCluster:
    """`links` are the replicas. `close` takes them away, and stops Ray where it was started here."""

    def __init__(self, settings: Settings, placement: Placement, port: int = 0) -> None:
        """`port`: the front's, which is a part of the applications' names."""
        placement = _with_address(placement)
        self._ours = placement.address is None
        ray, serve = _import(self._ours)
        self._ray, self._serve = ray, serve
        self._closing = threading.Lock()
        self._closed = False
        self._names: list[str] = []
        self._connect(placement)
        try:
            # Ray Serve's own HTTP server is not needed; where somebody else started Serve, theirs stays as it is.
            serve.start(proxy_location="Disabled", logging_config=_logging())
            placement = self._with_gpus(placement)
            self._names = [f"orchard-{_host()}-{port}-{place}" for place in range(placement.replicas)]
            targets = [
                serve.RunTarget(_application(serve, settings, placement), name=name, route_prefix=None)
                for name in self._names
            ]
            handles = serve.run_many(targets, wait_for_applications_running=False)
        except BaseException:
            self.close()
            raise
        self.links = [RayLink(str(place), handle) for place, handle in enumerate(handles)]

    def close(self) -> None:
        """Once is enough; from any thread."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            _bounded(self._serve.shutdown if self._ours else self._take_away)
            _bounded(self._ray.shutdown)

    def _with_gpus(self, placement: Placement) -> Placement:
        """A share of the cluster's GPUs, where nothing is said: without one, Ray would hide them from a replica."""
        if placement.gpus is not None:
            return placement
        known = float(self._ray.cluster_resources().get("GPU", 0))
        return replace(placement, gpus=min(1.0, math.floor(100 * known / placement.replicas) / 100))

    def _take_away(self) -> None:
        for name in self._names:
            self._serve.delete(name)

    def _connect(self, placement: Placement) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "address": placement.address}
        if self._ours:
            cores = _cores()
            os.environ.setdefault("ORCHARD_THREADS", str(max(1, cores // placement.replicas)))
            options |= {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
            options |= {"num_cpus": max(cores, int(placement.replicas * placement.cpus) + 1)}
            options |= {"object_store_memory": STORE_BYTES}
        try:
            if placement.address is not None:
                _knock(placement.address)
            with _signals_kept():
                self._ray.init(**options)
        except Exception as error:
            why = str(error).strip().split("\n")[0][:300]
            if self._ours:
                raise NoRay(f"Ray cannot be started: {why}", hint="`ray start --head` may say more") from error
            hint = (
                "`ray status` says whether it runs; one that asks for a token needs RAY_AUTH_MODE=token and the token; "
                "without --cluster-address and RAY_ADDRESS one is started here"
            )
            raise NoRay(f"the Ray at {placement.address} cannot be joined: {why}", hint=hint) from error


def _bounded(what: Callable[[], Any]) -> None:
    """Call it, but wait no longer than `END_SECONDS`: where Ray itself was killed, its calls never return."""
    ending = threading.Thread(target=_quietly, args=(what,), daemon=True)
    ending.start()
    ending.join(END_SECONDS)


def _quietly(what: Callable[[], Any]) -> None:
    with suppress(Exception):
        what()


class LocalReplica(Replica):
    """A replica on a Ray of our own, which keeps to this machine."""

    def __init__(self, settings: Settings) -> None:
        _bind_to_loopback()
        super().__init__(settings)


def _bind_to_loopback() -> None:
    """Ray Serve opens a port in every replica, for calls between deployments, on all interfaces, and takes no word about that
    (ray 2.60, `ReplicaActor._on_initialized`). Nothing of ours uses it."""
    module = sys.modules.get("ray.serve._private.replica")
    add_port = getattr(module, "add_port_to_grpc_server", None)
    if module is None or add_port is None:
        log.warning(
            "this version of Ray may open a port of the replica to other machines (it asks callers for a token)"
        )
        return
    module.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", "127.0.0.1"))  # type: ignore[attr-defined]


def _application(serve: Any, settings: Settings, placement: Placement) -> Any:
    ours = placement.address is None
    limits = settings.limits
    deployment = serve.deployment(LocalReplica if ours else Replica).options(
        name="replica",
        num_replicas=1,
        max_ongoing_requests=limits.running + limits.queue + SPARE,
        ray_actor_options={"num_cpus": placement.cpus, "num_gpus": placement.gpus},
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=5.0,
        logging_config=_logging(),
    )
    # The front has checked keys and speaks TLS: replicas need to know neither.
    return deployment.bind(replace(settings, keys=(), tls_cert=None, tls_key=None))


def _logging() -> dict[str, Any]:
    return {"log_level": "WARNING", "enable_access_log": False}


def _import(ours: bool) -> tuple[Any, Any]:
    """Ray reads these variables when it is imported, and its processes inherit them."""
    os.environ.update(QUIET)
    if ours:
        os.environ.update(LOOPBACK)
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    try:
        import ray
        from ray import serve
    except ImportError as error:
        hint = "pip install 'orchard[cluster]'"
        raise MissingExtra(f"--cluster needs Ray Serve, which is not installed ({error})", hint=hint) from error
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # the front says itself, once, what becomes of its replicas
    return ray, serve


def _with_address(placement: Placement) -> Placement:
    """Where nothing is said, Ray's own variable is asked."""
    if placement.address is None and os.environ.get("RAY_ADDRESS"):
        return replace(placement, address=os.environ["RAY_ADDRESS"])
    return placement


def _knock(address: str) -> None:
    """Ray tries for minutes to reach what is not there. This finds out at once; an address like "auto" is Ray's own affair."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_SECONDS).close()


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _host() -> str:
    """This machine's name as a part of an application's name."""
    return "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40]


@contextmanager
def _signals_kept() -> Iterator[None]:
    """`ray.init` takes SIGTERM for itself; it belongs to the server, which has answers to finish."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
