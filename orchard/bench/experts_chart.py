"""A replay's curves as one SVG picture: hit rate and reads over the size of the cache, a line per policy."""

from __future__ import annotations

import math
from html import escape

from orchard.core.report import Report

COLOURS = ("#2f7d4f", "#c98a2b", "#e0b36a", "#5b78b5", "#8a5bb5", "#b55b7a", "#222222", "#888888")
PANELS = {"hit rate": "hit rate (more is better)", "reads": "units read (less is better)"}
WIDTH, HEIGHT, LEFT, TOP, PLOT_WIDTH, PLOT = 1120, 420, 70, 78, 440, 270


def curves(report: Report) -> str:
    """The whole picture."""
    sizes = [float(size) for size in report.series["capacity"]]
    names = list(dict.fromkeys(name.partition(": ")[0] for name in report.series if ": " in name))
    model = str((report.config or {}).get("model", ""))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(LEFT, 30, f"Experts of {model} in a cache", size=17),
    ]
    x = LEFT
    for place, name in enumerate(names):
        parts.append(f'<rect x="{x}" y="43" width="12" height="12" fill="{COLOURS[place % len(COLOURS)]}"/>')
        parts.append(_text(x + 17, 54, name))
        x += 34 + 8 * len(name)
    for panel, (what, title) in enumerate(PANELS.items()):
        lines = {name: [float(value) for value in report.series[f"{name}: {what}"]] for name in names}
        parts += _panel(LEFT + panel * (PLOT_WIDTH + 110), sizes, lines, title, least=0.0)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(left: float, sizes: list[float], lines: dict[str, list[float]], title: str, *, least: float) -> list[str]:
    most = max(max(values) for values in lines.values()) or 1.0
    first, last = math.log(sizes[0]), math.log(sizes[-1])

    def across(size: float) -> float:
        return left + PLOT_WIDTH * ((math.log(size) - first) / (last - first) if last > first else 0.5)

    def up(value: float) -> float:
        return TOP + PLOT * (1 - (value - least) / (most - least))

    parts = [_text(left, TOP - 6, title, size=13)]
    for step in range(5):
        value = least + (most - least) * step / 4
        parts.append(
            f'<line x1="{left}" x2="{left + PLOT_WIDTH}" y1="{up(value):.1f}" y2="{up(value):.1f}" stroke="#ddd"/>'
        )
        parts.append(_text(left - 6, up(value) + 4, f"{value:,.3g}" if most < 10 else f"{value:,.0f}", anchor="end"))
    for size in sizes:
        parts.append(_text(across(size), TOP + PLOT + 18, f"{size:,.0f}", anchor="middle", size=10))
    parts.append(_text(left + PLOT_WIDTH / 2, TOP + PLOT + 40, "units in the cache", anchor="middle"))
    for place, (name, values) in enumerate(lines.items()):
        points = " ".join(f"{across(size):.1f},{up(value):.1f}" for size, value in zip(sizes, values, strict=True))
        colour = COLOURS[place % len(COLOURS)]
        line = f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2">'
        parts.append(f"{line}<title>{escape(name)}</title></polyline>")
    return parts


def _text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'
