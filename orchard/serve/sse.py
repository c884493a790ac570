"""Answers that come bit by bit: server-sent events, written by one rule for every protocol.

    async def events() -> AsyncGenerator[bytes, None]:
        async with service.run(ask) as run:  # what cannot be answered raises here
            async for some in together(run):
                yield b"".join(sse(...) for index, event in some)

    return await EventStream.begun(request, events())

`begun` waits for the first bytes before anything is sent, so that an error still gets its status. A client that hangs up closes
the generator, and with it whatever it holds. While nothing comes, a comment goes out now and then, so that nobody in between
takes the connection for dead.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from orchard.serve.disconnect import unless_gone
from orchard.serve.run import Run
from orchard.session.turn import Event

KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b": still here\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def sse(data: Any, event: str | None = None) -> bytes:
    """One event. `data`: a text as it is, anything else as JSON."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    name = f"event: {event}\n" if event is not None else ""
    return f"{name}data: {text}\n\n".encode()


async def together(run: Run) -> AsyncIterator[list[tuple[int, Event]]]:
    """The events of a run, as many at a time as are there: one write for all of them."""
    held: list[tuple[int, Event]] = []
    try:
        async for pair in run:
            held.append(pair)
            if not run.waiting:
                yield held
                held = []
    except Exception:
        if held:  # what came before the error is still the client's
            yield held
        raise
    if held:
        yield held


class EventStream(StreamingResponse):
    """The events of a generator, which is closed when they end, when the client hangs up, and when anything goes wrong."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], first: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(events, headers=HEADERS | dict(headers or {}))
        self.events = events
        self.first = first
        self._quiet = True

    @classmethod
    async def begun(
        cls, request: Request, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None
    ) -> EventStream:
        """A stream whose first bytes are there. What the generator raises before them is raised here."""
        try:
            first = await unless_gone(request, _first(events))
        except BaseException:
            await events.aclose()
            raise
        return cls(events, first, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(self.listen_for_disconnect(receive))
        writing = asyncio.ensure_future(self._write(send))
        beating = asyncio.ensure_future(self._keep_alive(send))
        try:
            await asyncio.wait((writing, gone), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            for task in (gone, beating, writing):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait((writing,))
            await self.events.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self.first:
            await send({"type": "http.response.body", "body": self.first, "more_body": True})
        async for chunk in self.events:
            self._quiet = False
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        """Ends with the stream: it is called off before anything else can be sent on the connection."""
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            if self._quiet:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            self._quiet = True


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events, b"")
