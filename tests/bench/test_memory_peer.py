"""The benchmark beside kvpress, whose answers are made up here: what it is asked, what is compared, what is said without it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from bench import memory_peer
from orchard.core.errors import OrchardError
from tests.session.export_models import folder_of


def options(model: str, **more: Any) -> argparse.Namespace:
    usual = {"model": model, "tokens": 200, "talks": 2, "questions": 2, "times": 2.0, "sinks": 4, "decode": 2}
    return argparse.Namespace(**{**usual, "threads": 1, "seed": 0, "python": "python", "limit": 9.0, **more})


def test_both_are_asked_the_same_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[dict[str, Any]] = []

    def answered(python: str, module: str, job: dict[str, Any], *, limit: float) -> dict[str, Any]:
        asked = job["options"]
        jobs.append(asked)
        count, ways = len(asked["talk"]["questions"]), ("plain", "rerotated")
        one = {
            "right": [False] * count,
            "first": [1.0],
            "decode": [0.01],
            "hear": 2.0,
            "bytes": 5,
            "kept": asked["budget"],
        }
        found = {f"{name} {way}": one for name in memory_peer.SHARED for way in ways}
        found["full plain"] = {**one, "kept": len(asked["talk"]["tokens"])}
        # Turned keys remember more here, and only in one method.
        found["snap rerotated"] = {**one, "right": [True] * count, "decode": [1e9]}
        return {"result": {"dtype": "float32", "found": found, "version": "0", "transformers": "0"}}

    monkeypatch.setattr(memory_peer.spawn, "ask", answered)
    monkeypatch.setattr(memory_peer, "model_folder", lambda model: tmp_path)
    model = str(folder_of(tmp_path / "tiny"))
    report = memory_peer.bench(options(model))
    assert [job["dtype"] for job in jobs] == ["auto", "float32"]
    for job in jobs:
        assert job["budget"] == round(len(job["talk"]["tokens"]) / 2) and len(job["talk"]["questions"]) == 2
    assert jobs[0]["talk"]["tokens"] != jobs[1]["talk"]["tokens"]
    for name in ("orchard full", "orchard snap", "orchard in blocks keydiff", "kvpress recent plain"):
        assert f"{name} accuracy" in report.values and report.values[f"{name} accuracy"].note == "of 4 questions"
    mine = report["orchard snap accuracy"]
    assert isinstance(mine, float) and report["snap accuracy margin"] == mine - 1.0
    assert report["least accuracy margin"] == min(report[f"{name} accuracy margin"] for name in memory_peer.SHARED)  # type: ignore[type-var]
    assert report["recent decode ratio"] > 2 > report["snap decode ratio"] == report["least decode ratio"]  # type: ignore[operator]
    verdicts = {claim.id: claim.passed for claim in report.claims}
    assert verdicts == {"accuracy": mine == 1.0, "decode": False}
    monkeypatch.setattr(memory_peer.spawn, "ask", lambda *given, **more: _other_budget(answered(*given, **more)))
    with pytest.raises(OrchardError, match="kept"):
        memory_peer.bench(options(model, talks=1))


def _other_budget(answer: dict[str, Any]) -> dict[str, Any]:
    answer["result"]["found"]["recent plain"] = {**answer["result"]["found"]["recent plain"], "kept": 1}
    return answer


def test_without_kvpress_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_peer, "ROOT", tmp_path)
    monkeypatch.setattr(memory_peer, "PYTHON", tmp_path / "bin" / "python")
    monkeypatch.setattr(memory_peer, "TARGET", tmp_path / "report.json")
    assert memory_peer.main([]) == 1
    assert "make .venv-peers/kvpress/.ready" in capsys.readouterr().err
