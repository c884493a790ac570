"""Refuse every socket of a Python process, for tests that show what stays off the network.

Python imports a module of this name at start when its folder is on PYTHONPATH, so the programs that a test starts are
held to the same rule as the test itself. An audit hook sits below the `socket` module: code cannot step round it by
having kept a reference, and nothing has to be imported to install it. Only the environment variable switches it on;
when it says `loopback`, a program may talk to servers on this machine. Sockets whose address is a path (AF_UNIX) pass.
"""

from __future__ import annotations

import os
import sys

SWITCH = "ORCHARD_NO_NETWORK"
LOOPBACK = "loopback"
_WATCHED = frozenset({"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"})
_LOOKUPS = frozenset({"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"})
_HERE = ("127.", "::1", "localhost")


class NetworkBlocked(RuntimeError):
    """Deliberately no OSError: code that forgives network trouble must not forgive this."""


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event in _WATCHED:
        address = arguments[1] if len(arguments) > 1 else None
        if isinstance(address, (str, bytes)):
            return
        host = address[0] if isinstance(address, tuple) and address else ""
    elif event in _LOOKUPS:
        host = arguments[0]
    else:
        return
    mode = os.environ.get(SWITCH)
    if mode and not (mode == LOOPBACK and isinstance(host, str) and host.startswith(_HERE)):
        raise NetworkBlocked(f"{event} to {host!r}: the network is blocked in tests")


if os.environ.get(SWITCH):
    sys.addaudithook(_refuse)
