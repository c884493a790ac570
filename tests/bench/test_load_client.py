"""The client reads HTTP however its bytes are cut, and gives every event the time of its last byte."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.bench.load import client
from orchard.bench.load.client import Connection, Endpoint, EndpointFailed, Reply
from orchard.bench.load.sample import Sample, percentile, read
from orchard.core.errors import UsageError

BODY = b'data: {"a": 1}\n\n: a remark\n\ndata: two\r\ndata: lines\r\n\r\ndata: [DONE]\n\n'
EVENTS = ['{"a": 1}', "two\nlines", "[DONE]"]


class Closing:
    """The little that a connection asks of a transport."""

    closed = False

    def write(self, data: bytes) -> None: ...

    def close(self) -> None:
        self.closed = True


def received(pieces: list[bytes], *, lost: bool = False) -> Reply:
    """What a connection makes of these pieces."""

    async def run() -> Reply:
        connection = Connection()
        connection.transport = Closing()  # type: ignore[assignment]
        done = connection.exchange(b"")
        for piece in pieces:
            connection.data_received(piece)
        if lost:
            connection.connection_lost(None)
        return await asyncio.wait_for(done, 1)

    return asyncio.run(run())


def chunked(sizes: list[int]) -> bytes:
    out, rest = b"", BODY
    for size in sizes:
        piece, rest = rest[:size], rest[size:]
        out += b"%x;name=value\r\n%s\r\n" % (len(piece), piece) if piece else b""
    out += b"%X\r\n%s\r\n" % (len(rest), rest) if rest else b""
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + out + b"0\r\n\r\n"


@given(st.lists(st.integers(1, 30), max_size=6), st.lists(st.integers(1, 20), max_size=12))
def test_chunks_are_joined_however_they_are_cut(sizes: list[int], cuts: list[int]) -> None:
    whole, pieces = chunked(sizes), list[bytes]()
    for cut in cuts:
        pieces.append(whole[:cut])
        whole = whole[cut:]
    reply = received([*[piece for piece in pieces if piece], *([whole] if whole else [])])
    assert reply.content == BODY and reply.whole and [data for _, data in reply.events()] == EVENTS


@given(st.integers(1, 80))
def test_a_body_with_a_length(cut: int) -> None:
    whole = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 429 No\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
    reply = received([whole[:cut], whole[cut:]])
    assert (reply.status, reply.content) == (429, BODY)


def test_a_body_that_ends_with_the_connection() -> None:
    assert received([b"HTTP/1.0 200 OK\r\n\r\n", BODY], lost=True).content == BODY


@pytest.mark.parametrize("pieces", [[b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"], [b"HTTP/1.1 2"]])
def test_a_connection_that_ends_too_soon(pieces: list[bytes]) -> None:
    with pytest.raises(EndpointFailed, match="closed before"):
        received(pieces, lost=True)


@pytest.mark.parametrize("data", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"x" * 70_000])
def test_what_is_no_http(data: bytes) -> None:
    with pytest.raises(EndpointFailed, match="no HTTP"):
        received([data])


def test_events_have_the_time_of_their_last_byte() -> None:
    reply = Reply(pieces=[(1.0, b"data: a"), (2.0, b"b\n"), (3.0, b"\ndata: c\n\nda"), (4.0, b"ta: d")], ended=5.0)
    assert list(reply.events()) == [(3.0, "ab"), (3.0, "c")]
    reply.pieces.append((4.5, b"\n"))
    assert list(reply.events())[-1] == (5.0, "d")


def test_a_request_as_bytes() -> None:
    assert (
        client.written("POST", "/x", b"{}", {"host": "h"})
        == b"POST /x HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n{}"
    )
    assert Endpoint("https://[::1]:8443/v1", key="k").headers["host"] == "[::1]:8443"
    assert Endpoint("127.0.0.1:80/v1", key="k").headers["authorization"] == "Bearer k"


@pytest.mark.parametrize("url", ["ftp://x/v1", "http://", "://", "file:///etc"])
def test_wrong_addresses(url: str) -> None:
    with pytest.raises(UsageError, match="address"):
        Endpoint(url)


# Samples ----------------------------------------------------------------------------------------------------------------


def sample_of(*events: tuple[float, object], status: int = 200, ended: float = 9.0) -> Sample:
    pieces = [
        (when, f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()) for when, event in events
    ]
    sample = Sample(0, due=1.0, sent=1.5)
    read(sample, Reply(status=status, pieces=pieces, ended=ended, whole=True), started=0.0)
    return sample


def text(word: str, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"delta": {"content": word}, "finish_reason": finish}]}


def test_times_count_from_when_a_request_was_due() -> None:
    usage = {
        "choices": [],
        "usage": {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}},
    }
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    sample = sample_of(
        (2.0, role), (3.0, text("a")), (4.0, text("b")), (7.0, text("c", "stop")), (8.0, usage), (8.0, "[DONE]")
    )
    assert sample.ok and sample.text == "abc" and sample.finish == "stop"
    assert (sample.ttft, sample.total, sample.gaps, sample.per_token) == (2.0, 8.0, [1.0, 3.0], 1.0)
    assert (sample.prompt_tokens, sample.cached_tokens, sample.output_tokens, sample.counted) == (7, 4, 5, False)
    assert sample.meets(2.0, 1.0) and not sample.meets(1.9, None) and not sample.meets(None, 0.9)


def test_without_usage_pieces_are_counted_and_it_is_said() -> None:
    sample = sample_of(
        (3.0, {"choices": [{"text": "a"}]}), (4.0, {"choices": [{"text": "b", "finish_reason": "length"}]})
    )
    assert sample.ok and sample.output_tokens == 2 and sample.counted


def test_failures_have_names() -> None:
    error = {"error": {"message": "gone wrong", "code": "internal"}}
    assert sample_of((3.0, text("a")), (4.0, error)).failed == "200 internal"
    assert sample_of((3.0, text("a"))).failed == "stream cut"
    assert sample_of((3.0, "{")).failed == "no JSON in the stream"
    assert sample_of((3.0, "[DONE]")).failed == "no text"
    refused = Sample(0, 0.0, 0.0)
    read(
        refused,
        Reply(status=429, pieces=[(1.0, json.dumps({"error": {"code": "queue_full", "message": "wait"}}).encode())]),
        0.0,
    )
    assert (refused.failed, refused.message) == ("429 queue_full", "wait")
    for odd in (b"<html>", b"[1]", b'{"detail": "no"}'):
        read(refused, Reply(status=500, pieces=[(1.0, odd)]), 0.0)
        assert refused.failed == "500" and refused.message


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_lie_between_values(values: list[float], percent: float) -> None:
    import numpy as np

    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)
