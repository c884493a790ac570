"""One POST whose answer is read as it comes, on the standard library alone.

A thread of its own does what can block (looking up a name, connecting, reading), so that the caller can give up at any
moment: closing shuts the socket, which wakes the thread. Nothing is followed, nothing is tried twice, and certificates are
checked as Python's defaults say.
"""

from __future__ import annotations

import http.client
import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from orchard.core.errors import UsageError
from orchard.session.errors import AssetsUnavailableError, TimedOutError

STEP = 0.02
"""Seconds between two looks at whether the caller gave up."""
MOST_BYTES = 2**26
"""What one answer may take in all."""
_CHUNK = 2**16


@dataclass(frozen=True)
class Address:
    """Where requests go, in parts that were checked."""

    secure: bool
    host: str
    port: int
    path: str

    @classmethod
    def of(cls, base_url: str) -> Address:
        hint = 'an address looks like "https://example.org/v1" or "http://127.0.0.1:8000/v1"'
        if not isinstance(base_url, str) or not base_url.isascii() or not base_url.isprintable() or " " in base_url:
            raise UsageError("the address of the endpoint is no URL", hint=hint)
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError:
            raise UsageError("the address of the endpoint is no URL", hint=hint) from None
        if "@" in parts.netloc:  # not shown: it may hold a password
            raise UsageError("the address of the endpoint holds a user name", hint="give secrets as api_key or headers")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.fragment:
            raise UsageError(f"{base_url!r} is no address of an endpoint", hint=hint)
        path = parts.path.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        secure = parts.scheme == "https"
        return cls(secure, parts.hostname, port or (443 if secure else 80), path + (parts.query and f"?{parts.query}"))

    @property
    def on_this_machine(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}"


@dataclass(frozen=True)
class Head:
    """The status and the headers that matter."""

    status: int
    kind: str
    retry_after: str | None


class Exchange:
    """A request on its way and what comes back. Closing it, or leaving its `with`, drops the connection at once."""

    def __init__(self, address: Address, body: bytes, headers: Mapping[str, str], timeout: float) -> None:
        self._address, self._body, self._headers, self._timeout = address, body, headers, timeout
        self._came: queue.Queue[Head | bytes | Exception] = queue.Queue(maxsize=64)
        self._over = threading.Event()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._work, name="orchard-endpoint", daemon=True)
        self._thread.start()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._over.set()
        held = self._socket
        if held is not None:
            with suppress(OSError, ValueError, AttributeError):
                held.shutdown(socket.SHUT_RDWR)

    def head(self, cancel: threading.Event) -> Head | None:
        """The head of the answer; None when the caller gave up before."""
        first = self._next(cancel)
        return first if isinstance(first, Head) else None

    def chunks(self, cancel: threading.Event) -> Iterator[bytes]:
        """The body as it comes; ends early when the caller gives up."""
        taken = 0
        while chunk := self._next(cancel):
            assert isinstance(chunk, bytes)
            taken += len(chunk)
            if taken > MOST_BYTES:
                hint = "ask for a shorter answer, or check what is behind the address"
                raise AssetsUnavailableError(f"{self._address} sent more than {MOST_BYTES:,} bytes", hint=hint)
            yield chunk

    def _next(self, cancel: threading.Event) -> Head | bytes | None:
        until = time.monotonic() + self._timeout
        while not cancel.is_set():
            try:
                got = self._came.get(timeout=STEP)
            except queue.Empty:
                if time.monotonic() > until:
                    raise self._too_slow() from None
                continue
            if isinstance(got, Exception):
                raise self._meaning(got) from None
            return got
        return None

    def _too_slow(self) -> TimedOutError:
        said = f"{self._address} sent nothing for {self._timeout:g} seconds"
        return TimedOutError(said, hint="try again, or give the endpoint a longer timeout")

    def _meaning(self, error: Exception) -> Exception:
        if isinstance(error, TimeoutError):
            return self._too_slow()
        if isinstance(error, ssl.SSLCertVerificationError):
            hint = "its certificate is not trusted here; SSL_CERT_FILE names a file of those that are"
            return AssetsUnavailableError(f"{self._address}: {error.verify_message}", hint=hint)
        if isinstance(error, OSError | http.client.HTTPException):
            why = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
            hint = "check that the endpoint runs and that the address is right; then try again"
            return AssetsUnavailableError(f"no answer from {self._address}: {why}", hint=hint)
        return error

    # What happens in the thread ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        connection = connection_to(self._address, self._timeout)
        try:
            connection.connect()
            self._socket = connection.sock  # kept: http.client lets go of it when the answer ends the connection
            if self._over.is_set():
                return
            connection.request("POST", self._address.path, body=self._body, headers=dict(self._headers))
            response = connection.getresponse()
            kind = (response.getheader("Content-Type") or "").partition(";")[0].strip().lower()
            self._give(Head(response.status, kind, response.getheader("Retry-After")))
            while chunk := response.read1(_CHUNK):
                if not self._give(chunk):
                    return
            self._give(b"")
        except Exception as error:  # the caller's thread says what it means
            self._give(error)
        finally:
            connection.close()
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.close()

    def _give(self, thing: Head | bytes | Exception) -> bool:
        """Hand something to the caller, waiting while it is slow; False when it has gone."""
        while not self._over.is_set():
            try:
                self._came.put(thing, timeout=STEP)
                return True
            except queue.Full:
                continue
        return False


def connection_to(address: Address, timeout: float) -> http.client.HTTPConnection:
    """A connection that is not open yet; with `https`, one that checks certificates and names."""
    if address.secure:
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(address.host, address.port, timeout=timeout, context=context)
    return http.client.HTTPConnection(address.host, address.port, timeout=timeout)
