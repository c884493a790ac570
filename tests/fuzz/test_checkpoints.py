"""A short run of the checkpoint fuzzer; `checkpoint_fuzz.py` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchard.models.zoo import families
from orchard.weights import load
from tests.fuzz import checkpoint_fuzz
from tests.fuzz.checkpoint_cases import make_case, make_samples

ONE = {"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4}


def test_hostile_content_gives_typed_errors_only(empty_home: Path, tmp_path: Path) -> None:
    outcomes = checkpoint_fuzz.run(400, 0, tmp_path)
    assert sum(outcomes.values()) == 400
    # The damage is neither so gentle that all models load nor so rough that none does, and it reaches every stage.
    for kind in ("gguf", "folder"):
        found = {name.removeprefix(f"{kind} "): many for name, many in outcomes.items() if name.startswith(kind)}
        assert found["loaded, finite"] > 20
        assert sum(many for name, many in found.items() if name.startswith("refused")) > 60
        assert {name.split(":")[0] for name in found} >= {f"refused by {stage}" for stage in ("open", "config", "load")}


def test_samples_cover_every_family() -> None:
    samples = make_samples()
    folders = {sample.config["model_type"] for sample in samples if sample.kind == "folder"}
    files = {sample.config["general.architecture"] for sample in samples if sample.kind == "gguf"}
    assert folders == families().keys()
    assert files == {family.gguf for family in families().values() if family.gguf}


def test_cases_depend_on_seed_and_number_only() -> None:
    samples = make_samples()
    assert make_case(samples, 3, 17) == make_case(samples, 3, 17)
    assert make_case(samples, 3, 17) != make_case(samples, 4, 17)


@pytest.mark.parametrize("fault", ["untyped", "memory", "slow", "net"])
def test_the_fuzzer_notices(fault: str, empty_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that breaks a rule is caught: an untyped error, a large allocation, a slow case, a check that is missing."""
    sound, samples = load.refuse_misfits, len(make_samples())
    calls = 0

    def faulty(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls > samples + 20:
            if fault == "untyped":
                raise KeyError("x")
            if fault == "memory":
                bytearray(200 << 20)
            if fault == "net":
                families()["llama"].tree({**ONE, "rope_parameters": Strange()})
        sound(*arguments)  # type: ignore[arg-type]

    if fault == "slow":
        monkeypatch.setattr(checkpoint_fuzz, "TIME_LIMIT", 0.0)
    monkeypatch.setattr(load, "refuse_misfits", faulty)
    expected = {
        "untyped": "KeyError",
        "memory": "MemoryError|memory grew|allocated",
        "slow": "took",
        "net": "last net",
    }[fault]
    with pytest.raises(checkpoint_fuzz.Failure, match=expected):
        checkpoint_fuzz.run(150, 0, tmp_path)


class Strange(dict):  # type: ignore[type-arg]
    """A table that breaks whoever looks into it: what a forgotten check would do."""

    def __contains__(self, key: object) -> bool:
        raise TypeError("strange")
