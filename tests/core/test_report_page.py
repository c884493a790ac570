"""The page of a Report: whole, small, self-contained, and text in it stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.report import Bound, Claim, Report, Value
from orchard.core.report_page import MOST_NOTES, MOST_ROWS, page
from orchard.core.report_page_tree import MOST_NODES, tree_html

HOSTILE = "</script></style><script>alert(1)</script>\"'&<img src=x onerror=y>\x1b[31m \ud800"
TAGS = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "script",
        "header",
        "h1",
        "h2",
        "small",
        "div",
        "section",
    ),
    *(
        "span",
        "b",
        "figure",
        "figcaption",
        "svg",
        "path",
        "i",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "ul",
        "li",
        "p",
    ),
    *("details", "summary", "em"),
}
ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "class", "style", "tabindex", "data-chart", "viewbox"),
    *("preserveaspectratio", "role", "aria-label", "d", "open"),
}
RESULTS = sorted((Path(__file__).parents[2] / "results").glob("*/*.json"))


class Read(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "path"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def run(count: int = 60, **changes: Any) -> Report:
    curve = [5.0 / (1 + i) + (i * 7919 % 13) / 50 for i in range(count)]
    fields: dict[str, Any] = {
        "values": {"loss": Value(curve[-1] if curve else None, note="of the last step"), "steps": count},
        "series": {
            "step": list(range(1, count + 1)),
            "loss": curve,
            "norm": curve,
            "held out, x": [[1, 2.0], [9, 1.0]],
        },
        "config": {"kind": "a.b:Trainer", "steps": count},
        "notes": ["first"],
        "wall_time": 75.0,
    }
    return Report.record("train", "example", **{**fields, **changes})


def test_it_has_all_parts_and_every_tag_is_closed() -> None:
    text = page(run(claims=[Claim("a", "It learns", "loss", Bound("<", 100))]))
    read = Read(text)
    assert not read.open and set(read.tags) <= TAGS and {name for name, _ in read.attributes} <= ATTRIBUTES
    said = " ".join(read.texts)
    for words in ("example", "It learns", "holds", "of the last step", "first", "steps", "1 min 15 s"):
        assert words in said
    assert read.tags.count("figure") == 2 and "Where this comes from" in said


def test_it_loads_nothing_and_allows_only_its_own_script() -> None:
    text = page(run())
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\bsrc=|\bhref=", text)
    allowed = re.search(r"script-src &#x27;sha256-([^&]+)&#x27;", text)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert allowed is not None
    assert base64.b64decode(allowed[1]) == hashlib.sha256(script.encode()).digest()
    assert "default-src &#x27;none&#x27;" in text and "innerHTML" not in script and "eval" not in script


def hostile() -> Report:
    return run(
        values={HOSTILE: Value(HOSTILE, HOSTILE, note=HOSTILE), "size": 3},
        claims=[Claim(HOSTILE, HOSTILE, "size", Bound("==", HOSTILE))],
        reasons={HOSTILE: HOSTILE},
        notes=[HOSTILE],
        series={
            HOSTILE: [1, 2],
            f"words{HOSTILE}": [HOSTILE],
            "rows": [[HOSTILE, 1]],
            f"held out, {HOSTILE}": [[1, 2]],
        },
        config={"kind": HOSTILE, HOSTILE: HOSTILE, "deep": {"kind": HOSTILE, "list": [HOSTILE, {HOSTILE: [HOSTILE]}]}},
    )


def test_hostile_text_stays_text() -> None:
    report = hostile()
    report.name = report.kind = report.command = report.created = HOSTILE
    text = page(report)
    read = Read(text)
    assert set(read.tags) <= TAGS and {name for name, _ in read.attributes} <= ATTRIBUTES
    assert read.tags.count("script") == 1 and not read.open
    assert not any(
        "alert" in (value or "") for name, value in read.attributes if name not in ("data-chart", "aria-label")
    )
    assert "\x1b" not in text and text.encode()


@settings(max_examples=40)
@given(st.text(max_size=40))
def test_any_name_is_a_name(name: str) -> None:
    read = Read(page(run(0, series={name: [1.0, 2.0], "loss": [2.0]}, config={name: {name: [name]}}, notes=[name])))
    assert set(read.tags) <= TAGS and {key for key, _ in read.attributes} <= ATTRIBUTES and not read.open


odd = st.none() | st.floats() | st.integers() | st.just(10**400) | st.text(max_size=2)


@settings(max_examples=60)
@given(st.lists(odd, max_size=40), st.lists(st.lists(odd, min_size=2, max_size=2), max_size=10))
def test_odd_numbers_are_drawn_or_left_out(curve: list[Any], held_out: list[Any]) -> None:
    text = page(run(0, series={"loss": curve, "held out, x": held_out, "step": list(range(len(curve)))}))
    for name, value in Read(text).attributes:
        if name == "data-chart":
            assert value is not None
            json.loads(value, parse_constant=lambda odd: pytest.fail(odd))
        if name == "d":
            assert value is not None and re.fullmatch(r"[MLHh\d .-]*", value)


@pytest.mark.parametrize(
    "curve", [[], [3.0], [2.0] * 50, [0.0] * 50, [1e300, -1e300] * 50, [None] * 9, [1e-320, 2e-320]]
)
def test_empty_single_constant_and_extreme_curves(curve: list[Any]) -> None:
    read = Read(page(run(0, series={"loss": curve})))
    assert not read.open and read.tags.count("figure") == int(any(value is not None for value in curve))


def test_a_hundred_thousand_steps_make_a_small_page() -> None:
    report = run(100_000)
    report.series |= dict.fromkeys(("rate", "tokens/s", "mfu", "z", "correct"), report.series["loss"])
    text = page(report)
    assert len(text.encode()) < 1_000_000
    shown = [json.loads(value or "") for name, value in Read(text).attributes if name == "data-chart"]
    assert all(len(xs) <= 500 and xs[-1] in (100_000, 9) for chart in shown for _, xs, _, _ in chart[3])


def test_what_is_too_long_is_shortened_and_said() -> None:
    report = run(
        notes=[f"note {i}" for i in range(MOST_NOTES + 7)],
        values={f"v{i}": i for i in range(MOST_ROWS + 9)},
        series={"lines": ["x" * 10_000] * 3000, **{f"c{i}": [1.0, 2.0] for i in range(300)}},
        config={f"n{i}": {"kind": "a:B", "x": i} for i in range(MOST_NODES)},
    )
    text = page(report)
    assert len(text.encode()) < 2_000_000
    for words in ("and 7 more, in the JSON", "and 9 more, in the JSON", "Not drawn: c48"):
        assert words in text


def test_layers_of_one_kind_are_shown_once() -> None:
    layers = [
        {"kind": "a:Block", "layer": i, "mixer": {"kind": "a:Attention", "layer": i, "heads": 4}} for i in range(30)
    ]
    layers[29]["mixer"] = {"kind": "a:Other", "layer": 29}
    text = tree_html({"kind": "a:Decoder", "dim": {"required": True}, "layers": layers})
    assert "0 to 28" in text and text.count("heads") == 1 and "Other" in text and "dim" not in text


def test_deep_and_odd_configs() -> None:
    deep: Any = 1
    for _ in range(500):
        deep = {"x": deep}
    Read(tree_html(deep))
    assert tree_html({}) == "" and "null" in tree_html({"a": None}) and "[1, 2]" in tree_html({"a": [1, 2]})


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_reports_of_this_repository_have_pages(path: Path) -> None:
    report = Report.load(path)
    text = page(report)
    read = Read(text)
    assert not read.open and set(read.tags) <= TAGS and len(text) < 1_000_000
    assert text.count('class="badge') == len(report.claims) + bool(report.claims)
