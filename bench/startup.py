"""What `import orchard` and `orchard --help` cost, beside a Python that does nothing.

The three programs take turns, so that whatever else the machine does hits them alike. Each figure is the median over the
rounds with its quartiles. Two claims bound the whole program, interpreter included, because that is what a person waits for.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from orchard.core.report import Bound, Claim, Report, Value

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "results" / "bench" / "startup.json"
PROGRAMS = {
    "python": ["-c", "pass"],
    "import": ["-c", "import orchard"],
    "help": ["-c", "import sys; sys.argv = ['orchard', '--help']; from orchard.cli.main import run; run()"],
}
CLAIMS = [
    Claim("import", '`python -c "import orchard"` takes less than 0.3 s', "import", Bound("<", 0.3), baseline="python"),
    Claim("help", "`orchard --help` takes less than 0.5 s", "help", Bound("<", 0.5), baseline="python"),
]


def seconds(arguments: list[str]) -> float:
    """Wall time of one fresh interpreter, which may keep its bytecode as it does on anybody's machine."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of each program in every round, after one round that warms the disk and writes the bytecode."""
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for number in range(rounds + 1):
        for name, arguments in PROGRAMS.items():
            taken = seconds(arguments)
            if number:
                times[name].append(taken)
    return times


def summary(times: list[float]) -> Value:
    low, middle, high = statistics.quantiles(times, n=4)
    return Value(round(middle, 4), unit="s", low=round(low, 4), high=round(high, 4), note="median, quartiles")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21, help="how often each program runs (default: 21)")
    parser.add_argument("--out", type=Path, default=TARGET, help="where the Report goes")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    times = measure(max(options.rounds, 2))
    report = Report.record(
        "bench",
        "startup",
        values={name: summary(values) for name, values in times.items()},
        claims=CLAIMS,
        series={name: [round(value, 4) for value in values] for name, values in times.items()},
        wall_time=round(time.perf_counter() - started, 3),
    )
    report.save(options.out)
    Console().print(report.table())
    return int(not report.passed)


if __name__ == "__main__":
    sys.exit(main())
