"""Dates, times, durations and identifiers: texts of a fixed form. Every text that matches its pattern can be read, so a
model that is held to the pattern cannot write a 30th of February."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from typing import TYPE_CHECKING, Any

from orchard.session.schema.errors import mismatch
from orchard.session.schema.shapes import Shape, whole

if TYPE_CHECKING:
    from orchard.session.schema.book import Book

_LEAP_YEAR = r"(?:[1-9]\d(?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_DAY = r"(?:0[1-9]|1\d|2[0-8])"
DATE = rf"(?:[1-9]\d{{3}}-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)|{_LEAP_YEAR}-02-29)"
TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:0\d|1[0-4]):[0-5]\d)?"
DATETIME = rf"{DATE}T{TIME}"
_CLOCK = (
    r"T(?:\d{1,4}H(?:\d{1,4}M)?(?:\d{1,5}(?:\.\d{1,6})?S)?|\d{1,4}M(?:\d{1,5}(?:\.\d{1,6})?S)?|\d{1,5}(?:\.\d{1,6})?S)"
)
DURATION = rf"-?P(?:\d{{1,5}}W|\d{{1,6}}D(?:{_CLOCK})?|{_CLOCK})"
UUID = r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"

_UNITS = {"W": "weeks", "D": "days", "H": "hours", "M": "minutes", "S": "seconds"}


class FixedText(Shape):
    """A text that stands for a Python value. Its schema names the format; a grammar gets the pattern."""

    kinds = frozenset({"string"})

    def __init__(
        self, kind: type, form: str, pattern: str, parse: Callable[[str], Any], show: Callable[[Any], str]
    ) -> None:
        self.kind = kind
        self.name = kind.__name__
        self.form, self.pattern = form, pattern
        self._parse, self._show = parse, show

    def schema(self, book: Book) -> dict[str, Any]:
        return {"type": "string", **({"pattern": whole(self.pattern)} if book.exact else {"format": self.form})}

    def read(self, value: Any, at: str) -> Any:
        try:
            if isinstance(value, str):
                return self._parse(value)
        except (ValueError, OverflowError):
            pass
        raise mismatch(at, f"a {self.form} such as {self._show(_example(self.kind))}", value)

    def write(self, value: Any) -> Any:
        return self._show(value) if isinstance(value, self.kind) else super().write(value)

    def holds(self, value: Any) -> bool:
        # A datetime is a date to Python, and not to JSON.
        return isinstance(value, self.kind) and not (self.kind is date and isinstance(value, datetime))

    def begins(self, value: Any, depth: int) -> bool:
        return isinstance(value, str) and (depth > 0 or super().begins(value, depth))


def fixed_text(kind: type) -> FixedText | None:
    """The shape of a class that is written as a text of a fixed form; None for every other class."""
    if kind is date:
        return FixedText(date, "date", DATE, date.fromisoformat, date.isoformat)
    if kind is datetime:
        return FixedText(datetime, "date-time", DATETIME, datetime.fromisoformat, datetime.isoformat)
    if kind is time:
        return FixedText(time, "time", TIME, time.fromisoformat, time.isoformat)
    if kind is timedelta:
        return FixedText(timedelta, "duration", DURATION, read_duration, write_duration)
    if kind.__module__ == "uuid" and kind.__name__ == "UUID":  # not imported unless somebody has one
        return FixedText(kind, "uuid", UUID, kind, str)
    return None


def read_duration(text: str) -> timedelta:
    """`P1DT2H30M`, as ISO 8601 writes it, without years and months, which have no fixed length."""
    if not re.fullmatch(DURATION, text):
        raise ValueError(text)
    amounts = {_UNITS[unit]: float(amount) for amount, unit in re.findall(r"(\d+(?:\.\d+)?)([WDHMS])", text)}
    length = timedelta(**amounts)
    return -length if text.startswith("-") else length


def write_duration(length: timedelta) -> str:
    sign, length = ("-", -length) if length < timedelta(0) else ("", length)
    minutes, seconds = divmod(length.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    fraction = f".{length.microseconds:06d}".rstrip("0") if length.microseconds else ""
    days = f"{length.days}D" if length.days else ""
    clock = "".join(f"{amount}{unit}" for amount, unit in ((hours, "H"), (minutes, "M")) if amount)
    clock += f"{seconds}{fraction}S" if seconds or fraction or not (days or clock) else ""
    return f"{sign}P{days}{'T' if clock else ''}{clock}"


def _example(kind: type) -> Any:
    examples = {
        date: date(2026, 1, 31),
        datetime: datetime(2026, 1, 31, 9, 30),
        time: time(9, 30),
        timedelta: timedelta(hours=1, minutes=30),
    }
    return examples[kind] if kind in examples else kind("12345678-1234-1234-1234-123456789abc")
