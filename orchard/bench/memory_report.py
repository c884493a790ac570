"""What came out of `orchard bench memory`: values by subject, the issue's bars as claims, a table for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from orchard.bench.memory_measure import Outcome
from orchard.bench.memory_policies import EPISODIC, FULL
from orchard.bench.stats import spread
from orchard.core.report import Bound, Claim, Value

if TYPE_CHECKING:
    from rich.table import Table

BASELINES = ("recent", "snap", "keydiff")
EIGHT = (7.5, 8.5)
"""Compressions that count as 8 ×."""

PEAK = Claim(
    "peak",
    "No layer ever holds more tokens than its budget and a block",
    "peak over budget and block",
    Bound("<=", 1.0),
)
OVER_BEST = Claim(
    "episodic-over-best",
    "Episodes at 8 × compression: 1.5 × the best of the newest tokens, SnapKV and KeyDiff",
    "episodic over best at 8x",
    Bound(">=", 1.5),
    baseline="best at 8x",
)
OVER_FULL = Claim(
    "episodic-over-full",
    "Episodes at 8 × compression: 0.8 × everything",
    "episodic over full at 8x",
    Bound(">=", 0.8),
    baseline="full accuracy",
)


@dataclass(frozen=True, order=True)
class Subject:
    """What is measured: budget × codec × owner × policy. Everything has no budget."""

    codec: str
    owner: str
    budget: str
    policy: str

    @property
    def label(self) -> str:
        return " ".join(
            part for part in (self.policy, self.budget, _unlike_own(self.codec), _unlike_own(self.owner)) if part
        )


@dataclass
class Row:
    """A subject over all conversations so far."""

    subject: Subject
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def right(self) -> list[bool]:
        return [one for outcome in self.outcomes for one in outcome.right]

    @property
    def accuracy(self) -> float:
        return sum(self.right) / max(1, len(self.right))

    @property
    def compression(self) -> float:
        return median(outcome.tokens / max(1, outcome.budget) for outcome in self.outcomes)

    @property
    def nbytes(self) -> int:
        return max(outcome.nbytes for outcome in self.outcomes)

    def values(self) -> dict[str, Value]:
        label, asked = self.subject.label, len(self.right)
        low, high = wilson(sum(self.right), asked)
        first = spread([one for outcome in self.outcomes for one in outcome.first])
        hear = spread([outcome.hear for outcome in self.outcomes])
        made = {
            f"{label} accuracy": Value(self.accuracy, "", low, high, note=f"of {asked} questions"),
            f"{label} first token": Value(first.median, "s", first.low, first.high),
            f"{label} reading": Value(hear.median, "s", hear.low, hear.high, note=self._reading()),
            f"{label} bytes": Value(self.nbytes, "bytes"),
            f"{label} peak tokens": Value(max(outcome.peak for outcome in self.outcomes), "tokens"),
        }
        speeds = [one for outcome in self.outcomes for one in outcome.decode]
        if speeds:
            speed = spread(speeds)
            made[f"{label} decode"] = Value(speed.median, "tokens/s", speed.low, speed.high)
        return made

    def _reading(self) -> str:
        times = sum(one.read_tokens for one in self.outcomes) / max(1, sum(one.tokens for one in self.outcomes))
        return f"the model reads {times:.1f} × the conversation"


def judged(rows: Sequence[Row]) -> tuple[dict[str, Value], list[Claim]]:
    """Values of the bars that these rows can judge, and the bars. The first codec and owner count, and the same questions."""
    values: dict[str, Value] = {}
    claims: list[Claim] = []
    bounded = [outcome for row in rows for outcome in row.outcomes if row.subject.policy != FULL]
    if bounded:
        values[PEAK.metric] = Value(max(one.peak / one.limit for one in bounded))
        claims.append(PEAK)
    own = [
        row for row in rows if (row.subject.codec, row.subject.owner) == (rows[0].subject.codec, rows[0].subject.owner)
    ]
    eight = {row.subject.policy: row for row in own if EIGHT[0] <= row.compression <= EIGHT[1]}
    whole = next((row for row in own if row.subject.policy == FULL), None)
    if EPISODIC not in eight:
        return values, claims
    mine = eight[EPISODIC]
    least = 0.5 / max(
        1, len(mine.right)
    )  # half a question: nobody is infinitely better than somebody who is never right
    others = [eight[name].accuracy for name in BASELINES if name in eight and _same(eight[name], mine)]
    if len(others) == len(BASELINES):
        values["best at 8x"] = Value(max(others))
        values[OVER_BEST.metric] = Value(mine.accuracy / max(*others, least))
        claims.append(OVER_BEST)
    if whole is not None and _same(whole, mine):
        values[OVER_FULL.metric] = Value(mine.accuracy / max(whole.accuracy, least))
        claims.append(OVER_FULL)
    return values, claims


def series(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """One entry a subject, for charts."""
    return {
        "subject": [row.subject.label for row in rows],
        "policy": [row.subject.policy for row in rows],
        "budget": [row.subject.budget for row in rows],
        "codec": [row.subject.codec for row in rows],
        "owner": [row.subject.owner for row in rows],
        "accuracy": [row.accuracy for row in rows],
        "bytes": [row.nbytes for row in rows],
        "compression": [round(row.compression, 3) for row in rows],
    }


def table(rows: Sequence[Row]) -> Table:
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("policy", "budget", "codec", "owner"):
        shown.add_column(head, no_wrap=True)
    for head in ("accuracy", "first token", "decode", "peak", "peak tokens", "read once in"):
        shown.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        values, label, subject = row.values(), row.subject.label, row.subject
        decode = values.get(f"{label} decode")
        shown.add_row(
            subject.policy,
            subject.budget,
            subject.codec,
            subject.owner,
            f"{row.accuracy:.2f}",
            f"{1e3 * float(values[f'{label} first token'].value or 0):,.0f} ms",
            "" if decode is None else f"{float(decode.value or 0):.3g} /s",
            f"{row.nbytes / 1e6:,.1f} MB",
            f"{max(one.peak for one in row.outcomes):,}",
            f"{float(values[f'{label} reading'].value or 0):,.1f} s",
        )
    return shown


def wilson(right: int, asked: int) -> tuple[float, float]:
    """The interval of a share that holds 95 times in 100."""
    if not asked:
        return 0.0, 1.0
    z, share = 1.96, right / asked
    middle = (share + z * z / (2 * asked)) / (1 + z * z / asked)
    reach = z / (1 + z * z / asked) * math.sqrt(share * (1 - share) / asked + z * z / (4 * asked * asked))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def _same(one: Row, other: Row) -> bool:
    """Whether both were asked the same."""
    return len(one.right) == len(other.right)


def _unlike_own(name: str) -> str:
    return "" if name == "own" else name
