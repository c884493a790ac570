"""The whole benchmark of compressed models on a tiny one, without peers: bytes, keys and values, claims that nothing can test."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchard.bench.ondevice import Options, bench
from orchard.bench.ondevice_size import Original, size_values
from orchard.core.errors import UsageError
from orchard.core.report import Report
from tests.weights.compressed_models import HF, VOCAB, built_with, written

PROGRAM = Path(__file__).resolve().parents[2] / "bench" / "ondevice.py"
LONG = {**HF, "max_position_embeddings": 1024}
CHANGES = ("formats", "shared", "kv8")


@pytest.fixture
def files(tmp_path: Path, empty_home: Path) -> tuple[Path, Path]:
    """An original that is dense, and a compressed form of it: last two of four layers share keys and values."""
    original = written(tmp_path / "original.orchard", built_with((), LONG), LONG)
    return original, written(tmp_path / "tiny-2bit.orchard", built_with(CHANGES, LONG), LONG)


def test_sizes_are_those_of_the_file_to_the_byte(files: tuple[Path, Path]) -> None:
    original, small = files
    values = {name: value.value for name, value in size_values("m", small, Original.of(original))}
    assert values["m file"] == small.stat().st_size and values["m bytes off"] == 0
    assert sum(int(count) for name, count in values.items() if name.startswith("m bytes, ")) == small.stat().st_size  # type: ignore[arg-type]
    assert values["m KV over original"] == 0.5
    heads, dim = 2, 16
    assert Original.of(original).kv == 4 * 2 * heads * dim * 2
    assert values["m KV"] == 2 * 2 * heads * (dim + 4)  # two layers, one byte a number, a float32 scale a head
    with pytest.raises(UsageError, match="no compressed model"):
        from tests.tiny import tiny_gguf

        dict(size_values("m", tiny_gguf(small.with_name("t.gguf")), Original.of(original)))


def test_a_file_counted_for_another_original_is_off(files: tuple[Path, Path], tmp_path: Path) -> None:
    _, small = files
    hf = {**LONG, "intermediate_size": 192}
    larger = Original.of(written(tmp_path / "larger.orchard", built_with((), hf), hf))
    assert dict(size_values("m", small, larger))["m bytes off"].value != 0


def test_all_of_it_on_a_tiny_model(files: tuple[Path, Path], tmp_path: Path) -> None:
    original, small = files
    np.save(tmp_path / "own.npy", np.random.default_rng(0).integers(0, VOCAB, 200).astype(np.uint16))
    options = Options(
        models=(str(small),),
        original=str(original),
        texts=(f"own={tmp_path / 'own.npy'}",),
        tokens=64,
        window=32,
        rounds=2,
        steps=2,
        prompt=40,
        checks=1,
        peers=False,
    )
    report = bench(options)
    verdicts = {claim.id.removeprefix("tiny-2bit-"): claim for claim in report.claims}
    assert verdicts["exact"].passed and verdicts["kv"].value == 0.5 and not verdicts["kv"].passed
    assert verdicts["loss-own"].value == report["tiny-2bit loss ratio own"]
    for untested in (
        "ttft",
        "following",
        "loss-books",
        "kl-llama",
        "kl-torchao",
    ):  # 40 tokens are not 2,048, nor 3 checks 300
        assert not verdicts[untested].passed and "no value" in verdicts[untested].reason
    assert report["tiny-2bit KL own"] > 0  # type: ignore[operator]
    assert report["original, our engine KL own"] < 1e-3  # type: ignore[operator]
    assert report["tiny-2bit loss own"] == pytest.approx(
        report["original loss own"] * report["tiny-2bit loss ratio own"]  # type: ignore[operator]
    )
    assert len(report.series["tiny-2bit decode 32"]) == len(report.series["original TTFT 40"]) == 2
    assert Report.from_dict(report.to_dict()).to_dict() == report.to_dict()


def program() -> Any:
    spec = importlib.util.spec_from_file_location("ondevice_program", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_wrong_arguments_are_refused_before_any_work(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original, small = files
    out = tmp_path / "out.json"
    usual = ["--model", str(small), "--original", str(original), "--out", str(out)]
    for wrong in (["--texts", "poems=x"], ["--rounds", "0"], ["--model", "nothing-2bit"]):
        assert program().main([*usual, *wrong]) == 2
        assert capsys.readouterr().err.strip() and not out.exists()
