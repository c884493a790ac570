"""The same conversations and budgets in Orchard and in kvpress: StreamingLLM, SnapKV and KeyDiff, on the same model.

kvpress (through transformers, in the dtype that writes faster here) reads a conversation whole and throws away all but the
budget. So does Orchard here, by one block as long as the conversation; "in blocks" it also reads it block by block, never holding
more than twice the budget or what a question needs, which kvpress does not do. Both are asked the same questions, in the
same tokens, scored the same way. The two take turns, one conversation at a time. kvpress has an environment of its own, because
it asks for an older transformers: `make .venv-peers/kvpress/.ready` sets it up.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from orchard.bench import spawn
from orchard.bench.facts import facts
from orchard.bench.memory_measure import Asked, Outcome, measure
from orchard.bench.memory_model import embedding, keeper, opened
from orchard.bench.memory_policies import FULL, Encoded, Settings, encoded, memory
from orchard.bench.memory_report import wilson
from orchard.bench.memory_tasks import recalls
from orchard.bench.stats import ratio, spread
from orchard.core.errors import OrchardError
from orchard.core.machine import hardware
from orchard.core.report import Bound, Claim, Report, Value
from orchard.weights.library import home

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "results" / "bench" / "memory-peer.json"
PYTHON = ROOT / ".venv-peers" / "kvpress" / "bin" / "python"
SHARED = ("recent", "snap", "keydiff")
NAMES = {"recent": "StreamingLLM", "snap": "SnapKV", "keydiff": "KeyDiff"}
OURS, BLOCKS, THEIRS = "orchard", "orchard in blocks", "kvpress"
CLAIMS = [
    Claim(
        "accuracy",
        "Accuracy of the methods that both have: nowhere below kvpress's (the better of its two ways)",
        "least accuracy margin",
        Bound(">=", 0.0),
    ),
    Claim("decode", "Decode after each of them: twice as fast as kvpress", "least decode ratio", Bound(">=", 2.0)),
]


class Tally:
    """Answers and times of one way, over all conversations."""

    def __init__(self) -> None:
        self.right: list[bool] = []
        self.first: list[float] = []
        self.decode: list[float] = []
        self.hear: list[float] = []
        self.nbytes = 0

    def add(self, right: list[bool], first: list[float], decode: list[float], hear: float, nbytes: int) -> None:
        self.right += right
        self.first += first
        self.decode += decode
        self.hear.append(hear)
        self.nbytes = max(self.nbytes, nbytes)

    @property
    def accuracy(self) -> float:
        return sum(self.right) / max(1, len(self.right))

    def values(self, name: str) -> dict[str, Value]:
        low, high = wilson(sum(self.right), len(self.right))
        made = {
            f"{name} accuracy": Value(self.accuracy, "", low, high, note=f"of {len(self.right)} questions"),
            f"{name} bytes": Value(self.nbytes, "bytes"),
        }
        for what, unit, numbers in (
            ("first token", "s", self.first),
            ("decode", "tokens/s", self.decode),
            ("reading", "s", self.hear),
        ):
            if numbers:
                found = spread(numbers)
                made[f"{name} {what}"] = Value(found.median, unit, found.low, found.high)
        return made


def ours(
    make: Any, policy: str, talk: Encoded, asked: list[Asked], budget: int, block: int, sinks: int, decode: int
) -> Outcome:
    settings = Settings(len(talk.tokens) if policy == FULL else budget, block, sinks)
    held = memory(policy, make, lambda: embedding("lexical")[0], settings)
    return measure(held, talk, asked, decode=decode)


def theirs(
    options: argparse.Namespace, folder: Path, dtype: str, talk: Encoded, asked: list[Asked], budget: int
) -> Any:
    job = {
        "path": str(folder),
        "threads": options.threads,
        "dtype": dtype,
        "methods": [FULL, *SHARED],
        "budget": budget,
        "sinks": options.sinks,
        "decode": options.decode,
        "talk": {
            "tokens": talk.tokens,
            "questions": [{"prompt": one.prompt, "choices": one.choices, "answer": one.answer} for one in asked],
        },
    }
    python = str(options.python or PYTHON)
    return spawn.ask(python, "peer_kvpress", {"task": "talk", "options": job}, limit=options.limit)["result"]


def bench(options: argparse.Namespace) -> Report:
    started = time.perf_counter()
    folder = model_folder(options.model)
    model = opened(options.model, "own", "own")
    make, engine = keeper(model)
    talks = recalls(
        options.seed,
        options.talks,
        tokens=options.tokens,
        questions=options.questions,
        count=lambda text: len(model.tokenizer.encode(text)),
    )
    tallies: dict[str, Tally] = {}
    dtype, about = "auto", {}
    for number, talk in enumerate(talks):
        whole = encoded(model.tokenizer, talk.begin, talk.utterances)
        asked = [Asked.of(model.tokenizer, one) for one in talk.questions]
        tokens = len(whole.tokens)
        budget = max(options.sinks + 1, round(tokens / options.times))
        least = max(one.longest for one in asked) + options.decode
        print(f"conversation {number + 1} of {len(talks)}: {tokens} tokens, {budget} stay", file=sys.stderr)
        for policy in (FULL, *SHARED):
            blocks = {OURS: tokens} if policy == FULL else {OURS: tokens, BLOCKS: max(budget, least)}
            for name, block in blocks.items():
                one = ours(make, policy, whole, asked, budget, block, options.sinks, options.decode)
                tallies.setdefault(f"{name} {policy}", Tally()).add(
                    one.right, one.first, one.decode, one.hear, one.nbytes
                )
        about = theirs(options, folder, dtype, whole, asked, budget)
        dtype = about["dtype"]
        for way, found in about["found"].items():
            if not way.startswith(FULL) and found["kept"] != budget:
                raise OrchardError(f"kvpress kept {found['kept']} tokens, not {budget}", hint="compare like with like")
            tallies.setdefault(f"{THEIRS} {way}", Tally()).add(
                found["right"], found["first"], found["decode"], found["hear"], found["bytes"]
            )
    return _report(options, tallies, about, engine, time.perf_counter() - started)


def _report(
    options: argparse.Namespace, tallies: dict[str, Tally], about: dict[str, Any], engine: str, seconds: float
) -> Report:
    values: dict[str, Value] = {}
    for name, tally in tallies.items():
        values |= tally.values(name)
    margins, ratios = [], []
    for policy in SHARED:
        peers = [tallies[f"{THEIRS} {policy} {way}"] for way in ("plain", "rerotated")]
        mine = tallies[f"{OURS} {policy}"]
        margins.append(mine.accuracy - max(peer.accuracy for peer in peers))
        faster = max((peer.decode for peer in peers), key=lambda speeds: spread(speeds).median)
        found = ratio(mine.decode, faster)
        ratios.append(found.median)
        values[f"{policy} accuracy margin"] = Value(margins[-1], note=NAMES[policy])
        values[f"{policy} decode ratio"] = Value(found.median, "", found.low, found.high, note=NAMES[policy])
    values["least accuracy margin"] = Value(min(margins))
    values["least decode ratio"] = Value(min(ratios))
    return Report.record(
        "bench",
        "memory-peer",
        values=values,
        claims=CLAIMS,
        seed=options.seed,
        config={
            name: getattr(options, name)
            for name in ("model", "tokens", "talks", "questions", "times", "sinks", "decode", "threads")
        },
        notes=[
            f"kvpress {about['version']} on transformers {about['transformers']} in {about['dtype']}, the faster of two here; "
            f"Orchard on its {engine} engine. {options.threads} threads each.",
            "Orchard protects the first tokens in every method; kvpress does in StreamingLLM only.",
        ],
        wall_time=round(seconds, 3),
    )


def model_folder(model: str) -> Path:
    """The model as transformers reads it, made once (the same that `orchard bench engine` uses)."""
    known = facts(model)
    folder = home() / "bench" / f"{known.path.parent.name}-{known.path.stem}-{known.file_bytes}-bf16"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        print("writing the model as transformers reads it", file=sys.stderr)
        spawn.ask(sys.executable, "own_tasks", {"task": "folder", "options": {"model": model, "to": str(folder)}})
    return folder


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2048, help="of a conversation")
    parser.add_argument("--talks", type=int, default=4)
    parser.add_argument("--questions", type=int, default=16, help="about each")
    parser.add_argument(
        "--times", type=float, default=4.0, help="how many times smaller than the conversation the budget is"
    )
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--decode", type=int, default=32, help="tokens that are written to see how fast that is")
    parser.add_argument("--threads", type=int, default=int(hardware()["cores"]))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", help=f"that has kvpress; default: {PYTHON.relative_to(ROOT)}")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for one conversation in kvpress")
    parser.add_argument("--save", action="store_true", help=f"write {TARGET.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    if options.python is None and not PYTHON.is_file():
        print(
            f"memory_peer: there is no kvpress in {PYTHON.relative_to(ROOT)}: `make .venv-peers/kvpress/.ready` installs it, "
            "--python names another place",
            file=sys.stderr,
        )
        return 1
    os.environ["ORCHARD_THREADS"] = str(options.threads)
    try:
        report = bench(options)
    except OrchardError as error:
        print(f"memory_peer: {error}. {error.hint}", file=sys.stderr)
        return 1
    from rich.console import Console

    Console().print(report.table())
    if options.save:
        report.save(TARGET)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
