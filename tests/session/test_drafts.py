"""A model loaded with a draft model: the same answers, adapters with drafts of their own, other vocabularies refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import orchard
from orchard.cli.main import main
from orchard.cli.serving import drafts_of
from orchard.core.errors import BadFile, ModelNotFound, UsageError
from orchard.generate.constraint import Constraint
from orchard.generate.errors import DraftMismatch
from orchard.generate.request import Answer, Request
from orchard.recipes.package import About, Made, write_package
from orchard.serve.hub import _loaded
from orchard.serve.settings import ModelSpec
from orchard.session.model import Model
from tests.session.export_models import adapter_for, folder_of
from tests.tiny import tiny_gguf

TEXTS = ("the cat", "one two")
FORM = Constraint.regex("(ab|the |[0-9]{2})*")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def draft(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model itself, rounded: mostly right."""
    path = tmp_path_factory.mktemp("draft") / "draft.gguf"
    orchard.load(folder).save(path, type="q8_0")
    return path


@pytest.fixture(scope="module")
def side(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter_for(folder, tmp_path_factory.mktemp("side") / "side", size=0.1)


def answers(model: Model) -> list[Answer]:
    ids = [tuple(model.prompt_ids(text)) for text in TEXTS]
    asked = [Request(one, 20, seed=1, constraint=form) for one in ids for form in (None, FORM)]
    return model.engine.answer(asked)


def said(model: Model) -> list[tuple[int, ...]]:
    return [one.ids for one in answers(model)]


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_answers_stay_the_same(folder: Path, draft: Path, dtype: str) -> None:
    plain, guessing = orchard.load(folder, dtype=dtype), orchard.load(folder, dtype=dtype, draft=draft)
    assert plain.draft is None and guessing.draft is not None
    assert said(guessing) == said(plain)
    assert guessing.engine.facts()["speculation"]["draft"]["guessed"] > 0
    assert "speculation" not in plain.engine.facts()


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_variants_are_guessed_for_by_the_bases_draft(folder: Path, draft: Path, side: Path, dtype: str) -> None:
    found = []
    for given in (None, draft):
        model = orchard.load(folder, dtype=dtype, draft=given)
        model.adapters.load(side)
        variant = model.adapters.model("side")
        assert variant.draft is model.draft
        found.append(said(variant))
    assert found[0] == found[1] != said(model)
    assert variant.engine.facts()["speculation"]["draft"]["guessed"] > 0


def test_an_adapter_brings_its_own_draft(folder: Path, draft: Path, side: Path, tmp_path: Path) -> None:
    plain = orchard.load(folder)
    plain.adapters.load(side)
    expected = said(plain.adapters.model("side"))
    package = write_package(tmp_path / "package", side, About(name="mine"), Made("lora"), draft=draft)
    loose = shutil.copytree(side, tmp_path / "loose")
    shutil.copyfile(draft, loose / "draft.gguf")
    for given in (package.path, loose):
        model = orchard.load(folder)
        name = model.adapters.load(given)
        variant = model.adapters.model(name)
        assert variant.draft is not None and model.draft is None
        assert said(variant) == expected
        facts = model.engine.facts()["speculation"]
        assert [known.startswith("draft of ") for known in facts] == [True]
        said(model)
        assert model.engine.facts()["speculation"].keys() == facts.keys()  # nobody guesses for the base


def test_a_draft_in_a_package_that_is_not_what_was_written_is_refused(
    folder: Path, draft: Path, side: Path, tmp_path: Path
) -> None:
    package = write_package(tmp_path / "package", side, About(name="mine"), Made("lora"), draft=draft).path
    data = bytearray((package / "draft.gguf").read_bytes())
    data[-1] ^= 1
    (package / "draft.gguf").write_bytes(data)
    with pytest.raises(BadFile, match=r"draft\.gguf"):
        orchard.load(folder).adapters.load(package)


def test_a_draft_of_another_vocabulary_is_refused(folder: Path, side: Path, tmp_path: Path) -> None:
    other = tiny_gguf(tmp_path / "other.gguf")
    with pytest.raises(DraftMismatch, match="vocabulary"):
        orchard.load(folder, draft=other)
    with pytest.raises(ModelNotFound):
        orchard.load(folder, draft="no-such-draft")
    loose = shutil.copytree(side, tmp_path / "loose")
    shutil.copyfile(other, loose / "draft.gguf")
    model = orchard.load(folder)
    with pytest.raises(DraftMismatch):
        model.adapters.model(model.adapters.load(loose))
    # The same number of tokens, spelled otherwise.
    words = ["x" * n for n in range(1, 257)]
    spelled = tiny_gguf(
        tmp_path / "spelled.gguf",
        **{"tokenizer.ggml.tokens": [*words, "xt", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]},
        **{"tokenizer.ggml.merges": ["x x"]},
    )
    with pytest.raises(DraftMismatch, match="token"):
        orchard.load(other, draft=spelled)


def test_the_command_line_takes_a_draft(folder: Path, draft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["respond", "the cat", "--model", str(folder), "--max-tokens", "12", "--json"]
    told = []
    for more in ([], ["--draft", str(draft)], ["--draft", str(draft), "--regex", "[a-z ]{3}"]):
        assert main([*common, *more]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0]["ids"] == told[1]["ids"]
    assert main([*common, "--draft", "no-such-draft"]) != 0
    assert "no-such-draft" in capsys.readouterr().err


def test_a_server_takes_a_draft(folder: Path, draft: Path) -> None:
    sources = {"a": str(folder), "b": str(folder)}
    assert drafts_of([str(draft)], sources) == {"a": str(draft)}
    assert drafts_of([f"b={draft}", str(draft)], sources) == {"a": str(draft), "b": str(draft)}
    with pytest.raises(UsageError, match="two"):
        drafts_of([str(draft), f"a={draft}"], sources)
    with pytest.raises(ModelNotFound, match="--draft"):
        drafts_of(["no-such-draft"], sources)
    executor, _ = _loaded(ModelSpec("a", str(folder), draft=str(draft)))
    assert executor is not None and executor.model.draft is not None
