"""Tracks in one process: what they compute, what they keep, and that the native engine computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orchard.cache.policies import Window
from orchard.cache.store import Store
from orchard.core.config import BaseConfig
from orchard.core.context import Context
from orchard.core.errors import ConfigError, UnsupportedPair, UsageError
from orchard.generate.engine import Engine
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.generate.request import Request
from orchard.models.language.decoder import Decoder
from orchard.nn.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE
from orchard.nn.stack import Block, Stack, block_of
from orchard.nn.tensors import tensor_names, tensor_shapes
from orchard.nn.tracks import Track, Tracks, in_tracks
from orchard.nn.tracks_apart import Elsewhere, talk
from orchard.ops.kernels.native import library, why_not
from orchard.text.byte_tokens import byte_tokenizer
from orchard.train.compiled import compiled

DIM, VOCAB = 16, 40
needs_native = pytest.mark.skipif(library() is None, reason=f"no native kernels: {why_not()}")
IDS = torch.randint(VOCAB, (2, 14), generator=torch.Generator().manual_seed(3))


def block(place: int = 0, kind: str = "") -> Block.Config:
    """Three layers of four with a window, the fourth without positions."""
    mixer = Attention.Config(heads=2, kv_heads=1, head_dim=8)
    if (place + 1) % 4:
        mixer = mixer.clone(window=5, store=Store.Config(policy=Window.Config(window=5)))
    else:
        mixer = mixer.clone(rotary=None)
    mlp: Any = MoE.Config(hidden_dim=8, experts=4) if "moe" in kind else GatedMLP.Config(hidden_dim=24)
    return Block.Config(mixer=mixer, mlp=mlp)


def tree(tracks: int = 3, depth: int = 2, layers: int = 4, combine: str = "mean", kind: str = "") -> Decoder.Config:
    stack = in_tracks([block(place, kind) for place in range(layers)], tracks, depth, combine)
    return Decoder.Config(vocab=VOCAB, dim=DIM, context=64, stack=Stack.Config(layers=[*stack]), head=None)


def built(cfg: Decoder.Config, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    model: Decoder = cfg.build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    return model.eval()


@torch.no_grad()
def step_by_step(model: Decoder, ids: Tensor, size: int) -> Tensor:
    cache, out = model.cache(batch=len(ids), length=ids.shape[1]), []
    for start in range(0, ids.shape[1], size):
        part = ids[:, start : start + size]
        positions = torch.arange(start, start + part.shape[1]).expand(len(ids), -1)
        out.append(model(part, Context(positions, cache=cache, upto=start + part.shape[1])))
    return torch.cat(out, 1)


# What they compute ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_tracks_meet_after_their_blocks_and_nowhere_else(combine: str) -> None:
    model = built(tree(combine=combine))
    layer: Any = model.stack.layers[1]
    x = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(0))
    context = Context.whole(torch.zeros(2, 5, dtype=torch.long))
    alone = [track(x, context) for track in layer.tracks]
    wanted = torch.stack(alone).mean(0) if combine == "mean" else x + torch.stack([each - x for each in alone]).sum(0)
    torch.testing.assert_close(layer(x, context), wanted)
    with torch.no_grad():  # a track that says nothing new changes nothing but its own share
        for parameter in layer.tracks[0].parameters():
            parameter.zero_()
        without = layer.tracks[0](x, context)
    torch.testing.assert_close(without, x)


@settings(max_examples=12, deadline=None)
@given(
    tracks=st.integers(1, 4),
    depth=st.sampled_from([1, 2, 4]),
    combine=st.sampled_from(["mean", "sum"]),
    kind=st.sampled_from(["", "moe"]),
    size=st.integers(1, 14),
)
def test_in_pieces_as_whole_for_any_shape(tracks: int, depth: int, combine: str, kind: str, size: int) -> None:
    model = built(tree(tracks, depth, 4, combine, kind)).double()
    before = talk(model).meetings
    with torch.no_grad():
        whole = model(IDS)
    assert talk(model).meetings - before == 4 // depth  # L / D, whatever the number of tracks
    torch.testing.assert_close(step_by_step(model, IDS, size), whole, atol=1e-9, rtol=1e-9)


def test_one_track_is_the_model_without_tracks() -> None:
    model = built(tree(tracks=1, depth=2))
    plain = Decoder.Config(
        vocab=VOCAB, dim=DIM, context=64, stack=Stack.Config(layers=[block(p) for p in range(4)]), head=None
    )
    other = built(plain, seed=1)
    own = model.state_dict()
    for name in other.state_dict():
        parts = name.split(".")
        if parts[0] == "stack":
            number = int(parts[2])
            parts[2:3] = [str(number // 2), "tracks", "0", "layers", str(number % 2)]
        other.state_dict()[name].copy_(own[".".join(parts)])
    torch.testing.assert_close(other(IDS), model(IDS))


def test_every_parameter_gets_a_gradient_and_every_mixture_its_balance() -> None:
    model = built(tree(kind="moe"))
    context = Context.whole(IDS)
    model(IDS, context).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert len(context.collected["moe.balance"]) == 3 * 4


# What they keep ---------------------------------------------------------------------------------------------------------


def test_every_block_has_a_store_of_its_own() -> None:
    cfg = tree().complete()
    numbers = [mixer.layer for layer in cfg.stack.layers for mixer in layer.mixers()]
    assert numbers == list(range(3 * 4))
    model = built(cfg)
    cache = model.cache(batch=1, length=40)
    assert sorted(cache.stores) == numbers
    slots = {store.slots.capacity for store in cache.stores.values()}
    assert slots == {5, 40}  # windows, and the global layer of each track
    assert cfg.stack.layers[0].mixer is None and cfg.stack.layers[0].mlp is None


def test_stores_of_tracks_elsewhere_are_not_made() -> None:
    model = built(tree())
    model.stack.layers[1].tracks[1] = Elsewhere()  # type: ignore[union-attr, operator]
    assert model.stack.elsewhere() == {8, 9}
    assert set(range(12)) - set(model.cache(batch=1, length=8).stores) == {8, 9}
    with pytest.raises(UsageError, match="in another process"):
        model(IDS)


def test_the_tree_says_what_the_model_is() -> None:
    cfg = tree(kind="moe").complete()
    assert BaseConfig.from_dict(cfg.to_dict()) == cfg
    with torch.device("meta"):
        model: Decoder = cfg.build()
    assert tensor_shapes(cfg).keys() == tensor_names(model).keys()
    name = "stack.layers.1.tracks.2.layers.0.mlp.gate.weight"
    found = block_of(name, cfg)
    assert found is cfg.stack.layers[1].tracks[2].layers[0] and block_of("norm.weight", cfg) is None  # type: ignore[attr-defined]


# The native engine ------------------------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("kind", ["", "moe"])
@pytest.mark.parametrize("combine", ["mean", "sum"])
@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_natively_the_same(kind: str, combine: str, fused: bool) -> None:
    model = built(tree(3, 2, 4, combine, kind))
    plan = lower(model, stores="f32", fused=fused)
    assert plan.whole and len(plan.stores) == 12
    native = NativeRunner(plan, threads=1, level=2)
    got = torch.from_numpy(native.scores(IDS[0].tolist()))
    torch.testing.assert_close(got, model(IDS[:1])[0], atol=1e-4, rtol=1e-4)


@needs_native
def test_the_engine_gives_the_same_answers_natively_and_in_torch() -> None:
    model = built(tree(2, 2))
    hooked = built(tree(2, 2))
    hooked.stack.layers[0].tracks[1].register_forward_hook(lambda *_: None)  # type: ignore[union-attr, index]
    mixed = lower(hooked, stores="f32")
    assert [step.node for step in mixed.steps if step.kind == "torch"] == ["stack.layers.0.tracks.1"]  # type: ignore[attr-defined]
    request = Request(ids=tuple(IDS[0].tolist()), max_tokens=12)
    runners: list[Any] = [
        model,
        NativeRunner(lower(model, stores="f32"), threads=1, level=2),
        NativeRunner(mixed, threads=1, level=2, decoder=lambda: hooked),
    ]
    answers = [Engine(one, byte_tokenizer()).answer([request])[0].ids for one in runners]
    assert len(answers[0]) == 12 and answers[0] == answers[1] == answers[2]


# Compiled ---------------------------------------------------------------------------------------------------------------


def test_layers_of_tracks_compile() -> None:
    torch._dynamo.reset()
    model, plain = built(tree(2, 2)), built(tree(2, 2))
    report = compiled(model, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(model(IDS), plain(IDS))
    assert not report.reasons and report.blocks == 2


# Bad input --------------------------------------------------------------------------------------------------------------


def test_bad_trees_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="cannot meet after every 3"):
        in_tracks([block()] * 4, 2, 3)
    with pytest.raises(ConfigError, match="0 tracks"):
        in_tracks([block()] * 4, 0, 2)
    cfg = tree()
    cfg.stack.layers[0].tracks[1].layers.pop()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"3 tracks of \[1, 2\] layers"):
        cfg.complete()
    with pytest.raises(ConfigError, match="combine cannot be 'max'"):
        tree(combine="max").complete()
    shared = tree()
    shared.stack.layers[1].tracks[0].layers[0].mixer.store.owner = 0  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedPair, match="with tracks"):
        shared.complete()


def test_tracks_stand_beside_plain_blocks_and_may_differ() -> None:
    wide = Track.Config(layers=[block().clone(mlp=GatedMLP.Config(hidden_dim=40))])
    odd = Tracks.Config(tracks=[wide, Track.Config(layers=[block(3)])])
    last = block().clone(mixer=Attention.Config(heads=2, kv_heads=2, head_dim=8))
    cfg = Decoder.Config(vocab=VOCAB, dim=DIM, context=64, stack=Stack.Config(layers=[block(), odd, last]), head=None)
    model = built(cfg)
    assert [mixer.layer for layer in model.config.stack.layers for mixer in layer.mixers()] == [0, 1, 2, 3]
    whole = model(IDS)
    for size in (1, 7):
        torch.testing.assert_close(step_by_step(model, IDS, size), whole, atol=1e-5, rtol=1e-5)
