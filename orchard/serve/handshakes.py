"""TLS handshakes as part of what a server counts and times.

asyncio's own TLS servers tell nobody of a connection before its handshake is done: such connections could be neither counted nor
closed to make room, and each takes a quarter of a megabyte. So connections are accepted plainly, stand among all others, and are
then made secure.
"""

from __future__ import annotations

import asyncio
import ssl
import traceback
from collections.abc import Callable

from orchard.serve.connections import Connection
from orchard.serve.floor import Floor


class Handshake(asyncio.Protocol):
    """A connection that is not secure yet. `made` makes what takes over when it is."""

    def __init__(self, floor: Floor, tls: ssl.SSLContext, made: Callable[[], Connection]) -> None:
        self.floor = floor
        self._tls = tls
        self._made = made
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.pause_reading()  # what comes belongs to the handshake
        if self.floor.come(self):
            self._task = asyncio.get_running_loop().create_task(self._shake(transport))
        else:
            transport.abort()  # there is no way to say why before the handshake

    async def _shake(self, transport: asyncio.Transport) -> None:
        if transport.is_closing():
            return
        connection = self._made()
        patience = self.floor.limits.header_seconds
        try:
            secure = await asyncio.get_running_loop().start_tls(
                transport,
                connection,
                self._tls,
                server_side=True,
                ssl_handshake_timeout=patience,
                ssl_shutdown_timeout=patience,
            )
        except (OSError, TimeoutError) as error:  # whatever was sent, it was no handshake; an SSLError is an OSError
            # What failed and what knows of the failure hold each other, with their buffers, until the collector comes by.
            traceback.clear_frames(error.__traceback__)
            connection.parser = None  # type: ignore[assignment]
            return
        finally:
            self.floor.leave(self)
        if secure is not None:
            connection.begin(secure)

    def connection_lost(self, exc: Exception | None) -> None:
        """Heard only before the handshake has begun."""
        self.floor.leave(self)
        if self._task is not None:
            self._task.cancel()

    def give_up(self) -> None:
        self.floor.leave(self)
        if self._transport is not None:
            self._transport.abort()

    def last_answer(self) -> None:
        """Nothing was asked yet."""
