"""Accuracy against bytes as one SVG picture: a line per policy and way of keeping, a point per budget; dashed: everything."""

from __future__ import annotations

import math
from html import escape

from orchard.bench.memory_policies import FULL, POLICIES
from orchard.core.report import Report
from orchard.core.report_text import provenance

COLOURS = dict(zip(POLICIES, ("#222222", "#888888", "#c98a2b", "#5b78b5", "#8a5bb5", "#2f7d4f"), strict=True))
DASHES = ("", "6 3", "2 3", "9 3 2 3", "1 4")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BELOW = 900, 520, 70, 250, 60, 76
Point = tuple[float, float, str]


def curves(report: Report) -> str:
    """The whole picture."""
    lines = lines_of(report)
    points = [point for line in lines.values() for point in line]
    sizes = [size for size, _, _ in points] or [1.0, 10.0]
    low, high = math.log(min(sizes) * 0.85), math.log(max(sizes) * 1.15)
    plot_width, plot = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BELOW

    def across(size: float) -> float:
        return LEFT + plot_width * (math.log(size) - low) / (high - low)

    def up(share: float) -> float:
        return TOP + plot * (1 - share)

    model = str((report.config or {}).get("model", ""))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(LEFT, 28, f"What {model} remembers, against the bytes of keys and values", size=17),
        _text(LEFT, TOP - 10, "share of questions answered right"),
    ]
    for step in range(6):
        share = step / 5
        parts.append(
            f'<line x1="{LEFT}" x2="{LEFT + plot_width}" y1="{up(share):.1f}" y2="{up(share):.1f}" stroke="#ddd"/>'
        )
        parts.append(_text(LEFT - 6, up(share) + 4, f"{share:.1f}", anchor="end"))
    for size in _ticks(sizes):
        parts.append(_text(across(size), TOP + plot + 18, _megabytes(size), anchor="middle", size=10))
    parts.append(_text(LEFT + plot_width / 2, TOP + plot + 38, "peak bytes of keys and values", anchor="middle"))
    ways = list(dict.fromkeys(way for _, way in lines))
    for number, ((policy, way), line) in enumerate(lines.items()):
        look = f'stroke="{COLOURS[policy]}" stroke-width="2" stroke-dasharray="{DASHES[ways.index(way) % len(DASHES)]}"'
        name = f"{policy} {way}".strip()
        if policy == FULL:
            size, share, _ = line[0]
            ends = f'x1="{LEFT}" x2="{LEFT + plot_width}" y1="{up(share):.1f}" y2="{up(share):.1f}"'
            parts.append(f'<line {ends} stroke="{COLOURS[FULL]}" stroke-dasharray="2 4"/>')
        path = " ".join(f"{across(size):.1f},{up(share):.1f}" for size, share, _ in line)
        parts.append(f'<polyline points="{path}" fill="none" {look}><title>{escape(name)}</title></polyline>')
        for size, share, budget in line:
            parts.append(
                f'<circle cx="{across(size):.1f}" cy="{up(share):.1f}" r="4" fill="{COLOURS[policy]}">'
                f"<title>{escape(f'{name} {budget}'.strip())}: {share:.2f} in {_megabytes(size)}</title></circle>"
            )
        at = TOP + 18 * number
        parts.append(f'<line x1="{WIDTH - RIGHT + 24}" x2="{WIDTH - RIGHT + 52}" y1="{at}" y2="{at}" {look}/>')
        parts.append(_text(WIDTH - RIGHT + 60, at + 4, name))
    facts = dict(provenance(report))
    origin = " · ".join(facts[name] for name in ("machine", "commit", "created") if name in facts)
    return "\n".join([*parts, _text(LEFT, HEIGHT - 12, origin, size=10), "</svg>"]) + "\n"


def lines_of(report: Report) -> dict[tuple[str, str], list[Point]]:
    """(policy, codec and owner) → (bytes, accuracy, budget), from few bytes to many."""
    held: dict[tuple[str, str], list[Point]] = {}
    columns = ("policy", "codec", "owner", "budget", "bytes", "accuracy")
    for policy, codec, owner, budget, nbytes, accuracy in zip(*(report.series[name] for name in columns), strict=True):
        way = " ".join(part for part in (codec, owner) if part != "own")
        held.setdefault((str(policy), way), []).append((float(nbytes), float(accuracy), str(budget)))
    return {name: sorted(points) for name, points in held.items()}


def _ticks(sizes: list[float]) -> list[float]:
    """Powers of two that lie between the smallest and the largest, and those two where nothing does."""
    first, last = math.ceil(math.log2(min(sizes))), math.floor(math.log2(max(sizes)))
    return [2.0**power for power in range(first, last + 1)] or [min(sizes)]


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"


def _text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'
