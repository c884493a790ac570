"""Which names and which pages are let in: `Host`, `Origin` and `Sec-Fetch-Site`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import UsageError
from orchard.serve.keys import hashed
from orchard.serve.origin import Rules, host_of, is_loopback
from orchard.serve.security import Security
from tests.serve.door import KEY, PAIR, echo, host, knock, settings

OURS = [
    "127.0.0.1",
    "127.0.0.1:8000",
    "localhost",
    "localhost:1",
    "LOCALHOST:8000",
    "[::1]:8000",
    "[::1]",
    "localhost.",
]
THEIRS = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.7", "[::2]"]


@pytest.mark.parametrize("name", OURS)
def test_this_machines_names(name: str) -> None:
    assert knock(Security(echo, settings()), headers=host(name)).status == 200


@pytest.mark.parametrize("name", THEIRS)
def test_names_that_are_not_ours(name: str) -> None:
    found = knock(Security(echo, settings()), headers=host(name))
    assert found.status == 403 and found.code == "forbidden_host"
    assert knock(Security(echo, settings()), "/health", headers=host(name)).status == 403


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("host", "")],
        [("host", "localhost"), ("host", "localhost")],
        host("a b"),
        host("localhost:99999"),
        host("[::1"),
    ],
)
def test_headers_that_name_no_host(headers: list[PAIR]) -> None:
    found = knock(Security(echo, settings()), headers=headers)
    assert found.status == 400 and found.code == "invalid_request"


def test_names_that_were_allowed() -> None:
    door = Security(echo, settings(hosts=("box.local", "Other.example:443", "fd00::1")))
    for name in ("box.local:8000", "BOX.local", "other.example", "[fd00::1]:80", "localhost"):
        assert knock(door, headers=host(name)).status == 200
    assert knock(door, headers=host("sub.box.local")).status == 403


def test_a_server_for_others_is_called_by_any_address_but_not_by_any_name() -> None:
    door = Security(echo, settings(host="0.0.0.0", keys=(hashed(KEY),)))
    for name, status in (("192.168.1.5:8000", 401), ("[fd00::7]", 401), ("evil.example", 403)):
        assert knock(door, headers=host(name)).status == status
    named = Security(echo, settings(host="box.local", keys=(hashed(KEY),)))
    assert knock(named, headers=host("box.local:8000")).status == 401


@given(st.text(st.characters(max_codepoint=255), max_size=80))
def test_any_host_header_is_answered(text: str) -> None:
    found = knock(Security(echo, settings()), headers=host(text))
    assert found.status in (200, 400, 403) and found.ended
    parsed = host_of(text)
    assert (found.status == 200) == (parsed is not None and parsed[0] in ("127.0.0.1", "localhost", "::1"))


def test_what_is_reached_from_this_machine_only() -> None:
    assert all(is_loopback(name) for name in ("127.0.0.1", "127.3.4.5", "localhost", "::1", "[::1]", "LocalHost"))
    assert not any(is_loopback(name) for name in ("0.0.0.0", "::", "10.0.0.1", "localhost.evil", "", "box"))


OWN_ORIGINS = ["http://127.0.0.1:8000", "HTTP://127.0.0.1:8000"]
OTHER_ORIGINS = [
    "http://evil.example",
    "http://127.0.0.1:8001",
    "http://127.0.0.1",
    "https://127.0.0.1:8000",
    "http://localhost:8000",
    "null",
    "http://127.0.0.1:8000.evil.example",
    "http://127.0.0.1:8000@evil.example",
    "http://user@127.0.0.1:8000",
    "http://127.0.0.1:8000/path",
    "file://",
    "chrome-extension://abcdef",
    "http://[::1",
    "http://127.0.0.1:99999",
    "*",
    "\xff\r",
]


@pytest.mark.parametrize("origin", OWN_ORIGINS)
def test_our_own_page(origin: str) -> None:
    found = knock(Security(echo, settings()), headers=host("127.0.0.1:8000", ("origin", origin)))
    assert found.status == 200 and "access-control-allow-origin" not in found.headers


@pytest.mark.parametrize("origin", OTHER_ORIGINS)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_other_pages(origin: str, method: str) -> None:
    headers = host("127.0.0.1:8000", ("origin", origin), ("access-control-request-method", "POST"))
    found = knock(Security(echo, settings()), "/", method=method, headers=headers)
    assert found.status == 403 and found.code == "forbidden_origin"
    assert not any(name.startswith("access-control") for name in found.headers)


def test_a_port_that_goes_without_saying() -> None:
    door = Security(echo, settings())
    assert knock(door, headers=host("localhost", ("origin", "http://localhost"))).status == 200
    assert knock(door, headers=host("localhost:80", ("origin", "http://localhost"))).status == 200
    https = host("localhost", ("origin", "https://localhost"))
    assert knock(door, headers=https, scheme="https").status == 200
    assert knock(door, headers=https).status == 403


def test_a_page_that_was_allowed() -> None:
    door = Security(echo, settings(origins=("http://localhost:3000", "https://app.example/")))
    asks = host("localhost:8000", ("origin", "http://localhost:3000"), ("sec-fetch-site", "same-site"))
    found = knock(door, headers=asks)
    assert found.status == 200 and found.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert found.headers["vary"] == "Origin" and "access-control-allow-credentials" not in found.headers
    assert knock(door, headers=host("localhost", ("origin", "https://app.example"))).status == 200
    assert knock(door, headers=host("localhost", ("origin", "http://app.example"))).status == 403
    refused = knock(door, method="POST", headers=[*asks, ("content-encoding", "gzip")])
    assert refused.status == 415 and refused.headers["access-control-allow-origin"] == "http://localhost:3000"


def test_what_a_browser_asks_beforehand() -> None:
    door = Security(echo, settings(origins=("http://localhost:3000",), keys=(hashed(KEY),)))
    asks = host(
        "localhost:8000",
        ("origin", "http://localhost:3000"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization, content-type,x-stainless-os"),
        ("access-control-request-private-network", "true"),
    )
    found = knock(door, "/v1/chat/completions", method="OPTIONS", headers=asks)
    assert found.status == 204 and found.body == b""
    assert found.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert found.headers["access-control-allow-headers"] == "authorization, content-type,x-stainless-os"
    assert "POST" in found.headers["access-control-allow-methods"]
    assert found.headers["access-control-allow-private-network"] == "true"
    odd = [pair for pair in asks if pair[0] != "access-control-request-headers"]
    found = knock(door, method="OPTIONS", headers=[*odd, ("access-control-request-headers", "a\x01b; c")])
    assert "access-control-allow-headers" not in found.headers
    assert "*" not in "".join(found.headers.values())


@pytest.mark.parametrize("site", ["cross-site", "same-site", "Cross-Site"])
def test_pages_that_name_no_origin(site: str) -> None:
    """Pictures, scripts and forms of other pages: only a link to the page leads here."""
    door, headers = Security(echo, settings()), host("localhost", ("sec-fetch-site", site))
    assert knock(door, "/", headers=headers).status == 200
    for method, path in (("GET", "/v1/models"), ("POST", "/"), ("GET", "/metrics"), ("POST", "/v1/messages")):
        found = knock(door, path, method=method, headers=headers)
        assert found.status == 403 and found.code == "forbidden_origin"
    for own in ("same-origin", "none"):
        assert knock(door, headers=host("localhost", ("sec-fetch-site", own))).status == 200


@pytest.mark.parametrize("given", ["*", "localhost:3000", "http://", "ftp://a", "http://a/b", "null", ""])
def test_origins_that_cannot_be_allowed(given: str) -> None:
    with pytest.raises(UsageError, match="no origin"):
        Rules(settings(origins=(given,)))


@pytest.mark.parametrize("given", ["*", "http://box", "a b", "", "box/path"])
def test_hosts_that_cannot_be_allowed(given: str) -> None:
    with pytest.raises(UsageError, match="no name of a host"):
        Rules(settings(hosts=(given,)))
