"""What was found about the sensitivity of weights: options by path, as a value that can be stored, read again and printed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchard.core.config import BaseConfig
from orchard.core.errors import BadFile, ConfigError, UsageError
from orchard.transforms.ptq import plain, words

VERSION = 1


@dataclass(frozen=True)
class Option:
    """A format that a weight may have."""

    format: BaseConfig
    nbytes: int
    cost: float
    """Nats per token."""
    measured: bool = False
    note: str = ""
    """Why it is not the format that was asked for."""


@dataclass(frozen=True)
class Sensitivity:
    """Options by path, and what they were found on."""

    options: Mapping[str, tuple[Option, ...]]
    weights: int
    """Values in all tensors of the model."""
    rest: int
    """Bytes of all tensors that have no options, as the model keeps them."""
    tokens: int
    correlation: float | None = None
    """Of the logarithms of estimates and measured values."""
    checks: int = 0
    """How many were measured for that."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By what the estimates of a format were multiplied."""

    def total(self, formats: Mapping[str, BaseConfig]) -> tuple[int, float]:
        """Bytes, without the rest, and the sum of costs of one format for each path."""
        picked = [self.option(path, format) for path, format in formats.items()]
        return sum(option.nbytes for option in picked), math.fsum(option.cost for option in picked)

    def option(self, path: str, format: BaseConfig) -> Option:
        for option in self.options.get(plain(path), ()):
            if option.format == format:
                return option
        raise UsageError(f"{path} was not tried in {words(format)}", hint="measure sensitivity with this choice")

    def to_dict(self) -> dict[str, Any]:
        options = {
            path: [
                {
                    "format": option.format.to_dict(),
                    "bytes": option.nbytes,
                    "cost": option.cost,
                    "measured": option.measured,
                    "note": option.note,
                }
                for option in found
            ]
            for path, found in self.options.items()
        }
        plain_fields = ("weights", "rest", "tokens", "correlation", "checks")
        kept = {name: getattr(self, name) for name in plain_fields}
        return {"version": VERSION, **kept, "factors": dict(self.factors), "options": options}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sensitivity:
        """The inverse of `to_dict`, refused when it is something else."""
        try:
            if data["version"] != VERSION:
                raise ValueError(f"version {data['version']!r}")
            options = {str(path): tuple(_option(one) for one in found) for path, found in data["options"].items()}
            counts = {name: int(data[name]) for name in ("weights", "rest", "tokens", "checks")}
            correlation = None if data["correlation"] is None else float(data["correlation"])
            factors = {str(name): float(value) for name, value in data["factors"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
            raise BadFile(f"this is no record of sensitivity: {error}", hint="measure it again") from error
        return cls(options=options, correlation=correlation, factors=factors, **counts)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Sensitivity:
        try:
            data = json.loads(text)
        except ValueError as error:
            raise BadFile("this is no record of sensitivity: it is no JSON", hint="measure it again") from error
        return cls.from_dict(data)

    def __str__(self) -> str:
        """A table: one line a path, what it costs in each format (* measured), the costliest first."""
        lines = []
        for path, found in sorted(self.options.items(), key=lambda item: -max(one.cost for one in item[1])):
            told = "  ".join(f"{words(one.format)} {one.cost:.2e}{'*' if one.measured else ' '}" for one in found)
            lines.append(f"{path:<{max(map(len, self.options))}}  {told}")
        if self.correlation is not None:
            lines.append(
                f"estimates and {self.checks} measured values correlate by {self.correlation:.2f} (logarithms)"
            )
        return "\n".join(lines)


def _option(data: Mapping[str, Any]) -> Option:
    cost = float(data["cost"])
    if not (math.isfinite(cost) and cost >= 0) or int(data["bytes"]) < 0:
        raise ValueError("a cost or size that cannot be")
    format = BaseConfig.from_dict(data["format"])
    return Option(format, int(data["bytes"]), cost, bool(data["measured"]), str(data["note"]))
