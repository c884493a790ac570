"""Processes of one run on this machine: started together, told together, ended together. As torchrun does for one machine.

Each worker is the same program with a number of its own in its environment (RANK, WORLD_SIZE, MASTER_ADDR …). The first one has
our stdout and stderr; of the others something is heard only where they alone failed. Workers have a session of their own, so
that Ctrl-C reaches them once, through us, and not a second time from the terminal.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import IO, Any

from orchard.cli.common import note

GRACE = 30.0
"""Seconds that the others have to end by themselves after one has failed."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def belongs_to_a_group() -> bool:
    """Whether somebody (torchrun, or `start` below) has started this process as one of several."""
    return "RANK" in os.environ


def start(words: Sequence[str], count: int) -> int:
    """Run `orchard WORDS` in `count` processes; the exit code of the run."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // count)),
    }
    running: list[subprocess.Popen[bytes]] = []
    logs: list[IO[bytes]] = []
    handlers: dict[int, Any] = {}
    stack = ExitStack()

    def pass_on(number: int, frame: FrameType | None) -> None:
        for one in running:
            if one.poll() is None:
                one.send_signal(number)

    try:
        handlers = {number: signal.signal(number, pass_on) for number in _SIGNALS}
        for rank in range(count):
            logs.append(stack.enter_context(tempfile.TemporaryFile()))  # noqa: SIM115
            running.append(
                subprocess.Popen(
                    [*_program(), *words],
                    env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else subprocess.DEVNULL,
                    stderr=None if rank == 0 else logs[rank],
                    start_new_session=True,
                )
            )
        return _ended(running, logs)
    finally:
        for one in running:
            if one.poll() is None:
                one.kill()
                one.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        stack.close()


def _ended(running: list[subprocess.Popen[bytes]], logs: list[IO[bytes]]) -> int:
    """Wait for all; once one has failed the others get a while, for their last words."""
    until: float | None = None
    while any(one.poll() is None for one in running):
        if until is None and any(one.poll() not in (None, 0) for one in running):
            until = time.monotonic() + GRACE
        if until is not None and time.monotonic() > until:
            break
        time.sleep(0.05)
    codes = [one.poll() for one in running]
    if codes[0] == 0:
        for rank, code in enumerate(codes):
            if code not in (0, None):
                logs[rank].seek(0)
                note(f"process {rank} ended with {code}: {logs[rank].read()[-2000:].decode(errors='replace').strip()}")
    return next((_exit_code(code) for code in codes if code != 0), 0)


def _exit_code(code: int | None) -> int:
    """Of a process that was killed, or does not end: a failure."""
    return code if code is not None and code > 0 else 1


def _program() -> list[str]:
    """How to start ourselves again."""
    own = Path(sys.argv[0])
    if own.name == "orchard" and own.is_file():
        return [sys.executable, str(own)]
    return [sys.executable, "-c", "from orchard.cli.main import run; run()"]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
