"""A benchmark's Report for the terminal: engines side by side, with ratios and the limit that bounds each figure."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from orchard.bench import speculation
from orchard.bench.cases import topic_of
from orchard.bench.peers import LLAMA, OWN, TRANSFORMERS
from orchard.bench.summary import SHAPES
from orchard.core.report import Report, Value

if TYPE_CHECKING:
    from rich.console import RenderableType

_WORDS = {
    "ttft": "first token after {} tokens",
    "prefill": "prefill {}",
    "decode": "decode at {}",
    "batch": "decode of {} at once",
    "memory": "peak memory at {}",
    "start": "process start to first token",
    "busy": "decode at {}, one core busy",
    "shape": "1B shape, decode at {}",
}


def figures_of(report: Report) -> list[str]:
    """The figures of Orchard in a Report, in order; those of the 1B shape last."""
    engines = (OWN, *SHAPES)
    found = []
    for name in report.values:
        for engine in engines:
            figure = name.removeprefix(f"{engine} ")
            if figure != name and topic_of(figure) in _WORDS and " share of " not in name and figure not in found:
                found.append(figure)
    order = list(_WORDS)
    return sorted(found, key=lambda figure: (order.index(topic_of(figure)), _number(figure)))


def words(figure: str) -> str:
    """`decode 2048` → "decode at 2,048"."""
    return _WORDS[topic_of(figure)].format(f"{_number(figure):,}")


def short(value: Value | None) -> str:
    """A measured value in few characters, with its unit."""
    if value is None or not isinstance(value.value, (int, float)):
        return "–"
    number = float(value.value)
    if value.unit == "bytes":
        return f"{number / 1e6:,.0f} MB"
    if value.unit == "s":
        return f"{number * 1e3:,.0f} ms"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def table(report: Report) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.table import Table

    main = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title="tokens per second, unless a unit is given", title_justify="left"
    )
    for head in (
        "",
        "orchard",
        "quartiles",
        LLAMA,
        TRANSFORMERS,
        f"over {LLAMA}",
        f"over {TRANSFORMERS}",
        "bound by",
        "share",
    ):
        main.add_column(head, justify="left" if head in ("", "bound by") else "right", no_wrap=True)
    for label, own, llama, other, over_llama, over_other in _rows(report):
        value = report.values.get(own)
        by, near = bound(report, own)
        cells = [short(report.values.get(name)) for name in (llama, other)]
        ratios = [_times(report.values.get(name)) for name in (over_llama, over_other)]
        main.add_row(label, short(value), _quartiles(value), *cells, *ratios, by, near)
    tested = [claim for claim in report.claims if claim.value is not None]  # the others are in the notes, by name
    rest = dataclasses.replace(report, values=_extra(report), series={}, claims=tested)
    return Group(main, rest.table())


def _rows(report: Report) -> list[tuple[str, str, str, str, str, str]]:
    """Label, and the names of the values of each column."""
    rows = []
    for figure in figures_of(report):
        if topic_of(figure) == "shape":
            for engine, bits in (("orchard 4-bit", "4-bit"), ("orchard 2-bit", "2-bit")):
                over = f"{figure} {bits} over llama.cpp"
                rows.append(
                    (f"{words(figure)}, {bits}", f"{engine} {figure}", f"llama.cpp Q4_0 {figure}", "", over, "")
                )
            continue
        names = [f"{engine} {figure}" for engine in (OWN, LLAMA, TRANSFORMERS)]
        rows.append((words(figure), *names, f"{figure} over {LLAMA}", f"{figure} over {TRANSFORMERS}"))  # type: ignore[arg-type]
        if f"orchard generate {figure}" in report.values:
            rows.append(("  through Model.generate", f"orchard generate {figure}", "", "", "", ""))
    return rows


def bound(report: Report, name: str) -> tuple[str, str]:
    """Which limit bounds a value, and how near it is."""
    for by in ("bandwidth", "arithmetic"):
        value = report.values.get(f"{name} share of {by}")
        if value is not None and isinstance(value.value, float):
            return by, f"{100 * value.value:.0f} %"
    return "", ""


def _extra(report: Report) -> dict[str, Value]:
    """Values that have no place in the table of engines."""
    shown = (
        "limit ",
        "linear R2",
        "linear slope",
        "agreement",
        "divergence",
        "matrices",
        "families",
        "memory",
        "busy 32 over",
        "requests ",
        "shared prefix",
        "idle first",
        "late first",
        "first token beside",
        "same tokens",
        *(f"{case.name}:" for case in speculation.CASES),
        "lookup,",
        "speculation,",
        "gpu ",
    )
    return {
        name: value
        for name, value in report.values.items()
        if name.startswith(shown) and (not name.startswith("memory") or name.endswith(("weights and KV", "requests")))
    }


def _number(figure: str) -> int:
    last = figure.split()[-1]
    return int(last) if last.isdigit() else 0


def _times(value: Value | None) -> str:
    return f"{value.value:.2f} ×" if value is not None and isinstance(value.value, float) else ""


def _quartiles(value: Value | None) -> str:
    if value is None or value.low is None or value.high is None or value.low == value.high:
        return ""
    ends = [
        short(dataclasses.replace(value, value=float(end))).removesuffix(" MB").removesuffix(" ms")
        for end in (value.low, value.high)
    ]
    return "–".join(ends)
