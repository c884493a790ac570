"""What a person asks of a compressed model: how large it may be (`3.2bpw`, `58MB`), and what has to hold of it (`loss<1.08`)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchard.core.errors import UsageError
from orchard.core.report import Bound, Claim

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BITS = ("bpw", "bits", "bit")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]+)\s*")
_COUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([kKmMgGbB]?)\s*")
_RULE = re.compile(r"\s*([a-zA-Z_]+)\s*(<=|>=|<|>)\s*([0-9.eE+-]+)\s*")
MEASURES = {
    "loss": ("<", "the loss on held-out text over the original's"),
    "kl": ("<", "KL to the original, in nats a token"),
    "agreement": (">", "the share of places where both hold the same token to be the likeliest"),
    "tasks": (">", "the share of tasks that are answered right"),
}
"""What a rule may speak of, and which way is good."""


class BadBudget(UsageError):
    """A budget that says no size."""

    code = "bad-budget"


class BadRule(UsageError):
    """A rule that says nothing that is measured."""

    code = "bad-rule"


@dataclass(frozen=True)
class Budget:
    """Bytes of the whole file, or bits for each weight that the original has, all in."""

    size: float
    per_weight: bool

    @classmethod
    def parse(cls, text: str) -> Budget:
        found = _SIZE.fullmatch(text)
        unit = found[2].lower() if found else ""
        if found is None or (unit not in _UNITS and unit not in _BITS) or not float(found[1]) > 0:
            raise BadBudget(f"{text!r} is no budget", hint="write bits per weight or bytes: 3.2bpw, 58MB")
        return cls(float(found[1]) * _UNITS.get(unit, 1), unit in _BITS)

    def bytes(self, weights: int) -> int:
        """The whole file's, of a model whose original has so many weights."""
        return math.floor(self.size * weights / 8) if self.per_weight else math.floor(self.size)

    def __str__(self) -> str:
        return f"{self.size:g} bits per weight" if self.per_weight else f"{self.size / 1e6:,.4g} MB"


@dataclass(frozen=True)
class Rule:
    """One thing that has to hold after every step."""

    measure: str
    bound: Bound

    @classmethod
    def parse(cls, text: str) -> Rule:
        found = _RULE.fullmatch(text)
        if found is None:
            raise BadRule(f"{text!r} is no rule", hint='write what has to hold: "loss<1.08", "kl<0.3", "agreement>0.8"')
        name, op = found[1].lower(), found[2]
        if name not in MEASURES:
            from orchard.recipes.base import nearest

            raise BadRule(f"nothing that is measured is called {name!r}", hint=nearest(name, MEASURES))
        try:
            limit = float(found[3])
        except ValueError:
            limit = math.nan
        if not math.isfinite(limit):
            raise BadRule(f"{found[3]!r} is no number", hint=f"as in {name}{MEASURES[name][0]}1")
        if op[0] != MEASURES[name][0]:
            raise BadRule(
                f"{text.strip()!r} would ask for a bad model",
                hint=f"{name} is {MEASURES[name][1]}: write {name}{MEASURES[name][0]}{found[3]}",
            )
        return cls(name, Bound(op, limit))

    def holds(self, values: Mapping[str, float | None]) -> bool:
        """Whether it holds of what was measured; what is no number breaks it."""
        value = values.get(self.measure)
        return value is not None and math.isfinite(value) and self.bound.holds(value)

    def claim(self) -> Claim:
        return Claim(self.measure, MEASURES[self.measure][1], self.measure, self.bound)

    def __str__(self) -> str:
        return f"{self.measure}{self.bound.op}{self.bound.limit:g}"


def rules(texts: str | Iterable[str]) -> tuple[Rule, ...]:
    """Rules as texts, each of one or, with commas, of several; one about a thing that another is about already is refused."""
    every = [texts] if isinstance(texts, str) else list(texts)
    found = [Rule.parse(part) for text in every for part in text.split(",")]
    names = [rule.measure for rule in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise BadRule(f"two rules speak of {twice}", hint="give one of them")
    return tuple(found)


def count_of(text: str | int, what: str = "tokens") -> int:
    """20M, 500k, 1e6 or 4096 as a whole number."""
    if isinstance(text, int) and not isinstance(text, bool):
        number = float(text)
    else:
        found = _COUNT.fullmatch(str(text))
        factor = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}
        try:
            number = float(found[1]) * factor[found[2].lower()] if found else float(str(text))
        except ValueError:
            number = math.nan
    if not (math.isfinite(number) and 1 <= number < 1e15):
        raise UsageError(f"{what} is {text!r}", hint="write a number such as 20M, 500k or 4096")
    return round(number)
