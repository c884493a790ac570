"""A small endpoint on this machine that tests can make say anything."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from orchard.session.executors.endpoint import EndpointExecutor
from orchard.session.turn import Event, ToolSpec, Turn
from orchard.text.messages import Message

KEY = "sk-very-secret-0123456789"
HELLO = (Message("user", "Hello"),)
WEATHER = ToolSpec("weather", "The weather", {"type": "object", "properties": {"city": {"type": "string"}}})


class FakeEndpoint(ThreadingHTTPServer):
    """Answers every request with `answer`, a function of the handler, and keeps what it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer: Callable[[Handler], None] = lambda handler: handler.stream(said("hi"), stopped())
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.heads: list[dict[str, str]] = []
        self.gone = threading.Event()
        self.release = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        return None

    def executor(self, **named: Any) -> EndpointExecutor:
        url = f"http://127.0.0.1:{self.server_port}/v1"
        settings: dict[str, Any] = {"timeout": 5, "api_key": KEY} | named
        return EndpointExecutor(url, "small", **settings)


class Handler(BaseHTTPRequestHandler):
    server: FakeEndpoint
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        return None

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        self.server.heads.append(dict(self.headers))
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.close_connection = True
        self.server.answer(self)

    def reply(self, status: int, body: bytes = b"", kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": kind, "Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def begin(self, kind: str = "text/event-stream; charset=utf-8") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def stream(self, *events: Any, done: bool = True) -> None:
        self.begin()
        for event in events:
            self.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.chunk(b"data: [DONE]\n\n" if done else b": end\n")
        self.wfile.write(b"0\r\n\r\n")


def delta(finish: str | None = None, **parts: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": parts, "finish_reason": finish}]}


def said(text: str) -> dict[str, Any]:
    return delta(content=text)


def stopped(why: str = "stop") -> dict[str, Any]:
    return delta(why)


def served() -> Iterator[FakeEndpoint]:
    server = FakeEndpoint()
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()
    thread.join(5)


def events_of(executor: EndpointExecutor, turn: Turn | None = None) -> list[Event]:
    return list(executor.run(turn or Turn(HELLO), threading.Event()))
