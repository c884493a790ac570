"""An endpoint that refuses, breaks off, talks nonsense or says nothing; and a caller who gives up."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from orchard.core.errors import OrchardError
from orchard.session import errors
from orchard.session.turn import Done, Event, Text, Turn
from orchard.text.messages import Message
from tests.session.endpoint_server import (
    HELLO,
    KEY,
    WEATHER,
    FakeEndpoint,
    Handler,
    events_of,
    said,
    served,
    stopped,
)

pytestmark = pytest.mark.loopback


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    yield from served()


# What goes wrong -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "hint"),
    [
        (301, errors.AssetsUnavailableError, "redirect"),
        (307, errors.AssetsUnavailableError, "redirect"),
        (400, errors.GenerationError, "leaves a field out"),
        (401, errors.AssetsUnavailableError, "api_key"),
        (403, errors.AssetsUnavailableError, "api_key"),
        (404, errors.AssetsUnavailableError, "'small'"),
        (408, errors.TimedOutError, "try again"),
        (422, errors.GenerationError, "leaves a field out"),
        (429, errors.RateLimitedError, "in 17 seconds"),
        (500, errors.AssetsUnavailableError, "the endpoint's"),
        (503, errors.AssetsUnavailableError, "in 17 seconds"),
        (504, errors.TimedOutError, "try again"),
    ],
)
@pytest.mark.parametrize("json_body", [True, False])
def test_every_status_is_a_typed_error_without_the_key(
    endpoint: FakeEndpoint, status: int, kind: type[OrchardError], hint: str, json_body: bool
) -> None:
    words = f"no: Authorization Bearer {KEY} \x1b[31m" + "long " * 200
    body = json.dumps({"error": {"message": words}}) if json_body else words
    elsewhere = f"http://127.0.0.1:{endpoint.server_port}/elsewhere"
    endpoint.answer = lambda handler: handler.reply(status, body.encode(), Retry_After="17", Location=elsewhere)
    with pytest.raises(kind) as caught:
        events_of(endpoint.executor())
    error = caught.value
    assert type(error) is kind and str(status) in error.message and hint in error.hint
    shown = f"{error!r} {error} {error.hint} {error.to_dict()} {vars(error)}"
    assert KEY not in shown and "\x1b" not in shown and len(error.message) < 500
    assert len(endpoint.paths) == 1


@pytest.mark.parametrize(
    ("words", "tokens", "limit"),
    [
        ("This model's maximum context length is 4096 tokens. However, you requested 5,000 tokens", 5000, 4096),
        ("the request exceeds the available context size", 0, 0),
    ],
)
def test_too_long_for_the_endpoint(endpoint: FakeEndpoint, words: str, tokens: int, limit: int) -> None:
    body = json.dumps({"error": {"message": words, "code": "context_length_exceeded"}}).encode()
    endpoint.answer = lambda handler: handler.reply(400, body)
    with pytest.raises(errors.ExceededContextWindowSizeError) as caught:
        events_of(endpoint.executor())
    assert (caught.value.tokens, caught.value.limit) == (tokens, limit)


def test_too_long_by_our_estimate_is_not_sent(endpoint: FakeEndpoint) -> None:
    executor = endpoint.executor(context_size=100)
    assert executor.context_size == 100 and executor.counts_by_estimate
    assert executor.count([Message("user", "x" * 41)], answer=False) == 4 + 11
    assert executor.count(HELLO, [WEATHER]) > executor.count(HELLO) > executor.count(HELLO, answer=False)
    with pytest.raises(errors.ExceededContextWindowSizeError, match="about"):
        events_of(executor, Turn((Message("user", "x" * 400),)))
    assert not endpoint.bodies


def raw(data: bytes, kind: str = "text/event-stream") -> Callable[[Handler], None]:
    def answer(handler: Handler) -> None:
        handler.begin(kind)
        handler.chunk(data)
        handler.wfile.write(b"0\r\n\r\n")

    return answer


@pytest.mark.parametrize(
    "data",
    [
        b"data: {\n\n",
        b"data: [1]\n\n",
        b'data: {"choices": 3}\n\n',
        b'data: {"choices": [3]}\n\n',
        b'data: {"choices": [{"delta": [1]}]}\n\n',
        b'data: {"choices": [{"delta": {"content": 3}}]}\n\n',
        b'data: {"choices": [{"delta": {"tool_calls": [3]}}]}\n\n',
        b'data: {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": 3}}]}}]}\n\n',
        b'data: {"choices": [{"delta": {"tool_calls": [{"function": {}}]}, "finish_reason": "stop"}]}\n\n',
        b'data: {"choices": [{"delta": {}, "logprobs": {"content": [{"token": "a"}]}}]}\n\n',
        b'data: {"choices": [], "usage": 3}\n\n',
        b"data: " + b"[" * 100_000 + b"\n\n",
        b"data: \xff\n\n",
        b"data: " + b"x" * (2**20 + 10),
        b"data: " + KEY.encode() + b"\n\n",
    ],
    ids=range(15),
)
def test_streams_that_mean_nothing_are_typed_errors(endpoint: FakeEndpoint, data: bytes) -> None:
    endpoint.answer = raw(data)
    with pytest.raises(errors.DecodingFailureError) as caught:
        events_of(endpoint.executor())
    assert KEY not in caught.value.raw and len(caught.value.raw) <= 1000


@pytest.mark.parametrize(("kind", "body"), [("text/html", b"<html>"), ("application/json", b"<html>"), ("", b"")])
def test_other_bodies_are_typed_errors(endpoint: FakeEndpoint, kind: str, body: bytes) -> None:
    endpoint.answer = lambda handler: handler.reply(200, body, kind)
    with pytest.raises(errors.DecodingFailureError) as caught:
        events_of(endpoint.executor())
    assert caught.value.raw == body.decode() and caught.value.hint


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ({"error": {"message": "overloaded", "code": 503}}, errors.AssetsUnavailableError),
        ({"error": {"message": "slow down", "type": "rate_limit_exceeded"}}, errors.RateLimitedError),
        ({"error": "broken"}, errors.AssetsUnavailableError),
    ],
)
def test_errors_inside_a_stream(endpoint: FakeEndpoint, told: Any, kind: type[OrchardError]) -> None:
    endpoint.answer = lambda handler: handler.stream(said("so"), told)
    found: list[Event] = []
    with pytest.raises(kind):
        found.extend(endpoint.executor().run(Turn(HELLO), threading.Event()))
    endpoint.answer = lambda handler: handler.stream(said('the word "error" is no error'), stopped())
    assert len(events_of(endpoint.executor())) == 2


def test_a_connection_that_breaks(endpoint: FakeEndpoint) -> None:
    def cut(handler: Handler) -> None:
        handler.begin()
        handler.chunk(b"data: " + json.dumps(said("half")).encode() + b'\n\ndata: {"choi')

    endpoint.answer = cut
    seen: list[Event] = []
    with pytest.raises(errors.AssetsUnavailableError) as caught:
        for event in endpoint.executor().run(Turn(HELLO), threading.Event()):
            seen.append(event)
    assert seen == [Text("half")] and caught.value.retryable and caught.value.hint
    endpoint.answer = lambda handler: handler.stream(said("half"), done=False)
    with pytest.raises(errors.AssetsUnavailableError, match="in the middle"):
        events_of(endpoint.executor())
    endpoint.answer = lambda handler: None
    with pytest.raises(errors.AssetsUnavailableError, match="no answer"):
        events_of(endpoint.executor())


def test_nobody_there(endpoint: FakeEndpoint) -> None:
    executor = endpoint.executor()
    endpoint.server_close()
    with pytest.raises(errors.AssetsUnavailableError) as caught:
        events_of(executor)
    assert "127.0.0.1" in caught.value.message and KEY not in str(vars(caught.value))


@pytest.mark.parametrize("after_words", [False, True])
def test_silence_is_a_timeout(endpoint: FakeEndpoint, after_words: bool) -> None:
    def silent(handler: Handler) -> None:
        if after_words:
            handler.begin()
            handler.chunk(b"data: " + json.dumps(said("so")).encode() + b"\n\n")
        handler.server.release.wait(10)

    endpoint.answer = silent
    with pytest.raises(errors.TimedOutError, match=r"0\.2 seconds"):
        events_of(endpoint.executor(timeout=0.2))


# Giving up -----------------------------------------------------------------------------------------------------------------


def endless(handler: Handler) -> None:
    """Talks until the other side is gone, and says so."""
    handler.begin()
    try:
        while not handler.server.release.is_set():
            handler.chunk(b"data: " + json.dumps(said("x")).encode() + b"\n\n")
            time.sleep(0.002)
    except OSError:
        handler.server.gone.set()


def test_cancel_closes_the_connection_at_once(endpoint: FakeEndpoint) -> None:
    endpoint.answer = endless
    cancel = threading.Event()
    events = endpoint.executor().run(Turn(HELLO, seed=5), cancel)
    assert next(events) == Text("x")
    cancel.set()
    began = time.monotonic()
    assert list(events)[-1] == Done("cancelled", seed=5)
    assert time.monotonic() - began < 3 and endpoint.gone.wait(5)


def test_cancel_does_not_wait_for_a_silent_server(endpoint: FakeEndpoint) -> None:
    def silent(handler: Handler) -> None:
        handler.server.release.wait(10)

    endpoint.answer = silent
    cancel = threading.Event()
    threading.Timer(0.1, cancel.set).start()
    began = time.monotonic()
    assert list(endpoint.executor(timeout=9).run(Turn(HELLO), cancel)) == [Done("cancelled")]
    assert time.monotonic() - began < 2
    assert list(endpoint.executor().run(Turn(HELLO), cancel)) == [Done("cancelled")]
    assert len(endpoint.bodies) == 1


def test_closing_the_events_closes_the_connection_and_ends_the_thread(endpoint: FakeEndpoint) -> None:
    endpoint.answer = endless
    events = endpoint.executor().run(Turn(HELLO), threading.Event())
    next(events)
    del events
    gc.collect()
    assert endpoint.gone.wait(5)
    until = time.monotonic() + 5
    while any(thread.name == "orchard-endpoint" for thread in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(thread.name == "orchard-endpoint" for thread in threading.enumerate())


def test_one_executor_for_many_threads(endpoint: FakeEndpoint) -> None:
    endpoint.answer = lambda handler: handler.stream(said(handler.server.bodies[-1]["model"]), stopped())
    executor = endpoint.executor()
    found: list[list[Event]] = []
    threads = [threading.Thread(target=lambda: found.append(events_of(executor))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [[Text("small"), Done("stop")]] * 8
