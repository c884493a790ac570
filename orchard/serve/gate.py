"""Who may run now: a bounded line before the engine, fair between clients.

An answer that cannot run at once waits. The next to run is one of the highest priority, among these one of the client that has
the fewest answers running, among these the first that came: a client that sends a hundred requests at once waits behind one that
sends its first. Where the line is full, a client is told at once, and when to come back.

A client is where requests come from and, after a line break, the name it gives itself: `address\nuser`. Fairness is between
addresses first and between the names of one address second, and bounds are of addresses, because names cost nothing.

All of this happens on one event loop; nothing here blocks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from orchard.serve.errors import ApiError
from orchard.serve.settings import Limits

EASE = 0.2
"""How much of the last answer's time goes into the mean."""
LONGEST_RETRY = 60.0


@dataclass
class Waiting:
    client: str
    weight: int
    priority: int
    order: int
    turn: asyncio.Future[None]


class Gate:
    """`await enter(…)` before an answer runs, `leave(…)` after it, however it ended."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running = 0
        self.draining = False
        self._waiting: list[Waiting] = []
        self._running_of: Counter[str] = Counter()
        self._waiting_of: Counter[str] = Counter()
        self._came = 0
        self._mean_seconds = 1.0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def waiting(self) -> int:
        return sum(one.weight for one in self._waiting)

    def _busy(self, one: Waiting) -> tuple[int, int, int, int]:
        return -one.priority, self._running_of[_origin(one.client)], self._running_of[one.client], one.order

    async def enter(self, client: str, weight: int = 1, priority: int = 0) -> None:
        """Wait for a place. `ApiError` where there is none to wait for; cancelling gives the place in the line back."""
        self._refuse(client, weight)
        if not self._waiting and self.running + weight <= self.limits.running:
            self._let_in(client, weight)
            return
        self._came += 1
        one = Waiting(client, weight, priority, self._came, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        self._waiting_of[_origin(client)] += weight
        self._empty.clear()
        try:
            await one.turn
        except BaseException:
            if (
                one.turn.done() and not one.turn.cancelled() and one.turn.exception() is None
            ):  # let in and called off at once
                self.leave(client, weight)
            elif one in self._waiting:
                self._forget(one)
                self._next()
            raise

    def leave(self, client: str, weight: int = 1, seconds: float | None = None) -> None:
        """`seconds`: how long the answer ran."""
        if seconds is not None:
            self._mean_seconds += EASE * (seconds - self._mean_seconds)
        self.running -= weight
        for name in {client, _origin(client)}:
            self._running_of[name] -= weight
            if self._running_of[name] <= 0:
                del self._running_of[name]
        self._next()
        if not self.running and not self._waiting:
            self._empty.set()

    def drain(self) -> None:
        """Refuse whoever comes from now on. Those who wait have not begun: they are told to go elsewhere."""
        self.draining = True
        for one in list(self._waiting):
            self._forget(one)
            if not one.turn.done():
                one.turn.set_exception(_draining())
        if not self.running:
            self._empty.set()

    async def emptied(self) -> None:
        await self._empty.wait()

    def retry_after(self) -> float:
        """Seconds until the line will have moved on by one place for everybody in it, by what answers took lately."""
        rounds = (self.waiting + self.running) / max(1, self.limits.running)
        return min(LONGEST_RETRY, max(1.0, rounds * self._mean_seconds))

    def _refuse(self, client: str, weight: int) -> None:
        if self.draining:
            raise _draining()
        if weight > self.limits.running:
            words = f"{weight} answers at once are more than this server runs ({self.limits.running}): ask for fewer"
            raise ApiError(400, "invalid_request", words, param="n")
        origin = _origin(client)
        if self._running_of[origin] + self._waiting_of[origin] + weight > self.limits.per_client:
            words = f"this client has {self.limits.per_client} answers running or waiting: wait for one to end"
            raise ApiError(429, "too_many_requests", words, retry_after=self.retry_after())
        full = self.waiting + weight > self.limits.queue
        if full and (self._waiting or self.running + weight > self.limits.running):
            words = f"{self.waiting} answers are waiting already: try again later"
            raise ApiError(429, "queue_full", words, retry_after=self.retry_after())

    def _next(self) -> None:
        while self._waiting:
            one = min(self._waiting, key=self._busy)
            # The next one is not passed over by smaller ones: it would wait for ever.
            if self.running + one.weight > self.limits.running:
                return
            self._forget(one)
            if not one.turn.done():
                self._let_in(one.client, one.weight)
                one.turn.set_result(None)

    def _let_in(self, client: str, weight: int) -> None:
        self.running += weight
        for name in {client, _origin(client)}:
            self._running_of[name] += weight
        self._empty.clear()

    def _forget(self, one: Waiting) -> None:
        self._waiting.remove(one)
        origin = _origin(one.client)
        self._waiting_of[origin] -= one.weight
        if self._waiting_of[origin] <= 0:
            del self._waiting_of[origin]


def _draining() -> ApiError:
    return ApiError(503, "draining", "this server is stopping: ask another one, or try again later", retry_after=5)


def _origin(client: str) -> str:
    return client.partition("\n")[0]
