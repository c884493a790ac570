"""Server-sent events over a real connection: errors before the first byte, signs of life, and clients that hang up."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI, Request, Response

from orchard.serve import sse as module
from orchard.serve.app import create_app
from orchard.serve.errors import ApiError
from orchard.serve.sse import EventStream, sse
from tests.serve.serving import Serving, scripted_settings

pytestmark = pytest.mark.loopback
Made = Callable[[], AsyncGenerator[bytes, None]]


def _served(made: Made) -> Serving:
    app: FastAPI = create_app(scripted_settings())

    @app.get("/stream")
    async def stream(request: Request) -> Response:
        return await EventStream.begun(request, made(), {"x-more": "yes"})

    return Serving(app)


def test_one_event() -> None:
    assert sse("[DONE]") == b"data: [DONE]\n\n"
    assert sse({"a": "é\n"}, "ping") == b'event: ping\ndata: {"a":"\\u00e9\\n"}\n\n'
    assert json.loads(sse({"a": [1]})[6:]) == {"a": [1]}


def test_an_error_before_the_first_byte_has_its_status() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        raise ApiError(429, "queue_full", "full", retry_after=3)
        yield b""

    server = _served(events)
    try:
        found = httpx2.get(f"{server.url}/stream")
        assert found.status_code == 429 and found.headers["retry-after"] == "3"
        assert found.json()["error"]["code"] == "queue_full"
    finally:
        server.close()


def test_signs_of_life_while_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP_ALIVE_SECONDS", 0.02)

    async def events() -> AsyncGenerator[bytes, None]:
        yield sse("first")
        await asyncio.sleep(0.2)
        yield sse("last")

    server = _served(events)
    try:
        found = httpx2.get(f"{server.url}/stream")
    finally:
        server.close()
    assert found.headers["content-type"].startswith("text/event-stream") and found.headers["x-more"] == "yes"
    assert found.text.startswith("data: first\n\n: still here\n\n") and found.text.endswith("data: last\n\n")


@pytest.mark.parametrize("begun", [True, False])
def test_a_client_that_hangs_up_closes_the_generator(begun: bool) -> None:
    closed = threading.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            if begun:
                yield sse("first")
            while True:
                await asyncio.sleep(0.01)
                if begun:
                    yield sse("more")
        finally:
            closed.set()

    server = _served(events)
    try:
        if begun:
            with httpx2.stream("GET", f"{server.url}/stream") as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx2.ReadTimeout):
                httpx2.get(f"{server.url}/stream", timeout=0.2)
        assert closed.wait(10)
    finally:
        server.close()


def test_a_generator_that_is_never_read_is_closed() -> None:
    closed: list[bool] = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield sse("first")
        finally:
            closed.append(True)

    async def main() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await asyncio.sleep(10)

        stream = events()
        await EventStream(stream, await anext(stream))({"type": "http"}, receive, send)

    asyncio.run(main())
    assert closed == [True]
