"""Merging and going back: within rounding through files, and bit for bit for a model that is switched over for a while."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.generate.lowering import lower
from orchard.nn.formats import Int8
from orchard.nn.linear import Linear
from orchard.ops.plan.reference import Reference
from orchard.transforms.lora import (
    Lora,
    LoraLinear,
    lengths_of,
    magnitudes_of,
    merged,
    merged_in,
    sides_of,
    unmerged,
)
from tests.transforms.test_lora import IDS, built, scores, tree
from tests.transforms.test_lora_dora import stirred

EPS = float(np.finfo(np.float32).eps)


def adapted(seed: int = 0, **more: Any) -> tuple[Any, Any]:
    model = built(tree())
    return model, stirred(Lora(**{"r": 4, "alpha": 8, **more}).attach(model), seed)


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.booleans(), st.integers(1, 8))
def test_back_to_the_base_within_rounding(seed: int, dora: bool, rslora: bool, r: int) -> None:
    model, twin = adapted(seed, dora=dora, rslora=rslora, r=r)
    flat = merged(twin)
    assert torch.allclose(scores(flat), scores(twin), atol=2e-4)
    back = unmerged(flat, sides_of(twin), magnitudes_of(twin), lengths_of(twin))
    assert back.config == model.config and back.state_dict().keys() == model.state_dict().keys()
    sides = sides_of(twin)
    for name, value in back.named_parameters():
        before = dict(model.named_parameters())[name]
        path = name.removesuffix(".weight")
        if path not in sides:
            assert value is before
            continue
        a, b, scale = sides[path]
        size = before.detach().abs().numpy() + scale * np.abs(b) @ np.abs(a)
        # One rounding of each sum, and with DoRA of each product with a gain and of the lengths it is made of.
        assert bool((np.abs((value - before).detach().numpy()) <= (20 if dora else 3) * EPS * size + 1e-12).all())


def test_dora_cannot_go_back_by_its_adapter_alone() -> None:
    """Another base gives the very same merged weights with the very same adapter, so nothing could tell the two apart."""
    model, twin = adapted(dora=True, targets="q")
    path = "stack.layers.0.mixer.q"
    flat, (a, b, scale) = merged(twin), sides_of(twin)[path]
    other = built(tree())
    map_: Any = other.get_submodule(path)
    side = torch.from_numpy(scale * b @ a)
    map_.assign(
        2 * (model.get_submodule(path).dense().detach() + side) - side
    )  # another base: its adapted rows are twice as long
    again: Any = Lora(r=4, alpha=8, dora=True, targets="q").attach(other)
    again.load_state_dict({key: value for key, value in twin.state_dict().items() if ".lora_" in key}, strict=False)
    ours, theirs = (m.get_submodule(path).weight for m in (flat, merged(again)))
    assert not torch.allclose(map_.weight, model.get_submodule(path).weight, atol=0.1)
    assert torch.allclose(ours, theirs, atol=1e-5)
    with pytest.raises(UnsupportedPair, match=rf"{path}.*DoRA"):
        unmerged(flat, {path: sides_of(twin)[path]}, magnitudes_of(twin))
    with torch.no_grad():
        twin.get_submodule(path).lora_magnitude[5] = 0
    with pytest.raises(UnsupportedPair, match="row 5"):
        unmerged(merged(twin), {path: sides_of(twin)[path]}, magnitudes_of(twin), lengths_of(twin))


def test_what_was_never_merged_is_refused_by_name() -> None:
    model, twin = adapted()
    sides = sides_of(twin)
    with pytest.raises(UnsupportedPair, match="LoraLinear"):
        unmerged(twin, sides)
    packed = built(tree().rewrite(Linear, lambda node: node.clone(format=Int8.Config())))
    with pytest.raises(UnsupportedPair, match=r"stack\.layers\.0\.mixer\.q.*Int8"):
        unmerged(packed, sides)
    with pytest.raises(ConfigError, match=r"stack\.layers\.9\.mixer\.q"):
        unmerged(model, {"stack.layers.9.mixer.q": sides["stack.layers.0.mixer.q"]})
    with pytest.raises(ConfigError, match=r"stack\.layers\.0\.mixer\.q"):
        unmerged(model, {"stack.layers.0.mixer.q": (np.ones((1, 31)), np.ones((32, 1)), 1.0)})


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_switched_over_and_back_bit_for_bit(seed: int, dora: bool, dtype: torch.dtype) -> None:
    _, twin = adapted(seed, dora=dora)
    twin.to(dtype)
    tensors = dict(twin.named_parameters())
    bits = {name: value.clone() for name, value in tensors.items()}
    before = scores(twin)
    with merged_in(twin) as inside:
        assert inside is twin
        assert torch.allclose(scores(twin).float(), before.float(), atol=2e-4 if dtype == torch.float32 else 0.5)
        assert twin.stack.layers[0].mixer.q.weight is not tensors["stack.layers.0.mixer.q.weight"]
    assert all(value is tensors[name] and torch.equal(value, bits[name]) for name, value in twin.named_parameters())
    assert torch.equal(scores(twin), before)


def test_a_switch_goes_back_whatever_happens_inside() -> None:
    _, twin = adapted(dora=True)
    before = scores(twin)
    with pytest.raises(ZeroDivisionError), merged_in(twin):
        raise ZeroDivisionError
    assert torch.equal(scores(twin), before)
    with merged_in(twin):
        with pytest.raises(ConfigError, match="already"), merged_in(twin):
            pass
        with pytest.raises(ConfigError, match="already"):
            merged(twin)
        plan = lower(twin, stores="f32")  # what is inside has no side paths
        assert not any(".lora" in name for name in plan.tensors)
        ids = IDS[0].tolist()
        got = Reference(plan, 1, len(ids)).run(ids, [0] * len(ids), range(len(ids)), range(len(ids)))
        assert np.abs(got - before[0].numpy()).max() < 1e-3
    assert torch.equal(scores(twin), before)


def test_packed_weights_refuse_before_anything_is_switched() -> None:
    mixed = tree()
    mixed.stack.layers[1].mlp.down.format = Int8.Config()
    twin = stirred(Lora(r=4).attach(built(mixed)))
    before = scores(twin)
    with pytest.raises(UnsupportedPair, match="Int8"), merged_in(twin):
        pass
    assert torch.equal(scores(twin), before)
    assert not any(module.switched_in for module in twin.modules() if isinstance(module, LoraLinear))
