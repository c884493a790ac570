"""`experts_budget`: real files, the same answers, files made once, and errors that say what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import orchard
from orchard.cache.experts import BudgetTooSmall, RecordsUnreadable
from orchard.core.errors import UnsupportedPair, UsageError
from orchard.generate.experts_open import ExpertsOptions
from orchard.ops.kernels.native import library, why_not
from orchard.session import experts
from orchard.session.export import export
from orchard.session.model import Model
from orchard.session.prepare import _files, forget
from tests.session.export_models import folder_of
from tests.tiny import tiny_gguf

pytestmark = pytest.mark.skipif(library() is None, reason=why_not())
PROMPTS = ["the quick brown fox", "to be or not to be", "q"]


@pytest.fixture(scope="module", params=["f32", "q8_0"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    made = folder_of(folder / "tiny-moe", "qwen3-moe-all")
    if request.param == "f32":
        return made
    export(made, folder / "tiny-moe.gguf", format="gguf", type=request.param)
    return folder / "tiny-moe.gguf"


@pytest.fixture
def at_home(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are made in this process: another one would spend seconds on importing torch."""
    monkeypatch.setattr(experts, "_make_apart", experts.make)


def texts(model: Model) -> list[tuple[int, ...]]:
    return [tuple(answer.ids) for answer in model.generate_many(PROMPTS, max_tokens=12)]


def test_the_same_answers_from_a_quarter_of_the_memory(source: Path, at_home: None) -> None:
    whole = orchard.load(source)
    assert whole.experts is None
    total = sum(size for size in _elsewhere(source).plan.elsewhere.values())  # type: ignore[union-attr]
    model = orchard.load(source, experts_budget=f"{total // 2}B")
    assert model.experts is not None
    assert texts(model) == texts(whole)
    assert (model.runner.scores([1, 2, 3, 4, 5]) == whole.runner.scores([1, 2, 3, 4, 5])).all()  # type: ignore[attr-defined]
    counters = model.experts.resident.counters
    assert counters.reads > 0 and counters.hits > 0
    assert model.experts.resident.nbytes <= total // 2
    assert model.experts.resident.table.policy.name in ("lfu-ahead", "least-stale")
    assert list(model.generate("abc", stream=True))


def _elsewhere(source: Path) -> Model:
    return orchard.load(source, experts_budget="1GB")


def test_the_files_are_made_once_and_go_with_the_model(source: Path, at_home: None) -> None:
    _elsewhere(source)
    files = {path: path.stat().st_mtime_ns for path in _files()}
    assert sorted(path.name.partition(".")[2].rpartition(".")[2] for path in files) == ["experts", "orchard"]
    _elsewhere(source)
    assert {path: path.stat().st_mtime_ns for path in _files()} == files
    orchard.load(source)  # packs the whole model as well, and leaves these alone
    assert len(_files()) == 3
    damaged = next(path for path in files if path.suffix == ".experts")
    os.truncate(damaged, 5000)
    assert texts(_elsewhere(source))  # made again
    assert forget(source) > 0
    assert not _files()


def test_a_lost_file_fails_one_request_and_the_engine_goes_on(source: Path, at_home: None) -> None:
    model = orchard.load(source, experts_budget=ExpertsOptions("1GB", prefetch="none"))
    assert model.experts is not None
    path = model.experts.resident.records.path
    data = path.read_bytes()
    os.truncate(path, 4096)
    with pytest.raises(RecordsUnreadable) as error:
        model.generate("hello", max_tokens=4)
    assert error.value.retryable
    path.write_bytes(data)
    assert texts(model) == texts(orchard.load(source))


def test_another_process_makes_the_files(tmp_path: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "make", None)
    made = folder_of(tmp_path / "tiny-moe", "qwen3-moe-all")
    assert _elsewhere(made).generate("x", max_tokens=2).ids


def test_what_cannot_be_is_refused(source: Path, at_home: None, tmp_path: Path) -> None:
    with pytest.raises(BudgetTooSmall, match="units a layer needs at once"):
        orchard.load(source, experts_budget=10)
    with pytest.raises(UsageError, match="no size"):
        orchard.load(source, experts_budget="much")
    with pytest.raises(UsageError, match="budget"):
        orchard.load(source, experts_budget=0)
    with pytest.raises(UsageError, match="eviction policy"):
        orchard.load(source, experts_budget=ExpertsOptions("1GB", policy="best"))
    with pytest.raises(UnsupportedPair, match="native engine"):
        orchard.load(source, experts_budget="1GB", dtype="float32")
    with pytest.raises(UsageError, match="has no experts"):
        orchard.load(tiny_gguf(tmp_path / "dense.gguf"), experts_budget="1GB")
