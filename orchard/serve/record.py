"""Every request gets an id, a line in the log and its place in the numbers. What clients wrote is in none of them."""

from __future__ import annotations

import logging
import time
import uuid
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from orchard.serve.service import Service

REQUEST_IDS = (b"x-request-id", b"request-id")
"""What OpenAI's and what Anthropic's package look for."""
log = logging.getLogger("orchard.serve")


class Record:
    """ASGI middleware, the outermost but for nothing: also refused requests are recorded."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status = time.monotonic(), 0
        name: str = scope.get("orchard.request") or f"req_{uuid.uuid4().hex[:24]}"  # a cluster's front has named it
        scope["orchard.request"] = name

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = list(message.get("headers", []))
                known = {header for header, _ in given}
                mine = [(header, name.encode()) for header in REQUEST_IDS if header not in known]
                message["headers"] = [*given, *mine]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            seconds = time.monotonic() - begun
            self.service.metrics.request(route, status or 499, seconds)
            log.info("%s %s %s %d %.3f s", name, scope["method"], route, status or 499, seconds)
