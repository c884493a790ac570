"""Running a tool without depending on it: in a thread of its own, for no longer than it may take.

A tool that never returns cannot be stopped from outside. It is left behind in a daemon thread, which ends with the program.
A coroutine can be cancelled, and is.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from orchard.session.errors import TimedOutError

RunAsync = Callable[[Coroutine[Any, Any, Any]], "Future[Any]"]
"""Starts a coroutine in a loop that runs elsewhere, such as `lambda it: asyncio.run_coroutine_threadsafe(it, loop)`."""


class Running:
    """One call on its way; `result(timeout)` waits for it."""

    def __init__(self, work: Callable[[], Any], name: str, run_async: RunAsync | None = None) -> None:
        self._work = work
        self._name = name
        self._run_async = run_async
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self._cancel: Callable[[], Any] = lambda: None
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._run,), name=f"tool {name}", daemon=True).start()

    def result(self, timeout: float | None) -> Any:
        if not self._done.wait(timeout):
            self._cancel()
            hint = "raise the timeout, or make the tool quicker"
            raise TimedOutError(f"{self._name} gave nothing within {timeout:g} seconds", hint=hint)
        if self._error is not None:
            error, self._error = self._error, None  # kept in no cycle with its own traceback
            try:
                raise error
            finally:
                del error
        return self._value

    def _run(self) -> None:
        try:
            value = self._work()
            self._value = self._awaited(value) if inspect.isawaitable(value) else value
        except BaseException as error:  # also `SystemExit`: a tool does not end the program
            self._error = error
        finally:
            self._done.set()

    def _awaited(self, value: Any) -> Any:
        if self._run_async is not None:
            future = self._run_async(_whole(value))
            self._cancel = future.cancel
            return future.result()
        return asyncio.run(self._own_loop(value))

    async def _own_loop(self, value: Any) -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(value)

        def cancel() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)

        self._cancel = cancel
        return await task


async def _whole(value: Any) -> Any:
    return await value
