"""The one record of any run, evaluation, benchmark or study: what was measured, what was claimed, where and how.

A claim names a metric and a bound; its verdict is computed from the value that the run gave, here and again whenever a
file is read, so nobody can write "passed" by hand. Reports are JSON with a version; everything else (terminal, notebook,
cards, README) only renders them, see `orchard.core.report_text`. Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.core import machine
from orchard.core.errors import ConfigError
from orchard.core.files import write_text

if TYPE_CHECKING:
    from rich.console import RenderableType

VERSION = 1
Scalar = int | float | bool | str | None
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
    "==": operator.eq,
    "!=": operator.ne,
}


@dataclass(frozen=True)
class Value:
    """A measured number (or yes/no, or a short text) with its unit, its interval and a word about it.

    A number that is not finite becomes None, and the note says what it was: JSON has no such numbers, and a claim
    about one must fail.
    """

    value: Scalar
    unit: str = ""
    low: float | None = None
    high: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("value", "low", "high"):
            given = _plain(getattr(self, name))
            if isinstance(given, float) and not math.isfinite(given):
                note = "; ".join(part for part in (self.note, f"{name} was {given}") if part)
                object.__setattr__(self, "note", note)
                given = None
            if not isinstance(given, (int, float, str, type(None))) or (name != "value" and isinstance(given, str)):
                raise TypeError(f"a {type(given).__name__} cannot be a measured {name}")
            object.__setattr__(self, name, given)

    @classmethod
    def of(cls, given: Value | Scalar) -> Value:
        return given if isinstance(given, Value) else cls(given)


@dataclass(frozen=True)
class Bound:
    """`Bound("<=", 10)`: what a value must satisfy. Text can only be equal or not."""

    op: str
    limit: int | float | bool | str

    def __post_init__(self) -> None:
        if self.op not in _OPERATORS:
            raise ConfigError(f"no bound {self.op!r}", hint="one of " + " ".join(_OPERATORS))
        if not isinstance(self.limit, (int, float, str)):
            raise ConfigError(f"a {type(self.limit).__name__} is no limit", hint="use a number or a text")
        if isinstance(self.limit, float) and not math.isfinite(self.limit):
            raise ConfigError(f"a bound of {self.limit} says nothing", hint="use a finite number")
        if isinstance(self.limit, str) and self.op not in ("==", "!="):
            raise ConfigError(f"text cannot be {self.op}", hint="use == or !=")

    def holds(self, value: Scalar) -> bool:
        if value is None or isinstance(value, str) != isinstance(self.limit, str):
            return False
        return bool(_OPERATORS[self.op](value, self.limit))

    def __str__(self) -> str:
        return f"{self.op} {json.dumps(self.limit, ensure_ascii=False)}"

    @classmethod
    def parse(cls, text: str) -> Bound:
        op, _, limit = text.partition(" ")
        return cls(op, json.loads(limit))


@dataclass(frozen=True)
class Claim:
    """What a study says before it runs. `metric` is a name among the run's values (`name.low` and `name.high` are its
    interval's ends); `baseline` names the value to show beside it, from the same run."""

    id: str
    statement: str
    metric: str
    bound: Bound
    baseline: str | None = None

    def judge(self, values: Mapping[str, Value], reason: str = "") -> Verdict:
        found, value = _metric(values, self.metric)
        if not found:
            reason = f"the run gave no value for {self.metric!r}" + (f"; {reason}" if reason else "")
        baseline = _metric(values, self.baseline)[1] if self.baseline else None
        return Verdict(
            id=self.id,
            statement=self.statement,
            metric=self.metric,
            value=value,
            bound=self.bound,
            baseline=baseline,
            reason=reason,
        )


@dataclass(frozen=True)
class Verdict:
    """A claim after the run. `passed` follows from `value` and `bound` and cannot be set."""

    id: str
    statement: str
    metric: str
    value: Scalar
    bound: Bound
    baseline: Scalar = None
    reason: str = ""

    @property
    def passed(self) -> bool:
        return self.bound.holds(self.value)

    def to_dict(self) -> dict[str, Any]:
        record = {name: getattr(self, name) for name in ("id", "statement", "metric", "value")}
        record |= {"bound": str(self.bound), "passed": self.passed}
        return record | {name: x for name in ("baseline", "reason") if (x := getattr(self, name)) not in (None, "")}


@dataclass(kw_only=True)
class Report:
    """`Report.record(…)` makes one for the run that is going on; the constructor takes everything as it is."""

    kind: str
    name: str
    created: str
    command: str
    commit: str | None
    seed: int | None
    hardware: dict[str, Any]
    values: dict[str, Value]
    claims: list[Verdict]
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    wall_time: float | None = None
    series: dict[str, list[Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    version: int = VERSION

    def __post_init__(self) -> None:
        self.values = {name: Value.of(value) for name, value in self.values.items()}
        lost: list[str] = []
        self.series = _finite(self.series, "series", lost)
        self.config = _finite(self.config, "config", lost)
        self.notes = [*self.notes, *(note for note in lost if note not in self.notes)]

    @classmethod
    def record(
        cls,
        kind: str,
        name: str,
        *,
        values: Mapping[str, Value | Scalar],
        claims: Sequence[Claim] = (),
        seed: int | None = None,
        reasons: Mapping[str, str] | None = None,
        **rest: Any,
    ) -> Report:
        """A Report of the run in this process: judges the claims, fills in time, command, commit and machine.

        `reasons` explains, by claim id, why a claim came out as it did. `rest`: config, wall_time, series, notes.
        """
        ids = [claim.id for claim in claims]
        twice = sorted({one for one in ids if ids.count(one) > 1})
        if twice:
            raise ConfigError(f"{name}: claims share the ids {twice}", hint="give each claim its own id")
        plain = {key: Value.of(value) for key, value in values.items()}
        return cls(
            kind=kind,
            name=name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=machine.command(),
            commit=machine.commit(),
            seed=seed,
            hardware=machine.hardware(),
            versions=machine.versions(),
            values=plain,
            claims=[claim.judge(plain, (reasons or {}).get(claim.id, "")) for claim in claims],
            **rest,
        )

    @property
    def passed(self) -> bool:
        """Whether every claim holds."""
        return all(claim.passed for claim in self.claims)

    def __getitem__(self, name: str) -> Scalar:
        """A value by name, without its unit and interval."""
        return self.values[name].value

    # Storing ------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data in a fixed order of keys."""
        record = {name: getattr(self, name) for name in _ORDER}
        record["values"] = {name: _value_to_dict(value) for name, value in self.values.items()}
        record["claims"] = [claim.to_dict() for claim in self.claims]
        return record

    @classmethod
    def from_dict(cls, data: Any) -> Report:
        from orchard.core.report_file import from_dict

        return from_dict(data)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> Path:
        """Write the file whole or not at all."""
        path, text = Path(path), self.to_json()
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair: JSON can hold it only as an escape
            text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        write_text(path, text)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Report:
        from orchard.core.report_file import load

        return load(Path(path))

    # Showing ------------------------------------------------------------------------------------------------------

    def table(self) -> RenderableType:
        """For a terminal: `rich.print(report.table())`."""
        from orchard.core.report_text import table

        return table(self)

    def card(self, docstring: str = "") -> str:
        """Markdown. With the study's docstring a whole page, without it only what was measured."""
        from orchard.core.report_text import card

        return card(self, docstring)

    def _repr_html_(self) -> str:
        from orchard.core.report_html import html

        return html(self)


_ORDER = (
    *("version", "kind", "name", "created", "command", "commit", "seed", "wall_time", "hardware", "versions"),
    *("claims", "values", "series", "notes", "config"),
)


def _metric(values: Mapping[str, Value], name: str) -> tuple[bool, Scalar]:
    if name in values:
        return True, values[name].value
    stem, _, end = name.rpartition(".")
    if stem in values and end in ("low", "high"):
        return True, getattr(values[stem], end)
    return False, None


def _value_to_dict(value: Value) -> dict[str, Any]:
    record: dict[str, Any] = {"value": value.value}
    rest = {item.name: getattr(value, item.name) for item in dataclasses.fields(value) if item.name != "value"}
    return record | {name: x for name, x in rest.items() if x not in (None, "")}


def _plain(value: Any) -> Any:
    """The Python number inside a scalar of numpy or torch."""
    return value.item() if hasattr(value, "item") and callable(value.item) else value


def _finite(value: Any, path: str, lost: list[str]) -> Any:
    """Plain data in which numbers that are not finite are None, each told in `lost`."""
    value = _plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        lost.append(f"{path} was {value}")
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item, f"{path}.{key}", lost) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item, f"{path}[{i}]", lost) for i, item in enumerate(value)]
    return value
