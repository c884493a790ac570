"""Starts the processes of a test with the environment that torchrun gives."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start(program: str, argument: str, *, size: int = 2, wait: float = 100) -> list[tuple[int, str, str]]:
    """Return code, output and errors of every process. None of them outlives the call."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.train.{program}", argument],
            cwd=ROOT,
            env={**given, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=wait) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, out, err) for process, (out, err) in zip(running, said)]
