"""Any set of layers that keep keys and values: bytes, owners, and the same scores in pieces, at once, in torch and natively."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.cache.codecs import Int8
from orchard.cache.store import Store
from orchard.core.batch import Batch
from orchard.core.config import REQUIRED
from orchard.core.context import Context
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.nn.attention import Attention, Rotary
from orchard.ops.kernels.native import library
from orchard.transforms.kv8 import KV8
from orchard.transforms.retain import Retain
from orchard.transforms.share_kv import ShareKV, kv_bytes
from tests.transforms.routing_models import IDS, VOCAB, built, owners, tree

LAYERS = 6
MODEL = built(tree(layers=LAYERS))
SETS = st.sets(st.integers(1, LAYERS - 1)).map(lambda more: (0, *sorted(more)))


@settings(max_examples=12, deadline=None)
@given(SETS, st.lists(st.integers(1, 10), max_size=3, unique=True), st.sampled_from(["plain", "int8"]))
@torch.no_grad()
def test_any_set_takes_its_share_of_the_bytes_and_says_the_same_in_pieces(
    kept: tuple[int, ...], cuts: list[int], codec: str
) -> None:
    made: Any = Retain(layers=kept).apply(MODEL)
    assert owners(made.config) == [
        None if layer in kept else max(one for one in kept if one < layer) for layer in range(LAYERS)
    ]
    assert kv_bytes(made.config) * LAYERS == kv_bytes(MODEL.config) * len(kept)
    whole = MODEL.cache(batch=2, length=11).nbytes
    cache = made.cache(batch=2, length=11)
    assert cache.nbytes * LAYERS == whole * len(kept)
    wanted, edges = made(IDS), [0, *sorted(cuts), 11]
    pieces = []
    for start, stop in pairwise(edges):
        context = Context(torch.arange(start, stop).expand(2, -1), cache=cache, upto=stop)
        pieces.append(made(IDS[:, start:stop], context))
    assert torch.allclose(torch.cat(pieces, 1), wanted, atol=1e-5 * float(wanted.abs().max()))
    if library() is None:
        return
    coded = KV8().apply(made) if codec == "int8" else made
    plan = lower(coded, stores="f32")
    assert plan.whole
    native = NativeRunner(plan, threads=1).begin([IDS[0].tolist()], length=16)
    for start, stop in pairwise(edges):
        native.read(start, stop)
    ones = [native.first().copy()] + [native.step([token]).copy() for token in (3, 5)]
    cache = coded.cache(batch=1, length=16)
    coded(IDS[:1, :10], Context(torch.arange(10)[None], cache=cache))
    for at, (token, found) in enumerate(zip([int(IDS[0, 10]), 3, 5], ones), 10):
        want = coded(torch.tensor([[token]]), Context(torch.tensor([[at]]), cache=cache))[0, 0]
        far = (torch.from_numpy(found).view(-1) - want).abs().max() / want.abs().max()
        assert far < 1e-4, "bits of codes may fall otherwise" if codec == "int8" else kept


def test_layers_are_named_counted_or_spread() -> None:
    eight = tree(layers=8)
    assert owners(Retain(every=4)(eight)) == [None, 0, 0, 0, None, 4, 4, 4]
    assert Retain(share=0.25).kept(eight.complete()) == [0, 4] and Retain(share=0.01).kept(eight.complete()) == [0]
    assert Retain(share=0.375).kept(eight.complete()) == [0, 2, 5]
    assert Retain(every=1)(eight) == eight.complete() == Retain(share=1.0)(eight)
    assert owners(Retain(layers=(4, 0))(ShareKV(last=3)(eight))) == [None, 0, 0, 0, None, 4, 4, 4]
    assert owners(Retain(layers=(0,))(Retain(every=2)(eight))) == [None] + [0] * 7, "a fixed pattern can be cut further"
    half = Retain(every=2)(eight.clone(vocab=REQUIRED))
    assert half.vocab is REQUIRED and half.clone(vocab=VOCAB).complete() == Retain(every=2)(eight)
    near = Attention.Config(heads=4, kv_heads=2, head_dim=8, window=4, rotary=Rotary.Config(theta=100.0))
    gemma = tree(near, near, near.clone(window=None), near, near, near.clone(window=None))
    assert owners(Retain(every=2)(gemma)) == [None, 0, None, None, 3, 2], "each kind by itself"
    with pytest.raises(UnsupportedPair, match="layer 2 sees everything, and no layer before it"):
        Retain(layers=(0,))(gemma)


def test_nothing_else_changes_and_texts_bring_it_nearer() -> None:
    made = Retain(every=2).apply(MODEL)
    kept, before = made.state_dict(), MODEL.state_dict()
    parts = ("k.weight", "v.weight", "k_norm.weight")
    assert before.keys() - kept.keys() == {
        f"stack.layers.{layer}.mixer.{part}" for layer in (1, 3, 5) for part in parts
    }
    assert all(torch.equal(value, before[name]) for name, value in kept.items())
    draw = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, VOCAB, (8, 24), generator=draw) for _ in range(4)]
    places = torch.arange(24).expand(8, -1)
    texts = [Batch(one, one, places, torch.zeros_like(one)) for one in ids[:-1]]
    fitted, left = Retain(every=2).apply(MODEL, texts), Retain(every=2, fit=False).apply(MODEL, texts)
    with torch.no_grad():
        was, plain, fit, same = (one.hidden(ids[-1], Context(places)) for one in (MODEL, made, fitted, left))
    assert torch.equal(plain, same) and (fit - was).square().sum() < 0.6 * (plain - was).square().sum()
    eight = KV8().apply(made)
    assert all(isinstance(node.codec, Int8.Config) for _, node in eight.config.find(Store))


def test_sets_that_cannot_be_are_refused() -> None:
    for wrong in (
        {},
        {"every": 2, "share": 0.5},
        {"every": 0},
        {"every": True},
        {"share": 0.0},
        {"share": float("nan")},
        {"layers": (0, 0)},
        {"layers": (0, -1)},
        {"layers": (False, 2)},
    ):
        with pytest.raises(ConfigError):
            Retain(**wrong)  # type: ignore[arg-type]
    for layers, message in (((2, 3), "the first layer"), ((0, 6), "no layer 6"), ((), "the first layer")):
        with pytest.raises(ConfigError, match=message):
            Retain(layers=layers).apply(MODEL)
    with pytest.raises(ConfigError, match="layer 5 reads the keys and values of layer 3"):
        Retain(layers=(0, 5))(ShareKV(last=2)(MODEL.config))
