"""The door by itself: requests as ASGI knows them, without a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from orchard.serve.security import Security
from orchard.serve.settings import ModelSpec, Settings

KEY = "orchard-a-key-that-is-long-enough"
PAIR = tuple[str, str]


def settings(**more: Any) -> Settings:
    return Settings((ModelSpec("m", "m"),), **more)


class Answer:
    def __init__(self, messages: list[dict[str, Any]]) -> None:
        starts = [message for message in messages if message["type"] == "http.response.start"]
        assert len(starts) <= 1
        self.status = starts[0]["status"] if starts else 0
        self.pairs = [(name.decode(), value.decode()) for name, value in starts[0]["headers"]] if starts else []
        self.headers = dict(self.pairs)
        assert len(self.headers) == len(self.pairs), "no header twice"
        self.body = b"".join(message.get("body", b"") for message in messages)
        self.ended = bool(messages) and not messages[-1].get("more_body", False)

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body it was sent and the name of the key."""
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            break
    headers = [(b"x-key", scope.get("orchard.key", "").encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def knock(
    door: Security,
    path: str = "/v1/models",
    *,
    method: str = "GET",
    headers: Sequence[PAIR] = (("host", "127.0.0.1:8000"),),
    parts: Sequence[bytes] = (),
    wait: Callable[[int], Awaitable[None]] | None = None,
    gone: bool = False,
    scheme: str = "http",
) -> Answer:
    sent: list[dict[str, Any]] = []
    left = list(parts)

    async def receive() -> dict[str, Any]:
        if wait is not None:
            await wait(len(parts) - len(left))
        if not left and gone:
            return {"type": "http.disconnect"}
        part = left.pop(0) if left else b""
        return {"type": "http.request", "body": part, "more_body": bool(left) or gone}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "scheme": scheme,
        "client": ("127.0.0.1", 1),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
    }
    asyncio.run(door(scope, receive, send))  # type: ignore[arg-type]
    return Answer(sent)


def host(name: str, *more: PAIR) -> list[PAIR]:
    return [("host", name), *more]
