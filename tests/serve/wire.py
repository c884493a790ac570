"""Talking to a server byte by byte, and a server process to talk to: for tests that do what no decent client does."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("server_program.py")
SECONDS = 20.0


class ServerProcess:
    """`tests/serve/server_program.py` in a process of its own. `asked`: limits, keys, words, delay …"""

    def __init__(self, **asked: Any) -> None:
        environment = {**os.environ, "ORCHARD_NO_NETWORK": "loopback"}
        command = [sys.executable, str(PROGRAM), json.dumps(asked)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self._said: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(SECONDS)
            self._listener.join(SECONDS)
            raise AssertionError(f"the server did not start: {self.errors}")
        facts = json.loads(line)
        self.url, self.port = facts["url"], facts["port"]

    def _listen(self) -> None:
        assert self.process.stderr is not None
        self._said += self.process.stderr

    @property
    def errors(self) -> str:
        return "".join(self._said)

    def connect(self, timeout: float = SECONDS) -> socket.socket:
        found = socket.create_connection(("127.0.0.1", self.port), timeout=timeout)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return found

    def resident(self) -> int:
        """Bytes of memory that the process has now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ended(self, seconds: float = SECONDS) -> int:
        code = self.process.wait(seconds)
        self._listener.join(seconds)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SECONDS)
        self._listener.join(SECONDS)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


class Reply:
    """What came back: `status`, `headers`, `body`."""

    def __init__(self, data: bytes) -> None:
        head, _, self.body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(first.split()[1]) if first else 0
        pairs = [line.partition(":") for line in lines]
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found

    @property
    def code(self) -> str:
        return str(self.error["code"])


def until_closed(found: socket.socket, seconds: float = SECONDS) -> bytes:
    """Everything the server sends until it closes. A reset is a close, too."""
    found.settimeout(seconds)
    data = bytearray()
    try:
        while part := found.recv(1 << 16):
            data += part
    except (ConnectionResetError, BrokenPipeError):
        pass
    return bytes(data)


def reply_on(found: socket.socket, seconds: float = SECONDS) -> Reply:
    """One reply with a Content-Length; the connection may stay open."""
    found.settimeout(seconds)
    data = bytearray()
    while b"\r\n\r\n" not in data:
        part = found.recv(1 << 16)
        if not part:
            return Reply(bytes(data))
        data += part
    length = int(Reply(bytes(data)).headers.get("content-length", "0"))
    while len(data) < data.index(b"\r\n\r\n") + 4 + length:
        part = found.recv(1 << 16)
        if not part:
            break
        data += part
    return Reply(bytes(data))


def request_bytes(
    method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None, *, close: bool = True
) -> bytes:
    said = {"Host": "127.0.0.1"} | ({"Connection": "close"} if close else {})
    if body is not None:
        said |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    said |= headers or {}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in said.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1") + (body or b"")


def ask(
    server: ServerProcess,
    method: str = "GET",
    path: str = "/health",
    body: Any = None,
    headers: dict[str, str] | None = None,
) -> Reply:
    """One request on a connection of its own."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    with server.connect() as found:
        found.sendall(request_bytes(method, path, data, headers))
        return Reply(until_closed(found))


def chat_body(**more: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": "hello"}], **more}


def seconds_to_close(connections: list[socket.socket], limit: float) -> float:
    """Until the server has closed all of these; `limit` where some stay."""
    begun = time.monotonic()
    with selectors.DefaultSelector() as watch:
        for one in connections:
            one.setblocking(False)
            watch.register(one, selectors.EVENT_READ)
        while watch.get_map() and time.monotonic() - begun < limit:
            for key, _ in watch.select(0.2):
                try:
                    ended = not key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                except BlockingIOError:
                    continue
                except OSError:
                    ended = True
                if ended:
                    watch.unregister(key.fileobj)
    return time.monotonic() - begun


HASTY = {"header_seconds": 1.0, "body_seconds": 1.5, "idle_seconds": 1.0, "drain_seconds": 8.0}
"""Limits of a server that a test need not wait for."""
CHAT = "/v1/chat/completions"
