"""Fuzz compressed files: sound bytes with hostile content may only give typed errors.

    python -m tests.fuzz.compressed_fuzz --count 20000 --seed 0

Rules are those of `checkpoint_fuzz`, and so is what is done with a file; each case depends on (seed, number) alone. The time of a
case is that of the processor, so that a busy machine breaks no rule.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import torch

from tests.fuzz.checkpoint_fuzz import COMMAND_EVERY, TIME_LIMIT, TRACE_EVERY, Failure, by_command, outcome
from tests.fuzz.compressed_cases import compressed_bytes, make_compressed, make_compressed_case
from tests.fuzz.weights_fuzz import MEMORY_LIMIT, address_space_limit, peak_memory, put


def run(count: int, seed: int, folder: Path, *, start: int = 0) -> Counter[str]:
    """Run cases `start` to `start + count`; count outcomes, raise `Failure` for the first that breaks a rule."""
    os.environ.setdefault("ORCHARD_HOME", str(folder / "home"))
    path, outcomes = folder / "case.orchard", Counter[str]()
    for sample in make_compressed():
        put(path, compressed_bytes(sample))
        assert outcome(path) == "loaded, finite"
    base = peak_memory()
    with address_space_limit(MEMORY_LIMIT):
        for number in range(start, start + count):
            sample, data = make_compressed_case(seed, number)
            put(path, data)
            try:
                outcomes[_one(number, path)] += 1
                assert peak_memory() - base <= MEMORY_LIMIT, f"peak memory grew by {peak_memory() - base:,} bytes"
            except Exception as error:
                why = f"case {number} (seed {seed}): {type(error).__name__}: {error}"
                raise Failure("\n  ".join([why, *sample.log])) from error
    return outcomes


def _one(number: int, path: Path) -> str:
    traced = number % TRACE_EVERY == 0
    if traced:
        tracemalloc.start()
    try:
        began = time.process_time()
        found = outcome(path, show=number % 2 == 1)
        assert traced or time.process_time() - began <= TIME_LIMIT, "took too long"
        assert not traced or tracemalloc.get_traced_memory()[1] <= MEMORY_LIMIT, "allocated too much"
    finally:
        if traced:
            tracemalloc.stop()
    if number % COMMAND_EVERY == 0:
        by_command(path, number // COMMAND_EVERY)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            total = run(options.count, options.seed, Path(folder), start=options.start)
        except Failure as failure:
            print(f"FAILED: {failure}", file=sys.stderr)
            return 1
    for found, number in sorted(total.items()):
        print(f"{found:48} {number:>9,}")
    print(f"{options.count:,} cases, seed {options.seed}, {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
