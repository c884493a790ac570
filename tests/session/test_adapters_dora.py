"""DoRA adapters of a session's model: run unmerged by whatever runs the model, and alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import orchard
from orchard.core.errors import UnsupportedPair
from orchard.generate.native import NativeRunner
from orchard.session.adapters import Adapters
from orchard.transforms.lora import Lora, freeze_base, magnitudes_of, merged, sides_of, with_sides
from orchard.weights.adapters import Side, write_adapter
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.load import load_decoder
from tests.session.export_models import adapter_for
from tests.tiny import tiny_gguf

IDS = [72, 101, 108, 108, 111, 32, 119]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_it_runs_unmerged_and_says_what_the_merged_model_says(dtype: str, file: Path, tmp_path: Path) -> None:
    folder = adapter_for(file, tmp_path / "one", dora=True)
    model = orchard.load(file, dtype=dtype)
    adapters = Adapters(model)
    adapter = adapters[adapters.load(folder)]
    variant = adapters.model("one")
    with open_checkpoint(file) as checkpoint:
        dense = load_decoder(checkpoint)
    sides = {path: [(side.a, side.b, side.scale)] for path, side in adapter.sides.items()}
    flat = merged(with_sides(dense, sides, None, adapter.magnitudes))
    with torch.no_grad():
        want = flat(torch.tensor([IDS]))[0].numpy()
        plain = dense(torch.tensor([IDS]))[0].numpy()
    bound = 0.03 * float(np.abs(want).max())
    assert np.abs(want - plain).max() > 5 * bound
    assert np.abs(variant.logits(IDS)[0].float().numpy() - want).max() < bound
    if dtype == "auto":
        assert isinstance(variant.runner, NativeRunner) and variant.plan is not None and variant.plan.whole
        assert np.abs(variant.runner.scores(IDS) - want).max() < bound
    best = int(want[-1].argmax())
    assert variant.generate(IDS, max_tokens=1).ids == (best,)


def test_it_is_applied_alone(file: Path, tmp_path: Path) -> None:
    adapters = Adapters(orchard.load(file))
    for name in ("plain", "sized"):
        adapters.load(adapter_for(file, tmp_path / name, dora=name == "sized"))
    with pytest.raises(UnsupportedPair, match=r"'sized' is a DoRA.*'plain'"):
        adapters.model(("plain", "sized"))
    assert adapters.model("sized") is not adapters.model("plain")


def test_trained_written_and_read_again(file: Path, tmp_path: Path) -> None:
    """From a few steps of training to a folder and back into the engine."""
    model = orchard.load(file, dtype="float32")
    twin = Lora(r=3, alpha=6, dora=True).attach(model.decoder).train()
    optimizer = torch.optim.AdamW(freeze_base(twin), lr=0.02)
    ids = torch.tensor([IDS])
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(twin(ids)[0, :-1], ids[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    twin.eval()
    sides = {path: Side(*side) for path, side in sides_of(twin).items()}
    write_adapter(tmp_path / "mine", sides, model.adapters.base, magnitudes=magnitudes_of(twin))
    with torch.no_grad():
        want = twin(ids)[0].numpy()
    for dtype, bound in (("float32", 1e-4), ("auto", 0.03 * float(np.abs(want).max()))):
        adapters = Adapters(orchard.load(file, dtype=dtype))
        variant = adapters.model(adapters.load(tmp_path / "mine"))
        assert np.abs(variant.logits(IDS)[0].float().numpy() - want).max() < bound
