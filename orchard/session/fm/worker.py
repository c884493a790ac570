"""A turn of a session in a thread, for asyncio: the event loop goes on while the model works.

Every call has a thread of its own. It hands what it has to the loop and never waits for it, so a slow reader slows no model.
A cancelled task cancels its turn and waits, without blocking the loop, until the model has stopped; that is one token.

Exceptions carry the frames they went through, and frames carry their variables. So no frame here keeps a future or a queue that
keeps an exception: a session would live on in that ring until the garbage collector comes by.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from orchard.session.profiles import Asked
from orchard.session.respond import ANSWERING
from orchard.session.session import Session
from orchard.session.streams import Place, Response, Snapshot

PATIENCE = 1.0
"""Seconds that a cancelled task waits for its worker. A tool that does not return is not waited for."""


class LoopRunner:
    """Runs the coroutines of tools on the loop of whoever asked, for the worker thread, which waits for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, key: object) -> None:
        self._loop = loop
        self._key = key
        self._running: list[Future[Any]] = []

    def __call__(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        started: Future[Any] = asyncio.run_coroutine_threadsafe(self._marked(work), self._loop)
        self._running = [future for future in self._running if not future.done()] + [started]
        return started

    def cancel(self) -> None:
        """End those that still run: the turn they belong to is over."""
        for future in self._running:
            future.cancel()

    async def _marked(self, work: Coroutine[Any, Any, Any]) -> Any:
        ANSWERING.set(ANSWERING.get() | {self._key})  # a task has a context of its own, so nothing is to be undone
        return await work


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error


Item = Snapshot | Response | _Failed


async def answer(session: Session, asked: Asked) -> Response:
    """The whole response."""
    last: Item | None = None
    async for item in _items(session, asked, snapshots=False):
        last = item
    assert isinstance(last, Response)
    return last


async def snapshots(session: Session, asked: Asked) -> AsyncGenerator[Snapshot | Response, None]:
    """Snapshots as they come, and the response at the end."""
    items = _items(session, asked, snapshots=True)
    try:
        async for item in items:
            yield item
    finally:
        await items.aclose()


async def _items(session: Session, asked: Asked, *, snapshots: bool) -> AsyncGenerator[Snapshot | Response, None]:
    loop = asyncio.get_running_loop()
    place = session.wait_in_line()
    queue: asyncio.Queue[Item] = asyncio.Queue()
    asked = replace(asked, run_async=LoopRunner(loop, session.key))
    # The thread is given what it needs, and not this frame.
    give = _Mailbox(loop, queue, snapshots)
    threading.Thread(target=_work, args=(session, asked, place, give), name="orchard turn", daemon=True).start()
    ended = False
    try:
        while True:
            item = await queue.get()
            ended = not isinstance(item, Snapshot)
            if isinstance(item, _Failed):
                error = item.error
                del item
                try:
                    raise error
                finally:
                    del error
            yield item
            if ended:
                return
    finally:
        place.cancel()
        if not ended:
            await _settled(queue)
        del queue, give, place


async def _settled(queue: asyncio.Queue[Item]) -> None:
    """Wait until the worker has put its last item, or patience ends."""
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            while isinstance(await queue.get(), Snapshot):
                pass


class _Mailbox:
    """Puts items into a queue of a loop from another thread. A loop that is closed wants nothing any more."""

    def __init__(self, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Item], snapshots: bool) -> None:
        self._loop, self._queue, self.snapshots = loop, queue, snapshots

    def __call__(self, item: Item) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


def _work(session: Session, asked: Asked, place: Place, give: _Mailbox) -> None:
    put: Callable[[Item], None] | None = give
    try:
        last: Item = _run(session, asked, place, give)
    except BaseException as error:  # it is raised again in the task that waits for it
        trace = error.__traceback__
        last = _Failed(error.with_traceback(trace.tb_next if trace is not None else None))
        del trace
    # The caller may let go of the session the moment it has the last item: nothing of it may linger here.
    del session, asked, place, give
    assert put is not None
    put(last)
    del last, put


def _run(session: Session, asked: Asked, place: Place, give: _Mailbox) -> Response:
    turn = session.converse(asked, place)
    while True:
        try:
            snapshot = next(turn)
        except StopIteration as end:
            response: Response = end.value
            return response
        if give.snapshots:
            give(snapshot)
