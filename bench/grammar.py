"""Answers that are held to schemas: are they valid, what do the masks cost, and how many runs of the model are saved?

A hundred schemas (`bench/schemas/guided.json`: flat and nested, recursive, enums, patterns, formats, bounds, unions, maps) are
answered by the default model at temperature 1, each with several seeds. Every answer is read as JSON and validated by the
package jsonschema, formats included, in an interpreter that has it (`--validator`). An answer that does not come to an end
counts as not valid. Numbers are read exactly, since 1.15 is no multiple of 0.01 among floats.

The time of masks is everything that the grammar does for an answer: following its tokens, masks over the vocabulary, applying
them, forced tokens. It is put beside the time from the first token to the last. Two times of making: the vocabulary, once for a
tokenizer, and each grammar.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from orchard.core.report import Bound, Claim, Report, Value
from orchard.generate import grammar as grammars
from orchard.generate.constraint import Constraint
from orchard.generate.grammar_words import Words
from orchard.generate.request import Request, Sampling
from orchard.session.model import Model, load

ROOT = Path(__file__).resolve().parent.parent
SCHEMAS = ROOT / "bench" / "schemas" / "guided.json"
TARGET = ROOT / "results" / "bench" / "grammar.json"
FIELDS = ("eight fields", "ten fields", "twelve fields")
CLAIMS = [
    Claim("valid", "every answer is valid JSON of its schema", "valid", Bound("==", 1.0)),
    Claim("saved", "JSON of eight fields takes at least 20 % fewer runs than tokens", "calls saved", Bound(">=", 0.2)),
    Claim("share", "masks take at most 5 % of the time of decoding", "share of decoding", Bound("<=", 0.05)),
]
VALIDATE = """
import json, sys
from decimal import Decimal
from jsonschema import Draft202012Validator
wrong = []
for number, (schema, text) in enumerate(json.load(sys.stdin)):
    try:
        value = json.loads(text, parse_float=Decimal)
        schema = json.loads(json.dumps(schema), parse_float=Decimal)
        checker = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        errors = [str(error.message) for error in checker.iter_errors(value)]
    except ValueError as error:
        errors = [f"no JSON: {error}"]
    if errors:
        wrong.append([number, errors[0][:200]])
json.dump(wrong, sys.stdout)
"""


@dataclass
class Clock:
    """Adds up what the rules of one answer take."""

    masks: list[float] = field(default_factory=list)
    total: float = 0.0

    def timed(self, what: Callable[..., Any], mask: bool) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            started = time.perf_counter()
            found = what(*given)
            taken = time.perf_counter() - started
            self.total += taken
            if mask:
                self.masks.append(taken)
            return found

        return run


class TimedRule(grammars.GrammarRule):
    """A rule that is watched."""

    clock = Clock()

    def __call__(self, scores: Any, state: Any) -> Any:
        return self.clock.timed(super().__call__, True)(scores, state)

    def forced(self, state: Any) -> tuple[int, ...]:
        found: tuple[int, ...] = self.clock.timed(super().forced, False)(state)
        return found

    def complete(self, state: Any) -> bool:
        return bool(self.clock.timed(super().complete, False)(state))


@dataclass
class Run:
    """What came of one answer."""

    schema: str
    seed: int
    text: str
    finish: str
    output: int
    calls: int
    decoding: float
    ruling: float


def answer(model: Model, name: str, schema: Any, seed: int, temperature: float) -> Run:
    prompt = f"Write one example of {name} as JSON."
    request = Request(
        tuple(model.prompt_ids(prompt)),
        max_tokens=min(1500, model.context - 200),
        sampling=Sampling(temperature=temperature),
        seed=seed,
        constraint=Constraint.json_schema(schema),
    )
    before = TimedRule.clock.total
    stream = model.engine.stream(request)
    started = None
    for _ in stream:
        if started is None:
            started, before = time.perf_counter(), TimedRule.clock.total
    ended = time.perf_counter()
    found = stream.answer
    return Run(
        schema=name,
        seed=seed,
        text=found.text,
        finish=found.finish,
        output=found.usage.output,
        calls=found.usage.calls,
        decoding=ended - (started or ended),
        ruling=TimedRule.clock.total - before,
    )


def invalid(python: str, schemas: dict[str, Any], runs: list[Run]) -> list[str]:
    """What the independent validator says against answers, and answers without an end."""
    pairs = json.dumps([[schemas[run.schema], run.text] for run in runs])
    done = subprocess.run([python, "-c", VALIDATE], input=pairs, capture_output=True, text=True, check=True)
    why = dict(json.loads(done.stdout))
    why |= {place: f"finish {run.finish}" for place, run in enumerate(runs) if run.finish != "stop"}
    return [f"{runs[place].schema}, seed {runs[place].seed}: {reason}" for place, reason in sorted(why.items())]


def making(model: Model, schemas: dict[str, Any]) -> tuple[float, list[float]]:
    """Seconds for the vocabulary, and for each grammar."""
    started = time.perf_counter()
    words = Words(model.tokenizer)
    vocabulary = time.perf_counter() - started
    times = []
    for schema in schemas.values():
        started = time.perf_counter()
        grammars.Grammar(words, Constraint.json_schema(schema))
        times.append(time.perf_counter() - started)
    return vocabulary, times


def quantile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * share))]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seeds", type=int, default=5, help="answers to each schema (default: 5)")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--validator", default=sys.executable, help="a Python with the package jsonschema")
    parser.add_argument("--out", type=Path, default=TARGET, help="where the Report goes")
    options = parser.parse_args(arguments)
    schemas: dict[str, Any] = json.loads(SCHEMAS.read_text())
    begun = time.perf_counter()
    invalid(options.validator, schemas, [])  # says so now if the package is not there
    model = load(options.model)
    vocabulary, made = making(model, schemas)
    grammars.GrammarRule = TimedRule  # type: ignore[misc]
    runs = [
        answer(model, name, schema, seed, options.temperature)
        for seed in range(options.seeds)
        for name, schema in schemas.items()
    ]
    wrong = invalid(options.validator, schemas, runs)
    masks, long = TimedRule.clock.masks, [run for run in runs if run.schema in FIELDS]
    decoding, ruling = sum(run.decoding for run in runs), sum(run.ruling for run in runs)
    report = Report.record(
        "bench",
        "grammar",
        values={
            "schemas": len(schemas),
            "answers": len(runs),
            "valid": Value(1 - len(wrong) / len(runs), note="of all answers, by jsonschema"),
            "unfinished": sum(run.finish != "stop" for run in runs),
            "calls saved": Value(
                1 - sum(r.calls for r in long) / sum(r.output for r in long), note="JSON of 8 to 12 fields"
            ),
            "calls saved, all": 1 - sum(r.calls for r in runs) / sum(r.output for r in runs),
            "share of decoding": Value(ruling / decoding, note="time in rules, of the time after the first token"),
            "mask mean": Value(statistics.mean(masks) * 1e6, unit="µs"),
            "mask p50": Value(quantile(masks, 0.5) * 1e6, unit="µs"),
            "mask p99": Value(quantile(masks, 0.99) * 1e6, unit="µs"),
            "vocabulary": Value(vocabulary, unit="s", note=f"once for a tokenizer of {model.tokenizer.vocab_size:,}"),
            "grammar median": Value(statistics.median(made) * 1e3, unit="ms"),
            "grammar p99": Value(quantile(made, 0.99) * 1e3, unit="ms"),
            "tokens": sum(run.output for run in runs),
            "tokens per second": sum(run.output for run in runs) / decoding,
        },
        claims=CLAIMS,
        seed=0,
        series={"wrong": wrong[:50]},
        wall_time=round(time.perf_counter() - begun, 3),
    )
    report.save(options.out)
    Console().print(report.table())
    return int(not report.passed)


if __name__ == "__main__":
    sys.exit(main())
