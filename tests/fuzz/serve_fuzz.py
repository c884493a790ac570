"""Fuzz the server: bodies and schemas of every bad kind may only be answered or refused, soon and with words.

    python -m tests.fuzz.serve_fuzz --count 20000 --seed 0
    python -m tests.fuzz.serve_fuzz --schemathesis http://127.0.0.1:8000

The first makes each case from (seed, number) alone, so a failure can be run again with `--start NUMBER --count 1`, and sends it
to the whole app in this process. The second runs schemathesis over the description at /openapi.json of a server that is there: no
status from 500, and nothing that hangs. Start that server with `orchard serve --max-tokens 8`, or long answers take all the time.
`serve_atheris.py` lets a fuzzer make the cases that sees what code they reach.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.serve_app import App, Fault, checked
from tests.fuzz.serve_bodies import Case, make_case

CHECKS = "not_a_server_error"
PHASES = "examples,coverage,fuzzing"
HOOKS = "tests.fuzz.serve_hooks"
HOW_TO_GET = (
    "pip install schemathesis (in an environment of its own), then put its bin folder on PATH or give --program"
)


def case_of(seed: int, number: int) -> Case:
    return make_case(random.Random(f"{seed}:{number}"))


def outcome(app: App, case: Case) -> str:
    """What came of a case; `Fault` where it must not have."""
    path, body = case
    return checked(app.post(path, body))


def run(app: App, count: int, seed: int, start: int = 0, progress: bool = False) -> tuple[Counter[str], float]:
    """Outcomes and the slowest case in seconds; raises `SystemExit` with the case at the first fault."""
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    for number in range(start, start + count):
        case = case_of(seed, number)
        began = time.perf_counter()
        try:
            outcomes[f"{case[0]} {outcome(app, case)}"] += 1
        except Fault as fault:
            raise SystemExit(f"case {seed}:{number}, {case[0]}: {fault}\n{case[1][:3000]!r}") from fault
        slowest = max(slowest, time.perf_counter() - began)
        if progress and number % 1000 == 999:
            print(f"{number + 1} cases, slowest {slowest:.2f} s", file=sys.stderr)
    return outcomes, slowest


def schemathesis(url: str, program: str | None, examples: int, seed: int, phases: str = PHASES) -> int:
    """Run the command line of schemathesis, where it is; its exit code. What it writes down goes away with the run."""
    found = program or shutil.which("schemathesis") or shutil.which("st")
    if found is None:
        print(f"schemathesis is not here: {HOW_TO_GET}", file=sys.stderr)
        return 2
    where = url.rstrip("/").removesuffix("/v1")
    command = [found, "run", f"{where}/openapi.json", "--url", where, "--checks", CHECKS]
    command += ["--max-examples", str(examples), "--seed", str(seed), "--request-timeout", "60", "--phases", phases]
    root = Path(__file__).resolve().parents[2]
    found_there = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": HOOKS, "PYTHONPATH": found_there}
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(command, check=False, cwd=folder, env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--schemathesis", metavar="URL", help="a server to run schemathesis against, instead")
    parser.add_argument("--program", help="the schemathesis program, where it is not on PATH")
    parser.add_argument("--examples", type=int, default=100, help="schemathesis: cases for each operation")
    parser.add_argument("--phases", default=PHASES, help="schemathesis: what it does")
    options = parser.parse_args()
    if options.schemathesis:
        return schemathesis(options.schemathesis, options.program, options.examples, options.seed, options.phases)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        app = App(Path(folder))
        outcomes, slowest = run(app, options.count, options.seed, options.start, progress=True)
        app.close()
    print(f"{options.count} requests in {time.perf_counter() - started:.0f} s, slowest {slowest:.2f} s")
    for name, number in sorted(outcomes.items()):
        print(f"  {name}: {number}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
