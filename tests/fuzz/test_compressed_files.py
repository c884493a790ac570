"""A short run of the fuzzer of compressed files; `compressed_fuzz.py` is the long one."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz import compressed_fuzz
from tests.fuzz.compressed_cases import make_compressed_case


def test_hostile_content_gives_typed_errors_only(empty_home: Path, tmp_path: Path) -> None:
    outcomes = compressed_fuzz.run(100, 0, tmp_path)
    assert sum(outcomes.values()) == 100
    # The damage is neither so gentle that all models load nor so rough that none does, and it reaches every stage.
    assert outcomes["loaded, finite"] > 10
    assert outcomes["refused by open: bad-file"] > 10 and outcomes["refused by config: bad-file"] > 40


def test_cases_depend_on_seed_and_number_only() -> None:
    assert make_compressed_case(3, 17) == make_compressed_case(3, 17)
    assert make_compressed_case(3, 17) != make_compressed_case(4, 17)
