"""The process around a verb: standard streams that are missing, signals that end it, and bringing torch in.

A program that is told to end (by `kill`, or because its terminal closed) leaves as tidily as after Ctrl-C: what a verb
does at its end still happens, so no half-done download and no child stays behind.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_ENDINGS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
_HELD = (signal.SIGINT, *_ENDINGS)


def prepare() -> None:
    """What the `orchard` program does before anything else."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in this order each gets its own number
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show a character is no reason to fail
        sys.stdout.reconfigure(errors="backslashreplace")
    for number in _ENDINGS:
        if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` and the like have the last word
            signal.signal(number, _leave)


def finish() -> None:
    """Before the interpreter ends, when all is said. What torch keeps alive is not searched for garbage once more, which
    took longer than some verbs do; and Ctrl-C ends us on the spot, without a word from handlers that Python still runs."""
    gc.disable()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def import_torch() -> None:
    """Import torch: quickly, whole, and so that it shares the machine.

    An interruption inside the import is lost, or aborts the process from C++, so signals wait until it is done. The
    collector would look through a hundred thousand new objects again and again and find nothing. And torch's OpenMP
    threads spin while they wait for each other: where another program runs on a core, the one that spins keeps out the
    one that it waits for. A short wait costs little on an idle machine and wins much on a busy one; see docs/log.md.
    """
    if "torch" in sys.modules:
        return
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():  # read once, when the library is loaded
        os.environ["GOMP_SPINCOUNT"] = "1000"
    collecting = gc.isenabled()
    gc.disable()
    try:
        with signals_later():
            import torch  # noqa: F401
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


@contextmanager
def signals_later() -> Iterator[None]:
    """Hold back Ctrl-C and its kin until the block is done."""
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _HELD}
    held = {number: handler for number, handler in handlers.items() if callable(handler)}  # not those that are ignored
    try:
        for number in held:
            signal.signal(number, lambda number, frame: came.append(number))
    except ValueError:  # only the main thread may do this, and only it gets signals
        held = {}
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second one is not asked to wait for the tidying
    raise SystemExit(128 + number)
