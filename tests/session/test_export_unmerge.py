"""An adapter is taken out of the model that it was merged into: what is left is the base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchard.cli.main import main
from orchard.core.errors import UnsupportedPair, UsageError
from orchard.session import export as module
from orchard.session.export import export
from orchard.session.parity_words import ExportDrift
from tests.session.export_models import adapter_for, folder_of, opened

IDS = [3, 300, 41, 7, 512, 9, 77, 101]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("unmerge") / "source")


def scores(path: Path) -> np.ndarray:
    return opened(path).logits(IDS)[0].numpy()


@pytest.mark.parametrize("rslora", [False, True])
def test_there_and_back(base: Path, tmp_path: Path, rslora: bool) -> None:
    adapters = [adapter_for(base, tmp_path / name, seed=n, rslora=rslora) for n, name in enumerate(("one", "two"))]
    export(base, tmp_path / "merged", format="hf", type="f32", adapters=adapters, merge=True)
    assert np.abs(scores(tmp_path / "merged") - scores(base)).max() > 0.1
    facts = export(tmp_path / "merged", tmp_path / "back", format="hf", type="f32", adapters=adapters, unmerge=True)
    assert facts.parity.scaled_difference <= 1e-5 and facts.adapters == ("one", "two")
    assert np.abs(scores(tmp_path / "back") - scores(base)).max() <= 1e-4


def test_what_cannot_be_taken_out_is_said(base: Path, tmp_path: Path) -> None:
    dora = adapter_for(base, tmp_path / "dora", dora=True)
    export(base, tmp_path / "merged", format="hf", type="f32", adapters=[dora], merge=True)
    with pytest.raises(UnsupportedPair, match="lengths"):
        export(tmp_path / "merged", tmp_path / "back", format="hf", adapters=[dora], unmerge=True)
    for wrong in ({"unmerge": True}, {"merge": True, "unmerge": True, "adapters": [dora]}):
        with pytest.raises(UsageError):
            export(base, tmp_path / "back", format="hf", **wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "back").exists()


def test_a_wrong_sum_is_found(base: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """What comes out is held against the merged model with its side paths turned round, not against itself."""
    adapter = adapter_for(base, tmp_path / "one")
    export(base, tmp_path / "merged", format="hf", type="f32", adapters=[adapter], merge=True)
    monkeypatch.setattr(module, "_unmerged", lambda built, adapters: built.decoder)
    with pytest.raises(ExportDrift):
        export(tmp_path / "merged", tmp_path / "back", format="hf", type="f32", adapters=[adapter], unmerge=True)


def test_on_the_command_line(base: Path, tmp_path: Path, capsys: Any) -> None:
    adapter = str(adapter_for(base, tmp_path / "one"))
    merged, back = str(tmp_path / "merged"), str(tmp_path / "back")
    words = ["--format", "hf", "--type", "f32", "--adapter", adapter]
    assert main(["export", str(base), "--to", merged, *words, "--merge"]) == 0
    assert main(["export", merged, "--to", back, *words, "--unmerge"]) == 0
    assert "taking out 1 adapter" in capsys.readouterr().err
