"""`orchard bench memory`: tables, JSON, a chart, files with conversations, and what is refused before any work."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from orchard.bench import memory as bench
from orchard.cli.main import main
from tests.bench.test_memory_tasks import QA, conversation
from tests.session.export_models import folder_of


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = folder_of(tmp_path_factory.mktemp("model") / "tiny")
    return ["bench", "memory", str(model), "--talks", "1", "--questions", "2", "--embedder", "lexical"]


def test_json_and_a_chart(asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "curves.svg"
    some = ["--tokens", "150", "--policy", "full,recent,snap", "--budget", "60,70", "--chart", str(picture), "--json"]
    assert main([*asked, *some]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["series"]["subject"] == ["full", "recent 60", "snap 60", "recent 70", "snap 70"]
    assert [claim["id"] for claim in report["claims"]] == ["peak"]
    assert {"full accuracy", "recent 60 first token", "snap 70 decode", "snap 60 bytes"} <= set(report["values"])
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_a_table_of_a_file(asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "locomo.json"
    path.write_text(json.dumps([{"sample_id": "c1", "conversation": conversation("text"), "qa": QA}]))
    some = ["--tasks", f"locomo:{path}", "--policy", "recent", "--budget", "30", "--block", "90"]
    assert main([*asked, *some, "--tokens", "200"]) == 0
    shown = capsys.readouterr()
    assert "recent" in shown.out and "holds" in shown.out and "kept by the" in shown.err
    assert main([*asked, "--tasks", f"realtalk:{path}"]) == 1
    assert "a list where an object belongs" in capsys.readouterr().err


def test_an_interrupt_shows_what_is_done(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, done = bench.measure, []

    def breaking(*given: object, **more: object) -> object:
        if done:
            raise KeyboardInterrupt
        done.append(1)
        return real(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(bench, "measure", breaking)
    assert main([*asked, "--tokens", "150", "--policy", "full,recent", "--budget", "60", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["series"]["subject"] == ["full"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "luck"], "luck"),
        (["--budget", "lots"], "lots"),
        (["--codec", "luck"], "luck"),
        (["--owner", "luck"], "luck"),
        (["--tasks", "luck"], "luck"),
        (["--budget", "3"], "sinks"),
        (["--block", "5"], "--block"),
    ],
)
def test_wrong_usage(asked: list[str], arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*asked, "--tokens", "150", "--policy", "recent", *arguments]) == 2
    assert says in capsys.readouterr().err
