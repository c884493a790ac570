"""Speculation on the default model: how much quicker are answers that repeat what was said, and how many guesses come true?

Three texts that mostly say again what they began with (code with a name changed, a letter with a word changed, records as JSON)
are continued, and the records once more held to a JSON Schema, where forced tokens already save calls. Each is answered without
speculation, with prompt lookup, with guesses of the model's own early layers and with those of a draft model; the ways take turns
within a round. Answers must be the same, token for token. Times are those of decoding: from the first piece to the last.

A draft that was trained for it comes with the trainer. Until then a model that lacks its last layer shows the mechanism: it
agrees often, costs nearly as much as the model, and wins nothing. It is measured for its acceptance.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from orchard.bench.stats import ratio, spread
from orchard.core.report import Bound, Claim, Value
from orchard.generate.constraint import Constraint
from orchard.generate.engine import Engine
from orchard.generate.request import Answer, Request
from orchard.generate.speculative import Speculation

CODE = """class Basket:
    def __init__(self, owner, limit):
        self.owner = owner
        self.limit = limit
        self.items = []

    def add(self, item, price):
        if len(self.items) >= self.limit:
            raise ValueError("the basket is full")
        self.items.append((item, price))

    def total(self):
        return sum(price for item, price in self.items)
"""
LETTER = (
    "The library opens at nine in the morning and closes at six in the evening. Members may borrow up to five books for three "
    "weeks. A book that comes back late costs ten cents a day. The reading room on the second floor is quiet, and the "
    "children's room on the ground floor is not. On Saturdays a volunteer reads stories at eleven. Lost cards can be replaced "
    "at the desk for two euros."
)
PEOPLE = [
    {"name": "Ada Lovelace", "city": "London", "role": "engineer", "active": True},
    {"name": "Alan Turing", "city": "Manchester", "role": "engineer", "active": False},
    {"name": "Grace Hopper", "city": "New York", "role": "engineer", "active": True},
    {"name": "Edsger Dijkstra", "city": "Rotterdam", "role": "teacher", "active": True},
    {"name": "Barbara Liskov", "city": "Los Angeles", "role": "teacher", "active": False},
]
RECORDS = json.dumps(PEOPLE, separators=(",", ":"))
PERSON = {
    "type": "object",
    "properties": {
        **{name: {"type": "string", "maxLength": 40} for name in ("name", "city", "role")},
        "active": {"type": "boolean"},
    },
    "required": ["name", "city", "role", "active"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 5, "maxItems": 5}
CLAIMS = [
    Claim(
        "speculation-same",
        "Answers are the same with and without speculation",
        "speculation, same answers",
        Bound("==", 1.0),
    ),
    Claim(
        "lookup",
        "Prompt lookup: at least 1.3 times as fast on each of three texts with repetition",
        "lookup, free text",
        Bound(">=", 1.3),
    ),
    Claim("lookup-grammar", "And at least 1.3 times with a JSON grammar", "lookup, JSON grammar", Bound(">=", 1.3)),
]
EARLY = 8
"""Layers of the model whose guesses are tried."""


@dataclass(frozen=True)
class Case:
    name: str
    prompt: str
    tokens: int
    schema: Mapping[str, Any] | None = None


CASES = (
    Case(
        "code edit",
        f"# basket.py, before\n\n{CODE}\n# basket.py, after the class was renamed to Cart\n\n"
        "class Cart:\n    def __init__(self, owner, limit):\n        self.owner",
        96,
    ),
    Case(
        "copy with a change",
        f"First version:\n{LETTER}\n\nSecond version, where the library is an archive:\nThe archive opens",
        80,
    ),
    Case("JSON records", f'Input:\n{RECORDS}\nOutput, the same records:\n[{{"name":"Ada Lovelace"', 110),
    Case("JSON records, grammar", f"Input:\n{RECORDS}\nOutput, the same records:\n", 160, SCHEMA),
)
FREE = ("code edit", "copy with a change", "JSON records")


@dataclass
class Runs:
    """What one way of answering one case came to, round by round."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    calls: int = 0
    ids: tuple[int, ...] = ()
    steady: bool = True
    guessed: int = 0
    kept: int = 0

    def add(self, answer: Answer, seconds: float, guessed: int, kept: int) -> None:
        self.steady &= not self.ids or self.ids == answer.ids
        self.ids, self.tokens, self.calls = answer.ids, answer.usage.output, answer.usage.calls
        self.seconds.append(seconds)
        self.guessed += guessed
        self.kept += kept


def measure(model: str, *, rounds: int) -> dict[str, dict[str, Any]]:
    """What each way of answering each case came to, by "case: way". The first round warms caches and tells the engine what
    calls cost."""
    from orchard.generate.speculative.early import early_runner
    from orchard.ops.plan.early import layer_count
    from orchard.session.model import load

    loaded = load(model)
    runner: Any = loaded.runner
    layers = layer_count(runner.plan)
    engine = Engine(runner, loaded.tokenizer, draft=early_runner(runner, max(1, layers - 1)))
    found: dict[str, Runs] = {}
    for number in range(rounds + 1):
        for case in CASES:
            for way, speculation in _ways(min(EARLY, max(1, layers - 1))).items():
                taken = _answer(engine, case, speculation)
                if number:
                    found.setdefault(f"{case.name}: {way}", Runs()).add(*taken)
    return {name: asdict(runs) for name, runs in found.items()}


def values(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Value]:
    plain = {case.name: measured[f"{case.name}: none"] for case in CASES}
    same = [runs["steady"] and runs["ids"] == plain[name.split(": ")[0]]["ids"] for name, runs in measured.items()]
    made = {"speculation, same answers": Value(sum(same) / len(same), note=f"of {len(same)} cases and ways")}
    for name, runs in measured.items():
        case, way = name.split(": ")
        rate = spread([runs["tokens"] / seconds for seconds in runs["seconds"]])
        made[f"{name}, decode"] = Value(rate.median, "tok/s", rate.low, rate.high, f"{runs['tokens']} tokens")
        if way == "none":
            continue
        gain = ratio(plain[case]["seconds"], runs["seconds"])
        made[f"{name}, speed-up"] = Value(gain.median, "×", gain.low, gain.high)
        made[f"{name}, kept"] = Value(runs["kept"] / max(runs["guessed"], 1), note="of the tokens guessed")
        made[f"{name}, tokens per call"] = Value(runs["tokens"] / max(runs["calls"], 1))
    least = min(ratio(plain[name]["seconds"], measured[f"{name}: lookup"]["seconds"]).median for name in FREE)
    made["lookup, free text"] = Value(least, "×", note="the least of three texts")
    made["lookup, JSON grammar"] = made["JSON records, grammar: lookup, speed-up"]
    return made


def _ways(layers: int) -> dict[str, Speculation | None]:
    return {
        "none": None,
        "lookup": Speculation(),
        "early layers": Speculation(kind="early", layers=layers),
        "draft": Speculation(kind="draft", length=3),
    }


def _answer(engine: Engine, case: Case, speculation: Speculation | None) -> tuple[Answer, float, int, int]:
    """The answer, seconds from its first piece to its last, and tokens guessed and kept."""
    request = Request(
        tuple(engine.tokenizer.encode(case.prompt)),
        max_tokens=case.tokens,
        seed=7,
        constraint=None if case.schema is None else Constraint.json_schema(case.schema),
        speculation=speculation,
    )
    before = _counted(engine)
    stream = engine.stream(request)
    next(stream)
    started = time.perf_counter()
    for _ in stream:
        pass
    seconds = time.perf_counter() - started
    after = _counted(engine)
    return stream.answer, seconds, after[0] - before[0], after[1] - before[1]


def _counted(engine: Engine) -> tuple[int, int]:
    kinds = engine.facts().get("speculation", {}).values()
    return sum(kind["guessed"] for kind in kinds), sum(kind["kept"] for kind in kinds)
