"""A load's outcome as a Report, and as a table for the terminal."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.bench.load.measure import Outcome, described
from orchard.bench.load.sample import PERCENTS, Sample, percentile, percentiles
from orchard.core.errors import UsageError
from orchard.core.machine import CHECKOUT
from orchard.core.report import Report, Scalar, Value

if TYPE_CHECKING:
    from rich.console import RenderableType

TARGET = CHECKOUT / "results" / "bench" / "load.json"
TIMES = {
    "ttft": "time to the first text",
    "itl": "between pieces of text",
    "tpot": "time per token after the first",
    "total": "whole answer",
}


def values(outcome: Outcome) -> dict[str, Value]:
    """Everything that was measured, by name. Names are the same for every endpoint."""
    load, samples = outcome.load, outcome.samples
    good = [sample for sample in samples if sample.ok]
    seconds = outcome.seconds or float("nan")
    tokens = sum(sample.output_tokens for sample in good)
    met = [sample for sample in good if sample.meets(load.target_ttft, load.target_itl)]
    found = {
        "requests": Value(len(samples)),
        "failed": Value(len(samples) - len(good)),
        "output tokens per second": Value(tokens / seconds, "tok/s"),
        "requests per second": Value(len(good) / seconds, "1/s"),
        "goodput": Value(len(met) / seconds, "1/s", note=_target(outcome)),
        "goodput share": Value(len(met) / len(samples) if samples else None, note=_target(outcome)),
    }
    for name, numbers in times(good).items():
        found |= {f"{name} p{percent}": Value(number, "s") for percent, number in percentiles(numbers)}
    prompts = [sample.prompt_tokens for sample in good if sample.prompt_tokens is not None]
    if prompts:
        found["prompt tokens"] = Value(sum(prompts) / len(prompts), low=min(prompts), high=max(prompts))
    if good:
        outputs = [sample.output_tokens for sample in good]
        found["output tokens"] = Value(tokens / len(good), low=min(outputs), high=max(outputs))
    if samples and load.rate is not None:
        late = percentile([sample.sent - sample.due for sample in samples], 99)
        found["sent late p99"] = Value(late, "s", note="how far the generator itself was behind its plan")
    found["generator"] = Value(outcome.busy, note="share of one core that sending and listening took")
    return found


def times(good: list[Sample]) -> dict[str, list[float]]:
    return {
        "ttft": [sample.ttft for sample in good if sample.ttft is not None],
        "itl": [gap for sample in good for gap in sample.gaps],
        "tpot": [sample.per_token for sample in good if sample.per_token is not None],
        "total": [sample.total for sample in good],
    }


def errors(samples: list[Sample]) -> Counter[str]:
    return Counter(sample.failed for sample in samples if sample.failed)


def report(outcome: Outcome, url: str) -> Report:
    failures: dict[str, str] = {}
    for sample in outcome.samples:
        if sample.failed:
            failures.setdefault(sample.failed, sample.message)
    notes = [f"{number} × {kind}: {failures[kind]}" for kind, number in errors(outcome.samples).most_common()]
    rows: list[dict[str, Any]] = [
        {
            "number": sample.number,
            "due": round(sample.due, 6),
            "ttft": _rounded(sample.ttft),
            "total": round(sample.total, 6),
            "tokens": sample.output_tokens,
            "finish": sample.finish,
            **({"failed": sample.failed} if sample.failed else {}),
        }
        for sample in outcome.samples
    ]
    return Report.record(
        "bench",
        "load",
        values=values(outcome),
        seed=outcome.load.seed,
        wall_time=round(outcome.seconds, 3),
        series={"requests": rows},
        notes=[*outcome.notes, *notes],
        config={**described(outcome.load), "url": url},
    )


def _rounded(seconds: float | None) -> Scalar:
    return None if seconds is None else round(seconds, 6)


def _target(outcome: Outcome) -> str:
    load = outcome.load
    asked = {"first text": load.target_ttft, "each further token": load.target_itl}
    said = " and ".join(f"{what} within {limit * 1e3:g} ms" for what, limit in asked.items() if limit is not None)
    return said or "no target: every answer counts"


def place(save: Path | None) -> Path | None:
    """Where a Report is kept; asked before the work begins."""
    if save is not None and not save.parent.is_dir():
        raise UsageError(f"there is no folder {save.parent}", hint="make it first; --json prints the Report")
    return save


# Showing ----------------------------------------------------------------------------------------------------------------


def table(found: Report) -> RenderableType:
    """Percentiles side by side, then what is one number, then what to know."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    main = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="milliseconds", title_justify="left")
    main.add_column("")
    for percent in PERCENTS:
        main.add_column(f"p{percent}", justify="right", no_wrap=True)
    for name, words in TIMES.items():
        cells = [found.values.get(f"{name} p{percent}") for percent in PERCENTS]
        if any(cell is not None for cell in cells):
            main.add_row(words, *(_milliseconds(cell) for cell in cells))
    rest = Table(box=None, show_header=False, pad_edge=False)
    rest.add_column("", no_wrap=True)
    rest.add_column("", justify="right", no_wrap=True)
    rest.add_column("")
    for name, value in found.values.items():
        if not name.endswith(tuple(f" p{percent}" for percent in PERCENTS)) or name.startswith("sent late"):
            rest.add_row(name, *_plain(value))
    return Group(main, rest, *(f"note: {note}" for note in found.notes))


def _milliseconds(value: Value | None) -> str:
    return f"{value.value * 1e3:,.1f}" if value is not None and isinstance(value.value, (int, float)) else "–"


def _plain(value: Value) -> tuple[str, str]:
    number = value.value
    if not isinstance(number, (int, float)):
        return "–", value.note
    if value.unit == "s":
        return f"{number * 1e3:,.2f} ms", value.note
    shown = f"{number:,}" if isinstance(number, int) else f"{number:,.1f}" if number >= 10 else f"{number:.3f}"
    spread = f"{value.low:g}–{value.high:g}" if value.low is not None and value.low != value.high else ""
    return f"{shown} {value.unit}".strip(), value.note or spread
