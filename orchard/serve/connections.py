"""Connections that are given up: uvicorn's HTTP/1.1 over httptools, with a clock and a bound for all that a stranger can stretch.

What uvicorn and httptools leave open, as read and tried with uvicorn 0.54 and httptools 0.9: a connection that sends nothing, or
its headers a byte at a time, stays for ever; headers have no bound in number or size; a client that sends requests and does not
wait for answers fills memory with them; and one that takes none of its answer holds it for ever. A blank line after an answer
even stops the clock of idle connections.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from orchard.serve.errors import ApiError, openai_body
from orchard.serve.floor import Floor

log = logging.getLogger("orchard.serve")

HEADERS = 100
HEADER_BYTES = 32 * 1024
"""All headers of a request together, with its first line."""
URL_BYTES = 8 * 1024
PIPELINED = 8
"""Requests of one connection that wait for the answer to an earlier one."""
FLUSH_SECONDS = 5.0
"""How long a connection that is being closed may take for what is still to be sent."""


class Connection(HttpToolsProtocol):
    """One connection. `floor`: where it stands with all others."""

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], floor: Floor) -> None:
        super().__init__(config, server_state, app_state, asyncio.get_running_loop())
        self.logger = log
        self.floor = floor
        self._head: asyncio.TimerHandle | None = None
        """Runs while the headers of a request are awaited."""
        self._writing: asyncio.TimerHandle | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._in_head = False
        self._header_bytes = 0
        """Of the headers that are whole."""
        self._waiting_bytes = 0
        """Read while headers were awaited, in pieces that may hold nothing else."""
        self._silent = 0
        """Bytes since the last of a body: lengths of its parts, and what may follow it, which httptools keeps at any length."""
        self._refusal: ApiError | None = None
        self._early: list[bytes] = []
        self._lost_early = False
        self._cycles: list[Any] = []
        """Requests that may still be answered; uvicorn knows the last one only."""

    # The connection -------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self.floor.come(self):
            self.connections.discard(self)
            words = "this server has as many connections as it takes: try again later"
            self._refuse_now(ApiError(503, "overloaded", words, retry_after=2))
            return
        self._await_head()

    def begin(self, transport: asyncio.Transport) -> None:
        """`connection_made` after a handshake, which may have brought the first request along, or the end."""
        if self._lost_early:
            return
        self.connection_made(transport)
        early, self._early = b"".join(self._early), []
        if early:
            self.data_received(early)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.transport is None:
            self._lost_early = True
            return
        self.floor.leave(self)
        for timer in (self._head, self._writing, self._ending):
            if timer is not None:
                timer.cancel()
        self._head = self._writing = self._ending = None
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        for cycle in self._cycles:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    def give_up(self) -> None:
        """Close, and do not wait long for the other side to take what is left."""
        self.floor.leave(self)
        if not self.transport.is_closing():
            self.transport.close()
        if self._ending is None:
            self._ending = self.loop.call_later(FLUSH_SECONDS, self.transport.abort)

    def last_answer(self) -> None:
        """After what is being answered, the connection ends."""
        if self._cycles:
            self._cycles[-1].keep_alive = False

    @property
    def answering(self) -> bool:
        return any(not cycle.response_complete for cycle in self._cycles)

    # What comes in --------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport is None:
            self._early.append(data)
            return
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._silent += len(data)
        begun = self._in_head
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # no other protocol is spoken here: the request is answered as it stands
        except httptools.HttpParserError:
            self._refuse_now(self._refusal or ApiError(400, "invalid_request", "this is not HTTP/1.1 as it should be"))
            return
        if self.answering and not self._in_head:
            if self._silent > HEADER_BYTES and self.cycle.more_body:
                self._refuse_now(_too_large())
            return
        # In the midst of headers, or between two requests, where blank lines are allowed.
        self._waiting_bytes += len(data) if begun or not self._in_head else 0
        if self._waiting_bytes > HEADER_BYTES:
            self._refuse_now(_too_large())
        elif self._head is None and not self.transport.is_closing():
            self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._header_bytes = self._waiting_bytes = 0
        self._refusal = None

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > URL_BYTES:
            self._refusal = ApiError(
                414, "invalid_request", f"the address is longer than {URL_BYTES:,} bytes: shorten it"
            )
            raise ValueError  # the parser stops, and data_received tells the client

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # after a body: nobody reads these, and they must not join headers that were checked
        self._header_bytes += len(name) + len(value)
        if len(self.headers) >= HEADERS or self._header_bytes > HEADER_BYTES:
            self._refusal = _too_large()
            raise ValueError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._waiting_bytes = self._silent = 0
        if self._head is not None:
            self._head.cancel()
            self._head = None
        if len(self.pipeline) >= PIPELINED:
            words = (
                f"{PIPELINED} requests wait for their answers on this connection: wait for one before you send another"
            )
            self._refusal = ApiError(400, "invalid_request", words)
            raise ValueError
        self.floor.busy(self)
        super().on_headers_complete()
        self._cycles = [*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle]
        if self.floor.draining:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._silent = 0
        super().on_body(body)

    def _await_head(self) -> None:
        self._head = self.loop.call_later(self.floor.limits.header_seconds, self._no_head)

    def _no_head(self) -> None:
        self._head = None
        if self.answering:  # it sends ahead, and may be held back by us
            self._await_head()
            return
        if self._in_head:
            words = f"the headers did not come within {self.floor.limits.header_seconds:g} s: send them faster"
            self._refuse_now(ApiError(408, "request_timeout", words))
        else:
            self.give_up()

    # What goes out --------------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self.give_up()
        elif not self.pipeline and not self.answering:
            self.floor.rest(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            # It takes nothing of what it is sent: idle in its own way.
            self._writing = self.loop.call_later(self.floor.limits.idle_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _refuse_now(self, error: ApiError) -> None:
        """Answer without a request, where there is none that could be answered, and close."""
        if self.transport.is_closing():
            return
        if not any(cycle.response_started and not cycle.response_complete for cycle in self._cycles):
            body = json.dumps(openai_body(error)).encode()
            lines = [
                STATUS_LINE[error.status],
                b"content-type: application/json\r\nx-content-type-options: nosniff\r\n",
            ]
            lines += [f"{name}: {value}\r\n".encode() for name, value in error.headers.items()]
            lines += [b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body), body]
            self.transport.write(b"".join(lines))
        self.give_up()


def _too_large() -> ApiError:
    words = f"more than {HEADERS} headers, or {HEADER_BYTES:,} bytes of them: send fewer"
    return ApiError(431, "headers_too_large", words)
