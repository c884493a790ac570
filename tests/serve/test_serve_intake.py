"""Bodies at the door: whole, in time, and not too many at once."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.serve import security
from orchard.serve.intake import SMALL, Gone, Intake
from orchard.serve.security import Security
from orchard.serve.settings import Limits
from tests.serve.door import PAIR, Answer, echo, host, knock, settings


def posted(door: Security, parts: Sequence[bytes], *more: PAIR, length: int | None = None, **how: Any) -> Answer:
    size = sum(map(len, parts)) if length is None else length
    return knock(
        door, method="POST", headers=host("localhost", ("content-length", str(size)), *more), parts=parts, **how
    )


@given(st.lists(st.binary(max_size=2000), max_size=30))
def test_bodies_arrive_as_they_were_sent(parts: list[bytes]) -> None:
    door = Security(echo, settings())
    chunked = knock(door, method="POST", headers=host("localhost", ("transfer-encoding", "chunked")), parts=parts)
    assert chunked.body == b"".join(parts) == posted(door, parts).body


def test_a_body_in_tiny_parts_takes_no_more_than_its_size() -> None:
    left = (number.to_bytes(2, "big") for number in range(10_000))

    async def receive() -> dict[str, Any]:
        part = next(left, None)
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}

    body = asyncio.run(Intake(Limits()).read(receive))  # type: ignore[arg-type]
    held = sum(map(sys.getsizeof, body._parts))  # not what the process allocates: others in it do too
    assert body.size == 20_000 and 20_000 <= held < 100_000


def test_large_bodies_are_refused_by_their_length_or_as_soon_as_they_are() -> None:
    door = Security(echo, settings(limits=Limits(body_bytes=1000)))
    assert posted(door, [b"x" * 1000]).status == 200
    found = posted(door, [], length=1001)
    assert found.status == 413 and found.code == "body_too_large" and "1,000" in found.body.decode()
    assert found.headers["connection"] == "close"
    chunked = host("localhost", ("transfer-encoding", "chunked"))
    assert knock(door, method="POST", headers=chunked, parts=[b"x" * 400] * 3).status == 413
    assert posted(door, [], length=10**30).status == 413


@pytest.mark.parametrize("length", ["-1", "1e3", "", "0x10", "１", "12, 13"])
def test_lengths_that_are_none(length: str) -> None:
    headers = [(b"host", b"localhost"), (b"content-length", length.encode())]
    with_bytes = [(name.decode(), value.decode("latin-1")) for name, value in headers]
    assert knock(Security(echo, settings()), method="POST", headers=with_bytes, parts=[b"x"]).status == 400


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip", "identity, gzip", "x"])
def test_compressed_bodies_are_refused(coding: str) -> None:
    door = Security(echo, settings())
    found = posted(door, [b"x"], ("content-encoding", coding))
    assert found.status == 415 and found.code == "unsupported_media_type"
    assert posted(door, [b"x"], ("content-encoding", "identity")).status == 200


@pytest.mark.parametrize("coding", [["gzip, chunked"], ["chunked", "chunked"], ["gzip"], [""]])
def test_bodies_that_were_coded_on_the_way_are_refused(coding: list[str]) -> None:
    headers = host("localhost", *(("transfer-encoding", one) for one in coding))
    found = knock(Security(echo, settings()), method="POST", headers=headers, parts=[b"x"])
    assert found.status == 400 and found.code == "invalid_request"


def test_slow_bodies_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "LINGER", 0.1)
    door = Security(echo, settings(limits=Limits(body_seconds=0.3)))

    async def drip(number: int) -> None:
        await asyncio.sleep(0.05)

    begun = time.monotonic()
    found = posted(door, [b"x"] * 100, wait=drip)
    assert found.status == 408 and found.code == "request_timeout" and found.headers["connection"] == "close"
    assert 0.25 < time.monotonic() - begun < 2


def test_bodies_that_come_too_slowly_are_given_up_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "LINGER", 0.1)
    monkeypatch.setattr("orchard.serve.intake.GRACE", 0.2)
    door = Security(echo, settings(limits=Limits(body_seconds=20)))

    async def drip(number: int) -> None:
        await asyncio.sleep(0.02)

    begun = time.monotonic()
    assert posted(door, [b"x"] * 1000, wait=drip).status == 408
    assert time.monotonic() - begun < 3
    assert posted(door, [b"x" * 100] * 50, wait=drip).status == 200, "5 kB/s are fast enough"


def test_a_client_that_leaves_in_the_midst_is_sent_nothing() -> None:
    door = Security(echo, settings())
    found = posted(door, [b"x" * 100_000], length=200_000, gone=True)
    assert found.status == 0 and door.intake.held == 0


def test_large_bodies_share_a_budget_and_small_ones_do_not() -> None:
    large, small = b"x" * (SMALL * 4), b"x" * SMALL
    inside: list[int] = []

    async def nested(scope: Any, receive: Any, send: Any) -> None:
        inside.append(door.intake.held)
        if len(inside) == 1:
            scope, sent = {**scope}, []

            async def keep(message: Any) -> None:
                sent.append(message)

            for body, status in ((large, 503), (small, 200)):
                sent.clear()
                scope["headers"] = [(b"host", b"localhost"), (b"content-length", str(len(body)).encode())]
                await door(scope, once(body), keep)
                assert Answer(sent).status == status
        await echo(scope, receive, send)

    def once(body: bytes) -> Any:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        return receive

    door = Security(nested, settings())
    door.intake = Intake(Limits(body_bytes=SMALL * 4), in_flight=SMALL * 6)
    assert posted(door, [large]).body == large
    assert inside == [SMALL * 4, SMALL * 4] and door.intake.held == 0


@given(st.lists(st.integers(0, SMALL * 2), max_size=20), st.booleans())
def test_the_budget_is_always_given_back(sizes: list[int], gone: bool) -> None:
    intake = Intake(Limits(body_bytes=SMALL * 8), in_flight=SMALL * 8)
    parts = [b"x" * size for size in sizes]

    async def receive() -> dict[str, Any]:
        if not parts and gone:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": parts.pop(0) if parts else b"", "more_body": bool(parts) or gone}

    async def read() -> None:
        try:
            body = await intake.read(receive)  # type: ignore[arg-type]
        except (Gone, security.ApiError):
            return
        assert intake.held == (body.size if body.size > SMALL else 0)
        body.release()
        body.release()

    asyncio.run(read())
    assert intake.held == 0
