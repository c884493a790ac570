"""How a server ends, and where it listens: signals, sockets and certificates."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import time
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from orchard.core.errors import BadFile, UsageError
from orchard.serve.listen import CannotListen, listening_sockets, room_for, tls_of
from orchard.serve.server import opened
from orchard.serve.settings import ModelSpec, Settings
from tests.serve.wire import (
    CHAT,
    HASTY,
    Reply,
    ServerProcess,
    ask,
    chat_body,
    reply_on,
    request_bytes,
    seconds_to_close,
    until_closed,
)

pytestmark = pytest.mark.loopback

MIB = 1 << 20


# The end ---------------------------------------------------------------------------------------------------------------


def streamed(found: socket.socket) -> bytes:
    found.sendall(request_bytes("POST", CHAT, json.dumps(chat_body(stream=True)).encode(), close=False))
    found.settimeout(10)
    first = found.recv(1000)
    assert first.startswith(b"HTTP/1.1 200")
    return first


def test_draining(own_server: Any) -> None:
    """A running answer is finished, new ones are refused, the exit code is 0."""
    server = own_server(limits=HASTY, words=40, delay=0.05)
    with server.connect() as running, server.connect() as waiting:
        waiting.sendall(request_bytes("GET", "/health", close=False))
        assert reply_on(waiting).status == 200
        first = streamed(running)
        server.signal(signal.SIGTERM)
        time.sleep(0.2)
        refused = ask(server, "POST", CHAT, chat_body())
        assert refused.status == 503 and refused.code == "draining"
        assert int(refused.headers["retry-after"]) >= 1 and refused.headers["connection"] == "close"
        waiting.sendall(request_bytes("POST", CHAT, json.dumps(chat_body()).encode(), close=False))
        late = reply_on(waiting)
        assert late.status == 503 and late.headers["connection"] == "close"
        assert ask(server, path="/ready").status == 503
        rest = first + until_closed(running)
    assert rest.count(b"word") == 40 and b"data: [DONE]" in rest and rest.endswith(b"0\r\n\r\n")
    assert server.ended() == 0
    assert "Traceback" not in server.errors, server.errors


def test_a_drain_has_an_end(own_server: Any) -> None:
    server = own_server(limits={"drain_seconds": 0.5}, words=400, delay=0.05)
    with server.connect() as running:
        streamed(running)
        begun = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
        assert time.monotonic() - begun < 5 and b"[DONE]" not in until_closed(running)
    assert "cut off" in server.errors and "Traceback" not in server.errors, server.errors


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_it_at_once(own_server: Any, number: int, code: int) -> None:
    server = own_server(words=400, delay=0.05)
    with server.connect() as running:
        streamed(running)
        server.signal(number)
        time.sleep(0.3)
        assert server.process.poll() is None
        begun = time.monotonic()
        server.signal(number)
        assert server.ended() == code and time.monotonic() - begun < 3
    assert "Traceback" not in server.errors, server.errors


# Clients that leave, and clients that do not listen ----------------------------------------------------------------------


def test_a_client_that_hangs_up_stops_its_answers(own_server: Any) -> None:
    """Also where it had sent another request meanwhile, or asked for a whole answer."""
    server = own_server(words=1000, delay=0.05)
    with server.connect() as found, server.connect() as ahead, server.connect() as whole:
        streamed(found)
        streamed(ahead)
        ahead.sendall(request_bytes("GET", "/health", close=False))
        whole.sendall(request_bytes("POST", CHAT, json.dumps(chat_body()).encode()))
        running(server, 3)
    running(server, 0)


def test_a_client_that_takes_nothing_of_its_answer(own_server: Any) -> None:
    server = own_server(limits={"idle_seconds": 1.0}, words=100_000)
    before = server.resident()
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", server.port))
        lazy.sendall(request_bytes("POST", CHAT, json.dumps(chat_body(stream=True)).encode()))
        running(server, 1)
        assert server.resident() - before < 64 * MIB
        running(server, 0, 10)
        assert b"[DONE]" not in until_closed(lazy)


def running(server: ServerProcess, count: int, seconds: float = 5.0) -> None:
    """Wait until so many answers are running."""
    until = time.monotonic() + seconds
    while b"orchard_answers_running %d.0" % count not in ask(server, path="/metrics").body:
        assert time.monotonic() < until
        time.sleep(0.02)


# Addresses and certificates -----------------------------------------------------------------------------------------------


def settings(**more: Any) -> Settings:
    return Settings((ModelSpec("scripted", "scripted"),), **more)


def test_a_port_in_use_and_hosts_that_are_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"port {port} of 127.0.0.1 is in use"):
            listening_sockets("127.0.0.1", port)
    with pytest.raises(CannotListen, match="cannot be found"):
        listening_sockets("127.0.0.1.no-such-host.invalid", 0)
    with pytest.raises(CannotListen, match="cannot be found"):
        listening_sockets("localhost\udcff" + "x" * 70, 0)


@pytest.mark.parametrize(
    ("number", "words", "hint"),
    [
        (errno.EACCES, "port 80 of 127.0.0.1 needs more permission", "above 1023"),
        (errno.EADDRNOTAVAIL, "this machine has no address 127.0.0.1", "127.0.0.1"),
        (errno.EMFILE, "cannot listen at 127.0.0.1, port 80: Too many open files", "--port"),
    ],
)
def test_what_the_system_refuses(monkeypatch: pytest.MonkeyPatch, number: int, words: str, hint: str) -> None:
    def refuse(*_: Any) -> socket.socket:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("orchard.serve.listen._bound", refuse)
    with pytest.raises(CannotListen) as error:
        listening_sockets("127.0.0.1", 80)
    assert error.value.message == words and hint in error.value.hint and error.value.exit_code == 1


def test_localhost_has_one_port_for_all_its_addresses() -> None:
    found = listening_sockets("localhost", 0)
    try:
        assert len({one.getsockname()[1] for one in found}) == 1
    finally:
        for one in found:
            one.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "box.example"])
def test_without_a_key_only_this_machine_is_listened_to(host: str) -> None:
    with pytest.raises(UsageError, match="needs an API key"), opened(settings(host=host, port=0)):
        pass


def test_room_for_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        assert room_for(100) == 100
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 512
        found = room_for(600)
        assert found == 600 and resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 856
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = which("openssl")
    if program is None:
        pytest.skip("there is no openssl here to make a certificate with")
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("one", "two"):
        made = ["-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.pem", "-days", "2", "-nodes"]
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        subprocess.run([program, "req", "-x509", *curve, *made, *names], check=True, capture_output=True)
    locked = ["-in", f"{folder}/one.key", "-aes256", "-passout", "pass:secret", "-out", f"{folder}/locked.key"]
    subprocess.run([program, "pkey", *locked], check=True, capture_output=True)
    (folder / "text.pem").write_text("not a certificate\n")
    return folder


def test_tls(certificates: Path, own_server: Any) -> None:
    server = own_server(limits=HASTY, tls_cert=str(certificates / "one.pem"), tls_key=str(certificates / "one.key"))
    assert server.url.startswith("https://")
    trust = ssl.create_default_context(cafile=str(certificates / "one.pem"))
    with trust.wrap_socket(server.connect(), server_hostname="127.0.0.1") as found:
        assert found.version() in ("TLSv1.2", "TLSv1.3")
        found.sendall(request_bytes("POST", CHAT, json.dumps(chat_body()).encode(), {"Origin": "https://127.0.0.1"}))
        assert Reply(until_closed(found)).status == 200
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with server.connect() as plain, pytest.raises((ssl.SSLError, ConnectionError)):
        old.wrap_socket(plain)
    with server.connect() as mute, server.connect() as plain, server.connect() as half:
        plain.sendall(request_bytes("GET", "/health"))  # no TLS at all
        half.sendall(b"\x16\x03\x01\x02\x00")
        assert seconds_to_close([mute, plain, half], 6) < 5
    with trust.wrap_socket(server.connect(), server_hostname="localhost") as late:
        late.sendall(request_bytes("GET", "/health"))
        assert Reply(until_closed(late)).status == 200
        server.signal()
    assert server.ended() == 0 and "Traceback" not in server.errors, server.errors


def test_handshakes_are_counted_like_any_connection(certificates: Path, own_server: Any) -> None:
    files = {"tls_cert": str(certificates / "one.pem"), "tls_key": str(certificates / "one.key")}
    server = own_server(limits={"connections": 20, "header_seconds": 30}, **files)
    trust = ssl.create_default_context(cafile=files["tls_cert"])
    with ExitStack() as stack:
        mute = [stack.enter_context(server.connect()) for _ in range(40)]
        begun = time.monotonic()
        with trust.wrap_socket(server.connect(), server_hostname="localhost") as found:
            found.sendall(request_bytes("GET", "/health"))
            assert Reply(until_closed(found)).status == 200
        assert time.monotonic() - begun < 1
        assert seconds_to_close(mute[:20], 5) < 2, "the oldest made room"
        assert seconds_to_close(mute[25:], 0.3) >= 0.3, "the others may still come"


def test_handshakes_that_fail_leave_nothing_behind(certificates: Path, own_server: Any) -> None:
    files = {"tls_cert": str(certificates / "one.pem"), "tls_key": str(certificates / "one.key")}
    server = own_server(limits={"header_seconds": 0.5}, **files)
    sizes = []
    for _ in range(4):
        with ExitStack() as stack:
            mute = [stack.enter_context(server.connect()) for _ in range(200)]
            for one in mute[::2]:
                one.sendall(b"\x16\x03\x01\x02\x00 and no more")
            assert seconds_to_close(mute, 5) < 4
        sizes.append(server.resident())
    assert sizes[-1] - sizes[0] < 24 * MIB, sizes


def test_a_request_that_comes_with_the_end_of_the_handshake(certificates: Path, own_server: Any) -> None:
    files = {"tls_cert": str(certificates / "one.pem"), "tls_key": str(certificates / "one.key")}
    server = own_server(**files)
    trust = ssl.create_default_context(cafile=files["tls_cert"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trust.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with server.connect() as found:
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                found.sendall(outgoing.read())
                incoming.write(found.recv(1 << 16))
        client.write(request_bytes("POST", CHAT, json.dumps(chat_body()).encode()))
        found.sendall(outgoing.read())  # the last of the handshake and the request in one
        data = b""
        while b"\r\n\r\n" not in data:
            incoming.write(found.recv(1 << 16))
            with suppress(ssl.SSLWantReadError):
                data += client.read(1 << 16)
        assert Reply(data).status == 200


def test_certificates_that_cannot_be_used(certificates: Path, tmp_path: Path) -> None:
    def refusal(cert: str | Path | None, key: str | Path | None, kind: type[Exception]) -> str:
        with pytest.raises(kind) as error:
            tls_of(settings(tls_cert=cert and str(cert), tls_key=key and str(key)))
        return str(error.value)

    one, key = certificates / "one.pem", certificates / "one.key"
    assert "--tls-key is missing" in refusal(one, None, UsageError)
    assert "--tls-cert is missing" in refusal(None, key, UsageError)
    assert "No such file" in refusal(tmp_path / "none.pem", key, BadFile)
    assert "cannot be read" in refusal(one, tmp_path, BadFile)
    assert "does not belong" in refusal(one, certificates / "two.key", BadFile)
    assert "passphrase" in refusal(one, certificates / "locked.key", BadFile)
    assert "no certificate" in refusal(certificates / "text.pem", key, BadFile)
    assert "no private key" in refusal(one, certificates / "text.pem", BadFile)
    assert tls_of(settings()) is None
