"""What runs in a Ray Serve replica: the app of the single server, called in its own process.

Ray starts this class by its name, gives it the server's settings (plain data) and calls `answer` for every request. The app
does not know that it is not behind a socket: a request comes as ASGI messages and goes as ASGI messages.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, MutableMapping
from contextlib import suppress
from typing import Any

from orchard.serve.cluster.link import HttpRequest, Message
from orchard.serve.settings import Settings

log = logging.getLogger("orchard.serve.cluster")

GRACE = 5.0
"""Seconds that the app has to end a request whose client is gone, before it is cancelled."""
BETWEEN = 1.0
"""Seconds between two signs of life."""
MOST_PULSES = 600
"""Ray keeps a little about every item of a stream until the stream ends, so these end now and then."""


class Replica:
    """One copy of the server. Every method runs on one event loop, which Ray gives it."""

    def __init__(self, settings: Settings) -> None:
        from orchard.serve.app import create_app

        self._app = create_app(settings)
        self._life = f"{socket.gethostname()}/{os.getpid()}/{time.time_ns()}"
        self._lifespan = Lifespan(self._app)
        self._start: asyncio.Task[None] | None = None

    async def pulses(self) -> AsyncIterator[dict[str, Any]]:
        """Signs of life. Asking for them starts the app and its default model; each says whether that has ended, and how."""
        start = self._started()
        for _ in range(MOST_PULSES):
            await asyncio.wait((start,), timeout=BETWEEN)
            failed = start.exception() if start.done() else None
            yield {"life": self._life, "ready": start.done() and failed is None, "trouble": str(failed or "")}
            if start.done():
                await asyncio.sleep(BETWEEN)

    async def check_health(self) -> None:
        """Ray asks this now and then. One that could not start is unhealthy: Ray starts another in its place, which tries
        again."""
        if self._start is not None and self._start.done():
            self._start.result()

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[dict[str, Any]]]:
        """The messages of one answer, as many at a time as are there. Closing or cancelling it ends the request."""
        await asyncio.shield(self._started())
        out: asyncio.Queue[dict[str, Any] | BaseException | None] = asyncio.Queue()
        gone = asyncio.Event()
        task = asyncio.create_task(self._run(HttpRequest(scope, body), out, gone))
        try:
            ended = False
            while not ended:
                found = [await out.get()]
                while not out.empty():
                    found.append(out.get_nowait())
                batch = [one for one in found if isinstance(one, dict)]
                if batch:
                    yield batch
                ended = None in found
                for error in found:
                    if isinstance(error, BaseException):
                        raise RuntimeError(f"the app failed: {type(error).__name__}") from error
        finally:
            gone.set()
            if not task.done():
                await asyncio.wait((task,), timeout=GRACE)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run(
        self, request: HttpRequest, out: asyncio.Queue[dict[str, Any] | BaseException | None], gone: asyncio.Event
    ) -> None:
        asked = ended = False

        async def receive() -> Message:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": request.body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal ended
            out.put_nowait(dict(message))
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                ended = True
                out.put_nowait(None)

        try:
            await self._app(request.asgi_scope(), receive, send)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            log.exception("a request failed in the app")
            if not ended:  # what it sent before it failed was a whole answer, usually of status 500
                out.put_nowait(error)
            return
        if not ended:
            out.put_nowait(None)

    def _started(self) -> asyncio.Task[None]:
        """The one task that starts the app. It belongs to no request: a client that hangs up does not end it."""
        if self._start is None:
            self._start = asyncio.create_task(self._begin())
        return self._start

    async def _begin(self) -> None:
        await self._lifespan.start()
        service = self._app.state.service
        service.hub.give(await service.take(service.hub.default))


class Lifespan:
    """What an app does before its first request. After its last one the process ends, and everything with it."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._to_app: asyncio.Queue[Message] = asyncio.Queue()
        self._from_app: asyncio.Queue[Message] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())
        self._to_app.put_nowait({"type": "lifespan.startup"})
        reply = await self._from_app.get()
        if reply["type"] != "lifespan.startup.complete":
            raise RuntimeError(f"the app could not start: {reply.get('message', '')}")

    async def _run(self) -> None:
        async def send(message: MutableMapping[str, Any]) -> None:
            self._from_app.put_nowait(message)

        try:
            await self._app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, self._to_app.get, send)
        except Exception as error:
            self._from_app.put_nowait({"type": "lifespan.failed", "message": f"{type(error).__name__}: {error}"})
