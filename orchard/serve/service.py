"""From what a client asks to events: a model, a place in the line, a thread for each answer, and an end whatever happens.

async with service.run(service.ask(request, "smollm2", [turn])) as run:
    async for index, event in run:
        ...

Entering waits for the model, for a place, and for the first event of every answer: what cannot be answered raises there, before a
client has been sent a single byte. Leaving early (a client that hung up) stops the answers within one token. The engine batches
what runs at the same time; nothing here knows of that.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from orchard.serve.errors import ApiError, api_error
from orchard.serve.gate import Gate
from orchard.serve.hub import Hub
from orchard.serve.metrics import Metrics
from orchard.serve.run import Job, Run
from orchard.serve.settings import Settings
from orchard.session.turn import Message, ToolSpec

if TYPE_CHECKING:
    import numpy as np

    from orchard.serve.hub import Held

DEADLINE = "x-request-timeout"
"""The header that says how many seconds a client will wait."""
SILENCES = ("x-stainless-timeout", "x-stainless-read-timeout")
"""How long the packages of OpenAI and Anthropic wait without hearing anything: a deadline where an answer comes as a whole."""
T = TypeVar("T")


@dataclass(frozen=True)
class Ask:
    """What one client wants of one model. `deadline`: seconds it will wait."""

    model: str
    jobs: tuple[Job, ...]
    client: str
    deadline: float
    priority: int = 0


@dataclass(frozen=True)
class Embedded:
    vectors: np.ndarray
    tokens: int


class Service:
    """One for an app. Made on any thread, used on one event loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.hub = Hub(settings)
        self.gate = Gate(settings.limits)
        self.metrics = Metrics(self)
        # As many threads as answers may run, so that none that was let in waits for one.
        self.threads = ThreadPoolExecutor(settings.limits.running, "answer")
        self._loaders = ThreadPoolExecutor(4, "load")
        self._helpers = ThreadPoolExecutor(4, "model")

    def ask(
        self,
        request: Request,
        model: str | None,
        jobs: Sequence[Job],
        *,
        user: str | None = None,
        priority: int | None = None,
        stream: bool = False,
    ) -> Ask:
        """`user`: who the client says it asks for; clients that say nothing are told apart by key and address."""
        address = request.client.host if request.client is not None else ""
        key = request.scope.get("orchard.key", "")
        if priority is not None and not -100 <= priority <= 100:
            raise ApiError(400, "invalid_request", "priority: use a whole number from -100 to 100", param="priority")
        if priority and priority > 0 and not key:
            words = "priority: only clients with an API key may go before others; use 0 or less"
            raise ApiError(400, "invalid_request", words, param="priority")
        client = f"{key} {address}\n{(user or '')[:256]}"
        return Ask(model or self.hub.default, tuple(jobs), client, self._deadline(request, stream), priority or 0)

    def run(self, ask: Ask) -> Run:
        return Run(self, ask)

    async def embed(self, ask: Ask, texts: Sequence[str | Sequence[int]], *, truncate: bool = False) -> Embedded:
        """Vectors of texts. They wait in the same line as answers."""
        held = await self.take(ask.model)
        try:
            embedder = held.vectors()
            await self.entered(ask, 1)
            begun, gone = time.monotonic(), threading.Event()
            try:
                work = self.helped(lambda: embedder.embed(texts, truncate=truncate, cancel=gone))
                found = await asyncio.wait_for(work, ask.deadline)
            except TimeoutError:
                raise too_late(ask.deadline) from None
            finally:
                gone.set()
                self.gate.leave(ask.client, 1, time.monotonic() - begun)
        finally:
            self.hub.give(held)
        tokens = sum(found.tokens)
        self.metrics.embedded(ask.model, tokens)
        return Embedded(found.vectors, tokens)

    async def count(self, model: str | None, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """Tokens that a conversation takes, with what invites the model to speak."""
        return await self.speaking(model, lambda executor: executor.count(messages, tools))

    async def speaking(self, model: str | None, what: Callable[[Any], T]) -> T:
        """Something short that a model which writes is asked, off the event loop: it gets the executor."""
        held = await self.take(model or self.hub.default)
        try:
            executor = held.speaker()
            return await self.helped(lambda: what(executor))
        finally:
            self.hub.give(held)

    async def take(self, model: str) -> Held:
        """A model; `hub.give` it back. At once where it is loaded. A client that hangs up meanwhile keeps nothing."""
        held = self.hub.ready(model)
        if held is not None:
            return held
        loading = self._loaders.submit(self.hub.take, model)
        try:
            return await asyncio.shield(asyncio.wrap_future(loading))
        except asyncio.CancelledError:
            loading.add_done_callback(self._give_back)
            raise
        except Exception as error:
            raise self.told(error) from error

    def _give_back(self, loading: Future[Held]) -> None:
        if not loading.cancelled() and loading.exception() is None:
            self.hub.give(loading.result())

    async def entered(self, ask: Ask, weight: int) -> None:
        """Wait in the line, but no longer than the client does."""
        try:
            await asyncio.wait_for(self.gate.enter(ask.client, weight, ask.priority), ask.deadline)
        except TimeoutError:
            raise too_late(ask.deadline) from None

    async def helped(self, what: Callable[[], T]) -> T:
        """Something that takes its time, on a thread of ours; its errors as clients are told them."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._helpers, what)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise self.told(error) from error

    def told(self, error: BaseException) -> ApiError:
        """An error as clients are told it; what nobody meant to happen is written to the log."""
        found = api_error(error)
        if found.status >= 500 and not isinstance(error, ApiError):
            self.metrics.log.error("a request failed", exc_info=error)
        return found

    def close(self) -> None:
        for threads in (self.threads, self._loaders, self._helpers):
            threads.shutdown(wait=False, cancel_futures=True)

    def _deadline(self, request: Request, stream: bool) -> float:
        limit = self.settings.limits.deadline
        for name in (DEADLINE,) if stream else (DEADLINE, *SILENCES):
            given = request.headers.get(name)
            if given is None:
                continue
            try:
                seconds = float(given)
            except ValueError:
                continue
            if math.isfinite(seconds) and seconds > 0:
                limit = min(limit, seconds)
        return limit


def too_late(seconds: float) -> ApiError:
    words = f"the answer was not ready after {seconds:g} s: allow more time, or ask for fewer tokens"
    return ApiError(504, "deadline_exceeded", words)
