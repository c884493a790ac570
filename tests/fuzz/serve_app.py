"""The whole app in this process, over a model of one layer with random weights: bytes in, an answer out, no socket.

Everything between the door and the engine is the real thing: limits, parsing, templates, grammars, sampling, streams. `checked`
says what is wrong with an answer to an arbitrary request: a fault of the server, a refusal without code or words, a broken
stream, or none at all in time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.tiny import tiny_gguf

MODEL = "smollm2"
"""What requests call the model."""
CONTEXT = 1024
LONGEST = 20.0
HOST = "127.0.0.1:8000"


class Fault(Exception):
    """The server did what it must not do."""


class Hang(BaseException):
    """The event loop was held up for many seconds."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    content: bytes


class App:
    """`App(folder).post("/v1/chat/completions", b"…")`. Not to be shared between threads."""

    def __init__(self, folder: Path) -> None:
        from orchard.serve.app import create_app
        from orchard.serve.settings import Limits, ModelSpec, Settings

        logging.getLogger("orchard.serve").setLevel(logging.CRITICAL)
        path = tiny_gguf(folder / "tiny.gguf", **{"llama.context_length": CONTEXT})
        limits = Limits(deadline=LONGEST)
        self.app = create_app(Settings(models=(ModelSpec(MODEL, str(path)),), limits=limits))
        self.loop = asyncio.new_event_loop()

    def close(self) -> None:
        self.app.state.service.close()
        self.loop.close()

    def post(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> Answer:
        return self.send("POST", path, body, {"content-type": "application/json", **(headers or {})})

    def send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """One request. `Fault` where nothing comes in time, also where the event loop itself is stuck."""
        previous = signal.signal(signal.SIGALRM, _alarm)
        signal.setitimer(signal.ITIMER_REAL, 2 * LONGEST)
        try:
            return self.loop.run_until_complete(
                asyncio.wait_for(self._send(method, path, body, headers), 1.5 * LONGEST)
            )
        except TimeoutError:
            raise Fault(f"no answer after {1.5 * LONGEST:g} s") from None
        except Hang as error:
            raise Fault(str(error)) from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)

    async def _send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        sent = {"host": HOST, "content-length": str(len(body)), **headers}
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in sent.items()],
            "client": ("127.0.0.1", 5),
            "server": ("127.0.0.1", 8000),
        }
        unread = [{"type": "http.request", "body": body, "more_body": False}]
        status, said, parts, ended = 0, dict[str, str](), list[bytes](), asyncio.Event()

        async def receive() -> dict[str, Any]:
            if unread:
                return unread.pop()
            await ended.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                said.update({name.decode(): value.decode("latin-1") for name, value in message["headers"]})
            else:
                parts.append(message.get("body", b""))
                if not message.get("more_body"):
                    ended.set()

        await self.app(scope, receive, send)
        if not ended.is_set():
            raise Fault("the answer was never ended")
        return Answer(status, said, b"".join(parts))


def checked(answer: Answer) -> str:
    """What came of it in a word; `Fault` where it must not have come."""
    shown = answer.content[:300].decode(errors="replace")
    if answer.status >= 500 or answer.status < 200:
        raise Fault(f"status {answer.status}: {shown}")
    if answer.status >= 400:
        code, message = _error(answer.content, shown)
        if not (isinstance(code, str) and code and isinstance(message, str) and len(message) > 5):
            raise Fault(f"status {answer.status} without a code and a message: {shown}")
        return f"{answer.status} {code}"
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        return _stream(answer.content)
    if answer.content:
        json.loads(answer.content)
    return "answered"


def _error(content: bytes, shown: str) -> tuple[Any, Any]:
    try:
        error = json.loads(content)["error"]
        return error["code"], error["message"]
    except (ValueError, KeyError, TypeError) as error:
        raise Fault(f"a refusal of no known shape: {shown}") from error


def _stream(content: bytes) -> str:
    for line in content.decode().split("\n"):
        data = line.removeprefix("data:").strip()
        if data == line or data == "[DONE]":
            continue
        event = json.loads(data)
        error = event.get("error") or (event.get("response") or {}).get("error") if isinstance(event, dict) else None
        if error and error.get("code") == "internal":
            raise Fault(f"a fault of the server in the stream: {data[:300]}")
        if error:
            return f"streamed, then {error.get('code')}"
    return "streamed"


def _alarm(number: int, frame: types.FrameType | None) -> None:
    raise Hang(f"the event loop stood still for {2 * LONGEST:g} s")
