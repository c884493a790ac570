"""Worker processes: started, timed, listened to, and never left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from orchard.bench.peers import START, environment
from orchard.core.errors import OrchardError

RUN = Path(__file__).with_name("workers") / "run.py"
TIME_LIMIT = 600.0
# Ends by itself when whoever started it is gone, however that went.
_SPIN = (
    "import os, sys, time\n"
    "parent = os.getppid()\n"
    "if hasattr(os, 'sched_setaffinity'): os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    "print('spinning', flush=True)\n"
    "while os.getppid() == parent:\n"
    "    for _ in range(1_000_000): pass\n"
)


class WorkerFailed(OrchardError):
    """A worker process gave no answer."""

    code = "worker-failed"


@contextmanager
def process(
    command: list[str], errors: IO[bytes], *, limit: float, **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A child that is gone when the block is left, however it is left, and that is ended after `limit` seconds."""
    child = subprocess.Popen(command, stderr=errors, env=environment(), **streams)
    alarm = threading.Timer(limit, child.kill)
    alarm.daemon = True
    alarm.start()
    try:
        yield child
    finally:
        alarm.cancel()
        if child.poll() is None:
            child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()


def ask(python: str, module: str, job: dict[str, Any], *, limit: float = TIME_LIMIT) -> dict[str, Any]:
    """Run one job in a worker of `module` and give its answer."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with tempfile.TemporaryFile() as errors:
        with process([python, str(RUN), module], errors, limit=limit, **pipes) as child:
            out, _ = child.communicate(json.dumps(job).encode())
        answer = _parsed(out)
        said = _last_words(errors, child.returncode) if answer is None else str(answer.get("error", ""))
    if answer is None or "error" in answer:
        raise WorkerFailed(said, hint="ORCHARD_DEBUG=1 lets workers show their tracebacks")
    return answer


def seconds_to_first_token(engine: str, python: str, options: dict[str, Any], *, limit: float = TIME_LIMIT) -> float:
    """From starting a fresh interpreter to the line that it prints when it has a token."""
    command = [python, "-c", START[engine], json.dumps(options)]
    with tempfile.TemporaryFile() as errors:
        started = time.perf_counter()
        with process(command, errors, limit=limit, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            line = child.stdout.readline()
            took = time.perf_counter() - started
            child.wait()
        if not line.strip():
            raise WorkerFailed(_last_words(errors, child.returncode), hint="ORCHARD_DEBUG=1 shows what it said")
        return took


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process that keeps one core busy, pinned to it where the system allows that."""
    with tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-c", _SPIN]
        with process(command, errors, limit=TIME_LIMIT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            yield


def _parsed(out: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return answer if isinstance(answer, dict) else None


def _last_words(errors: IO[bytes], code: int | None) -> str:
    """The last line that a dead worker wrote, or the signal that ended it."""
    errors.seek(0)
    text = errors.read().decode(errors="replace")
    if os.environ.get("ORCHARD_DEBUG", "") not in ("", "0"):
        print(text, file=sys.stderr)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ended = f"ended by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
    return f"{ended}: {lines[-1][:300]}" if lines else ended
