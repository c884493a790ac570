"""Where a server listens: sockets, certificates and room for connections; whatever is wrong with them is said in one line."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from pathlib import Path

from orchard.core.errors import BadFile, OrchardError, UsageError
from orchard.serve.settings import Settings

FILES = 256
"""Open files that the process needs besides connections."""
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class CannotListen(OrchardError):
    """The address or the port cannot be had."""

    code = "cannot-listen"


def listening_sockets(host: str, port: int) -> list[socket.socket]:
    """Bound sockets for every address of a host (`localhost` has two), all with the same port; 0: any that is free."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        hint = "use 127.0.0.1 for this machine only, or 0.0.0.0 for every network it is in"
        raise CannotListen(f"the host {host!r} cannot be found: {_why(error)}", hint=hint) from error
    made: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            place = (address[0], made[0].getsockname()[1] if made and not port else port, *address[2:])
            try:
                made.append(_bound(family, place))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing = error  # a machine without IPv6 has a name for it all the same
        if not made:
            raise missing or OSError("it has no address")
    except OSError as error:
        for one in made:
            one.close()
        raise _cannot(host, port, error) from error
    return made


def _bound(family: int, address: tuple[object, ...]) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere it would let another program take the port over
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
        one.listen(1024)  # here, so that a port which two have bound is noticed before anything is loaded
        one.setblocking(False)
    except BaseException:
        one.close()
        raise
    return one


def _cannot(host: str, port: int, error: OSError) -> CannotListen:
    if error.errno == errno.EADDRINUSE:
        hint = "stop the program that has it, or choose another port with --port; 0 takes any that is free"
        return CannotListen(f"port {port} of {host} is in use", hint=hint)
    if error.errno in (errno.EACCES, errno.EPERM):
        return CannotListen(f"port {port} of {host} needs more permission", hint="choose a --port above 1023")
    if error.errno in _NOT_HERE:
        hint = "use 127.0.0.1 for this machine only, or 0.0.0.0 for every network it is in"
        return CannotListen(f"this machine has no address {host}", hint=hint)
    return CannotListen(f"cannot listen at {host}, port {port}: {_why(error)}", hint="choose another --host or --port")


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def tls_of(settings: Settings) -> ssl.SSLContext | None:
    """What TLS needs, from the files of the settings; None where there are none."""
    if settings.tls_cert is None and settings.tls_key is None:
        return None
    if settings.tls_cert is None or settings.tls_key is None:
        missing = "--tls-cert" if settings.tls_cert is None else "--tls-key"
        raise UsageError(f"{missing} is missing", hint="TLS needs a certificate and its key, each in a PEM file")
    for path in (settings.tls_cert, settings.tls_key):
        _check_readable(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password=_no_passphrase)
    except _Encrypted as error:
        hint = "write one without: openssl pkey -in KEY -out NEW"
        raise BadFile(f"the key {settings.tls_key} has a passphrase", hint=hint) from error
    except ssl.SSLError as error:
        raise _unusable(settings.tls_cert, settings.tls_key, error) from error
    return context


def _unusable(cert: str, key: str, error: ssl.SSLError) -> BadFile:
    if "MISMATCH" in (error.reason or ""):
        return BadFile(
            f"the key {key} does not belong to the certificate {cert}", hint="name the two that were made together"
        )
    for path, mark in ((cert, b"-----BEGIN CERTIFICATE-----"), (key, b"PRIVATE KEY-----")):
        if mark not in Path(path).read_bytes():
            what = "certificate" if path == cert else "private key"
            return BadFile(f"{path} holds no {what} in PEM form", hint=f"it should have a line with {mark.decode()}")
    why = error.reason or "OpenSSL gives no reason"
    return BadFile(
        f"{cert} and {key} cannot be used for TLS: {why}", hint="make them again, or check them with openssl x509"
    )


class _Encrypted(Exception):
    pass


def _no_passphrase() -> str:
    raise _Encrypted  # otherwise OpenSSL would ask at the terminal


def _check_readable(path: str) -> None:
    try:
        with Path(path).open("rb") as file:
            file.read(1)
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {_why(error)}", hint="check the path and its permissions") from error


def room_for(connections: int) -> int:
    """How many of that many connections the system has room for, having asked it for more where that is needed and allowed."""
    try:
        import resource
    except ImportError:  # Windows counts differently
        return connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):
        most = soft
    return max(1, min(connections, most - min(FILES, most // 2)))
