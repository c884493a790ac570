"""What every worker process runs: `python run.py MODULE`, a job as JSON on stdin, one line of JSON on stdout.

MODULE is a neighbour of this file with a class `Subject(options)`: one engine, loaded. Its `begin(prompts, length)` gives a
session with `read()` (all prompts; answers the first token of each), `step(tokens)` (one more of each) and `close()`. So
every engine is timed by the same lines. This file needs the standard library only: it also runs where Orchard is not.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

STATUS = Path("/proc/self/status")


def peak_memory() -> int:
    """The most memory this process ever held at once, in bytes."""
    with contextlib.suppress(OSError):  # ru_maxrss would count what the parent held when it started us
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def token_ids(count: int, vocab: int, seed: int) -> list[int]:
    """Token ids that every engine gets alike: scattered over the vocabulary, without its first, special ones."""
    return [
        64 + (seed * 7_919 + place * 104_729) % (vocab - 64) if vocab > 128 else place % vocab for place in range(count)
    ]


def run_case(subject: Any, case: dict[str, Any], vocab: int) -> dict[str, Any]:
    """Seconds to read the prompts and seconds of a step, once for each repeat, and bytes per second that this machine read
    between repeats where the case asks for it.

    Of the steps of a repeat the median counts: a neighbour that takes the core for a moment stops one step, not the engine."""
    reads: list[float] = []
    steps: list[float] = []
    bandwidth: list[float] = []
    for repeat in range(case["warm"] + case["repeats"]):
        prompts = [token_ids(length, vocab, repeat + place) for place, length in enumerate(case["prompts"])]
        session = subject.begin(prompts, case["length"])
        try:
            started = time.perf_counter()
            tokens = session.read()
            read = time.perf_counter()
            times = [read]
            for _ in range(case["steps"]):
                tokens = session.step(tokens)
                times.append(time.perf_counter())
        finally:
            session.close()
        if repeat >= case["warm"]:
            reads.append(read - started)
            if case["steps"]:
                steps.append(median(after - before for before, after in pairwise(times)))
        if case.get("limit"):
            bandwidth.append(subject.bandwidth())
    return {"read": reads, "step": steps, "memory": peak_memory(), "bandwidth": bandwidth}


def answer(module: Any, job: dict[str, Any]) -> dict[str, Any]:
    if "task" in job:  # something that is no timing of sessions: limits, quality, preparing files
        return {"result": module.task(job["task"], job["options"])}
    subject = module.Subject(job["options"])
    cases = {case["name"]: run_case(subject, case, job["vocab"]) for case in job["cases"]}
    return {"cases": cases, "about": subject.about()}


def main() -> int:
    job = json.load(sys.stdin)
    line = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not end up in the answer
    try:
        record = answer(importlib.import_module(sys.argv[1]), job)
    except Exception as error:
        if os.environ.get("ORCHARD_DEBUG", "") not in ("", "0"):
            raise
        record = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
    os.write(line, (json.dumps(record) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
