"""The harness: finding studies without importing them, running one, and saying clearly what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import orchard
from orchard.core.errors import ConfigError, UsageError
from orchard.core.report import Report
from orchard.studies import available, card, harness, results_folder, study

GOOD = '''"""Pears are heavier than plums.

About pears."""
from orchard.core.report import Bound, Claim
from orchard.studies import Outcome
CLAIMS = [Claim("heavier", "Pears are heavier", "ratio", Bound(">", 1), baseline="plum")]
def run(scale, seed):
    return Outcome(values={"ratio": 2.0 + seed, "plum": 40}, notes=[scale], series={"w": [1, 2]}, reasons={"heavier": "sugar"})
'''
PLAIN = '''"""One argument, a plain dictionary."""
from orchard.core.report import Bound, Claim
CLAIMS = [Claim("never", "It never holds", "x", Bound(">", 1))]
def run(scale):
    return {"x": 1}
'''
BROKEN = '''"""Breaks."""
CLAIMS = []
def run(scale):
    raise ZeroDivisionError("inside")
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of studies of this test's own."""
    sources = {
        "heavy_pears": GOOD,
        "plain": PLAIN,
        "breaks": BROKEN,
        "lawless": '"""No claims."""\ndef run(scale): return {}\n',
    }
    for name, text in {**sources, "_helper": "raise RuntimeError", "harness": '"""Not one."""'}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(harness, "FOLDER", tmp_path)
    monkeypatch.setattr(sys.modules["orchard.studies"], "__path__", [str(tmp_path)])
    for name in sources:
        monkeypatch.delitem(sys.modules, f"orchard.studies.{name}", raising=False)
    return tmp_path


def test_studies_are_listed_by_slug_without_importing_them(folder: Path) -> None:
    (folder / "explodes.py").write_text('"""Would explode."""\nraise RuntimeError\n')
    found = available()
    assert list(found) == ["breaks", "explodes", "heavy-pears", "lawless", "plain"]
    assert found["heavy-pears"] == "Pears are heavier than plums."


def test_a_study_becomes_a_report(folder: Path) -> None:
    report = study("heavy-pears", seed=3)
    assert report.passed and report.name == "heavy-pears" and report.seed == 3 and report["ratio"] == 5.0
    assert report.notes == ["small"] and report.series == {"w": [1, 2]} and report.config == {"scale": "small"}
    assert report.claims[0].baseline == 40 and report.claims[0].reason == "sugar"
    assert report.wall_time is not None
    assert study("heavy-pears", "full").notes == ["full"]


def test_a_claim_that_fails_is_reported_not_raised(folder: Path) -> None:
    report = study("plain")
    assert not report.passed and report.claims[0].value == 1


def test_saving(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study("plain", save=tmp_path / "x.json")
    assert Report.load(tmp_path / "x.json").name == "plain"
    study("heavy-pears", save=str(tmp_path / "into"))
    assert (tmp_path / "into" / "heavy-pears.json").exists()
    monkeypatch.setattr(harness, "CHECKOUT", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    report = study("heavy-pears", save=True)
    assert Report.load(tmp_path / "results" / "studies" / "heavy-pears.json") == report
    assert card("heavy-pears").startswith("# Pears are heavier than plums\n\nAbout pears.\n\n## Last run\n\n**1 of 1")
    assert "No Report yet" in card("plain")


def test_saving_outside_a_checkout_is_refused_before_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "CHECKOUT", tmp_path)
    with pytest.raises(UsageError, match="checkout"):
        study("breaks", save=True)


@pytest.mark.parametrize("slug", ["havy-pears", "heavy_pears", "HEAVY-PEARS"])
def test_an_unknown_study_names_the_nearest(folder: Path, slug: str) -> None:
    with pytest.raises(UsageError) as caught:
        study(slug)
    assert "heavy-pears" in caught.value.hint


@pytest.mark.parametrize("slug", ["", "../core/report", "_helper", "harness", "orchard.core"])
def test_what_is_no_study_is_refused(folder: Path, slug: str) -> None:
    with pytest.raises(UsageError):
        study(slug)


@pytest.mark.parametrize("options", [{"scale": "huge"}, {"scale": ""}, {"seed": -1}, {"seed": 1.5}, {"seed": True}])
def test_wrong_options_are_refused(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        study("plain", **options)
    assert caught.value.hint


def test_an_error_inside_a_study_is_not_swallowed(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="inside"):
        study("breaks")


def test_a_study_without_claims_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="CLAIMS"):
        study("lawless")


def test_the_top_level_name_is_the_same_function() -> None:
    assert orchard.study is study
    assert results_folder() == Path(__file__).resolve().parents[2] / "results" / "studies"


def test_listing_studies_loads_no_torch() -> None:
    program = "import sys; from orchard.studies import available; assert available(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
