"""What runs in a replica, called as Ray calls it, but without Ray: the app of the single server, and a model that answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from orchard.serve.cluster.link import HttpRequest
from orchard.serve.cluster.replica import Replica
from orchard.serve.settings import ModelSpec, Settings
from tests.serve.cluster.scripted_fleet import chat

pytestmark = pytest.mark.real
CHAT = "/v1/chat/completions"


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def made(source: str = "smollm2") -> Replica:
    return Replica(Settings(models=(ModelSpec("m", source),), host="127.0.0.1"))


def asked(replica: Replica, path: str = CHAT, fields: dict[str, Any] | None = None) -> AsyncIterator[list[Any]]:
    body = b"" if fields is None else json.dumps(fields).encode()
    scope = {
        "method": "GET" if fields is None else "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
    }
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    if body:
        headers.append((b"content-length", str(len(body)).encode()))
    scope |= {"http_version": "1.1", "scheme": "http", "headers": headers, "client": ("127.0.0.1", 1)}
    return replica.answer(HttpRequest.of(scope, body).scope, body)


async def whole(batches: AsyncIterator[list[Any]]) -> tuple[int, bytes]:
    messages = [message async for batch in batches for message in batch]
    assert [message["type"] for message in messages[:1]] == ["http.response.start"]
    assert not messages[-1].get("more_body", False)
    return messages[0]["status"], b"".join(message.get("body", b"") for message in messages[1:])


def test_it_answers_as_the_app_does(smollm2: Path) -> None:
    async def main() -> None:
        replica = made()
        status, text = await whole(asked(replica, fields=chat("Name a fruit.", max_tokens=4, temperature=0)))
        assert status == 200
        assert json.loads(text)["usage"]["completion_tokens"] == 4
        status, text = await whole(asked(replica, "/v1/models"))
        assert json.loads(text)["data"][0]["id"] == "m"
        assert (await whole(asked(replica, fields={"messages": 3})))[0] == 400
        status, text = await whole(asked(replica, fields=chat("Count.", max_tokens=4, stream=True)))
        assert text.endswith(b"data: [DONE]\n\n")

    run(main())


def test_its_signs_of_life_say_when_it_is_ready(smollm2: Path) -> None:
    async def main() -> None:
        replica = made()
        lives = set()
        async with aclosing(replica.pulses()) as pulses:  # type: ignore[type-var]
            async for pulse in pulses:
                lives.add(pulse["life"])
                if pulse["ready"]:
                    break
        await replica.check_health()
        assert len(lives) == 1
        other = made()
        async with aclosing(other.pulses()) as pulses:  # type: ignore[type-var]
            assert (await anext(pulses))["life"] not in lives

    run(main())


def test_one_that_cannot_start_says_why_and_is_unhealthy() -> None:
    async def main() -> None:
        replica = made("no-such-model")
        async with aclosing(replica.pulses()) as pulses:  # type: ignore[type-var]
            async for pulse in pulses:
                if pulse["trouble"]:
                    break
        assert not pulse["ready"]
        assert "no-such-model" in pulse["trouble"]
        with pytest.raises(Exception, match="no-such-model"):
            await replica.check_health()

    run(main())


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_a_request_that_is_left_frees_its_place(smollm2: Path, how: str) -> None:
    async def main() -> None:
        replica = made()
        gate = replica._app.state.service.gate
        batches = asked(replica, fields=chat("Tell a long story.", max_tokens=2000, stream=True))

        async def read() -> None:
            async for _ in batches:
                if how == "closed":
                    break

        reading = asyncio.ensure_future(read())
        while not gate.running:
            await asyncio.sleep(0.01)
        if how == "cancelled":
            reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await batches.aclose()  # type: ignore[attr-defined]
        left = time.monotonic()
        while gate.running:
            assert time.monotonic() - left < 3
            await asyncio.sleep(0.01)

    run(main())


def test_an_app_that_fails_is_told_apart_from_a_whole_answer(smollm2: Path) -> None:
    async def main() -> None:
        replica = made()
        await whole(asked(replica, "/v1/models"))

        async def half(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            raise ValueError("broken")

        async def late(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b"told"})
            raise ValueError("broken")

        replica._app = half  # type: ignore[assignment]
        got = []
        with pytest.raises(RuntimeError, match="ValueError"):
            async for batch in asked(replica, "/"):
                got += batch
        assert got[-1]["body"] == b"half"
        replica._app = late  # type: ignore[assignment]
        assert await whole(asked(replica, "/")) == (500, b"told")

    run(main())
