"""Sub-networks picked out of packed weights: what is left has the very numbers that it had, in every kind of packing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from orchard.core.errors import UnsupportedPair, UsageError
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.models.language.decoder import Decoder
from orchard.nn.formats import Blocks, Int2, Int4, Int8, Palette, Plain
from orchard.nn.linear import Linear
from orchard.nn.tensors import carried
from orchard.ops.kernels.packing import values
from orchard.ops.plan.steps import Gated, Matrix, Plan
from orchard.ops.plan.subset import gated_mlps, subset, unit_of
from orchard.transforms.ifprune_choice import Choice
from orchard.transforms.ifprune_gather import picked
from tests.transforms.ifprune_models import decoder

IDS = [5, 17, 3, 8, 1, 2, 9, 20]
FORMATS: dict[str, Any] = {
    "f32": Plain.Config(),
    "q8": Int8.Config(group=32, half=True),
    "q4": Int4.Config(group=32),
    "q4 with minima": Int4.Config(group=32, minimum=True),
    "q4 in longer groups": Int4.Config(group=64),
    "q2": Int2.Config(group=32),
    "p4": Palette.Config(bits=4),
}


def model(kind: Any) -> Decoder:
    """Two hundred and fifty-six hidden units, packed in one way in all MLPs, of a width that all groups divide."""
    base = decoder(hidden=256, dim=64)
    tree = base.config.rewrite(Linear, lambda node: node.clone(format=kind), where="stack.layers[*].mlp.*")
    made: Decoder = carried(base, tree)
    return made


def matrices(plan: Plan, path: str) -> list[np.ndarray]:
    at, down = gated_mlps(plan)[path]
    gated: Any = plan.steps[at]
    after: Any = plan.steps[down]
    return [_values(plan, matrix) for matrix in (gated.gate, gated.up, after.outputs[0].matrix)]


def _values(plan: Plan, matrix: Matrix) -> np.ndarray:
    return values(plan.tensors[matrix.tensor], matrix.kind, matrix.rows, matrix.cols, matrix.group, matrix.minimum)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_left_has_the_numbers_that_it_had(name: str) -> None:
    plan = lower(model(FORMATS[name]))
    kept: dict[str, list[int]] = {}
    for place, path in enumerate(gated_mlps(plan)):
        count = 256 // unit_of(plan, path)
        kept[path] = [0, 2, 3] if place == 0 else [1, count - 1]
    assert len(kept) == 3
    small = subset(plan, kept)
    for path, groups in kept.items():
        size = unit_of(plan, path)
        units = (np.asarray(groups)[:, None] * size + np.arange(size)).reshape(-1)
        gate, up, down = matrices(plan, path)
        found = matrices(small, path)
        for one, other in zip(found, (gate[units], up[units], down[:, units]), strict=True):
            assert np.array_equal(one, other)
    shared = [key for key in plan.tensors if ".mlp." not in key]
    assert shared and all(small.tensors[key] is plan.tensors[key] for key in shared)


@pytest.mark.parametrize("name", ["f32", "q4 with minima"])
def test_the_native_engine_runs_it_as_torch_does(name: str) -> None:
    base = model(FORMATS[name])
    plan = lower(base, stores="f32")
    choice = Choice(torch.randn(3, 8, generator=torch.Generator().manual_seed(2)), 3, temperature=0.5)
    paths = list(gated_mlps(plan))
    kept = dict(zip(paths, choice.groups(), strict=True))
    weights = {p: [float(row[g]) for g in kept[p]] for p, row in zip(paths, choice.weights, strict=True)}
    scores = NativeRunner(subset(plan, kept, weights), threads=1).scores(IDS)
    with torch.no_grad():
        want = picked(carried(base, decoder(hidden=256, dim=64).config), choice)(torch.tensor([IDS]))[0].numpy()
    size = float(np.abs(want).max())
    assert np.abs(scores - want).max() <= (1e-4 if name == "f32" else 2e-2) * size
    other = NativeRunner(plan, threads=1).scores(IDS)
    assert np.abs(other - want).max() > 0.05 * size


def test_nonsense_is_refused() -> None:
    plan = lower(decoder(hidden=256))
    path = next(iter(gated_mlps(plan)))
    for groups in ([], [1, 0], [0, 0], [-1], [8]):
        with pytest.raises(UsageError):
            subset(plan, {path: groups})
    with pytest.raises(UnsupportedPair):
        subset(plan, {"stack.layers.9.mlp": [0]})
    with pytest.raises(UnsupportedPair, match="multiple"):
        subset(lower(decoder(hidden=48)), {path: [0]})
    assert all(isinstance(plan.steps[at], Gated) for at, _ in gated_mlps(plan).values())


def test_blocks_are_left_to_torch() -> None:
    base = decoder(hidden=96)
    tree = base.config.rewrite(Linear, lambda n: n.clone(format=Blocks.Config()), where="stack.layers[*].mlp.down")
    assert not gated_mlps(lower(carried(base, tree)))
