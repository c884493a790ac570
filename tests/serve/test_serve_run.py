"""Answers on their way through threads and the event loop: errors before the first byte, cancelling, deadlines, slow readers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest

from orchard.core.errors import UsageError
from orchard.serve.errors import ApiError
from orchard.serve.run import UNREAD
from orchard.serve.service import Ask, Service
from orchard.serve.settings import Limits, ModelSpec, Settings
from orchard.session.completion import Completion
from orchard.session.errors import ExceededContextWindowSizeError
from orchard.session.turn import Done, Event, Message, Text, Turn, Usage

TURN = Turn((Message("user", "Hello"),))


class Counting:
    """An executor that counts until it is stopped, and says what happened to it."""

    name, context_size, capabilities = "counting", 100, frozenset[Any]()

    def __init__(self, pieces: int = 5, *, delay: float = 0.0, error: Exception | None = None, after: int = 0) -> None:
        self.pieces, self.delay, self.error, self.after = pieces, delay, error, after
        self.stopped = threading.Event()
        self.given = 0

    def run(self, turn: Turn, cancel: threading.Event) -> Iterator[Event]:
        for number in range(self.pieces):
            if self.error is not None and number == self.after:
                raise self.error
            if cancel.wait(self.delay) if self.delay else cancel.is_set():
                self.stopped.set()
                yield Done("cancelled")
                return
            self.given += 1
            yield Text(f"{number} ", (number,))
        yield Done("stop", Usage(3, 1, self.pieces))


def service_with(executor: Any, **limits: Any) -> Service:
    service = Service(Settings((ModelSpec("m", "m"),), limits=replace(Limits(), **limits)))
    service.hub.add("m", executor)
    return service


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


async def all_quiet(service: Service) -> None:
    """Places and models are given back."""
    while service.gate.running or service.hub._entries["m"].users > 1:
        await asyncio.sleep(0.01)


def test_events_of_several_answers_come_with_their_places() -> None:
    async def work() -> None:
        service = service_with(Counting())
        texts = ["", ""]
        async with service.run(Ask("m", (TURN, TURN), "c", 10)) as run:
            async for place, event in run:
                if isinstance(event, Text):
                    texts[place] += event.delta
        assert texts == ["0 1 2 3 4 "] * 2
        await all_quiet(service)
        numbers = service.metrics.text().decode()
        assert 'orchard_answers_total{finish="stop",model="m"} 2.0' in numbers
        assert 'orchard_answered_tokens_total{kind="cached",model="m"} 2.0' in numbers

    run(work())


def test_what_cannot_be_answered_is_said_before_anything_is_sent() -> None:
    async def work() -> None:
        for error, status, code in (
            (UsageError("no", hint="yes"), 400, "invalid_request"),
            (ExceededContextWindowSizeError(tokens=120, limit=100), 400, "context_length_exceeded"),
            (RuntimeError("a secret"), 500, "internal"),
        ):
            service = service_with(Counting(error=error))
            with pytest.raises(ApiError) as told:
                async with service.run(Ask("m", (TURN,), "c", 10)):
                    raise AssertionError("nothing should have begun")
            assert (told.value.status, told.value.code) == (status, code)
            assert "secret" not in told.value.message
            if code == "context_length_exceeded":
                assert "120" in told.value.message and "100" in told.value.message
            await all_quiet(service)
        with pytest.raises(ApiError) as told:
            async with service.run(Ask("other", (TURN,), "c", 10)):
                pass
        assert (told.value.status, told.value.code) == (404, "model_not_found")
        with pytest.raises(ApiError) as told:
            async with service.run(Ask("m", (Completion("a"),), "c", 10)):
                pass
        assert told.value.code == "wrong_kind_of_model"
        await all_quiet(service)

    run(work())


def test_an_error_on_the_way_is_raised_where_the_reader_stands() -> None:
    async def work() -> None:
        service = service_with(Counting(error=UsageError("broke"), after=3))
        seen = 0
        with pytest.raises(ApiError, match="broke"):
            async with service.run(Ask("m", (TURN,), "c", 10)) as run:
                async for _ in run:
                    seen += 1
        assert seen == 3
        await all_quiet(service)

    run(work())


def test_leaving_early_stops_the_answer() -> None:
    async def work() -> None:
        executor = Counting(10_000, delay=0.005)
        service = service_with(executor)
        async with service.run(Ask("m", (TURN,), "c", 10)) as run:
            async for _ in run:
                break
        await all_quiet(service)
        assert executor.stopped.is_set() and executor.given < 20

    run(work())


def test_a_deadline_ends_an_answer_and_one_that_waits() -> None:
    async def work() -> None:
        executor = Counting(10_000, delay=0.01)
        service = service_with(executor, running=1)
        begun = time.monotonic()
        with pytest.raises(ApiError) as told:
            async with service.run(Ask("m", (TURN,), "c", 0.3)) as run:
                with pytest.raises(ApiError) as waited:
                    async with service.run(Ask("m", (TURN,), "d", 0.1)):
                        pass
                assert (waited.value.status, waited.value.code) == (504, "deadline_exceeded")
                async for _ in run:
                    pass
        assert (told.value.status, told.value.code) == (504, "deadline_exceeded")
        assert time.monotonic() - begun < 3
        await all_quiet(service)

    run(work())


def test_a_reader_that_does_not_read_stops_the_writing() -> None:
    async def work() -> None:
        executor = Counting(20 * UNREAD)
        service = service_with(executor)
        async with service.run(Ask("m", (TURN,), "c", 10)) as run:
            await asyncio.sleep(0.3)
            assert executor.given <= UNREAD + 2
            texts = [event async for _, event in run if isinstance(event, Text)]
        assert len(texts) == 20 * UNREAD
        await all_quiet(service)

    run(work())


def test_a_client_that_goes_while_a_model_loads_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        loading, go_on = threading.Event(), threading.Event()

        def slow(spec: ModelSpec) -> tuple[Any, None]:
            loading.set()
            go_on.wait(10)
            return Counting(), None

        monkeypatch.setattr("orchard.serve.hub._loaded", slow)
        service = Service(Settings((ModelSpec("m", "m"),)))
        task = asyncio.create_task(service.take("m"))
        await asyncio.to_thread(loading.wait, 10)
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        while not service.hub._entries["m"].loaded or service.hub._entries["m"].users:
            await asyncio.sleep(0.01)

    run(work())
