"""Experts for whole images: nothing changes until experts part, an image uses exactly k of them, bad trees are refused."""

from __future__ import annotations

import pytest
import torch

from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.models.language import Decoder
from orchard.models.vision import ViT, small_vit
from orchard.nn.attention import Attention
from orchard.nn.feed_forward import FeedForward
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import Follow, ImageLevel, MoE
from orchard.nn.stack import Block, Stack
from orchard.transforms.image_experts import ImageExperts


def dense(seed: int = 0) -> ViT:
    torch.manual_seed(seed)
    made: ViT = small_vit(side=8, patch=4, classes=5, dim=12, layers=3, heads=2, hidden_dim=16).build()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.4)
    return made


def images(count: int = 16) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("k", [1, 2, 3])
@torch.no_grad()
def test_copies_compute_what_the_dense_model_did(k: int) -> None:
    model = dense()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = ImageExperts(experts=4, last=2, k=k).apply(model)
    assert torch.allclose(made(images()), model(images()), atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in made.parameters())
    assert [type(layer.mlp) for layer in made.stack.layers] == [GatedMLP, MoE, MoE]
    places = [{parameter.data_ptr() for parameter in each.parameters()} for each in (model, made)]
    assert not places[0] & places[1]


@torch.no_grad()
def test_an_image_uses_its_k_experts_and_no_others() -> None:
    made = ImageExperts(experts=4, last=1, k=2).apply(dense())
    moe, image = made.stack.layers[-1].mlp, images(1)
    seen: list[torch.Tensor] = []
    hook = moe.router.register_forward_hook(lambda _, __, routing: seen.append(routing.experts))
    before = made(image)
    hook.remove()
    used = seen[0].unique().tolist()
    assert len(used) == 2 and (seen[0] == seen[0][0]).all()
    for expert in range(4):
        other = ImageExperts(experts=4, last=1, k=2).apply(dense())
        other.stack.layers[-1].mlp.down.weight[expert] += 1
        assert torch.equal(other(image), before) == (expert not in used)


def test_routers_learn_from_labels() -> None:
    for single, count in ((False, 2), (True, 1)):
        made = ImageExperts(experts=3, last=2, single=single).apply(dense())
        context = made.context(images(), torch.arange(16) % 3)
        made.hidden(images(), context)
        assert len(context.collected["moe.router"]) == count
        torch.stack(context.collected["moe.router"]).mean().backward()
        for layer in made.stack.layers[1 : 1 + count]:
            assert layer.mlp.router.gate.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_all_layers_go_by_one_decision() -> None:
    made = ImageExperts(experts=4, last=3, k=2).apply(dense())
    seen: list[torch.Tensor] = []
    for layer in made.stack.layers:
        layer.mlp.router.register_forward_hook(lambda _, __, routing: seen.append(routing.experts))
    made(images())
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2]) and len(seen[0].unique()) > 2
    assert [name for name, _ in made.named_parameters() if "router" in name] == [
        "stack.layers.0.mlp.router.gate.weight"
    ]


def test_nobody_follows_nobody() -> None:
    tree = ImageExperts(experts=4, last=2)(dense().config)
    alone = tree.set("stack.layers[1].mlp.router", Follow.Config())
    with pytest.raises(UnsupportedPair, match="there is none"):
        alone.build()(images())
    other = tree.set("stack.layers[2].mlp.experts", 5)
    with pytest.raises(UnsupportedPair, match="1 of 5 experts follows one with 1 of 4"):
        other.build()(images())


def test_routers_learn_without_labels_where_gradients_go_through() -> None:
    for through in (False, True):
        made = ImageExperts(experts=3, last=1, through=through).apply(dense())
        scores = made(images())
        assert torch.allclose(scores, dense()(images()), atol=1e-5)
        scores.square().sum().backward()
        gradient = made.stack.layers[-1].mlp.router.gate.weight.grad
        assert bool(gradient.abs().sum() > 1e-3) == through
    with pytest.raises(ConfigError, match="gradient of their own"):
        ImageExperts(renormalize=False, through=True)(dense().config)


def test_trees_and_seeds() -> None:
    tree = dense().config
    made = ImageExperts(experts=6, last=3, k=2, renormalize=False, single=False)(tree)
    assert [block.mlp.router.k for block in made.stack.layers] == [2, 2, 2]
    assert isinstance(made.stack.layers[0].mlp.router, ImageLevel.Config)
    one, again, other = (ImageExperts(seed=seed).apply(dense()) for seed in (1, 1, 2))
    gates = [model.stack.layers[1].mlp.router.gate.weight for model in (one, again, other)]
    assert torch.equal(gates[0], gates[1]) and not torch.equal(gates[0], gates[2])


def test_what_cannot_be_is_refused() -> None:
    for settings, said in (
        ({"experts": 1}, "1 of 1 experts"),
        ({"experts": 3, "k": 4}, "4 of 3 experts"),
        ({"last": 0}, "last 0 layers"),
    ):
        with pytest.raises(ConfigError, match=said):
            ImageExperts(**settings)
    with pytest.raises(ConfigError, match="there are 3 layers, not 4"):
        ImageExperts(last=4)(dense().config)
    ungated = dense().config.rewrite(GatedMLP, lambda mlp: FeedForward.Config(hidden_dim=mlp.hidden_dim))
    with pytest.raises(UnsupportedPair, match="is a FeedForward, not a gated MLP"):
        ImageExperts()(ungated)
    block = Block.Config(mixer=Attention.Config(heads=2, kv_heads=1, head_dim=8), mlp=GatedMLP.Config(hidden_dim=8))
    writes = Decoder.Config(vocab=9, dim=16, context=8, stack=Stack.Config(layers=[block]))
    with pytest.raises(UnsupportedPair, match="looks at tokens that are not written yet"):
        ImageExperts(experts=2, last=1)(writes)
