"""One request on its way to a replica and back, and to another replica where the first one dies.

Until something of an answer was sent to the client, nobody can tell which replica is writing it. So nothing is sent before
there is something to send: an answer that is not a stream is collected whole, a stream's headers wait for its first event. If
the replica is lost before that, the same request goes to another one. After that, a stream ends with an error event of its
protocol, because the rest of a sampled answer cannot be had again.

A request that was there when `MOST_LIVES` replicas died has probably killed them, and is not sent again.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress

from orchard.serve.cluster.fleet import Fleet, Member
from orchard.serve.cluster.gauges import Gauges
from orchard.serve.cluster.link import HttpRequest, Message, ReplicaLost
from orchard.serve.errors import ApiError, anthropic_body, api_error, body_for, openai_body
from orchard.serve.sse import sse

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

log = logging.getLogger("orchard.serve.cluster")

MOST_LIVES = 3
EVENT_END = b"\n\n"


class Forwarder:
    """Sends requests on. One for all requests."""

    def __init__(self, fleet: Fleet, gauges: Gauges) -> None:
        self.fleet = fleet
        self.gauges = gauges

    async def __call__(self, request: HttpRequest, key: str | None, receive: Receive, send: Send) -> None:
        """Answer a request. `ApiError` where nothing was sent; a client that hangs up ends it, here and in the replica."""
        ended = asyncio.Event()
        work = asyncio.ensure_future(self._until_answered(request, key, send, ended))
        gone = asyncio.ensure_future(_hung_up(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done() or ended.is_set():  # a client that has all of its answer may go
                await work
            else:
                self.gauges.gone.inc()
        finally:
            for task in (work, gone):
                task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await asyncio.gather(work, gone, return_exceptions=True)

    async def _until_answered(self, request: HttpRequest, key: str | None, send: Send, ended: asyncio.Event) -> None:
        for life in range(1, MOST_LIVES + 1):
            member, choice = await self.fleet.place(key)
            self.gauges.sent(member.name, key is not None, choice.home)
            answer, living = Answer(request, send, ended), member.gone
            try:
                with self.fleet.using(member):
                    await self._relay(member, request, answer)
                return
            except ReplicaLost as error:
                self.fleet.lost(member, error, living)
                if answer.ended:
                    return
                if answer.begun:
                    self.gauges.lost.inc()
                    await answer.break_off(_lost())
                    return
                if life < MOST_LIVES:
                    self.gauges.retries.inc()
            except Exception as error:
                if answer.ended:
                    log.exception("something failed after an answer had ended")
                    return
                if not answer.begun:
                    raise
                log.exception("a stream broke off")
                await answer.break_off(api_error(error))
                return
        words = f"{MOST_LIVES} replicas were lost while they worked on this request: it is not sent to another one"
        raise ApiError(503, "replica_lost", words, retry_after=5)

    async def _relay(self, member: Member, request: HttpRequest, answer: Answer) -> None:
        messages: AsyncIterator[list[Message]] = member.link.answer(request)
        async with aclosing(messages):  # type: ignore[type-var]
            async for batch in _with_loss(messages, member, answer):
                for message in batch:
                    await answer.take(message)
        if not answer.ended:
            raise ReplicaLost("the answer broke off")


async def _with_loss(
    messages: AsyncIterator[list[Message]], member: Member, answer: Answer
) -> AsyncIterator[list[Message]]:
    """The messages, and `ReplicaLost` as soon as others notice that the replica is gone. Without that a request which was
    sent in the moment of its death would wait, in Ray's own line, for the next life of the same replica."""
    gone = asyncio.ensure_future(member.gone.wait())
    try:
        while not answer.begun:
            following = asyncio.ensure_future(anext(messages, None))
            try:
                await asyncio.wait((following, gone), return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    raise ReplicaLost("it died before it answered")
                batch = following.result()
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            if batch is None:
                return
            yield batch
    finally:
        gone.cancel()
    async for batch in messages:
        yield batch


class Answer:
    """The answer of one replica, held back until it is certain that something of it will be sent."""

    def __init__(self, request: HttpRequest, send: Send, whole: asyncio.Event) -> None:
        """`whole` is set before the last part is sent."""
        self._path = request.path
        self._send = send
        self._whole = whole
        self._start: Message | None = None
        self._held = bytearray()
        self._stream = False
        self._named = 0
        """Events with a name that have gone out; a protocol that names them numbers them as well."""
        self.begun = False
        self.ended = False

    async def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            kinds = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
            self._stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
        elif message["type"] == "http.response.body":
            self._held += message.get("body", b"")
            if not message.get("more_body", False):
                self._end()
            await self._pass_on()

    def _end(self) -> None:
        self.ended = True
        self._whole.set()

    async def _pass_on(self) -> None:
        whole = len(self._held)
        if not self.ended:  # only whole events, so that an error event can follow at any time
            whole = self._held.rfind(EVENT_END) + len(EVENT_END) if self._stream and EVENT_END in self._held else 0
        if not whole and not self.ended:
            return
        part = bytes(self._held[:whole])
        del self._held[:whole]
        self._named += part.count(b"\ndata: ")
        if not self.begun:
            self.begun = True
            assert self._start is not None, "a body came before its headers"
            await self._send(self._start)
        await self._send({"type": "http.response.body", "body": part, "more_body": not self.ended})

    async def break_off(self, error: ApiError) -> None:
        """End a stream that cannot go on, in words of its protocol."""
        self._end()
        event = error_event(self._path, error, self._named)
        await self._send({"type": "http.response.body", "body": event, "more_body": False})


def _lost() -> ApiError:
    return ApiError(503, "replica_lost", "the replica that wrote this answer was lost: ask again", retry_after=1)


def error_event(path: str, error: ApiError, number: int) -> bytes:
    """A server-sent event that tells of an error, as clients of the path's protocol understand it. `number`: its place."""
    if path.startswith("/v1/messages"):
        return sse(anthropic_body(error), "error")
    if path.startswith("/v1/responses"):
        fields = {"code": error.code, "message": error.message, "param": error.param, "sequence_number": number}
        return sse({"type": "error", **fields}, "error")
    return sse(openai_body(error))


async def answer_error(path: str, error: ApiError, send: Send) -> None:
    """An error as a whole answer."""
    body = json.dumps(body_for(path, error)).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    pairs = [(name.encode(), value.encode()) for name, value in (headers | error.headers).items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
