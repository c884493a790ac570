"""Many requests through a small engine: what the benchmark counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchard.bench import many
from tests.tiny import tiny_gguf


def test_a_small_model_gives_every_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "SHORT", 400)
    monkeypatch.setattr(many, "PREFIX", 64)
    monkeypatch.setattr(many, "TOKENS", 6)
    monkeypatch.setattr(many, "_ids", lambda random, count, vocab: tuple(random.integers(1, 250, count).tolist()))
    path = tiny_gguf(tmp_path / "tiny.gguf")
    values = many.values(many.measure(str(path), rounds=2, quick=False))
    assert values["same tokens in a crowd"].value == 1.0
    names = {claim.metric for claim in many.CLAIMS if "10000" not in claim.metric}
    assert names <= values.keys() and "memory after 400 requests" in values
    for name in many.UNITS:
        value = values[name].value
        assert isinstance(value, float) and value > 0
