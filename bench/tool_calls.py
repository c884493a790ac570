"""Tool calls of a small model, held to their schemas and left free, on samples of the Berkeley Function-Calling Leaderboard.

Four ways of answering the same questions, always the likeliest token: *free* (the prompt gives the tools' schemas and the form
of a call, with an example; the first JSON object in what the model writes counts), *begun* (the same, and the answer is begun
for it), *grammar* (names and arguments held to the tools' schemas), and *call* (as a session does it with tools required: the
tool is chosen by what it makes likely, then the grammar). An answer is right if name and arguments are among those that the
benchmark lists, compared as its own checker does. Then mode "allowed": how often a call is made where a tool fits, and where none
does. The data is not part of the project; it is read from a folder as BFCL ships it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from orchard.core.progress import track
from orchard.core.report import Bound, Claim, Report, Value
from orchard.generate.loops import NoLoops
from orchard.generate.request import Request
from orchard.session.executors.local import LocalExecutor
from orchard.session.model import load
from orchard.session.schema.check import check
from orchard.session.schema.errors import UnreadableContentError
from orchard.session.tools.calls import calls_constraint
from orchard.session.turn import Call, Text, ToolSpec, Turn
from orchard.text.messages import Message

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "results" / "bench" / "tool-calls.json"
SETS = {"simple": "simple_python", "multiple": "multiple", "irrelevant": "irrelevance"}
WAYS = ("free", "begun", "grammar", "call")
MOST_TOKENS = 200
"""Of an answer; the longest right call of BFCL's questions has fewer."""
TOLD = """You answer by calling one of these functions:
{tools}

Write one JSON object and nothing else: {{"name": the function's name, "arguments": an object with the arguments}}.
For example, with a function get_time of a city, the question "How late is it in Rome?" is answered by:
{{"name": "get_time", "arguments": {{"city": "Rome"}}}}"""
BEGIN = '{"name": "'
_KINDS = {"dict": "object", "float": "number", "tuple": "array"}
_NOTES = ("optional", "default", "format")
CLAIMS = [
    Claim(
        "valid",
        "Names and arguments of all calls match a tool and its schema",
        "call.valid",
        Bound("==", 1.0),
        "free.valid",
    ),
    Claim(
        "simple",
        "With one tool, more calls are right than without a grammar, begun for the model or not",
        "call.simple.gain",
        Bound(">", 0.0),
    ),
    Claim(
        "multiple",
        "With several tools, more calls are right than without a grammar, begun for the model or not",
        "call.multiple.gain",
        Bound(">", 0.0),
    ),
    Claim(
        "name",
        "Choosing by likelihood finds the right tool more often than the grammar alone",
        "name.gain",
        Bound(">", 0.0),
    ),
    Claim(
        "allowed",
        "Left to choose, it calls where a tool fits at least twice as often as where none does",
        "allowed.ratio",
        Bound(">=", 2.0),
    ),
]


@dataclass(frozen=True)
class Item:
    """One question. `answers` maps the right name to the values that each argument may have; "" means it may be left out."""

    id: str
    question: str
    tools: tuple[ToolSpec, ...]
    answers: Mapping[str, Mapping[str, list[Any]]]


def items(folder: Path, name: str) -> list[Item]:
    rows = _lines(folder / f"{SETS[name]}.json")
    known = folder / "possible_answer" / f"{SETS[name]}.json"
    right = {row["id"]: row["ground_truth"][0] for row in _lines(known)} if known.is_file() else {}
    return [
        Item(
            row["id"],
            row["question"][0][-1]["content"],
            tuple(ToolSpec(f["name"], f["description"], json_schema(f["parameters"])) for f in row["function"]),
            right.get(row["id"], {}),
        )
        for row in rows
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def json_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """BFCL's words for types, which are Python's, as JSON Schema. Objects hold what is named, or anything where nothing is."""
    made: dict[str, Any] = {}
    for key, value in parameters.items():
        if key == "type" and value != "any":
            made["type"] = _KINDS.get(value, value)
        elif key == "properties" and value:
            made[key] = {name: json_schema(part) for name, part in value.items()}
        elif key == "items":
            made[key] = json_schema(value)
        elif key not in ("type", "properties", *_NOTES):
            made[key] = value
    if made.get("type") == "object":
        made["additionalProperties"] = "properties" not in made
    return made


# Right or wrong ------------------------------------------------------------------------------------------------------


def right(name: str, arguments: Any, item: Item) -> bool:
    return name in item.answers and _matches_object(arguments, item.answers[name])


def _matches_object(value: Any, answers: Mapping[str, list[Any]]) -> bool:
    if not isinstance(value, dict):
        return False
    given = all(key in answers and any(_same(part, one) for one in answers[key]) for key, part in value.items())
    return given and all(key in value or "" in answers[key] for key in answers)


def _same(value: Any, answer: Any) -> bool:
    """Texts without case, spaces and marks; numbers by value; objects by the values that each of their fields may have."""
    if isinstance(value, bool) or isinstance(answer, bool):
        return value is answer
    if isinstance(value, str) and isinstance(answer, str):
        return _plain(value) == _plain(answer)
    if isinstance(value, list) and isinstance(answer, list):
        return len(value) == len(answer) and all(map(_same, value, answer))
    if isinstance(answer, dict):
        return _matches_object(value, answer)
    return type(value) in (int, float) and type(answer) in (int, float) and value == answer


def _plain(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')


def valid(name: str, arguments: Any, item: Item) -> bool:
    for tool in item.tools:
        if tool.name == name:
            try:
                check(tool.parameters, arguments)
            except UnreadableContentError:
                return False
            return isinstance(arguments, dict)
    return False


# Ways of answering ---------------------------------------------------------------------------------------------------


def called(executor: LocalExecutor, item: Item) -> tuple[str, Any]:
    turn = Turn((Message("user", item.question),), item.tools, "required", parallel_calls=False)
    for event in executor.run(turn, threading.Event()):
        if isinstance(event, Call):
            return event.name, json.loads(event.arguments)
    return "", None


def written(executor: LocalExecutor, item: Item) -> tuple[str, Any]:
    """Held to the grammar of calls."""
    ids = executor.format.ids(executor.model.tokenizer, [Message("user", item.question)], item.tools)
    constraint = calls_constraint(executor.format.written, item.tools, parallel=False)
    return first_call(_answer(executor, ids, rules=(NoLoops(),), constraint=constraint))


def free(executor: LocalExecutor, item: Item, *, begin: str = "") -> tuple[str, Any]:
    """Told the tools and the form of a call in words, and held to nothing."""
    tokenizer = executor.model.tokenizer
    tools = "\n".join(
        json.dumps({"name": tool.name, "description": tool.description, "parameters": tool.parameters})
        for tool in item.tools
    )
    messages = [Message("system", TOLD.format(tools=tools)), Message("user", item.question)]
    ids = [*executor.format.ids(tokenizer, messages, ()), *tokenizer.encode_piece(begin, first=False)]
    return first_call(begin + _answer(executor, ids))


def _answer(executor: LocalExecutor, ids: list[int], **more: Any) -> str:
    return executor.model.engine.answer([Request(tuple(ids), MOST_TOKENS, **more)])[0].text


def first_call(text: str) -> tuple[str, Any]:
    """The first JSON object of a text that has a name and arguments."""
    at = text.find("{")
    while at >= 0:
        try:
            call, _ = json.JSONDecoder().raw_decode(text, at)
            return str(call["name"]), call["arguments"]
        except (ValueError, KeyError, TypeError):
            at = text.find("{", at + 1)
    return "", None


def calls_at_all(executor: LocalExecutor, item: Item) -> bool:
    """Whether the first thing that comes in mode "allowed" is a call."""
    events = executor.run(Turn((Message("user", item.question),), item.tools), threading.Event())
    return any(isinstance(event, Call) for event in _until_text(events))


def _until_text(events: Iterable[Any]) -> Iterable[Any]:
    for event in events:
        yield event
        if isinstance(event, Text):
            return


def measure(
    executor: LocalExecutor, samples: Mapping[str, list[Item]]
) -> tuple[dict[str, Value], dict[str, list[Any]]]:
    ways: dict[str, Callable[[Item], tuple[str, Any]]] = {
        "free": lambda item: free(executor, item),
        "begun": lambda item: free(executor, item, begin=BEGIN),
        "grammar": lambda item: written(executor, item),
        "call": lambda item: called(executor, item),
    }
    values: dict[str, Value] = {}
    series: dict[str, list[Any]] = {}
    for way in WAYS:
        sound: list[bool] = []
        for name in ("simple", "multiple"):
            answers = [ways[way](item) for item in track(samples[name], f"{way}, {name}")]
            judged = [right(*answer, item) for answer, item in zip(answers, samples[name], strict=True)]
            named = [answer[0] in item.answers for answer, item in zip(answers, samples[name], strict=True)]
            sound += [valid(*answer, item) for answer, item in zip(answers, samples[name], strict=True)]
            values[f"{way}.{name}.right"], values[f"{way}.{name}.name"] = share(judged), share(named)
            series[f"{way}.{name}"] = [int(one) for one in judged]
        values[f"{way}.valid"] = share(sound)
    for name in ("simple", "multiple"):
        best = max(("free", "begun"), key=lambda way: values[f"{way}.{name}.right"].value)  # type: ignore[arg-type, return-value]
        values[f"call.{name}.gain"] = _gain(values, f"call.{name}.right", f"{best}.{name}.right")
    values["name.gain"] = _gain(values, "call.multiple.name", "grammar.multiple.name")
    for name in ("simple", "irrelevant"):
        values[f"allowed.{name}"] = share(
            [calls_at_all(executor, item) for item in track(samples[name], f"allowed, {name}")]
        )
    fits, others = (values[f"allowed.{name}"].value for name in ("simple", "irrelevant"))
    assert isinstance(fits, float) and isinstance(others, float)
    values["allowed.ratio"] = Value(round(fits / max(others, 1e-9), 2))
    return values, series


def share(yes: list[bool]) -> Value:
    """A share with Wilson's interval (95 %)."""
    n, p, z = len(yes), sum(yes) / max(1, len(yes)), 1.96
    middle, half = (
        (p + z * z / 2 / n) / (1 + z * z / n),
        z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / 4 / n / n),
    )
    return Value(
        round(p, 4), low=round(max(0.0, middle - half), 4), high=round(min(1.0, middle + half), 4), note=f"of {n}"
    )


def _gain(values: Mapping[str, Value], one: str, other: str) -> Value:
    more, less = values[one].value, values[other].value
    assert isinstance(more, float) and isinstance(less, float)
    return Value(round(more - less, 4), note=f"{one} - {other}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the folder with BFCL's files")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sample", type=int, default=150, help="questions of each kind (default: 150)")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first so many of the shuffled questions")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle")
    parser.add_argument("--json", action="store_true", help="the Report as JSON on standard output")
    parser.add_argument("--save", action="store_true", help=f"keep the Report in {TARGET.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    if not options.data.is_dir():
        parser.error(f"no data at {options.data}; give the folder with BFCL's files (simple_python.json, …)")
    samples = {}
    for name in SETS:
        samples[name] = items(options.data, name)
        random.Random(options.seed).shuffle(samples[name])
        samples[name] = samples[name][options.skip : options.skip + options.sample]
    started = time.perf_counter()
    values, series = measure(LocalExecutor(load(options.model)), samples)
    report = Report.record(
        "bench",
        "tool-calls",
        values=values,
        claims=CLAIMS,
        seed=options.seed,
        series=series,
        config={"model": options.model, "sample": options.sample, "skip": options.skip},
        notes=[
            "BFCL v4 (ShishirPatil/gorilla, Apache-2.0): simple_python, multiple, irrelevance",
            "The ways without a grammar are told the tools' schemas, the form of a call and an example in a system message.",
        ],
        wall_time=round(time.perf_counter() - started, 3),
    )
    if options.save:
        report.save(TARGET)
    if options.json:
        sys.stdout.write(report.to_json())
    else:
        Console().print(report.table())
    return int(not report.passed)


if __name__ == "__main__":
    sys.exit(main())
