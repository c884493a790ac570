"""`relufy` as a step: the file has ReLU, the model runs from its neurons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orchard
from orchard.nn.mlp import GatedMLP
from orchard.recipes.compress import compress
from orchard.transforms.neurons import FromFlash, spent, write_neurons
from tests.recipes.compressed_models import trained_folder

SMALL: dict[str, Any] = {"held": 64, "looked": 128, "length": 32, "rows": 4, "dtype": "float32", "device": "cpu"}


def test_a_relufied_file_runs_from_its_neurons(tmp_path: Path) -> None:
    base = trained_folder(tmp_path / "qwen2", steps=2)
    made = compress(base, ["relufy:tokens=256"], tmp_path / "relu.orchard", tokens=256, **SMALL)
    model = orchard.load(made.path, dtype="float32")
    assert {node.activation for _, node in model.decoder.config.find(GatedMLP)} == {"relu"}
    write_neurons(model.decoder, tmp_path / "relu.neurons")
    flash = FromFlash(tmp_path / "relu.neurons", activity="exact")
    small = orchard.load(made.path, dtype="float32", rewrite=flash)
    assert small.generate("The", max_tokens=8).ids == model.generate("The", max_tokens=8).ids
    assert spent(small.decoder).reads > 0
