"""A client that costs little and stamps every piece of an answer with the moment it arrived.

Written on asyncio's transports: a piece gets its time in `data_received`, before any coroutine is woken, and nothing is
decoded before the answer is whole. One core then follows many hundred streams (`cost.py` measures it). HTTP/1.1 only, with
connections that are used again; no proxies, no redirects.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

from orchard.core.errors import OrchardError, UsageError

_LONGEST_HEAD = 64 << 10


class EndpointFailed(OrchardError):
    """An endpoint cannot be reached, or does not speak HTTP as we know it."""

    code = "endpoint-failed"
    retryable = True


@dataclass
class Reply:
    """An answer as it arrived: `pieces` are its bytes with their times."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    ended: float = 0.0
    whole: bool = False

    @property
    def content(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    def json(self) -> Any:
        return json.loads(self.content)

    def events(self) -> Iterator[tuple[float, str]]:
        """The data of server-sent events, each with the time at which its last byte came."""
        rest, data = b"", list[bytes]()
        for when, piece in self.pieces:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                line = line.rstrip(b"\r")
                if line.startswith(b"data:"):
                    data.append(line[5:].removeprefix(b" "))
                elif not line and data:
                    yield when, b"\n".join(data).decode(errors="replace")
                    data = []
        if data:
            yield self.ended, b"\n".join(data).decode(errors="replace")


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.reply = Reply()
        self.done: asyncio.Future[Reply] | None = None
        self.used = False
        self._clear()

    def _clear(self) -> None:
        self.rest = b""
        self.left: int | None = None
        self.state = "head"

    @property
    def alive(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def exchange(self, request: bytes) -> asyncio.Future[Reply]:
        assert self.transport is not None
        self._clear()
        self.reply, self.done = Reply(), asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.done

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.done is None or self.done.done():
            return self.close()  # more than was asked for: this connection cannot be trusted with another request
        try:
            self._read(data, now)
        except ValueError as error:
            self._fail(EndpointFailed(f"the answer is no HTTP: {error}", hint="check the address and the port"))

    def connection_lost(self, error: Exception | None) -> None:
        if self.state == "until close":
            self._end(time.perf_counter())
        else:
            said = f": {error}" if error else ""
            self._fail(EndpointFailed(f"the connection was closed before the answer ended{said}", hint="see its log"))

    def _fail(self, error: Exception) -> None:
        self.close()
        if self.done is not None and not self.done.done():
            self.done.set_exception(error)

    def _end(self, now: float) -> None:
        self.reply.ended, self.reply.whole = now, True
        self.used = True
        if self.done is not None and not self.done.done():
            self.done.set_result(self.reply)

    # Reading --------------------------------------------------------------------------------------------------------

    def _read(self, data: bytes, now: float) -> None:
        if self.state == "head":
            data = self._head(self.rest + data)
            if self.state == "head":
                return
        if self.state == "chunks":
            self._chunks(self.rest + data, now)
        elif self.state == "until close":
            self._take(data, now)
        else:
            assert self.left is not None
            self._take(data[: self.left], now)
            self.left -= len(data)
            if self.left <= 0:
                self._end(now)

    def _head(self, data: bytes) -> bytes:
        """Status and headers; gives back what follows them."""
        head, found, after = data.partition(b"\r\n\r\n")
        if not found:
            self.rest = data
            if len(data) > _LONGEST_HEAD:
                raise ValueError("headers without an end")
            return b""
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(first[:60])
        status = int(rest[:3])
        if status < 200:  # "continue" and its kin: the real head follows
            return self._head(after)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.reply.status, self.reply.headers, self.rest = status, headers, b""
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self.state = "chunks"
        elif "content-length" in headers or status in (204, 304):
            self.state, self.left = "length", int(headers.get("content-length", 0))
        else:
            self.state = "until close"
        return after

    def _chunks(self, data: bytes, now: float) -> None:
        while True:
            line, found, after = data.partition(b"\r\n")
            size = int(line.split(b";")[0], 16) if found else 0
            if not found or len(after) < size + 2:
                self.rest = data
                return
            if size == 0:  # trailers are not read: whoever sends them loses the connection
                return self._end(now)
            self._take(after[:size], now)
            data = after[size + 2 :]

    def _take(self, piece: bytes, now: float) -> None:
        if piece:
            self.reply.pieces.append((now, piece))


class Endpoint:
    """An address with its connections: `url` is what OpenAI's clients call the base address, such as http://127.0.0.1:8000/v1."""

    def __init__(self, url: str, *, key: str = "") -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no address", hint="give one such as http://127.0.0.1:8000/v1")
        self.url, self.base = url, parts.path.rstrip("/")
        self.host, self.port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        name = f"[{self.host}]" if ":" in self.host else self.host
        headers = {"host": f"{name}:{self.port}", "accept": "text/event-stream, application/json"}
        headers |= {"authorization": f"Bearer {key}"} if key else {}
        self.headers = headers | {"user-agent": "orchard-bench"}
        self.idle: list[Connection] = []

    async def post(self, path: str, body: bytes, *, timeout: float = 300.0) -> Reply:
        return await self.send("POST", self.base + path, body, {"content-type": "application/json"}, timeout=timeout)

    async def get(self, path: str, *, timeout: float = 30.0) -> Reply:
        """`path` counts from the root of the server, not from the base address."""
        return await self.send("GET", path, b"", {}, timeout=timeout)

    async def send(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], *, timeout: float = 300.0
    ) -> Reply:
        request = written(method, path, body, {**self.headers, **headers})
        async with asyncio.timeout(timeout):
            while True:
                connection = await self._connection()
                try:
                    reply = await connection.exchange(request)
                except EndpointFailed:
                    # A server may close an idle connection at any moment; only a fresh one's failure says something.
                    if not connection.used or connection.reply.status:
                        raise
                except BaseException:  # given up: the server must see that nobody listens
                    connection.close()
                    raise
                else:
                    if connection.state != "until close" and reply.headers.get("connection", "").lower() != "close":
                        self.idle.append(connection)
                    else:
                        connection.close()
                    return reply

    async def _connection(self) -> Connection:
        while self.idle:
            connection = self.idle.pop()
            if connection.alive:
                return connection
        loop = asyncio.get_running_loop()
        try:
            _, made = await loop.create_connection(Connection, self.host, self.port, ssl=self.tls)
        except OSError as error:
            hint = "start the server, or give its address with --url"
            raise EndpointFailed(f"nothing answers at {self.url}: {error.strerror or error}", hint=hint) from error
        return made

    def close(self) -> None:
        for connection in self.idle:
            connection.close()
        self.idle.clear()


def written(method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """A request as bytes."""
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    if body or method == "POST":
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
