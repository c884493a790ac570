"""The line before the engine: bounded, fair between clients, and left tidy by whoever goes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.serve.errors import ApiError
from orchard.serve.gate import Gate
from orchard.serve.settings import Limits

LIMITS = Limits(running=2, queue=3, per_client=4)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10))


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_line_is_bounded_and_says_when_to_come_back() -> None:
    async def work() -> None:
        gate = Gate(LIMITS)
        for client in "ab":
            await gate.enter(client)
        waiting = [asyncio.create_task(gate.enter(client)) for client in "cde"]
        await settled()
        assert (gate.running, gate.waiting) == (2, 3)
        with pytest.raises(ApiError) as refused:
            await gate.enter("f")
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        assert int(refused.value.headers["retry-after"]) >= 1
        gate.leave("a")
        await settled()
        assert [task.done() for task in waiting] == [True, False, False]
        for task in waiting[1:]:
            task.cancel()
        await settled()
        assert (gate.running, gate.waiting) == (2, 0)

    run(work())


def test_a_client_that_sends_much_waits_behind_one_that_sends_little() -> None:
    async def work() -> None:
        gate = Gate(replace(LIMITS, queue=50, per_client=50))
        order: list[str] = []

        async def one(client: str) -> None:
            await gate.enter(client)
            order.append(client)

        for _ in range(2):
            await gate.enter("greedy")
        tasks = [asyncio.create_task(one("greedy")) for _ in range(10)]
        await settled()
        tasks.append(asyncio.create_task(one("modest")))
        await settled()
        gate.leave("greedy")
        await settled()
        assert order == ["modest"]
        for task in tasks:
            task.cancel()

    run(work())


def test_names_make_no_second_client_of_one() -> None:
    async def work() -> None:
        gate = Gate(replace(LIMITS, queue=50, per_client=5))
        order: list[str] = []

        async def one(client: str) -> None:
            await gate.enter(client)
            order.append(client)

        for number in range(2):
            await gate.enter(f"greedy\n{number}")
        tasks = [asyncio.create_task(one(f"greedy\n{number}")) for number in (2, 3, 0)]
        await settled()
        with pytest.raises(ApiError, match="this client"):
            await gate.enter("greedy\nanother")
        tasks.append(asyncio.create_task(one("modest\n")))
        await settled()
        for name in ("greedy\n0", "greedy\n1", "modest\n"):
            gate.leave(name)
            await settled()
        assert order == ["modest\n", "greedy\n2", "greedy\n3"]
        for task in tasks:
            task.cancel()

    run(work())


def test_priorities_come_first_and_large_ones_are_not_passed_over() -> None:
    async def work() -> None:
        gate = Gate(replace(LIMITS, queue=50))
        order: list[str] = []

        async def one(client: str, weight: int, priority: int) -> None:
            await gate.enter(client, weight, priority)
            order.append(client)

        await gate.enter("a", 2)
        wishes = [("low", 1, -1), ("two", 2, 0), ("one", 1, 0), ("high", 1, 5)]
        tasks = [asyncio.create_task(one(*wish)) for wish in wishes]
        await settled()
        gate.leave("a", 2)
        await settled()
        assert order == ["high"], "the one with weight 2 is next, and does not fit yet"
        gate.leave("high")
        await settled()
        assert order == ["high", "two"]
        gate.leave("two", 2)
        await settled()
        assert order == ["high", "two", "one", "low"]
        for task in tasks:
            task.cancel()

    run(work())


def test_one_client_has_its_own_bound_and_nobody_asks_for_more_than_there_is() -> None:
    async def work() -> None:
        gate = Gate(replace(LIMITS, per_client=1))
        await gate.enter("a")
        with pytest.raises(ApiError, match="this client") as refused:
            await gate.enter("a")
        assert refused.value.status == 429
        await gate.enter("b")
        with pytest.raises(ApiError) as refused:
            await gate.enter("c", 3)
        assert refused.value.status == 400

    run(work())


def test_draining_refuses_who_waits_and_who_comes_and_lets_the_rest_end() -> None:
    async def work() -> None:
        gate = Gate(LIMITS)
        await gate.enter("a", 2)
        waiting = asyncio.create_task(gate.enter("b"))
        await settled()
        gate.drain()
        with pytest.raises(ApiError) as refused:
            await waiting
        assert (refused.value.status, refused.value.code) == (503, "draining")
        with pytest.raises(ApiError):
            await gate.enter("c")
        empty = asyncio.create_task(gate.emptied())
        await settled()
        assert not empty.done()
        gate.leave("a", 2)
        await empty

    run(work())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["enter", "leave", "cancel"]), st.sampled_from("abc"), st.integers(1, 3)), max_size=40
    )
)
def test_places_are_never_lost(moves: list[tuple[str, str, int]]) -> None:
    async def work() -> None:
        gate = Gate(Limits(running=3, queue=4, per_client=6))
        inside: list[tuple[str, int]] = []
        waiting: list[tuple[asyncio.Task[None], str, int]] = []
        for move, client, weight in moves:
            if move == "enter":
                waiting.append((asyncio.create_task(gate.enter(client, weight)), client, weight))
            elif move == "leave" and inside:
                gate.leave(*inside.pop(0))
            elif move == "cancel" and waiting:
                waiting.pop(0)[0].cancel()
            await settled()
            for one in list(waiting):
                if one[0].done():
                    waiting.remove(one)
                    if one[0].exception() is None:
                        inside.append((one[1], one[2]))
            assert gate.running == sum(weight for _, weight in inside) <= 3
            assert gate.waiting == sum(weight for *_, weight in waiting) <= 4
        for task, *_ in waiting:
            task.cancel()
        await settled()
        for one in inside:
            gate.leave(*one)
        assert gate.running == gate.waiting == 0
        await gate.emptied()

    run(work())
