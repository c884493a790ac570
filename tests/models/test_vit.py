"""The vision transformer: shapes, what it must not depend on, its costs by two ways of counting, and bad trees."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.models.vision import ViT, small_vit
from orchard.models.vision.costs import costs
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE, Own, TopK
from orchard.transforms.image_experts import ImageExperts


def tree() -> ViT.Config:
    return small_vit(side=12, patch=4, classes=7, dim=16, layers=3, heads=2, hidden_dim=24)


def images(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_scores_do_not_depend_on_the_batch() -> None:
    model = tree().build()
    alone = torch.cat([model(image[None]) for image in images()])
    assert alone.shape == (5, 7) and torch.allclose(model(images()), alone, atol=1e-6)
    assert torch.equal(model.scores(model.hidden(images())), model(images()))


@torch.no_grad()
def test_without_places_the_order_of_squares_does_not_matter_and_with_them_it_does() -> None:
    model, x = tree().build(), images()
    flipped = x.view(5, 3, 3, 4, 12).flip(2).reshape(x.shape)  # rows of squares in another order
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    assert not torch.allclose(model(x), model(flipped), atol=1e-3)
    model.patches.places.zero_()
    assert torch.allclose(model(x), model(flipped), atol=1e-4)


@torch.no_grad()
def test_the_first_token_can_stand_for_an_image() -> None:
    cfg = tree().clone(pool="first").set("patches.first", True)
    model = cfg.build()
    assert model(images()).shape == (5, 7) and model.patches.places.shape == (10, 16)
    with pytest.raises(ConfigError, match="no first token"):
        tree().clone(pool="first").build()
    with pytest.raises(ConfigError, match="no pooling called 'max'"):
        tree().clone(pool="max").build()


@pytest.mark.parametrize(
    "change",
    [None, ImageExperts(experts=4), ImageExperts(experts=4, single=False), ImageExperts(experts=3, last=1, k=2)],
)
@torch.no_grad()
def test_costs_are_what_torch_counts(change: ImageExperts | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Own, "run", lambda self, tokens, counts, _: self.loop(tokens, counts)
    )  # kernels are not counted
    cfg = tree() if change is None else change(tree())
    model = cfg.build()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # others are not counted on a CPU
        model(images(1))
    told = costs(cfg)
    routers = (
        0 if change is None else (1 if change.single else change.last) * 9 * 16
    )  # means are no products of matrices
    assert told.flops - routers == counter.get_total_flops()
    assert told.parameters == sum(parameter.numel() for parameter in model.parameters())
    idle = 0 if change is None else change.last * (change.experts - change.k) * 3 * 16 * 24
    assert told.touched == told.parameters - idle


def test_costs_that_depend_on_the_image_are_refused() -> None:
    cfg = tree().rewrite(GatedMLP, lambda mlp: MoE.Config(hidden_dim=8, experts=2, router=TopK.Config(k=1)))
    with pytest.raises(UnsupportedPair, match="each token has its own experts"):
        costs(cfg)
