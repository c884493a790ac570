"""The study flash-sparse: what it measures is what happens, and it runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from orchard.studies import _flash_sparse_buffer as buffers
from orchard.studies import _flash_sparse_model as models
from orchard.studies import flash_sparse
from orchard.studies._flash_sparse_disk import Files, bundling
from orchard.studies._flash_sparse_run import counted, loads, sampled
from orchard.transforms.activity import Activity
from orchard.transforms.neurons import FromFlash, write_neurons

SHAPE = models.Shape(dim=32, units=96, layers=2, first=2, second=2)
TINY = flash_sparse.Scale(
    shape=SHAPE, rank=8, fitting=3, looked=1, window=2, texts=1, prompt=4, tokens=8, timed=3, choosing=2
)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "ROUNDS", 2)
    monkeypatch.setattr(buffers, "RESIDENT", (64, 128))
    monkeypatch.setattr(buffers, "CHANGED", (4, 16))


def test_it_runs_and_every_claim_has_its_value(few: None) -> None:
    told = flash_sparse.measured(TINY, 0)
    assert {claim.metric for claim in flash_sparse.CLAIMS} <= set(told.values)
    plain = {name: getattr(value, "value", value) for name, value in told.values.items()}
    assert plain["exact_difference"] < 1e-5 and plain["exact_excess"] < 1e-9 + 512 / (3 * 4 * 32)
    assert plain["reads_per_neuron"] == 1 and plain["reads_per_neuron_apart"] == 3
    assert 0 < plain["window_ratio"] <= 1 and plain["prompt_ratio_alone"] > 0


def test_foreseen_loads_are_those_that_happen(tmp_path: Path) -> None:
    model = models.trained(SHAPE, 0).model
    predictors = Activity(rank=32, steps=0, recall=0.999).fit(model, models.text(SHAPE, 1, 0, "a"))
    write_neurons(model, tmp_path / "n", predictors)
    written = sampled(model, models.prompts(SHAPE, 1, 4, 0), 20, 0)
    for window in (0, 3):
        small = FromFlash(tmp_path / "n", window=window, activity="exact").apply(model)
        ran = counted(small, written, 1)
        foreseen = loads(model, predictors, torch.cat([written[0], written[0, :1]]), window)[1:]
        many = sum(len(units) for token in foreseen for units in token)
        assert abs(many - ran.spent.loaded) <= 0.2 * ran.spent.loaded  # nearly full rank, so predicted is nearly exact
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orchard.studies._flash_sparse_disk.ROUNDS", 1)
        files = Files(model, tmp_path)
        told = bundling(files, [[np.array([3, 5]), np.array([7])]])
        files.close()
    assert told["reads"] == {"bundled": 1, "apart": 3} and told["ratio"] > 0


def test_slopes_tell_growth() -> None:
    rows = [(c, r, 1e-6 * c, 1e-9 * r) for c in (4, 16, 64) for r in (100, 200, 800)]
    assert buffers.slopes(rows, 2) == pytest.approx((1, 0), abs=1e-9)
    assert buffers.slopes(rows, 3) == pytest.approx((0, 1), abs=1e-9)
    assert buffers.each(rows) == pytest.approx((1e-6, 0, 0), abs=1e-12)
