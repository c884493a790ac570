"""Fuzz the chat-template sandbox: hostile templates may only give text or a typed error, soon and in little memory.

    python -m tests.fuzz.template_fuzz --count 20000 --seed 0

Each case is made from (seed, number) alone, so a failure can be run again with `--start NUMBER --count 1`. Checked for
every case: no exception but `OrchardError`, no more than a second, no growth of the process above 64 MiB (one case in
32 is also measured by tracemalloc), and nothing in the output that looks like Python's insides.
"""

from __future__ import annotations

import argparse
import random
import resource
import signal
import sys
import time
import tracemalloc
import types
from collections import Counter

from orchard.core.errors import OrchardError
from orchard.text.limits import DEFAULT_LIMITS, Limits
from orchard.text.templates import render
from tests.fuzz.template_grammar import make_template

MEMORY_LIMIT = 64 << 20
TIME_LIMIT = 1.0
TRACE_EVERY = 32
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße 😀 <|im_end|>\n\n  two"},
    {
        "role": "assistant",
        "content": "<think>\nhm\n</think>\n\nyes",
        "tool_calls": [{"name": "f", "arguments": {"x": [1, 2]}}],
    },
    {"role": "user", "content": "a b c " * 200},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
LEAKS = ("<class '", "<function ", "<module ", "<frame ", "<code ", "Environment object")


class Hang(BaseException):
    """A case ran for many seconds."""


def make_case(seed: int, number: int) -> str:
    return make_template(random.Random(f"{seed}:{number}"))


def outcome(template: str, limits: Limits = DEFAULT_LIMITS) -> str:
    try:
        text = render(template, messages=MESSAGES, tools=TOOLS, bos_token="<s>", eos_token="</s>", limits=limits)
    except OrchardError as error:
        return f"refused ({error.code})"
    leaked = [leak for leak in LEAKS if leak in text and leak not in template]
    if leaked:
        raise AssertionError(f"the output shows {leaked[0]!r}")
    return "rendered"


def run(
    count: int, seed: int, start: int = 0, progress: bool = False, limits: Limits = DEFAULT_LIMITS
) -> tuple[Counter[str], float]:
    """Outcomes and the slowest case in seconds; raises `SystemExit` with the case at the first fault."""
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    previous = signal.signal(signal.SIGALRM, _alarm)
    try:
        for number in range(start, start + count):
            template = make_case(seed, number)
            result, seconds = _checked(template, limits, number % TRACE_EVERY == 0, f"{seed}:{number}")
            slowest = max(slowest, seconds)
            outcomes[result] += 1
            if progress and number % 2000 == 1999:
                print(f"{number + 1} cases, slowest {slowest:.2f} s, {dict(outcomes)}", file=sys.stderr)
    finally:
        signal.signal(signal.SIGALRM, previous)
    return outcomes, slowest


def _checked(template: str, limits: Limits, trace: bool, name: str) -> tuple[str, float]:
    shown = f"case {name}: {template[:300]!r}"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if trace:
        tracemalloc.start()
    result, seconds = _timed(template, limits, shown)
    peak = tracemalloc.get_traced_memory()[1] if trace else 0
    if trace:
        tracemalloc.stop()
    if trace and seconds > TIME_LIMIT:
        # Tracing slows everything down. Compiled templates are remembered, so make it look like another one.
        result, seconds = _timed(template + " ", limits, shown)
    if seconds > TIME_LIMIT:
        raise SystemExit(f"{shown} took {seconds:.2f} s")
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if max(peak, growth) > MEMORY_LIMIT:
        raise SystemExit(f"{shown} took {max(peak, growth) >> 20} MiB")
    return result, seconds


def _timed(template: str, limits: Limits, shown: str) -> tuple[str, float]:
    """Seconds of this thread's own time: what else the machine does is not the template's fault, and a template has no
    way to sleep."""
    started = time.thread_time()
    signal.setitimer(signal.ITIMER_REAL, 10.0)
    try:
        return outcome(template, limits), time.thread_time() - started
    except BaseException as error:
        raise SystemExit(f"{shown} raised {type(error).__name__}: {error}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _alarm(number: int, frame: types.FrameType | None) -> None:
    raise Hang("still running after 10 s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    options = parser.parse_args()
    started = time.perf_counter()
    outcomes, slowest = run(options.count, options.seed, options.start, progress=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        f"{options.count} templates in {time.perf_counter() - started:.0f} s, slowest {slowest:.2f} s, peak {peak} MiB"
    )
    for name, number in sorted(outcomes.items()):
        print(f"  {name}: {number}")


if __name__ == "__main__":
    main()
