"""The front of a cluster: an ASGI app that answers for all replicas.

It answers `/health`, `/ready` and `/metrics` itself and sends everything else on. It checks nothing that a replica checks: a
request that is wrong is refused in the same words as by a single server, because the same app refuses it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from orchard.serve.cluster.fleet import Fleet, Member
from orchard.serve.cluster.forward import Forwarder, Receive, Send, answer_error
from orchard.serve.cluster.gauges import Gauges, merged
from orchard.serve.cluster.link import HttpRequest, Message, ReplicaLost
from orchard.serve.cluster.sticky import sticky_key
from orchard.serve.errors import ApiError, api_error
from orchard.serve.record import REQUEST_IDS
from orchard.serve.settings import Settings

log = logging.getLogger("orchard.serve.cluster")

_ROUTES = ("chat/completions", "completions", "responses", "messages", "embeddings", "models")
LOGGED = frozenset({"/health", "/ready", "/metrics", *(f"/v1/{name}" for name in _ROUTES)})
METRICS_SECONDS = 5.0
"""How long a replica may take to tell its metrics before the page goes without them."""


class Front:
    """`stop` is called after the last answer: it ends the replicas."""

    def __init__(self, settings: Settings, fleet: Fleet, stop: Callable[[], Awaitable[None]] | None = None) -> None:
        self.settings = settings
        self.fleet = fleet
        self.gauges = Gauges(fleet)
        self.draining = False
        self._forward = Forwarder(fleet, self.gauges)
        self._stop = stop

    def drain(self) -> None:
        """Refuse whoever comes from now on; running answers go on."""
        self.draining = True

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self.fleet.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.fleet.stop()
        if self._stop is not None:
            await self._stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _http(self, scope: Any, receive: Receive, send: Send) -> None:
        begun, status = time.monotonic(), 499

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # One id for a request, however many replicas have worked on it.
                headers = [pair for pair in message.get("headers", ()) if pair[0].lower() not in REQUEST_IDS]
                message = {**message, "headers": [*headers, *((one, name.encode()) for one in REQUEST_IDS)]}
            await send(message)

        name = f"req_{uuid.uuid4().hex[:24]}"
        await self._answered(name, scope, receive, noted)
        path = scope["path"] if scope["path"] in LOGGED else "other"  # paths can hold what clients wrote
        log.info("%s %s %s %d %.3f s", name, scope["method"], path, status, time.monotonic() - begun)

    async def _answered(self, name: str, scope: Any, receive: Receive, send: Send) -> None:
        own = {"/health": self._health, "/ready": self._ready, "/metrics": self._metrics}.get(scope["path"])
        try:
            if own is not None and scope["method"] in ("GET", "HEAD"):
                await own(scope, send)
                return
            if self.draining:
                raise ApiError(
                    503, "draining", "this server is stopping: ask another one, or try again later", retry_after=5
                )
            body = await read_body(receive, self.settings.limits.body_bytes)
            if body is not None:
                request = HttpRequest.of({**scope, "orchard.request": name}, body)
                await self._forward(request, sticky_key(request.path, body), receive, send)
        except Exception as error:
            told = api_error(error)
            if told.status == 500:
                log.exception("a request failed in the front")
            self.gauges.refused.labels(told.code).inc()
            await answer_error(scope["path"], told, send)

    # Pages of the front's own -----------------------------------------------------------------------------------------

    async def _health(self, scope: Any, send: Send) -> None:
        await _json(200, self._facts(), send)

    async def _ready(self, scope: Any, send: Send) -> None:
        ready = bool(self.fleet.ready) and not self.draining
        facts = self._facts()
        for name, member in self.fleet.members.items():
            if member.trouble:  # not in /health, which everybody may read: it can name files
                facts["replicas"][name]["trouble"] = member.trouble
        await _json(200 if ready else 503, facts, send, {} if ready else {"retry-after": "2"})

    def _facts(self) -> dict[str, Any]:
        state = "draining" if self.draining else "ok" if self.fleet.ready else "starting"
        members = self.fleet.members.items()
        return {
            "status": state,
            "ready": len(self.fleet.ready),
            "replicas": {name: one.facts() for name, one in members},
        }

    async def _metrics(self, scope: Any, send: Send) -> None:
        request = HttpRequest.of({**scope, "method": "GET", "headers": _without_accept(scope["headers"])}, b"")
        members = self.fleet.ready
        pages = await asyncio.gather(*(_page(member, request) for member in members))
        known = {member.name: page for member, page in zip(members, pages) if page is not None}
        body = (self.gauges.text() + merged(known)).encode()
        await _whole(200, b"text/plain; version=0.0.4; charset=utf-8", body, send)


async def read_body(receive: Receive, limit: int) -> bytes | None:
    """The whole body; None when the client hung up before its end. `ApiError` where it is larger than the limit."""
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts += message.get("body", b"")
        if len(parts) > limit:
            raise ApiError(413, "body_too_large", f"the body is larger than {limit:,} bytes: send less at a time")
        if not message.get("more_body", False):
            return bytes(parts)


async def _page(member: Member, request: HttpRequest) -> str | None:
    """A page of a replica, or None where it does not come."""
    try:
        async with asyncio.timeout(METRICS_SECONDS):
            status, body = 0, bytearray()
            messages: AsyncIterator[list[Message]] = member.link.answer(request)
            async with aclosing(messages):  # type: ignore[type-var]
                async for batch in messages:
                    for message in batch:
                        status = message.get("status", status)
                        body += message.get("body", b"")
            return body.decode() if status == 200 else None
    except (ReplicaLost, TimeoutError):
        return None


def _without_accept(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """So that every replica answers in the plain text format, uncompressed."""
    return [pair for pair in headers if pair[0].lower() not in (b"accept", b"accept-encoding")]


async def _json(status: int, fields: dict[str, Any], send: Send, headers: dict[str, str] | None = None) -> None:
    await _whole(status, b"application/json", json.dumps(fields).encode(), send, headers)


async def _whole(status: int, kind: bytes, body: bytes, send: Send, headers: dict[str, str] | None = None) -> None:
    pairs = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    pairs += [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body, "more_body": False})
