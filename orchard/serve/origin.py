"""Who may talk to us from inside a browser: the rules for `Host`, `Origin` and `Sec-Fetch-Site`.

Every page that a person opens can send requests to 127.0.0.1 from that person's browser. Three headers that a page cannot forge
tell them apart. `Host` is the name the browser believes to talk to: a page that points its own name at this machine (DNS
rebinding) gives itself away by it. `Origin` is the page whose script asks. `Sec-Fetch-Site` is there even where `Origin` is not,
as for pictures and links. Programs that are no browsers send neither of the last two, and are not held to them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from orchard.core.errors import UsageError
from orchard.serve.errors import ApiError
from orchard.serve.settings import Settings

OWN_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
PORTS = {"http": 80, "https": 443}
PREFLIGHT_SECONDS = 600
METHODS = "GET, HEAD, POST, OPTIONS"
EXPOSED = "retry-after, x-request-id, x-orchard-ignored"
_HOST = re.compile(r"(\[[0-9a-fA-F:.%]{2,64}\]|[A-Za-z0-9._-]{1,255})(?::([0-9]{1,5}))?")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_-]+(?:\s*,\s*[A-Za-z0-9_-]+)*")


@dataclass(frozen=True)
class Place:
    """A scheme, a host and a port: what browsers call an origin."""

    scheme: str
    host: str
    port: int

    @staticmethod
    def of(origin: str) -> Place | None:
        """None for anything that is no such thing: `null`, a path, a user name."""
        try:
            parts = urlsplit(origin)
            port = parts.port
        except ValueError:
            return None
        extra = parts.path or parts.query or parts.fragment or "@" in parts.netloc
        if parts.scheme not in PORTS or not parts.hostname or extra:
            return None
        return Place(parts.scheme, parts.hostname.lower().rstrip("."), PORTS[parts.scheme] if port is None else port)


def host_of(header: str) -> tuple[str, int | None] | None:
    """The name and the port of a Host header; None where it is malformed."""
    found = _HOST.fullmatch(header.strip())
    if found is None or int(found[2] or 0) > 65535:
        return None
    return found[1].strip("[]").lower().rstrip("."), int(found[2]) if found[2] else None


def is_loopback(host: str) -> bool:
    """Whether an address to listen at can only be reached from this machine."""
    address = _address(host)
    return host.lower() == "localhost" or (address is not None and address.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


class Rules:
    """What the settings allow. `ApiError` where a request is none of it."""

    def __init__(self, settings: Settings) -> None:
        self._names = OWN_NAMES | {settings.host.strip("[]").lower()} | {_name(host) for host in settings.hosts}
        # A name can be made to point anywhere, an address cannot: rebinding needs a name. So where a server listens to a network,
        # it may be called by any address; which of them leads here (a router's, a container's) it cannot know.
        self._any_address = not is_loopback(settings.host)
        self._origins = frozenset(_origin(origin) for origin in settings.origins)

    def check_host(self, headers: Mapping[str, list[str]]) -> tuple[str, int | None]:
        """The host that a request is for."""
        given = headers.get("host", [])
        found = host_of(given[0]) if len(given) == 1 else None
        if found is None:
            raise ApiError(400, "invalid_request", "a request has exactly one Host header, such as 127.0.0.1:8000")
        name = found[0]
        if name in self._names or (self._any_address and _address(name) is not None):
            return found
        name = name[:100]
        words = f"this server is not called {name!r}: use 127.0.0.1 or localhost, or start it with --allow-host {name}"
        raise ApiError(403, "forbidden_host", words)

    def check_origin(
        self, headers: Mapping[str, list[str]], scheme: str, host: tuple[str, int | None], *, harmless: bool
    ) -> str | None:
        """The other page that asks and may; None for our own and for programs. `harmless`: a link to the page may lead here."""
        given = headers.get("origin", [])
        if given:
            place = Place.of(given[0]) if len(given) == 1 else None
            if place is not None and place == Place(scheme, host[0], host[1] or PORTS.get(scheme, 80)):
                return None
            if place is not None and place in self._origins:
                return given[0]
            shown = _printable(given[0])
            words = f"pages of {shown} may not use this server: start it with --origin {shown} to allow that"
            raise ApiError(403, "forbidden_origin", words)
        sites = headers.get("sec-fetch-site", [])
        # Another port of this machine is the same site to a browser, but not the same program.
        if any(site.strip().lower() in ("cross-site", "same-site") for site in sites) and not harmless:
            raise ApiError(403, "forbidden_origin", "other pages may not use this server: open it by its own address")
        return None


def preflight_headers(origin: str, headers: Mapping[str, list[str]]) -> list[tuple[bytes, bytes]]:
    """What a browser asks before it sends a request of another page that is allowed to."""
    found = [
        ("access-control-allow-methods", METHODS),
        ("access-control-max-age", str(PREFLIGHT_SECONDS)),
    ]
    wanted = ", ".join(headers.get("access-control-request-headers", []))
    if wanted and len(wanted) <= 4096 and _HEADER_NAMES.fullmatch(wanted.strip()):
        found.append(("access-control-allow-headers", wanted.strip()))
    if headers.get("access-control-request-private-network") == ["true"]:
        found.append(("access-control-allow-private-network", "true"))
    return [*answer_headers(origin), *((name.encode(), value.encode("latin-1")) for name, value in found)]


def answer_headers(origin: str) -> list[tuple[bytes, bytes]]:
    """What lets the scripts of another page read an answer. It names that page; there is no answer for all."""
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", EXPOSED.encode()),
        (b"vary", b"Origin"),
    ]


def _name(host: str) -> str:
    """A name of `--allow-host`, as it is compared. A port does not matter."""
    found = host_of(host)
    if found is None and _address(host) is not None:
        return host.strip("[]").lower()
    if found is None:
        raise UsageError(
            f"{host[:100]!r} is no name of a host", hint="write a name or an address, as in box.local or 10.0.0.7"
        )
    return found[0]


def _origin(origin: str) -> Place:
    place = Place.of(origin.removesuffix("/"))
    if place is None:
        hint = "write a scheme, a host and a port, as in http://localhost:3000; there is no way to allow all"
        raise UsageError(f"{origin[:100]!r} is no origin", hint=hint)
    return place


def _printable(text: str) -> str:
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:100])
