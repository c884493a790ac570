"""Bodies of requests: read whole before anything else is done for a client, bounded in size, in time and all together.

A body that is too large is refused by its announced length or as soon as it is. One that comes too slowly is given up: at least
`FLOOR` bytes a second after a first grace, and all of it within the limit. Large bodies that are held at the same time share one
budget; small ones always find room, so that those who fill the budget cannot shut out those who ask a short question.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping

from starlette.types import Message, Receive

from orchard.serve.errors import ApiError
from orchard.serve.settings import MIB, Limits

IN_FLIGHT = 256 * MIB
"""Bytes of large bodies that are held at the same time."""
SMALL = 64 * 1024
GRACE = 5.0
"""Seconds before the rate of a body is looked at."""
FLOOR = 1024
"""Bytes a second."""


class Gone(Exception):
    """The client hung up before its body had come."""


class Intake:
    """One for a server."""

    def __init__(self, limits: Limits, in_flight: int = IN_FLIGHT) -> None:
        self.limits = limits
        self.held = 0
        """Bytes of large bodies."""
        self._most = max(in_flight, limits.body_bytes)

    def announced(self, headers: Mapping[str, list[str]]) -> bool:
        """Whether a body follows; `ApiError` where its headers say that it is none we take."""
        coded = [part.strip().lower() for value in headers.get("content-encoding", []) for part in value.split(",")]
        if any(part not in ("", "identity") for part in coded):
            words = "compressed bodies are not taken: send the body as it is, without Content-Encoding"
            raise ApiError(415, "unsupported_media_type", words)
        parted = [value.strip().lower() for value in headers.get("transfer-encoding", [])]
        if parted and parted != ["chunked"]:
            raise ApiError(400, "invalid_request", "Transfer-Encoding may only be chunked: send the body as it is")
        lengths = headers.get("content-length", [])
        if any(not length.isascii() or not length.isdigit() for length in lengths) or len(set(lengths)) > 1:
            raise ApiError(400, "invalid_request", "Content-Length is not one number: send the length of the body")
        length = int(lengths[0][:20]) if lengths else 0
        if length > self.limits.body_bytes:
            raise self._too_large()
        return length > 0 or bool(parted)

    async def read(self, receive: Receive) -> Body:
        """The whole body. `release` it when the request is done."""
        body = Body(self)
        try:
            await self._read(receive, body)
        except BaseException:
            body.release()
            raise
        return body

    async def _read(self, receive: Receive, body: Body) -> None:
        begun, limit = time.monotonic(), self.limits.body_seconds
        grace = min(GRACE, limit)
        more = True
        while more:
            patience = min(limit, grace + body.size / FLOOR) - (time.monotonic() - begun)
            try:
                async with asyncio.timeout(max(0.0, patience)):
                    message = await receive()
            except TimeoutError:
                words = f"the body did not come within {limit:g} s, or too slowly: send it faster, or a smaller one"
                raise ApiError(408, "request_timeout", words) from None
            if message["type"] == "http.disconnect":
                raise Gone
            body.add(message.get("body", b""))
            if body.size > self.limits.body_bytes:
                raise self._too_large()
            more = message.get("more_body", False)

    def _too_large(self) -> ApiError:
        limit = self.limits.body_bytes
        return ApiError(413, "body_too_large", f"the body is larger than {limit:,} bytes: send less at a time")

    def take(self, amount: int) -> None:
        if self.held + amount > self._most:
            words = "too many large requests are being read: try again in a moment, or send smaller ones"
            raise ApiError(503, "overloaded", words, retry_after=2)
        self.held += amount

    def give(self, amount: int) -> None:
        self.held -= amount


class Body:
    """What has come of one body. It is an ASGI `receive` in front of another one: `messages(receive)`."""

    def __init__(self, intake: Intake) -> None:
        self.size = 0
        self._intake = intake
        self._taken = 0
        self._parts: deque[bytearray] = deque()

    def add(self, part: bytes) -> None:
        self.size += len(part)
        if self._parts and len(self._parts[-1]) < SMALL:
            self._parts[-1] += part  # a million parts of two bytes would take twenty times their size
        elif part:
            self._parts.append(bytearray(part))
        if self.size > SMALL and self.size > self._taken:
            self._intake.take(self.size - self._taken)
            self._taken = self.size

    def release(self) -> None:
        self._intake.give(self._taken)
        self._taken = 0
        self._parts.clear()

    def messages(self, receive: Receive) -> Receive:
        """The body, and after it what else is heard of the client."""
        ended = False

        async def given() -> Message:
            nonlocal ended
            if ended:
                return await receive()
            part = bytes(self._parts.popleft()) if self._parts else b""
            ended = not self._parts
            return {"type": "http.request", "body": part, "more_body": not ended}

        return given
