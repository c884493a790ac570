"""Reports: verdicts follow from numbers, files survive a round trip, hostile text stays text."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core import machine, report_text
from orchard.core.errors import BadFile, ConfigError
from orchard.core.report import VERSION, Bound, Claim, Report, Value

HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=y> | [a](javascript:b) \x1b[31m"

numbers = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
scalars = numbers | st.booleans() | st.text(max_size=20) | st.none()
measured = st.builds(
    Value,
    scalars,
    unit=st.text(max_size=5),
    low=st.none() | numbers,
    high=st.none() | numbers,
    note=st.text(max_size=20),
)
numeric_bounds = st.builds(Bound, st.sampled_from(["<=", "<", ">=", ">", "==", "!="]), numbers)
bounds = numeric_bounds | st.builds(Bound, st.sampled_from(["==", "!="]), st.text(max_size=9))
claims = st.lists(
    st.builds(Claim, st.uuids().map(str), st.text(max_size=30), st.sampled_from(["a", "b", "a.low", "none"]), bounds),
    max_size=4,
)


def example(**changes: Any) -> Report:
    fields: dict[str, Any] = {
        "values": {"speed": Value(12.5, "ms", 11.0, 14.0, "median"), "size": 3},
        "claims": [
            Claim("small", "It is small", "size", Bound("<=", 4)),
            Claim("fast", "It is fast", "speed", Bound("<", 1)),
        ],
        "seed": 7,
        "wall_time": 1.25,
        "series": {"loss": [[1, 2.0], [2, 1.5]], "plain": [3, 2, 1]},
        "notes": ["first"],
        "config": {"scale": "small"},
    }
    return Report.record("study", "example", **{**fields, **changes})


# Verdicts -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "holding", "failing"),
    [
        (Bound("<=", 10), 10, 10.1),
        (Bound("<", 10), 9.9, 10),
        (Bound(">=", 20), 20, 19),
        (Bound(">", 0), 1e-9, 0),
        (Bound("==", 0), 0, -1),
        (Bound("!=", 0), 1, 0),
        (Bound("==", "O(1)"), "O(1)", "O(N)"),
        (Bound("==", True), True, False),
    ],
)
def test_bounds(bound: Bound, holding: Any, failing: Any) -> None:
    assert bound.holds(holding) and not bound.holds(failing)
    assert not bound.holds(None)
    assert Bound.parse(str(bound)) == bound


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "text"])
def test_what_is_no_number_passes_no_bound(value: Any) -> None:
    verdict = Claim("x", "", "x", Bound("!=", 3)).judge({"x": Value(value)})
    assert not verdict.passed


def test_a_claim_without_its_value_fails_and_says_so() -> None:
    verdict = Claim("x", "", "speed", Bound(">", 0)).judge({})
    assert not verdict.passed and "speed" in verdict.reason


def test_a_claim_can_be_about_the_end_of_an_interval() -> None:
    values = {"speed": Value(3.0, low=1.0, high=5.0)}
    assert Claim("x", "", "speed", Bound(">=", 2)).judge(values).passed
    assert not Claim("x", "", "speed.low", Bound(">=", 2)).judge(values).passed


def test_one_failing_claim_fails_the_report() -> None:
    report = example()
    assert [claim.passed for claim in report.claims] == [True, False] and not report.passed
    assert example(claims=[]).passed
    with pytest.raises(AttributeError):
        report.claims[1].passed = True  # type: ignore[misc]


@pytest.mark.parametrize("make", [lambda: Bound("~", 1), lambda: Bound("<", math.nan), lambda: Bound("<", "x")])
def test_bounds_that_say_nothing_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_two_claims_with_one_id_are_refused() -> None:
    with pytest.raises(ConfigError, match="share the ids"):
        example(claims=[Claim("a", "", "size", Bound(">", 0))] * 2)


# Files --------------------------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.sampled_from(["a", "b"]), measured),
    claims,
    st.lists(st.text(max_size=20)),
    st.none() | st.integers(),
)
def test_round_trip(values: dict[str, Value], stated: list[Claim], notes: list[str], seed: int | None) -> None:
    report = example(values=values, claims=stated, notes=notes, seed=seed)
    again = Report.from_dict(json.loads(report.to_json()))
    assert again == report and again.to_json() == report.to_json()


def test_save_and_load(tmp_path: Path) -> None:
    report = example(notes=["half a pair: \ud800"])
    path = report.save(tmp_path / "deep" / "report.json")
    assert Report.load(path) == report
    assert [p.name for p in path.parent.iterdir()] == ["report.json"]


def test_the_file_has_what_readers_rely_on() -> None:
    record = example().to_dict()
    needed = "version kind name created command commit seed hardware values claims"
    assert record.keys() >= set(needed.split())
    assert list(record) == list(example().to_dict())
    assert all(claim.keys() >= {"id", "statement", "value", "bound", "passed"} for claim in record["claims"])


def test_numbers_that_json_lacks_become_null_with_a_note() -> None:
    report = example(values={"size": math.nan, "speed": Value(1.0, high=math.inf)}, series={"loss": [1.0, -math.inf]})
    assert report["size"] is None and "nan" in report.values["size"].note
    assert report.values["speed"].high is None and "inf" in report.values["speed"].note
    assert report.series["loss"] == [1.0, None] and "series.loss[1] was -inf" in report.notes
    assert Report.from_dict(json.loads(report.to_json())) == report


def test_scalars_of_torch_are_taken_as_numbers() -> None:
    torch = pytest.importorskip("torch")
    assert example(values={"size": torch.tensor(3)}).to_dict()["values"]["size"] == {"value": 3}


def broken() -> dict[str, Any]:
    good = example().to_dict()
    claim = good["claims"][0]
    return {
        "newer": {**good, "version": VERSION + 1},
        "version 0": {**good, "version": 0},
        "version true": {**good, "version": True},
        "no claims": {name: value for name, value in good.items() if name != "claims"},
        "claims object": {**good, "claims": {}},
        "claim text": {**good, "claims": ["x"]},
        "claim without bound": {**good, "claims": [{k: v for k, v in claim.items() if k != "bound"}]},
        "verdict edited": {**good, "claims": [{**claim, "passed": False}]},
        "bound odd": {**good, "claims": [{**claim, "bound": "<= ["}]},
        "bound list": {**good, "claims": [{**claim, "bound": "<= [1]"}]},
        "value list": {**good, "values": {"size": [3]}},
        "unit number": {**good, "values": {"size": {"value": 3, "unit": 4}}},
        "seed text": {**good, "seed": "7"},
        "notes numbers": {**good, "notes": [1]},
        "series text": {**good, "series": {"loss": "x"}},
        "unknown": {**good, "colour": "red"},
        "list": [good],
        "number": 3,
        "null": None,
    }


@pytest.mark.parametrize("name", list(broken()))
def test_broken_reports_are_refused_with_a_hint(name: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(broken()[name]))
    with pytest.raises(BadFile) as caught:
        Report.load(path)
    assert caught.value.hint and "report.json" in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff\xfe", b'{"version": NaN}', b"[" * 100_000, b'{"version": ' + b"9" * 5000 + b"}"]
)
def test_files_that_are_no_json_are_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(data)
    with pytest.raises(BadFile):
        Report.load(path)
    with pytest.raises(BadFile):
        Report.load(tmp_path / "missing.json")
    with pytest.raises(BadFile):
        Report.load(tmp_path)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda x: st.lists(x) | st.dictionaries(st.sampled_from(["version", "values", "claims", "kind", "x"]), x),
    )
)
def test_any_other_data_is_refused_or_read(data: Any) -> None:
    merged = {**example().to_dict(), **data} if isinstance(data, dict) else data
    try:
        Report.from_dict(merged)
    except BadFile as error:
        assert error.hint


# Rendering ----------------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def hostile() -> Report:
    return example(
        values={HOSTILE: Value(HOSTILE, HOSTILE, note=HOSTILE), "size": 3},
        claims=[Claim(HOSTILE, HOSTILE, "size", Bound("==", HOSTILE))],
        reasons={HOSTILE: HOSTILE},
        notes=[HOSTILE],
        series={HOSTILE: [1, 2]},
    )


def test_html_keeps_hostile_text_as_text() -> None:
    tags = Tags()
    tags.feed(hostile()._repr_html_())
    assert {tag for tag, _ in tags.found}.isdisjoint({"script", "img", "a", "iframe", "link"})
    assert {name for _, attributes in tags.found for name in attributes} <= {
        *("class", "viewbox", "width", "height", "role", "points", "fill", "stroke", "stroke-width"),
    }


def test_html_shows_each_claim_and_its_verdict() -> None:
    text = example()._repr_html_()
    assert "It is small" in text and ">holds<" in text and ">fails<" in text and "<polyline" in text
    assert "http" not in text


def test_card_keeps_hostile_text_inside_its_cell() -> None:
    lines = hostile().card().splitlines()
    assert not any("<script" in line or "<img" in line for line in lines)
    rows = [line for line in lines if line.startswith("|") and "alert" in line]
    assert rows and all(row.count("|") - row.count("\\|") in (4, 5) for row in rows)


def test_card_is_a_page_with_a_docstring_and_a_part_without() -> None:
    page = example().card("Trees that grow.\n\nAbout them.")
    assert page.startswith("# Trees that grow\n\nAbout them.\n\n## Last run\n")
    part = example().card()
    assert part.startswith("**1 of 2 claims hold.**") and "| It is fast | 12.5 | &lt; 1 | **no** |" in part


def test_table_fits_a_terminal_of_eighty_columns() -> None:
    from rich.console import Console

    for report in (example(), hostile(), example(values={}, claims=[], notes=[], series={})):
        out = io.StringIO()
        Console(file=out, width=80).print(report.table())
        assert all(len(line) <= 80 for line in out.getvalue().splitlines())
    assert "1 of 2 claims hold" in _printed(example()) and "FAILS" in _printed(example())
    long = Value(1.0, low=0.5, high=2.0, note=" ".join(f"word{i}" for i in range(30)))
    assert all(f"word{i}" in _printed(example(values={"n" * 25: long})).split() for i in range(30))


def _printed(report: Report) -> str:
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=80).print(report.table())
    return out.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234567, "1,234,567"), (0.123456, "0.1235"), (True, "yes"), (None, "none"), (56789.4, "56,789")],
)
def test_numbers_are_readable(value: Any, text: str) -> None:
    assert report_text.show(value) == text


# Where it came from -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["/home/ann/.venv/bin/python3.11", "/home/ann/.venv/bin/orchard", "study", "axlearn"],
            "orchard study axlearn",
        ),
        (["/usr/bin/python3", "-c", "import orchard"], "python -c 'import orchard'"),
        (["python", "-m", "orchard.cli.main", "--model=/data/ann/m.gguf"], "python -m orchard.cli.main --model=m.gguf"),
        (["python", "bench/startup.py"], "python bench/startup.py"),
        (["python", "-c", "load('/home/ann/m.gguf')"], "python -c \"load('m.gguf')\""),
        (["orchard", "pull", "https://host/a/b"], "orchard pull https://host/a/b"),
        (["orchard", "serve", "--api-key", "s3cret", "--token=s3cret"], "orchard serve --api-key … --token=…"),
        (["orchard", "bench", "--tokens", "10", "--max-tokens=64"], "orchard bench --tokens 10 --max-tokens=64"),
        (["C:\\Python\\python.exe", "C:\\Users\\ann\\x.py"], "python x.py"),
    ],
)
def test_commands_hold_no_path_and_no_secret(words: list[str], text: str) -> None:
    assert machine.command(words) == text


def test_hardware_names_the_machine_but_not_its_owner() -> None:
    import platform

    facts = machine.hardware()
    assert facts["cores"] >= 1 and facts["cpu"] and facts["python"].startswith("3.")
    text = json.dumps(facts)
    assert platform.node() not in text or len(platform.node()) < 4
    assert str(Path.home()) not in text


def test_commit_is_that_of_the_checkout_and_tells_changes(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    assert machine.commit(tmp_path) is None
    git("init", "-q")
    assert machine.commit(tmp_path) is None
    (tmp_path / "part.py").write_text("x = 1\n")
    git("add", "-A")
    git("commit", "-qm", "first")
    clean = machine.commit(tmp_path)
    assert clean is not None and len(clean) == 12
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "x.json").write_text("{}")
    assert machine.commit(tmp_path) == clean
    (tmp_path / "part.py").write_text("x = 2\n")
    assert machine.commit(tmp_path) == f"{clean}+changes"
    inside = tmp_path / "site-packages"
    inside.mkdir()
    assert machine.commit(inside) is None


def test_a_report_needs_no_torch_and_no_rich() -> None:
    program = (
        "import sys; from orchard.core.report import Report\n"
        "Report.record('bench', 'x', values={'a': 1})._repr_html_()\n"
        "print(sorted({'torch', 'numpy', 'rich', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
