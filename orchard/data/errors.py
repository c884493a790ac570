"""What can be wrong with data, and how often it was: typed errors, and the tally of what was left out by choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchard.core.errors import ConfigError, OrchardError, TemplateError

SHOWN = 5
"""How many of the rows that were left out a tally remembers with their place."""


class BadSample(OrchardError):
    """A row of a file cannot be learnt from. `place` says where it is, `reason` is a short, stable word."""

    code = "bad-sample"

    def __init__(self, message: str, *, reason: str, place: str = "", hint: str = "") -> None:
        super().__init__(f"{place}: {message}" if place else message, hint=hint or "mend the row, or use on_bad='skip'")
        self.reason = reason
        self.place = place


class SampleTooLong(BadSample):
    """A sample has more tokens than fit into a row."""

    code = "sample-too-long"


class UnstableTemplate(TemplateError):
    """A chat template writes a turn differently once more turns follow, so no one text holds what inference would read."""

    code = "unstable-template"
    reason = "template"


class StateError(OrchardError):
    """A state does not belong to this source: other files, other settings, or another kind of source."""

    code = "data-state"


class Tally:
    """Counts what was left out, by reason. Under `stop` the first such thing is an error instead."""

    def __init__(self, on_bad: str) -> None:
        check_choice("on_bad", on_bad, ("stop", "skip"))
        self.stops = on_bad == "stop"
        self.reasons: dict[str, int] = {}
        self.shown: list[str] = []

    def add(self, error: OrchardError, *, harmless: bool = False) -> None:
        """`harmless`: counted under `stop` too."""
        if self.stops and not harmless:
            raise error
        reason = str(getattr(error, "reason", error.code))
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if len(self.shown) < SHOWN:
            self.shown.append(error.message)

    @property
    def bad(self) -> int:
        return sum(self.reasons.values())

    def state(self) -> dict[str, Any]:
        return {"bad": self.bad, "reasons": dict(self.reasons), "shown": list(self.shown)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.reasons, self.shown = dict(state["reasons"]), list(state["shown"])


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}", hint="use one of: " + ", ".join(choices))


def at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}", hint=f"use a whole number from {least:,}")
