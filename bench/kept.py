"""A long conversation read under a budget of tokens on the native engine: memory, and what looking without keeping costs.

Each length is read by a program of its own, so that its peak of memory is known. Reading a block and letting as many tokens look
at the same kept ones take turns, so that whatever else the machine does hits both alike.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console

from orchard.core.report import Bound, Claim, Report, Value

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "results" / "bench" / "kept.json"
CLAIMS = [
    Claim("peak", "no layer ever holds more tokens than budget + block", "peak", Bound("<=", 1.0)),
    Claim("bytes", "ten times the tokens take the same bytes of keys and values", "bytes", Bound("<=", 1.0)),
    Claim("resident", "and the program's peak of memory stays within 5 %", "resident", Bound("<=", 1.05)),
    Claim("probe", "looking costs at most twice what reading as many tokens costs", "probe", Bound("<=", 2.0)),
]


def read(tokens: int, options: argparse.Namespace) -> dict[str, float]:
    """Read so many tokens of nonsense, in this process."""
    kept, vocab = _kept(options, "recent"), _vocab(options)
    ids = np.random.default_rng(0).integers(0, vocab, tokens)
    started = time.perf_counter()
    for at in range(0, tokens, options.block):
        kept.read(ids[at : at + options.block].tolist())
    seconds = time.perf_counter() - started
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"bytes": kept.nbytes, "peak": kept.peak, "resident": resident, "rate": tokens / seconds}


def apart(tokens: int, arguments: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.kept", *arguments, "--only", str(tokens)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def costs(options: argparse.Namespace) -> list[float]:
    """Seconds of a probe over seconds of reading as many tokens beside as many kept ones, round by round."""
    kept = _kept(options, "probe")
    ids = np.random.default_rng(1).integers(0, _vocab(options), options.budget + 2 * options.block).tolist()
    for at in range(0, options.budget, options.block):
        kept.read(ids[at : at + options.block][: options.budget - at])
    kept.probe(ids[: options.block])  # memory for it is there from now on
    found = []
    for _ in range(options.rounds):
        started = time.perf_counter()
        kept.probe(ids[: options.block])
        between = time.perf_counter()
        kept.read(ids[: options.block])
        found.append((between - started) / (time.perf_counter() - between))
        kept.back(options.block)
    return found


def _kept(options: argparse.Namespace, scoring: str):  # type: ignore[no-untyped-def]
    import orchard
    from orchard.generate.memory.native_kept import NativeKept

    model = orchard.load(options.model, device="cpu")
    return NativeKept(model.runner, budget=options.budget, block=options.block, scoring=scoring)  # type: ignore[arg-type]


def _vocab(options: argparse.Namespace) -> int:
    import orchard

    return int(orchard.load(options.model, device="cpu").runner.config.vocab)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=50_000, help="of the longer text; the other has a tenth of it")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help=f"write {TARGET.relative_to(ROOT)}")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    if options.only:
        print(json.dumps(read(options.only, options)))
        return 0
    plain = [one for one in given if one != "--save"]
    short, long = (apart(tokens, plain) for tokens in (options.tokens // 10, options.tokens))
    shares = costs(options)
    values = {
        "peak": long["peak"] / (options.budget + options.block),
        "bytes": long["bytes"] / short["bytes"],
        "resident": long["resident"] / short["resident"],
        "probe": Value(statistics.median(shares), low=min(shares), high=max(shares), note="median, extremes"),
        "kept.bytes": Value(long["bytes"], unit="B"),
        "rate.short": Value(short["rate"], unit="tokens/s"),
        "rate.long": Value(long["rate"], unit="tokens/s"),
    }
    report = Report.record("bench", "kept", values=values, claims=CLAIMS)
    if options.save:
        report.save(TARGET)
    Console().print_json(json.dumps({name: getattr(value, "value", value) for name, value in values.items()}))
    for claim in report.claims:
        print("holds" if claim.passed else "fails", claim.statement, claim.value)
    return 0 if all(claim.passed for claim in report.claims) else 1


if __name__ == "__main__":
    raise SystemExit(main())
