"""The on-device models beside the original they were made from, and beside what others make of it.

    python bench/ondevice.py --model smollm2-mix smollm2-2bit --original smollm2 \\
        --texts own=own.npy books=held-out/ wikipedia=wiki.txt web=c4.jsonl wikitext2=test.txt --tokens 32768

Models are files (`.orchard`) or names of the library. Which bars one is held to follows from its name (mix or 2bit), or is said
before it: `mix=FILE`. Kinds of text that are not given leave their claims failed, as not tested. llama.cpp's Q2_K, Q2_0, Q4_0 and
torchao's 2-bit weights of the same model are measured on the same tokens where an environment has them: `.venv-peers`, this one,
or `--peers-python PATH` (one that has torchao can be a virtual environment whose site-packages holds torchao alone and a `.pth`
file that leads to this one).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from orchard.bench.ondevice import Options, bench
from orchard.core.errors import OrchardError

TARGET = Path(__file__).resolve().parent.parent / "results" / "bench" / "ondevice.json"


def main(arguments: list[str] | None = None) -> int:
    usual = Options()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(usual.models), help="compressed files, or names")
    parser.add_argument("--original", default=usual.original, help="the 4-bit GGUF they were made from")
    parser.add_argument("--texts", nargs="+", default=[], metavar="KIND=FILE", help=".txt, .jsonl or .npy")
    parser.add_argument("--tokens", type=int, default=usual.tokens, help="of each kind")
    parser.add_argument("--window", type=int, default=usual.window, help="tokens of a row")
    parser.add_argument("--rounds", type=int, default=usual.rounds, help="of speed")
    parser.add_argument("--steps", type=int, default=usual.steps, help="tokens written in a round")
    parser.add_argument("--prompt", type=int, default=usual.prompt, help="tokens before the first one")
    parser.add_argument(
        "--checks", type=int, default=usual.checks, help="of instruction following, for each of 3 kinds"
    )
    parser.add_argument("--no-peers", action="store_true", help="leave llama.cpp and torchao out")
    parser.add_argument("--peers-python", action="append", default=[], help="a Python with llama-cpp-python or torchao")
    parser.add_argument("--work", type=Path, help="a folder for the peers' files, which are kept there")
    parser.add_argument("--out", type=Path, help=f"where the Report goes; with --texts {TARGET.name} of results/bench")
    asked = parser.parse_args(arguments)
    options = Options(
        models=tuple(asked.model),
        original=asked.original,
        texts=tuple(asked.texts),
        tokens=asked.tokens,
        window=asked.window,
        rounds=asked.rounds,
        steps=asked.steps,
        prompt=asked.prompt,
        checks=asked.checks,
        peers=not asked.no_peers,
        peers_python=tuple(asked.peers_python),
        work=asked.work,
    )
    try:
        report = bench(options)
    except OrchardError as error:
        print(f"{error.message}\n{error.hint}", file=sys.stderr)
        return 2
    target = asked.out or (TARGET if asked.texts else None)  # a run without texts must not replace one with them
    if target is not None:
        report.save(target)
    Console().print(report.table())
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
