"""The curves of a Report as a PNG picture, for documents and messages: the charts of its page, on white.

Pillow draws: it brings a font of its own, so the picture is the same everywhere, and images need it anyway. Everything is drawn
at twice the size and made smaller, which is what makes lines smooth. The font has the letters of ASCII; accents are taken off
and what has no such letter becomes a question mark.
"""

from __future__ import annotations

import io
import re
import unicodedata
from typing import TYPE_CHECKING, Any

from orchard.core.errors import MissingExtra
from orchard.core.report import Report
from orchard.core.report_page_axis import Axis
from orchard.core.report_page_curves import Chart, Drawn, Line, charts
from orchard.core.report_text import label, measure, provenance

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

WIDTH = 1440
MOST = 13
"""Charts of one picture; the page has the others."""
SCALE = 2
"""How much larger everything is drawn."""
MARGIN, GAP, PAD = 36, 18, 18
HEAD, MAIN, SMALL, FOOT = 92, 470, 300, 44
INK, QUIET, RULE, CARD, PAPER = "#1d211f", "#646c67", "#e2e5e0", "#ffffff", "#fbfbf9"
COLOURS = ("#23784a", "#c2701b", "#3f66b0", "#a03c78", "#7a6a10", "#1d8391")
_SIGNS = {"−": "-", "≥": ">=", "≤": "<=", "×": "x", "–": "-", "—": "-", "’": "'", "“": '"', "”": '"'}
_POWER = re.compile("(·?)10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)")
_RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


def png(report: Report, drawn: Drawn | None = None) -> bytes:
    """The picture's file. `drawn`: the charts, where they are known already."""
    found = charts(report.series) if drawn is None else drawn
    shown = found.charts[:MOST]
    places, height = _places(shown)
    canvas = _Canvas(height)
    _head(canvas, report)
    for chart, box in zip(shown, places, strict=True):
        _chart(canvas, chart, box)
    more = len(found.charts) + len(found.left) - len(shown)
    facts = dict(provenance(report))
    origin = [facts[name] for name in ("machine", "commit", "created") if name in facts]
    origin += [f"{more} more curves in the page"] if more else []
    canvas.text(
        MARGIN, height - FOOT / 2, "  ·  ".join(origin) if shown else "no curves", 15, QUIET, width=WIDTH - 2 * MARGIN
    )
    return canvas.file()


Box = tuple[float, float, float, float]
"""Left, top, width, height."""


def _places(shown: list[Chart]) -> tuple[list[Box], int]:
    """The main chart over the whole width, the others three in a row, and how high all of it is."""
    boxes: list[Box] = []
    top, column = float(HEAD), 0
    others = sum(not chart.main for chart in shown)
    columns = max(1, min(3, others))
    width = (WIDTH - 2 * MARGIN - GAP * (columns - 1)) / columns
    for chart in shown:
        if chart.main:
            boxes.append((MARGIN, top, WIDTH - 2 * MARGIN, MAIN))
            top += MAIN + GAP
            continue
        boxes.append((MARGIN + column * (width + GAP), top, width, SMALL))
        column = (column + 1) % columns
        top += SMALL + GAP if not column else 0
    top += SMALL + GAP if column else 0
    return boxes, round(top - GAP + FOOT) if boxes else HEAD + FOOT


def _head(canvas: _Canvas, report: Report) -> None:
    canvas.text(MARGIN, 34, report.name, 30, INK, bold=True, width=WIDTH - 2 * MARGIN)
    words = [f"{label(name)} {measure(value)}" for name, value in list(report.values.items())[:5]]
    canvas.text(MARGIN, 68, "  ·  ".join([report.kind, *words]), 17, QUIET, width=WIDTH - 2 * MARGIN)


def _chart(canvas: _Canvas, chart: Chart, box: Box) -> None:
    left, top, width, height = box
    canvas.card(box)
    canvas.text(left + PAD, top + 24, chart.title, 18, INK, bold=True, width=width - 2 * PAD)
    labels = [_letters(words) for _, words in chart.y.ticks]
    gutter = max(canvas.width(words, 15) for words in (*labels, chart.x_name)) + 10
    keys = 26 if len(chart.lines) > 1 else 0
    inner = (left + PAD + gutter, top + 46 + keys, width - 2 * PAD - gutter, height - 46 - keys - 40)
    if keys:
        _keys(canvas, chart, left + PAD, top + 50, left + width - PAD)
    _grid(canvas, chart, inner)
    canvas.begin_lines(inner)
    for index, line in enumerate(chart.lines):
        _line(canvas, chart, inner, line, COLOURS[index % len(COLOURS)])
    canvas.end_lines()
    canvas.line([(inner[0], inner[1] + inner[3]), (inner[0] + inner[2], inner[1] + inner[3])], QUIET, 1)


def _keys(canvas: _Canvas, chart: Chart, left: float, middle: float, right: float) -> None:
    for index, line in enumerate(chart.lines):
        room = right - left - 26
        if room < 60:
            return
        canvas.line([(left, middle), (left + 18, middle)], COLOURS[index % len(COLOURS)], 4)
        left += 26 + canvas.text(left + 26, middle, line.name, 15, INK, width=room) + 20


def _grid(canvas: _Canvas, chart: Chart, inner: Box) -> None:
    left, top, width, height = inner
    for at, words in chart.y.ticks:
        y = top + height * (1 - chart.y.place(at))
        canvas.line([(left, y), (left + width, y)], RULE, 1)
        canvas.text(left - 10, y, words, 15, QUIET, anchor="rm")
    under = top + height + 18
    taken = left - 1e9
    for at, words in chart.x.ticks:
        half = canvas.width(_letters(words), 15) / 2
        x = min(left + width * chart.x.place(at), left + width - half)
        if x - half > taken + 12:  # a label that would touch the one before it is left out
            canvas.text(x, under, words, 15, QUIET, anchor="mm")
            taken = x + half
    canvas.text(left - 10, under, chart.x_name, 15, QUIET, anchor="rm")


def _line(canvas: _Canvas, chart: Chart, inner: Box, line: Line, colour: str) -> None:
    raw = _points(line.xs.tolist(), line.ys.tolist(), chart.x, chart.y, inner)
    if line.smooth is not None:
        canvas.line(raw, _pale(colour), 1)
        raw = _points(line.smooth[0].tolist(), line.smooth[1].tolist(), chart.x, chart.y, inner)
    canvas.line(raw, colour, 2.4)
    if line.dots:
        for x, y in raw:
            canvas.dot(x, y, 4, colour)


def _points(xs: list[float], ys: list[float], x: Axis, y: Axis, inner: Box) -> list[tuple[float, float]]:
    left, top, width, height = inner
    return [(left + width * x.place(a), top + height * (1 - y.place(b))) for a, b in zip(xs, ys, strict=True)]


def _pale(colour: str) -> str:
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - 0.3 * (255 - part)):02x}" for part in parts)


def _letters(text: str) -> str:
    """A text in the letters that the font has."""
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    text = _POWER.sub(lambda found: f"{'' if found[1] else '1'}e{found[2].translate(_RAISED)}", text)
    kept = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return "".join(c if " " <= c <= "~" or c == "·" else " " if c.isspace() else "?" for c in kept)


class _Canvas:
    """A picture that is drawn on in its own units and made smaller at the end."""

    def __init__(self, height: int) -> None:
        try:
            from PIL import Image, ImageDraw, ImageFont
        except ImportError as error:
            raise MissingExtra("a picture of curves needs Pillow", hint="pip install pillow") from error
        self._new: Any = Image.new
        self._draw_on: Any = ImageDraw.Draw
        self._font: Any = ImageFont.load_default
        self._fonts: dict[int, Any] = {}
        self._image: Image.Image = Image.new("RGB", (WIDTH * SCALE, height * SCALE), PAPER)
        self._draw: ImageDraw.ImageDraw = ImageDraw.Draw(self._image)
        self._whole: tuple[Any, Any] | None = None
        self._at = (0, 0)

    def file(self) -> bytes:
        out = io.BytesIO()
        self._image.reduce(SCALE).save(out, "PNG", compress_level=4)
        return out.getvalue()

    def card(self, box: Box) -> None:
        left, top, width, height = (part * SCALE for part in box)
        self._draw.rounded_rectangle((left, top, left + width, top + height), 8 * SCALE, CARD, RULE, SCALE)

    def begin_lines(self, box: Box) -> None:
        """Draw on a piece of the picture: what leaves it is cut off, but for the room of a dot at its sides."""
        left, top, width, height = (round(part * SCALE) for part in box)
        self._at, self._whole = (left - 8 * SCALE, top), (self._image, self._draw)
        self._image = self._image.crop((self._at[0], top, left + width + 8 * SCALE, top + height))
        self._draw = self._draw_on(self._image)

    def end_lines(self) -> None:
        assert self._whole is not None
        part, (self._image, self._draw) = self._image, self._whole
        self._image.paste(part, self._at)
        self._at, self._whole = (0, 0), None

    def line(self, points: list[tuple[float, float]], colour: str, width: float) -> None:
        if len(points) > 1:
            thick = max(1, round(width * SCALE))
            self._draw.line(
                [self._spot(*point) for point in points], colour, thick, joint="curve" if thick > 2 else None
            )

    def dot(self, x: float, y: float, radius: float, colour: str) -> None:
        a, b = self._spot(x, y)
        size = radius * SCALE
        self._draw.ellipse((a - size, b - size, a + size, b + size), colour)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int,
        colour: str,
        *,
        anchor: str = "lm",
        bold: bool = False,
        width: float = 0,
    ) -> float:
        """Words beside a point, cut to a width where one is given; how wide they became."""
        words = _letters(words)[:400]
        while width and len(words) > 1 and self.width(words, size) > width:
            words = f"{words[: max(0, int(len(words) * 0.95) - 1)]}…"
        stroke = 1 if bold else 0  # the font has one weight
        self._draw.text(self._spot(x, y), words, colour, self._sized(size), anchor, stroke_width=stroke)
        return self.width(words, size)

    def width(self, words: str, size: int) -> float:
        return float(self._sized(size).getlength(words)) / SCALE

    def _spot(self, x: float, y: float) -> tuple[float, float]:
        return x * SCALE - self._at[0], y * SCALE - self._at[1]

    def _sized(self, size: int) -> Any:
        if size not in self._fonts:
            self._fonts[size] = self._font(size * SCALE)
        return self._fonts[size]
