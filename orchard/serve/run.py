"""The answers to one request on their way: a thread for each pulls events out of an executor, the event loop takes them up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchard.serve.errors import ApiError
from orchard.session.completion import Completion
from orchard.session.turn import Done, Event, Text, Turn

if TYPE_CHECKING:
    from orchard.serve.hub import Held
    from orchard.serve.service import Ask, Service

Job = Turn | Completion
UNREAD = 256
"""Events that wait for a slow client before its answers pause."""


class Run:
    """Iterate inside `async with`: pairs of a job's place and an event; the last of each job is a `Done`.

    A job that fails ends all of them: the error is raised where the iteration stands.
    """

    def __init__(self, service: Service, ask: Ask) -> None:
        self.service = service
        self.ask = ask
        self.came = time.monotonic()
        self._cancel = threading.Event()
        self._late = False
        self._events: deque[tuple[int, Event | BaseException]] = deque()
        self._news = asyncio.Event()
        self._told = False  # whether the loop has been told of news that it has not looked at
        self._drained = threading.Event()
        self._left = 0
        """Jobs whose last event has not been taken."""
        self._threads = 0
        self._begun: set[int] = set()
        self._held: Held | None = None
        self._started = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Run:
        service, ask = self.service, self.ask
        self._loop = asyncio.get_running_loop()
        self._held = await service.take(ask.model)
        try:
            executor = self._held.speaker()
            await service.entered(ask, len(ask.jobs))
        except BaseException:
            service.hub.give(self._held)
            raise
        self._started = time.monotonic()
        service.metrics.queued(self._started - self.came)
        self._left = self._threads = len(ask.jobs)
        left = ask.deadline - (self._started - self.came)
        self._timer = self._loop.call_later(max(0.0, left), self._expire)
        for index, job in enumerate(ask.jobs):
            service.threads.submit(self._work, executor, index, replace(job, adapters=self._held.adapters))
        try:
            await self._first_of_all()
        except BaseException:
            self._stop()
            raise
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._stop()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        while self._left:
            while not self._events:
                await self._wait()
            index, event = self._taken()
            if isinstance(event, Done):
                self._left -= 1
            yield index, event

    @property
    def waiting(self) -> int:
        """Events that can be taken without waiting."""
        return len(self._events)

    # On the event loop --------------------------------------------------------------------------------------------------

    async def _first_of_all(self) -> None:
        """Until every job has begun, or one has failed before it began."""
        while len(self._begun) < len(self.ask.jobs):
            for index, event in list(self._events):
                if isinstance(event, BaseException) and index not in self._begun:
                    raise self._failure(event)
                self._begun.add(index)
            if len(self._begun) < len(self.ask.jobs):
                await self._wait()

    async def _wait(self) -> None:
        self._told = False
        if not self._events:
            await self._news.wait()
        self._news.clear()

    def _taken(self) -> tuple[int, Event]:
        index, event = self._events.popleft()
        if len(self._events) < UNREAD // 2 and not self._drained.is_set():
            self._drained.set()
        if isinstance(event, BaseException):
            self._stop()
            raise self._failure(event)
        if isinstance(event, Done) and event.finish == "cancelled":
            self._stop()
            raise self._failure(None)
        return index, event

    def _failure(self, error: BaseException | None) -> ApiError:
        from orchard.serve.service import too_late

        if self._late:
            return too_late(self.ask.deadline)
        if error is None:
            return ApiError(503, "stopped", "the answer was stopped: ask again", retry_after=1)
        return self.service.told(error)

    def _expire(self) -> None:
        self._late = True
        self._cancel.set()

    def _stop(self) -> None:
        self._cancel.set()
        self._drained.set()
        if self._timer is not None:
            self._timer.cancel()

    def _thread_ended(self) -> None:
        """The place in the line is free when nothing of this runs any more, not when the client stops listening."""
        self._threads -= 1
        if self._threads or self._held is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self.service.gate.leave(self.ask.client, len(self.ask.jobs), time.monotonic() - self._started)
        self.service.hub.give(self._held)
        self._held = None

    # On threads ---------------------------------------------------------------------------------------------------------

    def _work(self, executor: Any, index: int, job: Job) -> None:
        metrics, model = self.service.metrics, self.ask.model
        try:
            last = 0.0
            for event in self._events_of(executor, job):
                now = time.monotonic()
                if isinstance(event, Done):
                    metrics.ended(model, event)
                elif not last:
                    metrics.first(model, now - self.came)
                elif isinstance(event, Text) and event.ids:
                    metrics.between(model, (now - last) / len(event.ids))
                last = now
                self._put(index, event)
        except BaseException as error:
            metrics.failed(model)
            self._put(index, error)
        finally:
            self._tell(self._thread_ended)

    def _events_of(self, executor: Any, job: Job) -> Iterator[Event]:
        if isinstance(job, Turn):
            return executor.run(job, self._cancel)
        complete = getattr(executor, "complete", None)
        if complete is None:
            raise ApiError(400, "wrong_kind_of_model", "this model only takes conversations: ask /v1/chat/completions")
        found: Iterator[Event] = complete(job, self._cancel)
        return found

    def _put(self, index: int, event: Event | BaseException) -> None:
        while len(self._events) >= UNREAD and not self._cancel.is_set():
            self._drained.clear()
            if len(self._events) >= UNREAD:
                self._drained.wait(0.5)
        self._events.append((index, event))
        if not self._told:
            self._told = True
            self._tell(self._news.set)

    def _tell(self, what: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop is gone, and everybody with it
            self._cancel.set()
