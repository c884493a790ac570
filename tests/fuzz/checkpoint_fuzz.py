"""Fuzz the way from an opened file to a model that runs: sound bytes with hostile content may only give typed errors.

    python -m tests.fuzz.checkpoint_fuzz --count 20000 --seed 0

Each case (`checkpoint_cases.py`) is made from (seed, number) alone, so a failure can be run again with `--start NUMBER
--count 1`. Checked for every case: `open_checkpoint`, `tokenizer_of`, `config`, `load_decoder` and, where all that went
well, one id through the model; for every second also `headers` (what `orchard show` prints), for one in 64 `orchard.load`
or the command line. No exception but `OrchardError` with a short message and a hint, none that only the last net caught,
no allocation above 64 MiB (by a limit on the address space, by the process's peak memory and, for one case in 64, by
tracemalloc), no more than a second.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import tempfile
import time
import tracemalloc
import types
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch

from orchard.cli.main import main as command
from orchard.cli.show import headers
from orchard.core.errors import OrchardError
from orchard.session.model import load, tokenizer_of
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.load import load_decoder
from tests.fuzz.checkpoint_cases import make_case, make_samples, write
from tests.fuzz.weights_fuzz import MEMORY_LIMIT, address_space_limit, peak_memory

TIME_LIMIT = 1.0
COMMAND_EVERY = TRACE_EVERY = 64


class Failure(Exception):
    """A case that broke a rule."""


def checked(error: OrchardError) -> str:
    """The code of an error that says what it must."""
    assert error.message and error.hint, "an error without a message or a hint"
    assert len(error.message) < 600 and error.message.isprintable(), f"an unreadable message: {error.message!r:.700}"
    assert "is not usable" not in error.message, f"caught by the last net only: {error.message}"
    return error.code


def outcome(path: Path, *, show: bool = True) -> str:
    """What a user's first touch does, in a word: how far it went, and what stopped it."""
    try:
        if show:
            headers(path)
    except OrchardError as error:
        checked(error)
    stage = "open"
    try:
        with open_checkpoint(path) as checkpoint:
            try:
                tokenizer_of(checkpoint)
            except OrchardError as error:
                assert error.hint
            stage = "config"
            checkpoint.config()
            stage = "load"
            model = load_decoder(checkpoint)
    except OrchardError as error:
        return f"refused by {stage}: {checked(error)}"
    with torch.inference_mode():
        logits = model(torch.tensor([[1]]))
    assert logits.shape == (1, 1, model.config.vocab) and logits.dtype == torch.float32
    return "loaded, finite" if bool(logits.isfinite().all()) else "loaded, not finite"


def by_command(path: Path, turn: int) -> None:
    """The doors that users come through: `orchard.load` and, in turn, the forms of `orchard show`."""
    if turn % 4 == 0:
        try:
            load(path)
        except OrchardError as error:
            assert error.hint
        return
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
        code = command(["show", str(path), *([], ["--json"], ["--config"])[turn % 4 - 1]])
    assert code in (0, 1, 2) and "unexpected" not in said.getvalue(), said.getvalue()[:500]


def run(count: int, seed: int, folder: Path, *, start: int = 0) -> Counter[str]:
    """Run cases `start` to `start + count`; count outcomes, raise `Failure` for the first that breaks a rule."""
    os.environ.setdefault("ORCHARD_HOME", str(folder / "home"))
    samples, outcomes = make_samples(), Counter[str]()
    for sample in samples:  # loads what is loaded lazily, and shows that the samples themselves are sound
        path = write(sample, folder)
        assert outcome(path) == "loaded, finite", (sample.kind, sample.config)
        for turn in range(4) if sample in samples[:2] else ():
            by_command(path, turn)
    base = peak_memory()
    with address_space_limit(MEMORY_LIMIT):
        for number in range(start, start + count):
            sample = make_case(samples, seed, number)
            try:
                outcomes[f"{sample.kind} {_one(number, write(sample, folder))}"] += 1
                assert peak_memory() - base <= MEMORY_LIMIT, f"peak memory grew by {peak_memory() - base:,} bytes"
            except Exception as error:
                why = f"case {number} (seed {seed}, {sample.kind}): {type(error).__name__}: {error}"
                raise Failure("\n  ".join([why, *sample.log])) from error
    return outcomes


def _one(number: int, path: Path) -> str:
    traced = number % TRACE_EVERY == 0
    if traced:
        tracemalloc.start()
    try:
        begin = time.perf_counter()
        found = outcome(path, show=number % 2 == 1)
        if time.perf_counter() - begin > TIME_LIMIT:  # once more: the machine may have been busy with something else
            begin = time.perf_counter()
            outcome(path)
        took = time.perf_counter() - begin
        assert took <= TIME_LIMIT, f"took {took:.1f} s"
        assert not traced or tracemalloc.get_traced_memory()[1] <= MEMORY_LIMIT, "allocated too much"
    finally:
        if traced:
            tracemalloc.stop()
    if number % COMMAND_EVERY == 0:
        by_command(path, number // COMMAND_EVERY)
    return found


def _stuck(_signal: int, _frame: types.FrameType | None) -> None:
    raise TimeoutError("two thousand cases took more than five minutes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, _stuck)
    torch.set_num_threads(1)
    began = time.perf_counter()
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for first in range(options.start, options.start + options.count, 2000):
                signal.alarm(300)
                many = min(2000, options.start + options.count - first)
                total += run(many, options.seed, Path(folder), start=first)
        except Failure as failure:
            print(f"FAILED: {failure}", file=sys.stderr)
            return 1
        finally:
            signal.alarm(0)
    seconds = time.perf_counter() - began
    for found, number in sorted(total.items()):
        print(f"{found:48} {number:>9,}")
    print(f"{options.count:,} cases, seed {options.seed}, {seconds:.0f} s ({options.count / seconds:,.0f} a second)")
    print(f"peak memory of the process: {peak_memory() >> 20} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
