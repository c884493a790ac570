"""A server in a process of its own, for as long as something is measured on it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from orchard.bench.load.client import EndpointFailed

_START = 120.0
_STOP = 30.0


@dataclass
class Served:
    """A server that answers: its base address and its process."""

    url: str
    process: subprocess.Popen[bytes]


def command(model: str, port: int, *more: str) -> list[str]:
    """`orchard serve` of this very installation."""
    run = "from orchard.cli.main import run; run()"
    return [sys.executable, "-c", run, "serve", model, "--host", "127.0.0.1", "--port", str(port), *more]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    words: Sequence[str], port: int, *, ready: str = "/health", env: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """Start a program, wait until it answers at `ready`, and end it when the block is left: first gently."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=env)
        try:
            wait_until_answers(f"http://127.0.0.1:{port}{ready}", process)
            yield Served(f"http://127.0.0.1:{port}/v1", process)
        except EndpointFailed as error:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            raise EndpointFailed(f"{error.message}: {' / '.join(lines[-3:])[:500]}", hint=error.hint) from error
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes], *, seconds: float = _STOP) -> int:
    """End it as a person would, and for certain; its exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def wait_until_answers(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _START
    while time.monotonic() < until:
        if process.poll() is not None:
            raise EndpointFailed(
                f"the server ended with code {process.returncode} before it answered",
                hint="start it by hand to see why",
            )
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError as error:
            if error.code < 500:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise EndpointFailed(f"the server did not answer within {_START:g} s", hint="start it by hand to see why")
