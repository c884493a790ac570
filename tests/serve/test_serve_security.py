"""Who is let in by their keys, and what every answer says."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from orchard.serve.keys import hashed
from orchard.serve.security import Security
from tests.serve.door import KEY, PAIR, echo, host, knock, settings

# Keys ---------------------------------------------------------------------------------------------------------------------


def test_keys_are_asked_for() -> None:
    door = Security(echo, settings(keys=(hashed(KEY),)))
    for path in (
        "/v1/models",
        "/v1/chat/completions",
        "/metrics",
        "/ready",
        "/docs",
        "/openapi.json",
        "/health/",
        "/pages",
    ):
        found = knock(door, path)
        assert found.status == 401 and found.code == "invalid_api_key"
        assert found.headers["www-authenticate"].startswith("Bearer")
        assert KEY not in found.body.decode()
    for path in ("/health", "/", "/page/page.js"):
        assert knock(door, path).status == 200
    assert knock(door, "/", method="POST").status == 401


@pytest.mark.parametrize(
    "given", [[("authorization", f"Bearer {KEY}")], [("authorization", f"bearer  {KEY} ")], [("x-api-key", KEY)]]
)
def test_keys_that_are_let_in(given: list[PAIR]) -> None:
    found = knock(Security(echo, settings(keys=(hashed("x"), hashed(KEY)))), headers=host("localhost", *given))
    assert found.status == 200 and found.headers["x-key"] == hashed(KEY)[:8]


@pytest.mark.parametrize(
    "given",
    [
        [("authorization", KEY)],
        [("authorization", f"Basic {KEY}")],
        [("authorization", "Bearer")],
        [("authorization", f"Bearer {KEY}x")],
        [("x-api-key", "")],
        [("x-api-key", hashed(KEY))],
        [("x-api-key", "wrong"), ("authorization", f"Bearer {KEY}")],
        [("x-api-key", "\xff\xfe")],
        [("cookie", f"key={KEY}")],
    ],
)
def test_keys_that_are_not(given: list[PAIR]) -> None:
    found = knock(Security(echo, settings(keys=(hashed(KEY),))), headers=host("localhost", *given))
    assert found.status == 401 and found.code == "invalid_api_key"


def test_a_refusal_speaks_the_protocol_of_its_path() -> None:
    door = Security(echo, settings(keys=(hashed(KEY),)))
    anthropic = json.loads(knock(door, "/v1/messages", method="POST").body)
    assert anthropic["type"] == "error" and anthropic["error"]["type"] == "authentication_error"
    openai = json.loads(knock(door, "/v1/responses", method="POST").body)["error"]
    assert openai["type"] == "authentication_error" and openai["code"] == "invalid_api_key"


def test_without_keys_nobody_is_asked() -> None:
    found = knock(Security(echo, settings()), headers=host("localhost", ("authorization", "Bearer anything")))
    assert found.status == 200 and found.headers["x-key"] == ""


def test_those_who_guess_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Security(echo, settings(keys=(hashed(KEY),)))
    monkeypatch.setattr(type(door.slowdown), "FIRST", 0.05)

    def seconds(key: str) -> float:
        begun = time.monotonic()
        knock(door, headers=host("localhost", ("x-api-key", key)))
        return time.monotonic() - begun

    for _ in range(5):
        seconds("wrong")
    assert seconds("wrong") >= 0.15
    assert seconds(KEY) < 0.1, "whoever has the key does not"


# Answers ------------------------------------------------------------------------------------------------------------------


def test_what_every_answer_says() -> None:
    door = Security(echo, settings(keys=(hashed(KEY),)))
    for found in (knock(door, "/health"), knock(door), knock(door, headers=host("evil"))):
        assert found.headers["x-content-type-options"] == "nosniff"
        assert found.headers["cache-control"] == "no-store"
        assert found.headers["referrer-policy"] == "no-referrer"
        assert found.headers["x-frame-options"] == "DENY"


def test_what_an_answer_says_itself_stays() -> None:
    async def page(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"Cache-Control", b"no-cache")]})
        await send({"type": "http.response.body"})

    found = knock(Security(page, settings()))
    assert found.headers["Cache-Control"] == "no-cache" and "cache-control" not in found.headers


def test_what_nobody_foresaw() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("a secret of ours")

    found = knock(Security(broken, settings()))
    assert found.status == 500 and found.code == "internal" and "secret" not in found.body.decode()

    async def late(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("too late to say so")

    with pytest.raises(ValueError, match="too late"):
        knock(Security(late, settings()))


def test_web_sockets_are_turned_away() -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Security(echo, settings())({"type": "websocket", "headers": []}, receive, send))  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]
