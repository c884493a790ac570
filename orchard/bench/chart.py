"""A benchmark's Report as an SVG picture, drawn by hand: bars of the three engines on logarithmic axes, one panel per unit.

Every bar carries its number, so that the axis only has to show the order of magnitude; a dashed line over a group is the
limit that the machine sets to Orchard's bar.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from orchard.bench.cases import topic_of
from orchard.bench.peers import LLAMA, OWN, TRANSFORMERS
from orchard.bench.table import bound, figures_of, short
from orchard.core.report import Report, Value
from orchard.core.report_text import provenance

COLOURS = {OWN: "#2f7d4f", LLAMA: "#c98a2b", TRANSFORMERS: "#5b78b5"}
WIDTH, LEFT, RIGHT, BAR, GAP, PLOT, TOP, BELOW = 1180, 64, 24, 26, 26, 220, 46, 58
_LABELS = {
    "ttft": ("first token", "{} tokens"),
    "prefill": ("prefill", "{} tokens"),
    "decode": ("decode", "at {}"),
    "batch": ("decode", "{} at once"),
    "memory": ("peak memory", "at {}"),
    "start": ("process start", "to first token"),
    "busy": ("decode", "one core busy"),
}


@dataclass(frozen=True)
class Group:
    """Bars that stand together: engine → value, and the limit of the first one."""

    label: tuple[str, str]
    bars: dict[str, Value]
    limit: float | None = None


def groups_of(report: Report) -> dict[str, list[Group]]:
    """Panel title → its groups; panels without any are left out."""
    panels: dict[str, list[Group]] = {
        "tokens per second (more is better)": [],
        "milliseconds (less is better)": [],
        "megabytes (less is better)": [],
    }
    rates, times, sizes = panels.values()
    for figure in figures_of(report):
        topic, number = topic_of(figure), figure.split()[-1]
        if topic == "shape":
            rates += _shapes(report, figure)
            continue
        names = {engine: f"{engine} {figure}" for engine in (OWN, LLAMA, TRANSFORMERS)}
        bars = {engine: value for engine, name in names.items() if (value := report.values.get(name)) is not None}
        first, second = _LABELS[topic]
        label = (first, second.format(f"{int(number):,}" if number.isdigit() else ""))
        unit = next(iter(bars.values())).unit if bars else ""
        scale = {"s": 1e3, "bytes": 1e-6}.get(unit, 1.0)
        panel = {"s": times, "bytes": sizes}.get(unit, rates)
        limit = None if panel is not rates else _limit(report, names[OWN])
        panel.append(Group(label, {engine: _scaled(value, scale) for engine, value in bars.items()}, limit))
    return {title: groups for title, groups in panels.items() if groups}


def svg(report: Report) -> str:
    """The whole picture."""
    panels = groups_of(report)
    rows = _rows(panels)
    height = 84 + sum(TOP + PLOT + BELOW for _ in rows) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        _text(LEFT, 30, "One model, three engines, the same machine and run", size=18, weight=600),
        *_legend(LEFT, 56),
    ]
    y = 84
    for row in rows:
        x = float(LEFT)
        for title, groups in row:
            parts += _panel(x, y, title, groups)
            x += _space(title, groups)
        y += TOP + PLOT + BELOW
    facts = dict(provenance(report))
    origin = " · ".join(facts[name] for name in ("machine", "commit", "created") if name in facts)
    parts += [_text(LEFT, height - 16, origin, size=11, colour="#666"), "</svg>"]
    return "\n".join(parts) + "\n"


def _rows(panels: dict[str, list[Group]]) -> list[list[tuple[str, list[Group]]]]:
    """Panels beside each other while they fit; a panel that is too wide by itself is continued below."""
    most = int((WIDTH - LEFT - RIGHT) // _group_width(3))
    pieces = [(title, groups[at : at + most]) for title, groups in panels.items() for at in range(0, len(groups), most)]
    rows: list[list[tuple[str, list[Group]]]] = []
    room = 0.0
    for title, groups in pieces:
        need = _space(title, groups)
        if not rows or need > room:
            rows.append([])
            room = WIDTH - RIGHT
        rows[-1].append((title, groups))
        room -= need
    return rows


def _panel(x: float, y: float, title: str, groups: list[Group]) -> list[str]:
    numbers = [float(value.value) for group in groups for value in group.bars.values() if _number(value)]  # type: ignore[arg-type]
    numbers += [group.limit for group in groups if group.limit]
    low = 10 ** math.floor(math.log10(min(numbers) * 0.7))
    high = max(numbers) * 1.25
    base, span = y + TOP + PLOT, math.log10(high / low)

    def place(number: float) -> float:
        return base - PLOT * max(0.0, math.log10(number / low)) / span

    width = _panel_width(groups)
    parts = [_text(x, y + 22, title, weight=600, size=13)]
    tick = low
    while tick <= high:
        at = place(tick)
        parts.append(f'<line x1="{x}" x2="{x + width:.1f}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(_text(x - 6, at + 4, f"{tick:,.0f}" if tick >= 1 else f"{tick:g}", anchor="end", colour="#666"))
        tick *= 10
    left = x + GAP / 2
    for group in groups:
        parts += _bars(left, base, group, place)
        left += _group_width(len(group.bars))
    return parts


def _bars(left: float, base: float, group: Group, place: object) -> list[str]:
    assert callable(place)
    parts = []
    for index, (engine, value) in enumerate(group.bars.items()):
        if not _number(value):
            continue
        x, top = left + index * BAR, place(float(value.value))  # type: ignore[arg-type]
        colour = COLOURS[engine]
        parts.append(
            f'<rect x="{x + 1:.1f}" y="{top:.1f}" width="{BAR - 2}" height="{max(base - top, 1):.1f}" fill="{colour}">'
            f"<title>{escape(engine)}: {float(value.value):,.4g}</title></rect>"  # type: ignore[arg-type]
        )
        if value.low is not None and value.high is not None and value.low > 0:
            middle = x + BAR / 2
            ends = f'y1="{place(value.low):.1f}" y2="{place(value.high):.1f}"'
            parts.append(f'<line x1="{middle:.1f}" x2="{middle:.1f}" {ends} stroke="#222" stroke-width="1.5"/>')
        parts.append(_text(x + BAR / 2, top - 6, short(Value(value.value)), anchor="middle", size=10))
    width = BAR * len(group.bars)
    if group.limit:
        at = place(group.limit)
        parts.append(
            f'<line x1="{left:.1f}" x2="{left + BAR:.1f}" y1="{at:.1f}" y2="{at:.1f}" stroke="#222" stroke-dasharray="3 2"/>'
        )
    for line, words in enumerate(group.label):
        parts.append(_text(left + width / 2, base + 18 + 15 * line, words, anchor="middle", size=11))
    return parts


def _shapes(report: Report, figure: str) -> list[Group]:
    groups = []
    for engine, bits in (("orchard 4-bit", "4-bit"), ("orchard 2-bit", "2-bit")):
        own, peer = report.values.get(f"{engine} {figure}"), report.values.get(f"llama.cpp Q4_0 {figure}")
        bars = {name: value for name, value in ((OWN, own), (LLAMA, peer)) if value is not None}
        if own is not None:
            groups.append(Group(("1B shape", f"{bits} / Q4_0"), bars, _limit(report, f"{engine} {figure}")))
    return groups


def _limit(report: Report, name: str) -> float | None:
    by, _ = bound(report, name)
    near, value = report.values.get(f"{name} share of {by}"), report.values.get(name)
    if (
        near is None
        or value is None
        or not isinstance(near.value, float)
        or not isinstance(value.value, float)
        or near.value <= 0
    ):
        return None
    return value.value / near.value


def _scaled(value: Value, by: float) -> Value:
    ends = [end * by if end is not None else None for end in (value.low, value.high)]
    return Value(float(value.value) * by if _number(value) else None, "", *ends)  # type: ignore[arg-type]


def _number(value: Value) -> bool:
    return isinstance(value.value, (int, float)) and not isinstance(value.value, bool) and value.value > 0


def _group_width(bars: int) -> float:
    return bars * BAR + GAP


def _panel_width(groups: list[Group]) -> float:
    return sum(_group_width(len(group.bars)) for group in groups)


def _space(title: str, groups: list[Group]) -> float:
    """From the left edge of a panel to that of the next: room for its bars or its title, and for the axis after it."""
    return max(_panel_width(groups), 7.6 * len(title)) + LEFT + 12


def _legend(x: float, y: float) -> list[str]:
    parts = []
    for engine, colour in COLOURS.items():
        parts.append(f'<rect x="{x}" y="{y - 11}" width="14" height="14" fill="{colour}"/>')
        parts.append(_text(x + 20, y, engine))
        x += 36 + 7.5 * len(engine)
    parts.append(f'<line x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}" stroke="#222" stroke-dasharray="3 2"/>')
    parts.append(_text(x + 28, y, "what memory or arithmetic of this machine allow Orchard; thin lines: quartiles"))
    return parts


def _text(
    x: float, y: float, words: str, *, size: int = 12, weight: int = 400, anchor: str = "start", colour: str = "#222"
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'
