"""Structured pruning: the right units go, the rest computes as before, and every form of it agrees with zeros in their place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.batch import Batch
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.generate.lowering import lower
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.feed_forward import FeedForward
from orchard.nn.formats import Int8
from orchard.nn.linear import Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Block, Stack
from orchard.nn.tensors import carried
from orchard.ops.plan.reference import Reference
from orchard.transforms.lora import Lora
from orchard.transforms.prune import Prune
from orchard.transforms.prune_scores import IMPORTANCES, count_of, importance, keep_best, usual_multiple

IDS = torch.tensor([[5, 17, 3, 38, 41, 2, 9, 20], [1, 2, 3, 4, 5, 6, 7, 8]])


def tree(mlp: Any = None, layers: int = 3, **mixer: Any) -> Any:
    blocks = [
        Block.Config(
            mixer=Attention.Config(heads=4, kv_heads=2, head_dim=8, **mixer),
            mlp=(mlp or GatedMLP.Config(hidden_dim=64)).clone(),
        )
        for _ in range(layers)
    ]
    return Decoder.Config(vocab=50, dim=32, context=64, stack=Stack.Config(layers=blocks))


def built(cfg: Any) -> Decoder:
    torch.manual_seed(0)
    model: Decoder = cfg.build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
            else:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def texts(rows: int = 2) -> list[Batch]:
    ids = np.random.default_rng(0).integers(0, 50, (rows, 12))
    places = np.broadcast_to(np.arange(12), ids.shape).copy()
    return [Batch(ids=ids, targets=ids, positions=places, documents=np.zeros_like(ids), plain=True)]


@torch.no_grad()
def scores(model: Decoder) -> torch.Tensor:
    return model(IDS)


@torch.no_grad()
def without(model: Decoder, units: dict[str, torch.Tensor], groups: dict[str, torch.Tensor]) -> Decoder:
    """The same model with zeros where something goes."""
    model = carried(model, model.config)
    for path, kept in units.items():
        down: Any = model.get_submodule(f"{path}.down")
        gone = [i for i in range(down.shape[1]) if i not in kept.tolist()]
        down.weight[:, gone] = 0
    for path, kept in groups.items():
        mixer: Any = model.get_submodule(path)
        o = mixer.o.weight.view(mixer.o.shape[0], mixer.config.kv_heads, -1)
        o[:, [g for g in range(mixer.config.kv_heads) if g not in kept.tolist()]] = 0
    return model


# What goes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", IMPORTANCES)
def test_a_pruned_model_is_the_one_with_zeros(kind: str, together: bool) -> None:
    model = built(tree(q_norm=RMSNorm.Config(), k_norm=RMSNorm.Config()))
    prune = Prune(width=0.5, heads=0.5, importance=kind, together=together)
    small = prune.apply(model, texts())
    units, groups = prune.choose(model, texts())
    assert torch.allclose(scores(small), scores(without(model, units, groups)), atol=1e-5)
    widths = [block.mlp.hidden_dim for block in small.config.stack.layers]
    assert sum(widths) == 96 and (together or widths == [32, 32, 32])
    assert sum(block.mixer.kv_heads for block in small.config.stack.layers) == 3
    assert scores(model).shape == scores(small).shape and not torch.allclose(scores(model), scores(small), atol=1e-2)


@pytest.mark.parametrize("kind", [kind for kind in IMPORTANCES if kind != "fpgm"])
def test_dead_units_go_first(kind: str) -> None:
    model = built(tree())
    with torch.no_grad():
        for path, layer in enumerate(model.stack.layers):
            mlp: Any = layer.mlp
            for weight in (mlp.gate.weight, mlp.up.weight, mlp.down.weight.mT):
                weight[path : 32 + path] *= 1e-6
    before = scores(model)
    prune = Prune(width=0.5, importance=kind)
    assert torch.allclose(scores(prune.apply(model, texts())), before, atol=1e-4)
    assert torch.equal(scores(model), before)  # the model itself stays


def test_equal_units_go_first_by_the_median() -> None:
    vectors = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    vectors[1] = vectors[4] = 0.01 * vectors[1]  # near the middle of all, and near each other
    assert set(importance("fpgm", vectors, where="x").argsort()[:2].tolist()) == {1, 4}


def test_lamp_is_the_order_of_l2_and_ends_in_one() -> None:
    vectors = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    lamp, l2 = (importance(kind, vectors, where="x") for kind in ("lamp", "l2"))
    assert torch.equal(lamp.argsort(), l2.argsort()) and float(lamp.max()) == 1.0


def test_layers_that_share_a_store_lose_the_same_heads() -> None:
    cfg = tree()
    cfg.stack.layers[2].mixer.store.owner = 1
    model = built(cfg)
    prune = Prune(width=1.0, heads=0.5)
    units, groups = prune.choose(model)
    assert not units and torch.equal(groups["stack.layers.1.mixer"], groups["stack.layers.2.mixer"])
    assert torch.allclose(scores(prune.apply(model)), scores(without(model, {}, groups)), atol=1e-5)


def test_norms_over_all_heads_are_cut() -> None:
    model = built(tree(q_norm=RMSNorm.Config(), k_norm=RMSNorm.Config(), norm_over="all"))
    small = Prune(width=1.0, heads=0.5).apply(model)
    assert small.stack.layers[0].mixer.q_norm.weight.shape == (16,)  # type: ignore[union-attr]
    assert scores(small).isfinite().all()


def test_layers_without_a_gate() -> None:
    model = built(tree(FeedForward.Config(hidden_dim=64)))
    prune = Prune(width=0.25)
    units, _ = prune.choose(model)
    assert torch.allclose(scores(prune.apply(model)), scores(without(model, units, {})), atol=1e-5)


# Trees and formats ----------------------------------------------------------------------------------------------------


def test_the_tree_is_known_before_the_weights() -> None:
    cfg = tree().complete()
    prune = Prune(width=0.5, heads=0.5, widths={"stack.layers[1].mlp": 20, "stack.layers.2.mlp": 64})
    assert prune(cfg) == prune.apply(built(cfg)).config.complete()
    assert [block.mlp.hidden_dim for block in prune(cfg).stack.layers] == [32, 20, 64]


def test_side_paths_are_cut_along() -> None:
    model = Lora(r=3, alpha=4).attach(built(tree()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_(std=0.3)
    prune = Prune(width=0.5, heads=0.5)
    units, groups = prune.choose(model)
    want = without(model, units, groups)
    with torch.no_grad():  # what a side path reads goes too
        for path, kept in units.items():
            a: Any = want.get_submodule(f"{path}.down").lora_a
            a[:, [i for i in range(64) if i not in kept.tolist()]] = 0
        for path, kept in groups.items():
            o: Any = want.get_submodule(f"{path}.o").lora_a
            o.view(3, 2, -1)[:, [g for g in range(2) if g not in kept.tolist()]] = 0
    assert torch.allclose(scores(prune.apply(model)), scores(want), atol=1e-5)


def test_pruned_models_are_packed_and_lowered() -> None:
    small = Prune(width=0.5).apply(built(tree()))
    packed = carried(
        small, small.config.rewrite(Linear, lambda node: node.clone(format=Int8.Config(group=32, half=True)))
    )
    want = scores(packed)[0]
    off = (want - scores(small)[0]).abs().mean() / scores(small)[0].abs().mean()
    assert 0 < off < 0.1  # eight bits
    got = Reference(lower(packed, stores="f32"), 1, 16).run(IDS[0].tolist(), [0] * 8, list(range(8)), list(range(8)))
    assert np.allclose(got, want.numpy(), atol=2e-2)


def test_what_a_format_cannot_hold_is_named() -> None:
    cfg = tree().rewrite(Linear, lambda node: node.clone(format=Int8.Config(group=8, half=True)), "*.down")
    with pytest.raises(UnsupportedPair, match=r"layers\[0\]\.mlp\.down.*20"):
        Prune(widths={"stack.layers.0.mlp": 20})(cfg)


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"importance": "l3"}, "l3"),
        ({"width": 0.0}, "width is 0"),
        ({"width": 1.5}, "width is 1.5"),
        ({"heads": -1.0}, "heads"),
        ({"multiple": 0}, "multiples of 0"),
        ({"importance": "soft", "together": True}, "masks"),
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Prune(**wrong)


def test_models_that_cannot_be_pruned() -> None:
    with pytest.raises(UnsupportedPair, match=r"experts|units"):
        Prune()(tree(MoE.Config(hidden_dim=16, experts=4)).complete())
    with pytest.raises(ConfigError, match=r"layers\.7"):
        Prune(widths={"stack.layers.7.mlp": 3})(tree())
    with pytest.raises(ConfigError, match="cannot keep 65"):
        Prune(widths={"stack.layers.0.mlp": 65})(tree())
    model = built(tree())
    with pytest.raises(ConfigError, match="no texts"):
        Prune(importance="activation").apply(model)
    assert Prune(importance="activation").looks and not Prune().looks and Prune.learns
    with torch.no_grad():
        model.stack.layers[1].mlp.up.weight[3, 4] = torch.nan  # type: ignore[union-attr,index,operator]
    with pytest.raises(ConfigError, match=r"stack\.layers\.1\.mlp has weights that are not finite"):
        Prune().apply(model)


# Choosing -------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.floats(0.05, 1.0),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
def test_the_best_stay(sizes: list[int], share: float, multiple: int, together: bool) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))
    given = {str(place): torch.rand(size, generator=generator) for place, size in enumerate(sizes)}
    kept = keep_best(given, share, together=together, multiple=multiple)
    for name, part in given.items():
        stay = kept[name].tolist()
        assert stay == sorted(set(stay)) and stay and (len(stay) % multiple == 0 or len(stay) == len(part))
        gone = [place for place in range(len(part)) if place not in stay]
        assert not gone or part[stay].min() >= part[gone].max()
        assert together or len(stay) == count_of(len(part), share, multiple)
    least = sum(min(multiple, size) for size in sizes)
    assert not together or sum(map(len, kept.values())) <= max(least, round(share * sum(sizes)))


@pytest.mark.parametrize(("size", "multiple"), [(1536, 64), (1024, 64), (576, 32), (64, 4), (24, 1), (7, 1), (1, 1)])
def test_usual_multiples(size: int, multiple: int) -> None:
    assert usual_multiple(size) == multiple
