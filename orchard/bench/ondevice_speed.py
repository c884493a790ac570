"""Speed of compressed models beside the original in our engine, as values of a Report: one process, alternating rounds."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchard.bench import spawn
from orchard.bench.ondevice_claims import ORIGINAL
from orchard.bench.stats import Spread, ratio, spread
from orchard.core.report import Value

Figures = Mapping[str, Mapping[str, Sequence[float]]]
"""By model and figure, one number a round."""


def measure(
    models: Mapping[str, Path], *, vocab: int, prompt: int, short: int, steps: int, rounds: int
) -> dict[str, Any]:
    """All models in one worker process, the original among them. `WorkerFailed` where that gives no answer."""
    options = {
        "models": {label: str(path) for label, path in models.items()},
        "vocab": vocab,
        "prompt": prompt,
        "short": short,
        "steps": steps,
        "rounds": rounds,
    }
    answer = spawn.ask(sys.executable, "ondevice_speed", {"task": "speed", "options": options}, limit=3600)
    found: dict[str, Any] = answer["result"]
    return found


def values(figures: Figures) -> dict[str, Value]:
    """Medians between their quartiles; ratios of medians, where more is better. The original is called so."""
    found: dict[str, Value] = {}
    for label, own in figures.items():
        for figure, rounds in own.items():
            unit = "s" if figure.startswith("TTFT") else "tokens/s"
            found[f"{label} {figure}"] = _value(spread(rounds), unit)
            if label == ORIGINAL:
                continue
            base = figures[ORIGINAL][figure]
            if figure.startswith("TTFT"):
                found[f"{label} {figure} gain over original"] = _value(ratio(base, rounds))
            else:
                found[f"{label} {figure} over original"] = _value(ratio(rounds, base))
    return found


def _value(found: Spread, unit: str = "") -> Value:
    return Value(found.median, unit=unit, low=found.low, high=found.high)
