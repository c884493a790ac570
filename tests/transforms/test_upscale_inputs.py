"""Decoders whose maps read parts of the residual stream: the same as with zeros, without gathers, stored and lowered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.generate.lowering import lower
from orchard.nn.formats import Int8
from orchard.nn.linear import Linear
from orchard.nn.norm import RMSNorm
from orchard.nn.tensors import carried, tensor_shapes
from orchard.ops.plan.reference import Reference
from orchard.transforms.lora import Lora
from orchard.transforms.prune import Prune
from orchard.transforms.prune_scores import IMPORTANCES
from orchard.transforms.upscale_decoder import OrderedNorm, PartLinear
from orchard.transforms.upscale_inputs import PruneInputs, copies, masked_inputs
from tests.transforms.test_prune import IDS, built, scores, texts, tree


@pytest.mark.parametrize("rule", ["tied", "free", "constrained", "together"])
@pytest.mark.parametrize("kind", IMPORTANCES)
def test_parts_are_what_zeros_are(kind: str, rule: str) -> None:
    model = built(tree())
    rules = {"tied": rule != "free", "constrained": rule == "constrained", "together": rule == "together"}
    prune = PruneInputs(keep=0.5, importance=kind, **rules)
    small = prune.apply(model, texts())
    kept = prune.choose(model, texts())
    assert torch.allclose(scores(small), scores(masked_inputs(model, kept)), atol=1e-5)
    spent = copies(small.config)
    assert spent.plain == sum(len(part) for part in kept.values() if len(part) < 32) and spent.norms <= 6 * 32
    assert spent.maps == 0 if rule != "free" else 0 < spent.maps <= spent.plain / 5
    if rule in ("tied", "free"):
        assert spent.plain == 15 * 16 and len(kept) == 15
    assert sum(part.numel() for part in small.parameters()) < sum(part.numel() for part in model.parameters())


def test_trees_are_complete_and_stored() -> None:
    model = built(tree())
    prune = PruneInputs(keep=0.75)
    small = prune.apply(model)
    again = type(small.config).from_dict(small.config.to_dict())
    assert again == small.config and again.complete() == small.config.complete()
    assert torch.equal(scores(carried(small, again)), scores(small))
    assert tensor_shapes(small.config.complete()) == tensor_shapes(prune(model.config))
    assert tensor_shapes(small.config.complete())["stack.layers.0.mixer.q.weight"] == (32, 24)
    assert {name: tuple(part.shape) for name, part in small.named_parameters()} == tensor_shapes(
        small.config.complete()
    )


@pytest.mark.parametrize("packed", [False, True])
def test_lowered_parts_compute_the_same(packed: bool) -> None:
    small = PruneInputs(keep=0.5, tied=False).apply(built(tree()))
    if packed:
        format = Int8.Config(group=8, half=True)
        small = carried(small, small.config.rewrite(PartLinear, lambda node: node.clone(format=format)))
    plan = lower(small, stores="f32")

    def in_torch(node: str, x: np.ndarray, *_: Any) -> np.ndarray:
        with torch.no_grad():
            made: np.ndarray = small.get_submodule(node)(torch.from_numpy(x)).numpy()
        return made

    got = Reference(plan, 1, 16, in_torch).run(IDS[0].tolist(), [0] * 8, list(range(8)), list(range(8)))
    assert np.allclose(got, scores(small)[0].numpy(), atol=1e-4)
    reasons = [str(getattr(step, "reason", "")) for step in plan.steps]
    assert any("OrderedNorm" in reason for reason in reasons)  # it says what runs in torch
    assert any("Int8" in reason for reason in reasons) == packed


def test_it_goes_on_after_other_pruning() -> None:
    both = PruneInputs(keep=0.5).apply(Prune(width=0.5, heads=0.5).apply(built(tree())))
    assert scores(both).isfinite().all() and both.config.stack.layers[0].mlp.hidden_dim == 32


def test_parts_learn() -> None:
    small = PruneInputs(keep=0.5, tied=False).apply(built(tree())).requires_grad_(True)
    small(IDS).square().mean().backward()
    assert all(part.grad is not None and float(part.grad.abs().sum()) > 0 for part in small.parameters())


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="keep is 2"):
        PruneInputs(keep=2.0)
    bare = tree()
    for block in bare.stack.layers:
        block.mixer_norm = block.mlp_norm = None
    with pytest.raises(UnsupportedPair, match="no map"):
        PruneInputs()(bare)
    with pytest.raises(UnsupportedPair, match="no plain linear map"):
        PruneInputs()(Lora(r=2, alpha=2)(tree().complete()))
    with pytest.raises(UnsupportedPair, match="PartLinear"):
        Prune().apply(PruneInputs().apply(built(tree())))
    odd: Any = {"in_dim": 8, "out_dim": 2, "whole": 8}
    for wrong in (
        {"length": 0},
        {"length": 9},
        {"start": 5, "length": 4},
        {"length": 2, "index": (1, 8)},
        {"length": 3, "index": (1, 2)},
    ):
        with pytest.raises(ConfigError, match="no part"):
            PartLinear.Config(**odd, **wrong).build()
    with pytest.raises(ConfigError, match="order"):
        OrderedNorm.Config(dim=3, order=(0, 1, 1)).build()
    with pytest.raises(ConfigError, match="an input of 7"):
        PartLinear.Config(**odd, length=3).build()(torch.zeros(1, 7))
    assert type(RMSNorm.Config(dim=3).derive(OrderedNorm, order=(2, 1, 0)).build()) is OrderedNorm
    assert issubclass(PartLinear, Linear)
