"""An embedding model on the command line: listed, shown, removed, and refused where a model has to write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchard.cli.main import main
from orchard.cli.pull import _prepare
from orchard.weights.library import Entry, Library
from tests.tiny_bert import TOKENS, tiny_bert


@pytest.fixture
def entry(empty_home: Path, tmp_path: Path) -> Entry:
    """A tiny model under the real one's name."""
    made = tiny_bert(tmp_path / "made")
    library = Library()
    with library.add("minilm", source="pypi:x==1", licence="mit") as folder:
        for path in made.rglob("*"):
            if path.is_file():
                target = folder / path.relative_to(made)
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(path.read_bytes())
    found = library.find("minilm")
    assert found is not None
    return found


def test_list_and_show(entry: Entry, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["models"][0]
    assert (row["name"], row["family"], row["damaged"]) == ("minilm", "bert", "")
    assert main(["show", "all-minilm-l6-v2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["embedding"] == {"dimensions": 32, "max_tokens": TOKENS, "pooling": "mean"}
    assert {row["kind"] for row in facts["tensors"]} == {"attention", "mlp", "embedding", "norm"}
    assert main(["show", "minilm"]) == 0
    shown = capsys.readouterr().out
    assert "embedding model: turns texts into vectors" in shown
    assert "32 (the mean of a text's tokens, length 1)" in shown and f"{TOKENS} tokens a text" in shown
    assert "template" not in shown
    assert main(["show", "minilm", "--config"]) == 0
    assert capsys.readouterr().out.startswith("Encoder")


@pytest.mark.parametrize("arguments", [["respond", "-m", "minilm", "hello"], ["show", "minilm", "--plan"]])
def test_it_does_not_write(arguments: list[str], entry: Entry, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == "" and "error: minilm turns texts into vectors; it does not write" in told.err
    assert "orchard.embedder('minilm')" in told.err


def test_nothing_is_packed_and_all_is_removed(entry: Entry, capsys: pytest.CaptureFixture[str]) -> None:
    _prepare(entry, quiet=False)
    assert capsys.readouterr().err == "" and not list((Library().home).glob("packed/*.orchard"))
    assert main(["rm", "minilm", "--yes"]) == 0
    assert Library().list() == []
