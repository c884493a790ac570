"""Learned masks: a top-k with a right gradient that hardens as it cools, learns which units matter, and ends as a smaller MLP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.feed_forward import FeedForward
from orchard.nn.mlp import GatedMLP
from orchard.transforms.prune import Prune
from orchard.transforms.prune_masks import MaskedMLP, relaxed_top_k
from tests.transforms.test_prune import IDS, built, scores, texts, tree


@given(st.integers(2, 40), st.integers(1, 40), st.floats(0.01, 5.0), st.integers(0, 99))
@settings(max_examples=60)
def test_the_mask_sums_to_k_and_keeps_the_order(size: int, k: int, temperature: float, seed: int) -> None:
    k = min(k, size)
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    mask = relaxed_top_k(values, k, temperature)
    assert abs(float(mask.sum()) - k) < 1e-3 * size and mask.min() >= 0 and mask.max() <= 1
    assert bool((mask[values.argsort()].diff() >= -1e-6).all())
    cold = relaxed_top_k(torch.arange(size).float(), k, 1e-2)
    assert torch.allclose(cold, (torch.arange(size) >= size - k).float(), atol=1e-4)


def test_the_gradient_is_right() -> None:
    values = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: relaxed_top_k(x, 4, 0.7), (values,), atol=1e-5)
    relaxed_top_k(values, 4, 0.7).square().sum().backward()
    assert values.grad is not None and abs(float(values.grad.sum())) < 1e-12  # what one gains, others lose


@pytest.mark.parametrize(("k", "temperature"), [(0, 1.0), (5, 1.0), (2, 0.0), (2, float("nan"))])
def test_no_such_top_k(k: int, temperature: float) -> None:
    with pytest.raises(ConfigError):
        relaxed_top_k(torch.zeros(4), k, temperature)


def test_masks_learn_which_units_matter() -> None:
    """The target is what half of the units compute, which have small weights: by their size all of them would go."""
    torch.manual_seed(0)
    whole: Any = GatedMLP.Config(dim=12, hidden_dim=16).build()
    with torch.no_grad():
        for weight in (whole.gate.weight, whole.up.weight, whole.down.weight):
            weight.normal_(std=0.5)
        whole.down.weight[:, 8:] *= 1.5
    mlp: Any = MaskedMLP.Config(dim=12, hidden_dim=16, keep=8, steps=60, speed=30.0).build()
    mlp.load_state_dict({**mlp.state_dict(), **whole.state_dict()})
    useful = torch.zeros(16).index_fill_(0, torch.arange(8), 1.0)
    optimizer = torch.optim.Adam([mlp.mask_scores], lr=0.01)
    context: Any = None
    mlp.train()
    losses = []
    for _ in range(80):
        x = torch.randn(32, 12)
        with torch.no_grad():
            target = whole.down(whole.act(whole.gate(x)) * whole.up(x) * useful)
        loss = (mlp(x, context) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert mlp.kept().tolist() == list(range(8))
    assert losses[-1] < 0.02 * losses[0] and mlp.warmth == pytest.approx(mlp.config.cold)


def test_updates_are_counted_not_passes() -> None:
    mlp: Any = MaskedMLP.Config(dim=4, hidden_dim=6, keep=3, steps=10).build().train()
    context: Any = None
    for update in range(3):
        for _ in range(4):  # micro-batches, or layers that are computed again
            mlp(torch.randn(2, 4), context)
        assert float(mlp.mask_updates) == update
        with torch.no_grad():
            mlp.mask_scores.add_(0.1)
    mlp.eval()
    mlp(torch.randn(2, 4), context)
    assert float(mlp.mask_updates) == 2
    assert mlp.warmth == pytest.approx(0.5 * (0.02 / 0.5) ** 0.2)


@pytest.mark.parametrize("fused", [False, True])
def test_updates_of_fused_optimizers_are_counted_too(fused: bool) -> None:
    mlp: Any = MaskedMLP.Config(dim=4, hidden_dim=6, keep=3, steps=10).build().train()
    optimizer = torch.optim.AdamW(mlp.parameters(), fused=fused)
    context: Any = None
    for update in range(4):
        out = mlp(torch.randn(2, 4), context)
        assert float(mlp.mask_updates) == update
        out.square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("looked", [False, True])
def test_masks_become_a_smaller_model(looked: bool) -> None:
    model = built(tree())
    prune = Prune(width=0.5, importance="soft", heads=0.5, steps=7)
    masked = prune.apply(model, texts() if looked else ())
    assert [type(layer.mlp) for layer in masked.stack.layers] == [MaskedMLP] * 3
    trained = {name for name, part in masked.named_parameters() if part.requires_grad}
    assert "stack.layers.0.mlp.mask_scores" in trained and "stack.layers.0.mlp.mask_updates" not in trained
    masked.requires_grad_(True)
    masked(IDS).square().mean().backward()
    gradient = masked.stack.layers[0].mlp.mask_scores.grad  # type: ignore[union-attr]
    assert gradient is not None and float(gradient.abs().sum()) > 0  # type: ignore[union-attr,arg-type,operator]
    for layer in masked.stack.layers:  # as cold as can be: the mask is as good as hard
        layer.mlp.mask_updates.data.fill_(7)  # type: ignore[union-attr]
        layer.mlp.config.cold = 1e-4  # type: ignore[union-attr]
    small = prune.finish(masked)
    assert small.config.complete() == prune(model.config)
    assert torch.allclose(scores(small), scores(masked), atol=1e-4)
    assert prune.finish(small) is small


def test_masks_need_a_gate_and_a_sound_schedule() -> None:
    with pytest.raises(UnsupportedPair, match="no gate"):
        Prune(importance="soft").apply(built(tree(FeedForward.Config(hidden_dim=64))))
    for wrong in ({"keep": 9}, {"keep": 0}, {"keep": 3, "steps": 0}, {"keep": 3, "cold": 0.0}):
        with pytest.raises(ConfigError):
            MaskedMLP.Config(dim=4, hidden_dim=6, **wrong).build()
