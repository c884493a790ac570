"""Connections of a hostile network: raw sockets against a server in a process of its own."""

from __future__ import annotations

import http.client
import json
import random
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from tests.serve.wire import (
    CHAT,
    HASTY,
    Reply,
    ServerProcess,
    ask,
    chat_body,
    reply_on,
    request_bytes,
    seconds_to_close,
    until_closed,
)

pytestmark = pytest.mark.loopback

MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One for all attacks: a later test sees what an earlier one broke."""
    found = ServerProcess(limits=HASTY, delay=0.01)
    try:
        yield found
        assert found.process.poll() is None, "it did not outlive the attacks"
        assert "Traceback" not in found.errors, found.errors
    finally:
        found.close()


def answered_soon(server: ServerProcess, seconds: float = 3.0) -> float:
    """How long two requests take; the bound leaves room for a busy machine."""
    begun = time.monotonic()
    assert ask(server).status == 200
    assert ask(server, "POST", CHAT, chat_body()).status == 200
    taken = time.monotonic() - begun
    assert taken < seconds
    return taken


# Connections that only wait -----------------------------------------------------------------------------------------------


def test_headers_that_come_a_byte_at_a_time(server: ServerProcess) -> None:
    begun = time.monotonic()
    with server.connect() as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        slow.settimeout(0.2)
        data = b""
        with suppress(OSError):
            while time.monotonic() - begun < 5:
                slow.sendall(b"x")
                with suppress(TimeoutError):
                    data += slow.recv(4096)
                    break
        reply = Reply(data + until_closed(slow))
    assert 0.8 < time.monotonic() - begun < 3
    assert reply.status == 408 and reply.code == "request_timeout" and reply.headers["connection"] == "close"
    answered_soon(server)


def test_a_connection_that_says_nothing_and_one_that_sends_blank_lines(server: ServerProcess) -> None:
    with server.connect() as mute, server.connect() as blank:
        begun = time.monotonic()
        blank.sendall(b"\r\n\r\n")
        assert until_closed(mute) == b"" and until_closed(blank) == b""
        assert 0.8 < time.monotonic() - begun < 3


def test_an_idle_connection_is_closed_and_a_blank_line_does_not_keep_it(server: ServerProcess) -> None:
    with server.connect() as one, server.connect() as other:
        for found in (one, other):
            found.sendall(request_bytes("GET", "/health", close=False))
            assert reply_on(found).status == 200
        begun = time.monotonic()
        other.sendall(b"\r\n")
        assert seconds_to_close([one, other], 5) < 3
        assert time.monotonic() - begun > 0.8


def test_a_connection_is_used_again(server: ServerProcess) -> None:
    with server.connect() as found:
        for _ in range(3):
            found.sendall(request_bytes("POST", CHAT, json.dumps(chat_body()).encode(), close=False))
            assert reply_on(found).status == 200


def test_a_thousand_idle_connections(own_server: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1400
    if soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            pytest.skip(f"the system allows {hard} open files only")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    server = own_server(limits={"header_seconds": 4.0})
    answered_soon(server)
    before = server.resident()
    with ExitStack() as stack:
        idle = [stack.enter_context(server.connect()) for _ in range(1000)]
        for one in idle[:500]:
            one.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost:")
        assert median(answered_soon(server) for _ in range(5)) < 1
        assert server.resident() - before < 64 * MIB
        assert seconds_to_close(idle, 10) < 9
    answered_soon(server)


def test_more_connections_than_it_takes(own_server: Any) -> None:
    """Those that wait for nothing make room; where all are being answered, the newest is told so."""
    server = own_server(limits={"connections": 20}, words=60, delay=0.05)
    with ExitStack() as stack:
        idle = [stack.enter_context(server.connect()) for _ in range(30)]
        assert ask(server).status == 200
        assert seconds_to_close(idle[:10], 5) < 4, "the longest idle ones go first"
        busy = [stack.enter_context(server.connect()) for _ in range(20)]
        for one in busy:
            one.sendall(request_bytes("POST", CHAT, json.dumps(chat_body(stream=True)).encode()))
            assert one.recv(100).startswith(b"HTTP/1.1 200")
        found = ask(server)
        assert found.status == 503 and found.code == "overloaded" and int(found.headers["retry-after"]) >= 1


# Bodies -------------------------------------------------------------------------------------------------------------------


def test_a_body_that_comes_a_byte_at_a_time(server: ServerProcess) -> None:
    begun = time.monotonic()
    with server.connect() as slow:
        slow.sendall(request_bytes("POST", CHAT, b"", {"Content-Length": "1000"}))
        slow.settimeout(0.2)
        data = b""
        with suppress(OSError):
            while time.monotonic() - begun < 6:
                slow.sendall(b" ")
                with suppress(TimeoutError):
                    data += slow.recv(4096)
                    break
        reply = Reply(data + until_closed(slow))
    assert 1.2 < time.monotonic() - begun < 5
    assert reply.status == 408 and reply.code == "request_timeout" and reply.headers["connection"] == "close"


def flood(server: ServerProcess, head: bytes, piece: bytes, total: int) -> tuple[Reply, int]:
    """Send until all is sent or the server has enough."""
    sent = 0
    with server.connect() as found:
        found.sendall(head)
        with suppress(OSError):
            while sent < total:
                found.sendall(piece)
                sent += len(piece)
        return Reply(until_closed(found)), sent


def test_a_hundred_megabytes_by_announcement(server: ServerProcess) -> None:
    before = server.resident()
    head = request_bytes("POST", CHAT, b"", {"Content-Length": str(100 * MIB)})
    reply, _ = flood(server, head, b"x" * MIB, 100 * MIB)
    assert reply.status == 413 and reply.code == "body_too_large"
    with server.connect() as patient:  # refused before a byte of it was sent
        patient.sendall(head)
        assert reply_on(patient, 1).status == 413
    assert server.resident() - before < 32 * MIB
    answered_soon(server)


def test_a_client_that_listens_only_after_it_has_spoken_hears_why(server: ServerProcess) -> None:
    """Such as Python's own. A connection that is closed while it sends would break off before it reads."""
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    with closing(client):
        client.request("POST", CHAT, b"x" * (30 * MIB), {"Content-Type": "application/json"})
        found = client.getresponse()
        assert found.status == 413 and json.loads(found.read())["error"]["code"] == "body_too_large"


def test_a_client_that_asks_before_it_sends(server: ServerProcess) -> None:
    body = json.dumps(chat_body()).encode()
    with server.connect() as found:
        found.sendall(request_bytes("POST", CHAT, b"", {"Expect": "100-continue", "Content-Length": str(len(body))}))
        assert found.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        found.sendall(body)
        assert Reply(until_closed(found)).status == 200
    with server.connect() as found:
        found.sendall(request_bytes("POST", CHAT, b"", {"Expect": "100-continue", "Content-Length": str(100 * MIB)}))
        assert reply_on(found).status == 413


def test_a_hundred_megabytes_in_parts(server: ServerProcess) -> None:
    before = server.resident()
    head = request_bytes("POST", CHAT, None, {"Transfer-Encoding": "chunked", "Content-Type": "application/json"})
    reply, _ = flood(server, head, b"100000\r\n" + b"x" * MIB + b"\r\n", 100 * MIB)
    assert reply.status == 413 and reply.code == "body_too_large"
    assert server.resident() - before < 48 * MIB
    answered_soon(server)


def test_what_follows_a_body_is_bounded(server: ServerProcess) -> None:
    """httptools keeps trailers however long they are."""
    before = server.resident()
    head = request_bytes("POST", CHAT, None, {"Transfer-Encoding": "chunked"}) + b"2\r\n{}\r\n0\r\nX-Long: "
    _, sent = flood(server, head, b"x" * 65536, 100 * MIB)
    assert sent < 20 * MIB and server.resident() - before < 32 * MIB
    data = json.dumps(chat_body()).encode()
    with server.connect() as found:  # short ones are dropped: they are not headers that were checked
        head = request_bytes("POST", CHAT, None, {"Transfer-Encoding": "chunked", "Content-Type": "application/json"})
        found.sendall(head + b"%x\r\n" % len(data) + data + b"\r\n0\r\nHost: evil\r\nX-Request-Timeout: 0.001\r\n\r\n")
        assert Reply(until_closed(found)).status == 200


def test_compressed_bodies(server: ServerProcess) -> None:
    found = ask(server, "POST", CHAT, b"\x1f\x8b" + b"\0" * 50, {"Content-Encoding": "gzip"})
    assert found.status == 415 and "Content-Encoding" in found.error["message"]


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"messages":['])
def test_ten_thousand_deep(server: ServerProcess, opening: bytes) -> None:
    found = ask(server, "POST", CHAT, opening * 10_000)
    assert found.status == 400 and found.code == "invalid_json"
    closed = {b"[": b"]", b"{": b"1}"}.get(opening[:1], b"") if opening != b'{"messages":[' else b"]}"
    assert ask(server, "POST", CHAT, opening * 10_000 + closed * 10_000).status == 400


# Headers and lines --------------------------------------------------------------------------------------------------------


def test_many_headers_large_headers_and_long_addresses(server: ServerProcess) -> None:
    before = server.resident()
    assert ask(server, headers={"X-Large": "x" * 20_000}).status == 200
    with server.connect() as pieces:  # as a network brings them
        data = request_bytes("GET", "/health", headers={"X-Large": "x" * 20_000, "X-More": "x" * 10_000})
        for start in range(0, len(data), 3000):
            pieces.sendall(data[start : start + 3000])
            time.sleep(0.005)
        assert Reply(until_closed(pieces)).status == 200
    assert ask(server, headers={"X-Large": "x" * 64 * 1024}).status == 431
    assert ask(server, headers={f"X-{n}": "1" for n in range(90)}).status == 200
    many = ask(server, headers={f"X-{n}": "1" for n in range(200)})
    assert many.status == 431 and many.code == "headers_too_large"
    assert ask(server, path="/" + "x" * 7000).status == 404
    assert ask(server, path="/" + "x" * 9000).status == 414
    endless, sent = flood(server, b"GET / HTTP/1.1\r\nX-Endless: ", b"x" * 65536, 100 * MIB)
    assert endless.status == 431 and sent < 20 * MIB
    assert server.resident() - before < 32 * MIB


WEIRD = [
    "//",
    "/%2e%2e/",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/%00",
    "/v1/models/%00",
    "/page/%2e%2e%2fsecurity.py",
    "/%ff%fe",
]


@pytest.mark.parametrize("path", [*WEIRD, "/..//..", "/page/..", "/v1//models", "//evil.example/v1/models/"])
def test_weird_paths_are_not_there(server: ServerProcess, path: str) -> None:
    found = ask(server, path=path)
    assert found.status == 404 and found.code in ("not_found", "model_not_found")
    assert "location" not in found.headers and found.headers["x-content-type-options"] == "nosniff"


NOT_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nBad Header\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\0b\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"CONNECT evil.example:443 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: localhost\r\n\r\n",
    b"\0" * 1000,
]


@pytest.mark.parametrize("data", NOT_HTTP)
def test_what_is_not_http(server: ServerProcess, data: bytes) -> None:
    with server.connect() as found:
        found.sendall(data)
        reply = Reply(until_closed(found, 5))
    assert reply.status == 400 and reply.code == "invalid_request", reply.body


def test_other_protocols_are_not_taken_up(server: ServerProcess) -> None:
    wishes = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "x", "Sec-WebSocket-Version": "13"}
    with server.connect() as found:
        found.sendall(request_bytes("GET", "/health", headers=wishes))
        assert reply_on(found).status == 200
    with server.connect() as found:
        found.sendall(request_bytes("GET", "/health", headers={"Connection": "Upgrade, close", "Upgrade": "h2c"}))
        assert Reply(until_closed(found)).status == 200


def test_a_request_cut_anywhere_is_the_same_request(server: ServerProcess) -> None:
    body = json.dumps(chat_body(user="x" * 3000)).encode()
    whole = request_bytes("POST", CHAT, body, close=False) + request_bytes("GET", "/health")
    chance = random.Random(0)
    for _ in range(30):
        cuts = [0, *sorted(chance.sample(range(1, len(whole)), chance.randint(1, 8))), len(whole)]
        with server.connect() as found:
            for start, end in pairwise(cuts):
                found.sendall(whole[start:end])
                time.sleep(chance.choice((0, 0.002)))
            assert until_closed(found).count(b"HTTP/1.1 200") == 2, cuts


def test_a_body_and_the_beginning_of_the_next_request(server: ServerProcess) -> None:
    body = json.dumps(chat_body()).encode() + b" " * 100_000
    last = request_bytes("GET", "/health")
    with server.connect() as found:
        found.sendall(request_bytes("POST", CHAT, body, close=False) + last[:20])
        time.sleep(0.3)
        found.sendall(last[20:])
        assert until_closed(found).count(b"HTTP/1.1 200") == 2


def test_requests_that_do_not_wait_for_answers(server: ServerProcess) -> None:
    one = request_bytes("GET", "/health", close=False)
    with server.connect() as found:  # a few are answered in order
        found.sendall(one * 4 + request_bytes("GET", "/health"))
        assert until_closed(found).count(b"HTTP/1.1 200") == 5
    before = server.resident()
    _, sent = flood(
        server, request_bytes("POST", CHAT, json.dumps(chat_body()).encode(), close=False), one * 1000, 50 * MIB
    )
    assert sent < 20 * MIB and server.resident() - before < 32 * MIB
    answered_soon(server)
