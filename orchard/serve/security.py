"""The door: what is refused before any route sees it, and what every answer says to browsers.

In this order: the name a request is for and the page it comes from (`orchard.serve.origin`), the key (`orchard.serve.keys`), the
body (`orchard.serve.intake`). Plain ASGI, so that a stream passes through untouched.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchard.serve.errors import ApiError, api_error, body_for
from orchard.serve.intake import Gone, Intake
from orchard.serve.keys import KeyRing, Slowdown
from orchard.serve.origin import Rules, answer_headers, preflight_headers
from orchard.serve.settings import Settings

log = logging.getLogger("orchard.serve")

LINGER = 2.0
"""Seconds in which the rest of a refused body is thrown away, so that a client which is still sending hears why."""
HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"x-frame-options": b"DENY",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-store",
}
"""What every answer says unless it says something else."""


class Security:
    """ASGI middleware. Sets `scope["orchard.key"]`: a short, stable name of the key that was sent, where keys are asked for."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self.rules = Rules(settings)
        self.keys = KeyRing(settings.keys)
        self.slowdown = Slowdown()
        self.intake = Intake(settings.limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await Request(self, scope, receive, send).run()
        elif scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":  # nothing here speaks it
            await receive()
            await send({"type": "websocket.close", "code": 1008})


class Request:
    """One request at the door."""

    def __init__(self, door: Security, scope: Scope, receive: Receive, send: Send) -> None:
        self.door = door
        self.scope = scope
        self.receive = receive
        self._send = send
        self.path: str = scope["path"]
        self.headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            self.headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        self._extra: list[tuple[bytes, bytes]] = []
        self._started = False
        self._body_left = "content-length" in self.headers or "transfer-encoding" in self.headers

    async def run(self) -> None:
        try:
            if await self._let_in():
                await self._answered()
        except Gone:
            return
        except ApiError as error:
            await self._refuse(error)
        except Exception as error:
            # Nobody foresaw it. It is answered here, so that it is recorded and has our headers like any other.
            if self._started:
                raise
            told = api_error(error)
            if told.status >= 500:
                log.error("a request failed", exc_info=error)
            await self._refuse(told)

    async def _let_in(self) -> bool:
        """False where all is said already."""
        rules, reading = self.door.rules, self.scope["method"] in ("GET", "HEAD")
        host = rules.check_host(self.headers)
        harmless = reading and self.path == "/"
        scheme = self.scope.get("scheme", "http")
        origin = rules.check_origin(self.headers, scheme, host, harmless=harmless)
        if origin is not None:
            self._extra = answer_headers(origin)
            if self.scope["method"] == "OPTIONS" and "access-control-request-method" in self.headers:
                self._extra = preflight_headers(origin, self.headers)
                await self._whole(204, b"")
                return False
        page = reading and (self.path == "/" or self.path.startswith("/page/"))
        if self.door.keys and not page and self.path != "/health":
            self.scope["orchard.key"] = await self._key()
        return True

    async def _key(self) -> str:
        keys = [value.encode("latin-1") for value in self.headers.get("x-api-key", [])]
        for value in self.headers.get("authorization", []):
            kind, _, key = value.strip().partition(" ")
            if kind.lower() == "bearer":
                keys.append(key.strip().encode("latin-1"))
        name = self.door.keys.name_of(keys[0]) if len(set(keys)) == 1 else None
        if name is not None:
            return name
        if keys:
            client = self.scope.get("client")
            await asyncio.sleep(self.door.slowdown.failed(client[0] if client else ""))
        said = "this API key is not let in" if keys else "an API key is needed"
        self._extra = [*self._extra, (b"www-authenticate", b'Bearer realm="orchard"')]
        words = (
            f"{said}: send `Authorization: Bearer KEY` or `x-api-key: KEY`, with the key that `orchard serve` showed"
        )
        raise ApiError(401, "invalid_api_key", words)

    async def _answered(self) -> None:
        intake = self.door.intake
        if not intake.announced(self.headers):
            self._body_left = False
            await self.door.app(self.scope, self.receive, self.send)
            return
        body = await intake.read(self.receive)
        self._body_left = False
        try:
            await self.door.app(self.scope, body.messages(self.receive), self.send)
        finally:
            body.release()

    async def send(self, message: Message) -> None:
        """What the app answers, with what every answer says."""
        if message["type"] == "http.response.start":
            self._started = True
            said = message.get("headers", [])
            names = {name.lower() for name, _ in said}
            ours = [(name, value) for name, value in HEADERS.items() if name not in names]
            message = {**message, "headers": [*said, *ours, *self._extra]}
        await self._send(message)

    async def _refuse(self, error: ApiError) -> None:
        body = json.dumps(body_for(self.path, error)).encode()
        headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
        await self._whole(error.status, body, [(b"content-type", b"application/json"), *headers])

    async def _whole(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """An answer of the door's own. Where a body is still coming the connection ends with it, but not at once."""
        said = list(headers or [])
        if status != 204:
            said.append((b"content-length", str(len(body)).encode()))
        if self._body_left:
            said.append((b"connection", b"close"))
        await self.send({"type": "http.response.start", "status": status, "headers": said})
        if self._body_left:
            await self.send({"type": "http.response.body", "body": body, "more_body": True})
            await self._throw_away()
            body = b""
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def _throw_away(self) -> None:
        """Closing a connection on which something unread lies makes the other side forget what it was sent."""
        until = time.monotonic() + LINGER
        more = True
        while more:
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    message = await self.receive()
            except TimeoutError:
                return
            more = message["type"] == "http.request" and message.get("more_body", False)
