"""Scales that go from one weight to the one before it: nothing changes, and places that cannot take them are named."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from orchard.core.config import BaseConfig
from orchard.transforms.awq import Awq, _dense, powers
from orchard.transforms.awq_folds import folds_of
from orchard.transforms.hessians import Stream
from orchard.transforms.lora import Lora
from orchard.transforms.ptq import holders
from orchard.transforms.ptq_scales import spent
from orchard.transforms.rtn import Rtn
from tests.transforms.ptq_models import rows, trained, tree

TEXTS = (rows(16, seed=1),)


def folded(model: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, int, list[str]]:
    """The model with random scales at every place that takes them."""
    torch.manual_seed(4)
    made = copy.deepcopy(model).to(dtype)
    targets = set(holders(model.config.complete(), "all-linear"))
    count, notes = 0, []
    for number, layer in enumerate(made.stack.layers):
        path = f"stack.layers.{number}"
        folds, said = folds_of(layer, path, targets, shared=number in Stream(model, TEXTS, "a test").shared)
        notes += said
        tensors = _dense(layer, path)
        for fold in folds:
            source = tensors[f"{fold.source}.weight"]
            fold.apply(tensors, fold.exact(tensors, torch.empty(len(source)).uniform_(0.2, 5.0)))
            count += 1
        for name, tensor in tensors.items():
            module, _, part = name.rpartition(".")
            owner = made.get_submodule(module)
            kept = tensor if fold_keeps(owner) else tensor.float()
            setattr(owner, part, torch.nn.Parameter(kept, requires_grad=False))
    return made, count, notes


def fold_keeps(module: Any) -> bool:
    """Norms and biases stay in the type they have; weights are packed from float32 next."""
    return not hasattr(module, "format")


@pytest.mark.parametrize(("kind", "per_layer"), [("llama", 4), ("qwen", 4), ("gemma", 4), ("olmo", 2), ("moe", 2)])
def test_folding_changes_nothing(kind: str, per_layer: int) -> None:
    model = trained(kind, steps=3)
    made, count, notes = folded(model)
    assert count == 2 * per_layer
    ids = TEXTS[0].to("cpu").ids
    torch.testing.assert_close(made(ids), model(ids), rtol=1e-3, atol=1e-3)
    assert not torch.equal(made.stack.layers[0].mixer.o.weight, model.stack.layers[0].mixer.o.weight)
    expected = {"olmo": "no norm stands before it", "moe": "experts are rounded to nearest"}.get(kind)
    assert bool(notes) == (expected is not None) and all(expected in note for note in notes)  # type: ignore[operator]


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_norm_in_half_the_bits_loses_nothing(kind: str) -> None:
    """What rounding the norm's weight changed is in the scales of the columns."""
    model = trained(kind, steps=3)
    rounded = copy.deepcopy(model).bfloat16()
    made, _, _ = folded(model, torch.bfloat16)
    path = "stack.layers.0"
    old, new = rounded.stack.layers[0], made.stack.layers[0]
    gain, after = (torch.from_numpy(layer.mixer_norm.scales()) for layer in (old, new))
    assert not torch.equal(gain, after), path
    torch.testing.assert_close(new.mixer.q.weight * after, old.mixer.q.weight.float() * gain, rtol=1e-5, atol=1e-6)


def test_shared_keys_and_values_take_no_scale() -> None:
    _, count, notes = folded(trained("shared", steps=3))
    assert count == 6  # both norms and up of both layers
    assert [note for note in notes if "values are shared" in note] == [
        f"stack.layers.{i}.mixer.o: values are shared with another layer" for i in (0, 1)
    ]


def test_other_places_that_are_named() -> None:
    layer = Lora(r=2, targets="v").attach(trained()).stack.layers[0]
    targets = set(holders(tree().complete(), "all-linear"))
    _, notes = folds_of(layer, "stack.layers.0", targets)
    assert len(notes) == 2 and all("LoraLinear" in note for note in notes)
    folds, notes = folds_of(trained().stack.layers[0], "stack.layers.0", targets - {"stack.layers.0.mixer.v"})
    assert len(folds) == 2 and all("mixer.v is not quantised" in note for note in notes)
    clipped: BaseConfig = tree()
    clipped.stack.layers[0].mixer.clip = 8.0  # type: ignore[attr-defined]
    _, notes = folds_of(clipped.build().stack.layers[0], "stack.layers.0", targets)
    assert notes == ["stack.layers.0.mixer.o: values are clipped on the way"]


def test_never_worse_than_rounding_on_the_texts() -> None:
    """What the first layer's maps that read one norm give, all together, against rounding to nearest."""
    model = trained()
    for bits in (2, 4):
        made, near = Awq(bits, 32).apply(model, TEXTS), Rtn(bits, 32).apply(model)
        stream = Stream(model, TEXTS, "a test")
        paths = [f"stack.layers.0.mixer.{name}" for name in "qkv"]
        modules = {path: model.get_submodule(path) for path in paths}
        hessian = stream.inputs(model.stack.layers[0], modules)[paths[0]][0].hessian("x")
        scales = model.stack.layers[0].mixer_norm.weight / made.stack.layers[0].mixer_norm.weight
        rows_of_v = _rows_scale(model, made)
        ours = theirs = 0.0
        for path, module in modules.items():
            back = made.get_submodule(path).dense() / scales
            if path.endswith("v"):
                back = back * rows_of_v[:, None]
            ours += float(spent(back - module.dense(), hessian).sum())
            theirs += float(spent(near.get_submodule(path).dense() - module.dense(), hessian).sum())
        assert ours <= theirs * 1.01  # scales of scaled rows are rounded to half precision anew


def _rows_scale(model: Any, made: Any) -> torch.Tensor:
    """By what the rows of v were divided: found from the rows' lengths, which rounding hardly changes on average."""
    scales = model.stack.layers[0].mixer_norm.weight / made.stack.layers[0].mixer_norm.weight
    old, new = model.stack.layers[0].mixer.v.dense(), made.stack.layers[0].mixer.v.dense() / scales
    return (old * new).sum(1) / new.square().sum(1)


def test_scales_from_inputs() -> None:
    root = torch.tensor([0.0, 1e-9, 1.0, 4.0, 1e9])
    made = powers(root, 0.5)
    assert made[0] == 1 and made.isfinite().all() and (made > 0).all()
    assert made[2] < made[3]
    assert torch.equal(powers(root, 0.0), torch.ones(5)) and torch.equal(powers(torch.zeros(3), 0.5), torch.ones(3))


def test_dead_inputs_are_said() -> None:
    model = copy.deepcopy(trained())
    model.stack.layers[0].mixer_norm.weight[7] = 0
    transform = Awq(4, 32)
    made = transform.apply(model, TEXTS)
    paths = ", ".join(f"stack.layers.0.mixer.{name}" for name in "qkv")
    assert f"{paths}: 1 of 64 inputs are always zero" in transform.notes
    assert made.stack.layers[0].mixer_norm.weight[7] == 0
    assert made(TEXTS[0].to("cpu").ids).isfinite().all()
