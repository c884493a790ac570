"""A benchmark of a tiny model whose workers are stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchard.bench import engine, peers, spawn
from orchard.bench.peers import Found
from tests.tiny import tiny_gguf

HERE = Path(__file__).resolve().parent


@pytest.fixture
def tiny(tmp_path: Path, empty_home: Path) -> Path:
    return tiny_gguf(tmp_path / "tiny.gguf", **{"llama.context_length": 8192})


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, Found]:
    """Stand-ins for all workers; both peers are said to be in this environment."""
    monkeypatch.setattr(spawn, "RUN", HERE / "fake_worker.py")
    for name in list(peers.START):
        monkeypatch.setitem(peers.START, name, "print(1)")
    here = {name: Found(python=sys.executable, version="1") for name in peers.PACKAGES}
    monkeypatch.setattr(peers, "find", lambda asked: here)
    return here


@pytest.fixture
def run(tiny: Path, found: dict[str, Found]) -> Callable[..., engine.Report]:
    def start(**options: object) -> engine.Report:
        return engine.bench(engine.Options(model=str(tiny), **options))  # type: ignore[arg-type]

    return start
