"""The picture of a Report's curves: a PNG of the right size that shows them, whatever the numbers are."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from orchard.core.errors import MissingExtra
from orchard.core.report import Report, Value
from orchard.core.report_png import COLOURS, WIDTH, _letters, png


def report(series: dict[str, Any], name: str = "example") -> Report:
    return Report.record("train", name, values={"loss": Value(1.5, note="last"), "steps": 3}, series=series)


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    assert image.format == "PNG" and image.size[0] == WIDTH
    return image.convert("RGB")


def rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def test_curves_are_there_in_their_colours_with_soft_edges() -> None:
    run = {"step": [1, 2, 3], "loss": [3.0, 2.0, 1.0], "held out, x": [[1, 3.0], [3, 2.0]], "norm": [1.0, 2.0, 1.0]}
    image = opened(png(report(run)))
    found = {colour: count for count, colour in image.getcolors(1 << 20)}
    assert found[rgb(COLOURS[0])] > 1000 and found[rgb(COLOURS[1])] > 500
    assert rgb(COLOURS[2]) not in found, "there are two curves in one chart"
    assert len(found) > 60, "lines and letters have edges of many shades"


def test_a_fall_is_drawn_as_a_fall() -> None:
    image = opened(png(report({"loss": [10.0, 0.0]})))
    wanted = rgb(COLOURS[0])
    pixels = image.load()
    assert pixels is not None
    rows = [(x, y) for x in range(0, WIDTH, 7) for y in range(image.size[1]) if pixels[x, y] == wanted]
    left = [y for x, y in rows if x < WIDTH * 0.25]
    right = [y for x, y in rows if x > WIDTH * 0.75]
    assert left and right and max(left) < min(right)


def test_pictures_grow_with_their_charts_and_stop_growing() -> None:
    heights = [opened(png(report({f"c{i}": [1.0, 2.0] for i in range(n)}))).size[1] for n in (0, 1, 3, 4, 13, 100)]
    assert heights[0] < heights[1] == heights[2] < heights[3] < heights[4] == heights[5]


def test_the_same_report_is_the_same_picture() -> None:
    one = report({"loss": [1.0, 2.0, 3.0]})
    assert png(one) == png(one)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2·10⁻⁷", "2e-7"),
        ("−4", "-4"),
        ("café", "cafe"),
        ("木", "?"),
        ("a\nb\x00", "a b?"),
        ("x · …", "x · ..."),
        ("10⁶", "1e6"),
    ],
)
def test_texts_in_the_letters_of_the_font(text: str, shown: str) -> None:
    assert _letters(text) == shown


odd = st.none() | st.floats() | st.integers() | st.text(max_size=2)


@settings(max_examples=15)  # a picture is slow to make
@given(st.lists(odd, max_size=60), st.text(max_size=30))
def test_odd_numbers_and_names_make_a_picture(curve: list[Any], name: str) -> None:
    opened(png(report({"loss": curve, name: curve}, name=name)))


@pytest.mark.parametrize("curve", [[], [3.0], [0.0] * 50, [1e300, -1e300] * 50, [None, None]])
def test_empty_single_constant_and_extreme_curves(curve: list[Any]) -> None:
    opened(png(report({"loss": curve})))


def test_without_pillow_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra) as caught:
        png(report({"loss": [1.0]}))
    assert "pillow" in caught.value.hint
