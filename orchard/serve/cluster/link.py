"""What passes between the front and a replica: a request as plain data, and the messages of its answer.

A `Link` is the front's end of one replica. The one that is used talks over a Ray Serve handle (`ray_link.py`); tests use scripted
ones. Everything that crosses is bytes, numbers, strings, lists and dictionaries, so that nothing of ours needs to be pickled.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

Message = MutableMapping[str, Any]
"""A message of ASGI: `http.response.start` or `http.response.body`."""

_OURS = ("orchard.request", "orchard.key")
"""`orchard.key` is the name of the client's key, which the front has checked; the key itself stays here."""
PLAIN_KEYS = ("http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", *_OURS)
STAY_HERE = frozenset({b"authorization", b"x-api-key", b"proxy-authorization", b"cookie", b"origin", b"sec-fetch-site"})
"""Headers that the front's door has dealt with."""


class ReplicaLost(Exception):
    """The replica died, or cannot be reached, before it ended its answer."""


@dataclass(frozen=True)
class HttpRequest:
    """A whole request. `scope` holds the plain parts of an ASGI scope."""

    scope: dict[str, Any]
    body: bytes = b""

    @classmethod
    def of(cls, scope: MutableMapping[str, Any], body: bytes) -> HttpRequest:
        plain: dict[str, Any] = {key: scope[key] for key in PLAIN_KEYS if key in scope}
        pairs = ((bytes(name).lower(), bytes(value)) for name, value in scope["headers"])
        plain["headers"] = [pair for pair in pairs if pair[0] not in STAY_HERE]
        for end in ("client", "server"):
            pair = scope.get(end)
            plain[end] = (str(pair[0]), pair[1]) if pair else None
        return cls(plain, body)

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    def asgi_scope(self) -> dict[str, Any]:
        """What an ASGI app is called with."""
        return {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "extensions": {}, **self.scope}


@dataclass(frozen=True)
class Pulse:
    """A replica's sign of life. `life` changes when it was started again."""

    life: str
    ready: bool
    trouble: str = ""
    """Why it cannot start, where it cannot."""


class Link(Protocol):
    """The front's end of one replica."""

    @property
    def name(self) -> str: ...

    def answer(self, request: HttpRequest) -> AsyncIterator[list[Message]]:
        """The messages of the answer, some at a time. Raises `ReplicaLost`; closing it cancels the request in the replica."""
        ...

    def pulses(self) -> AsyncIterator[Pulse]:
        """A sign of life every now and then. Raises `ReplicaLost` the moment that the replica dies; where it is dead already,
        the first sign comes from its next life. It may end; then it is asked for again."""
        ...
