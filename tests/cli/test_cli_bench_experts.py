"""`orchard bench experts`: tables, JSON, a chart, and traces that are none or another model's."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from orchard.cli.main import main
from orchard.ops.kernels.native import library, why_not
from orchard.session import experts
from orchard.studies._specmd_synthetic import synthetic
from tests.session.export_models import folder_of


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("trace") / "trace"
    synthetic(0, tokens=8, layers=3, experts=12, k=2).save(path)
    return str(path)


def test_curves_of_all_policies(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "curves.svg"
    assert main(["bench", "experts", trace, "--lookahead", "2", "--chart", str(picture), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    sizes = report["series"]["capacity"]
    for policy in ("least-stale", "lfu-ahead", "lru", "lru-touch", "lfu", "fifo", "gate-score", "belady"):
        assert len(report["series"][f"{policy}: hit rate"]) == len(sizes)
    assert [claim["id"] for claim in report["claims"]] == ["oracle"]
    lines = [element for element in ElementTree.parse(picture).iter() if element.tag.endswith("polyline")]
    assert len(lines) == 16
    assert main(["bench", "experts", trace, "--capacity", "4", "--policy", "lru"]) == 0
    assert "hit rate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--model", "olmoe"], 1, "'synthetic', not of 'olmoe'"),
        (["--record"], 2, "whose choices"),
        (["--policy", "luck"], 2, "luck"),
        (["--prefetch", "luck"], 2, "luck"),
        (["--capacity", "1"], 1, "does not hold"),
    ],
)
def test_wrong_usage(
    trace: str, arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "experts", trace, *arguments]) == code
    assert says in capsys.readouterr().err


@pytest.mark.skipif(library() is None, reason=why_not())
def test_recording_a_real_file(
    tmp_path: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experts, "_make_apart", experts.make)
    model, path = str(folder_of(tmp_path / "tiny-moe", "qwen3-moe-all")), str(tmp_path / "trace")
    asked = ["bench", "experts", path, "--model", model, "--policy", "lru", "--policy", "belady", "--json"]
    assert main([*asked, "--record", "--tokens", "20"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(asked) == 0  # the same trace, read again
    assert json.loads(capsys.readouterr().out)["series"] == first["series"]
