"""Running an app until it is told to stop: sockets, clocks, signals, and an end in which nobody's answer is cut off.

The first SIGTERM or Ctrl-C asks: no new answer is begun, those that run are finished, then the process ends. Meanwhile the server
still listens, so that whoever comes is told to go elsewhere instead of finding a closed door. The second one ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from email.utils import formatdate
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from orchard.core.errors import OrchardError, UsageError
from orchard.serve.arenas import few_arenas
from orchard.serve.connections import FLUSH_SECONDS, Connection
from orchard.serve.floor import Floor
from orchard.serve.handshakes import Handshake
from orchard.serve.listen import listening_sockets, room_for, tls_of
from orchard.serve.origin import is_loopback
from orchard.serve.settings import Settings

log = logging.getLogger("orchard.serve")

LAST_SECONDS = 2.0
"""How long what was called off may take to end."""


class StartFailed(OrchardError):
    """The app did not come up."""

    code = "start-failed"


@dataclass(frozen=True)
class Listening:
    """A server that takes requests. `stop` may be called from any thread: once to drain, a second time to end at once."""

    url: str
    host: str
    port: int
    stop: Callable[[], None]


Ready = Callable[[Listening], None]


def serve(settings: Settings, *, ready: Ready | None = None) -> int:
    """Serve the models of the settings until a signal says to stop; returns the exit code. Errors before that are raised."""
    from orchard.serve.app import create_app

    with opened(settings) as (sockets, tls):
        app = create_app(settings)
        return run_app(app, settings, drain=app.state.service.gate.drain, ready=ready, sockets=sockets, tls=tls)


@contextmanager
def opened(settings: Settings) -> Iterator[tuple[list[socket.socket], ssl.SSLContext | None]]:
    """The sockets, before anything that takes its time: a port that is in use is said at once."""
    if not settings.keys and not is_loopback(settings.host):
        hint = "give a key file (--api-key-file), or listen at 127.0.0.1"
        raise UsageError(f"a server at {settings.host} can be reached by others and needs an API key", hint=hint)
    tls = tls_of(settings)
    sockets = listening_sockets(settings.host, settings.port)
    try:
        yield sockets, tls
    finally:
        for one in sockets:
            one.close()


def run_app(
    app: Any,
    settings: Settings,
    *,
    drain: Callable[[], None],
    ready: Ready | None = None,
    sockets: list[socket.socket] | None = None,
    tls: ssl.SSLContext | None = None,
) -> int:
    """Run any ASGI app as `serve` does. `drain` is called on the event loop when the server is asked to stop. Without `sockets`
    they are opened as the settings say."""
    if sockets is None:
        with opened(settings) as (made, context):
            return run_app(app, settings, drain=drain, ready=ready, sockets=made, tls=context)
    few_arenas()
    return asyncio.run(_Server(app, settings, drain).run(sockets, tls, ready))


class _Server:
    def __init__(self, app: Any, settings: Settings, drain: Callable[[], None]) -> None:
        room = room_for(settings.limits.connections)
        if room < settings.limits.connections:
            log.warning("room for %d connections only: the system's limit of open files is low", room)
        self.limits = replace(settings.limits, connections=room)
        self.host = settings.host
        self.floor = Floor(self.limits)
        self.state = ServerState()
        self._app = app
        self._drain = drain
        self._ending = False
        self._config = uvicorn.Config(
            self._called_off,
            interface="asgi3",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # anybody can write X-Forwarded-For
            timeout_keep_alive=settings.limits.idle_seconds,  # type: ignore[arg-type]
        )
        self._asked = asyncio.Event()
        self._at_once = asyncio.Event()
        self._signal: int | None = None

    async def run(self, sockets: list[socket.socket], tls: ssl.SSLContext | None, ready: Ready | None) -> int:
        self._loop = asyncio.get_running_loop()
        self._config.load()
        lifespan = self._config.lifespan_class(self._config)
        with self._signals():
            await lifespan.startup()
            if lifespan.should_exit:
                raise StartFailed("the server cannot start", hint="its log says why")
            dates = self._loop.create_task(self._dates())
            servers = [await self._listen(one, tls, lifespan.state) for one in sockets]
            try:
                if ready is not None:
                    ready(self._listening(sockets[0], tls))
                await self._asked.wait()
                await self._finish()
            finally:
                for server in servers:
                    server.close()
                dates.cancel()
                await self._end()
                await lifespan.shutdown()
        return 128 + self._signal if self._at_once.is_set() and self._signal is not None else 0

    async def _called_off(self, scope: Any, receive: Any, send: Any) -> None:
        """The app. Answers that are called off at the end are no failures that a log should tell of."""
        try:
            await self._app(scope, receive, _saying_close(send) if self.floor.draining else send)
        except asyncio.CancelledError:
            if not self._ending:
                raise

    async def _listen(
        self, one: socket.socket, tls: ssl.SSLContext | None, app_state: dict[str, Any]
    ) -> asyncio.Server:
        def connection() -> Connection:
            return Connection(self._config, self.state, app_state, self.floor)

        def handshake() -> Handshake:
            assert tls is not None
            return Handshake(self.floor, tls, connection)

        return await self._loop.create_server(connection if tls is None else handshake, sock=one, backlog=1024)

    def _listening(self, one: socket.socket, tls: ssl.SSLContext | None) -> Listening:
        port = one.getsockname()[1]
        name = self.host.strip("[]")
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(name, name)
        shown = f"[{shown}]" if ":" in shown else shown
        url = f"{'http' if tls is None else 'https'}://{shown}:{port}"
        return Listening(url, self.host, port, self._stop_from_anywhere)

    # The end --------------------------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        """Let those who are being answered have their answers."""
        self.floor.draining = True
        self._drain()
        for one in self.floor.open:
            one.last_answer()
        running = set(self.state.tasks)
        if not running:
            return
        log.warning("stopping after %d requests that are being answered; a second signal stops at once", len(running))
        answered = self._loop.create_task(_all(running))
        hurry = self._loop.create_task(self._at_once.wait())
        await asyncio.wait((answered, hurry), timeout=self.limits.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        left = [task for task in running if not task.done()]
        if left and not self._at_once.is_set():
            log.warning(
                "%d requests were not answered within %g s and are cut off", len(left), self.limits.drain_seconds
            )
        answered.cancel()
        hurry.cancel()

    async def _end(self) -> None:
        """Whatever is left is called off."""
        self._ending = True
        for one in list(self.floor.open):
            one.give_up()
        await self._flushed()
        for connection in list(self.state.connections):
            connection.transport.abort()
        await asyncio.sleep(0.01)  # whoever answers one of them hears of it
        left = set(self.state.tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=LAST_SECONDS)

    async def _flushed(self) -> None:
        """Wait for those who have not taken the last bytes of their answers, but not long."""

        def owed() -> bool:
            return any(one.transport.get_write_buffer_size() for one in self.state.connections)

        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                while owed() and not self._at_once.is_set():
                    await asyncio.sleep(0.01)

    def _stop_from_anywhere(self) -> None:
        with suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._stop, None)

    def _stop(self, number: int | None) -> None:
        if self._asked.is_set():
            self._signal = number
            self._at_once.set()
        self._asked.set()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # only the main thread hears them
            yield
            return

        def told(number: int, frame: FrameType | None) -> None:
            self._loop.call_soon_threadsafe(self._stop, number)

        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, told) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    async def _dates(self) -> None:
        while True:
            self.state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
            await asyncio.sleep(1)


async def _all(tasks: set[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)


def _saying_close(send: Any) -> Any:
    """So that a client does not send its next request on this connection. Not every version of uvicorn says so by itself."""

    async def said(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = [pair for pair in message.get("headers", []) if pair[0].lower() != b"connection"]
            message = {**message, "headers": [*headers, (b"connection", b"close")]}
        await send(message)

    return said
