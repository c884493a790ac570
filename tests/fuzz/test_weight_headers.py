"""A short run of the weights fuzzer; `weights_fuzz.py` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchard.weights.gguf import GGUFFile
from tests.fuzz import weights_fuzz


def test_damaged_headers_give_typed_errors_only(tmp_path: Path) -> None:
    outcomes = weights_fuzz.run(3_000, 0, tmp_path)
    assert sum(outcomes.values()) == 3_000
    # The damage is neither so gentle that all files open nor so rough that none does.
    for kind in ("gguf", "safetensors"):
        assert outcomes[f"{kind} opened"] > 75
        assert outcomes[f"{kind} bad-file"] > 750


def test_cases_depend_on_seed_and_number_only() -> None:
    assert weights_fuzz.make_case(3, 17) == weights_fuzz.make_case(3, 17)
    assert weights_fuzz.make_case(3, 17) != weights_fuzz.make_case(4, 17)


@pytest.mark.parametrize("fault", ["untyped", "memory", "slow"])
def test_the_fuzzer_notices(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that breaks a rule is caught: an untyped error, a large allocation, a slow case."""
    sound = GGUFFile.open

    def faulty(path: Path) -> GGUFFile:
        file = sound(path)
        if faulty_from <= calls.pop():
            if fault == "untyped":
                raise KeyError("x")
            if fault == "memory":
                bytearray(200 << 20)
        return file

    faulty_from, calls = 10, list(range(1000, -1, -1))
    if fault == "slow":
        monkeypatch.setattr(weights_fuzz, "TIME_LIMIT", 0.0)
    monkeypatch.setattr(GGUFFile, "open", faulty)
    expected = {"untyped": "KeyError", "memory": "MemoryError|peak memory|allocated", "slow": "took"}[fault]
    with pytest.raises(weights_fuzz.Failure, match=expected):
        weights_fuzz.run(300, 0, tmp_path)
