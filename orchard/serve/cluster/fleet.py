"""What the front knows of its replicas: who is ready, how many requests each one has, who was lost and came back.

Every replica holds a line to the front over which it sends a sign of life now and then; when it dies the line breaks at once,
also when no request is there to notice. A replica is `starting` until it says that it is ready, and `lost` from the first
failed call or the broken line on, until a new line is there. Ray starts dead replicas by itself: the front only has to
notice. All of this happens on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from orchard.serve.cluster.link import Link, Pulse, ReplicaLost
from orchard.serve.cluster.sticky import Choice, choose
from orchard.serve.errors import ApiError
from orchard.serve.settings import Limits

log = logging.getLogger("orchard.serve.cluster")

EASE = 0.2
"""How much of the last answer's time goes into the mean."""
LONGEST_RETRY = 60.0
LONGEST_WAIT = 60.0
"""Seconds that a request waits for any replica to come back."""


class Member:
    """One replica, as the front sees it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.state = "starting"
        self.running = 0
        self.restarts = 0
        self.life = ""
        self.losses = 0
        self.trouble = ""
        self.gone = asyncio.Event()
        """Set when this life of the replica is over; the next life gets another."""

    @property
    def name(self) -> str:
        return self.link.name

    def facts(self) -> dict[str, Any]:
        return {"state": self.state, "running": self.running, "restarts": self.restarts}


class Fleet:
    """All replicas. `place` says where a request goes, `using` counts it there, `lost` takes a replica out."""

    def __init__(self, links: Sequence[Link], limits: Limits, *, pause: float = 0.5, patience: float = 15.0) -> None:
        """`pause`: seconds before a lost replica is asked for again; `patience`: how long one may be silent."""
        self.members = {link.name: Member(link) for link in links}
        self.capacity = limits.running + limits.queue
        self.limits = limits
        self._pause, self._patience = pause, patience
        self._mean_seconds = 1.0
        self._turn = 0
        self._changed = asyncio.Event()
        self._watches: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> list[Member]:
        return [member for member in self.members.values() if member.state == "ready"]

    @property
    def running(self) -> int:
        return sum(member.running for member in self.members.values())

    def start(self) -> None:
        """Begin to watch; needs a running event loop."""
        self._watches = [asyncio.create_task(self._watch(member)) for member in self.members.values()]

    async def stop(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        self._watches = []

    async def place(self, key: str | None) -> tuple[Member, Choice]:
        """Where a request goes. Where no replica is ready it waits for one; `ApiError` where all are full or none comes."""
        until = time.monotonic() + min(LONGEST_WAIT, self.limits.deadline)
        while True:
            loads = {member.name: member.running for member in self.ready}
            if loads:
                choice = choose(key or self._any(), loads, self.capacity)
                if choice is None:
                    words = f"every one of {len(loads)} replicas has {self.capacity} requests already: try again later"
                    raise ApiError(429, "queue_full", words, retry_after=self.retry_after())
                return self.members[choice.name], choice
            trouble = {member.trouble for member in self.members.values()}
            if trouble and all(trouble):
                raise ApiError(503, "not_ready", f"no replica can start: {min(trouble)}", retry_after=5)
            self._changed.clear()
            left = until - time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, left)):
                    await self._changed.wait()
            except TimeoutError:
                raise ApiError(503, "not_ready", "no replica is ready: try again later", retry_after=5) from None

    @contextmanager
    def using(self, member: Member) -> Iterator[None]:
        """The request counts as the member's for as long as this lasts. Call it right after `place`, with no wait between."""
        member.running += 1
        begun = time.monotonic()
        try:
            yield
            self._mean_seconds += EASE * (time.monotonic() - begun - self._mean_seconds)
        finally:
            member.running -= 1

    def lost(self, member: Member, why: object = "", life: asyncio.Event | None = None) -> None:
        """Nothing goes there until it shows a sign of life that was asked for after this. `life`: the `gone` of the life that was
        lost; the late word of a former life does not count against the present one."""
        if life is not None and life is not member.gone:
            return
        member.losses += 1
        if member.state == "ready":
            log.warning("replica %s is lost: %s", member.name, str(why).split("\n")[0][:200])
            member.state = "lost"
            member.gone.set()

    def retry_after(self) -> float:
        """Seconds until the lines will have moved on by one place for everybody in them, by what answers took lately."""
        rounds = self.running / max(1, self.limits.running * len(self.members))
        return min(LONGEST_RETRY, max(1.0, rounds * self._mean_seconds))

    # Inside -----------------------------------------------------------------------------------------------------------

    def _any(self) -> str:
        """A key for a request that has none: each one orders the replicas differently."""
        self._turn += 1
        return f"any-{self._turn}"

    async def _watch(self, member: Member) -> None:
        while True:
            try:
                await self._follow(member)
            except ReplicaLost as error:
                self.lost(member, error)
                await asyncio.sleep(self._pause)

    async def _follow(self, member: Member) -> None:
        """Listen to the signs of one life. A loss that others report ends this: only signs that were asked for after it
        count."""
        losses = member.losses
        signs: AsyncIterator[Pulse] = member.link.pulses()
        async with aclosing(signs):  # type: ignore[type-var]
            while member.losses == losses:
                try:
                    async with asyncio.timeout(
                        self._patience
                    ):  # not wait_for, which in 3.11 can swallow a cancellation
                        pulse = await anext(signs, None)
                except TimeoutError:
                    raise ReplicaLost(f"no sign of life for {self._patience:g} s") from None
                if pulse is None:
                    return
                if member.losses == losses:
                    self._alive(member, pulse)

    def _alive(self, member: Member, pulse: Pulse) -> None:
        if member.life and member.life != pulse.life:
            member.restarts += 1
        member.life = pulse.life
        if pulse.trouble and pulse.trouble != member.trouble:
            log.error("replica %s cannot start: %s", member.name, pulse.trouble)
        member.trouble = pulse.trouble
        if pulse.ready and member.state != "ready":
            log.info("replica %s is ready", member.name)
            member.state = "ready"
            member.gone = asyncio.Event()
            self._changed.set()
