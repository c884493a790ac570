"""Trees become trees with tracks, or with windows between global layers; and trained weights go along."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from orchard.cache.policies import KeepAll, Window
from orchard.core.batch import Batch
from orchard.core.config import REQUIRED
from orchard.core.context import Context
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.models.language.decoder import Decoder
from orchard.nn.attention import Attention
from orchard.nn.formats import Int8
from orchard.nn.linear import Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE, TopK
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Block, Stack
from orchard.nn.tracks import Tracks
from orchard.transforms.gptq import Gptq
from orchard.transforms.kv8 import KV8
from orchard.transforms.local_global import LocalGlobal
from orchard.transforms.lora import Lora
from orchard.transforms.qat import Qat
from orchard.transforms.rtn import Rtn
from orchard.transforms.share_kv import ShareKV
from orchard.transforms.tracks import ParallelTracks

IDS = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(1))


def tree(layers: int = 4, kind: str = "") -> Decoder.Config:
    bias = "bias" in kind
    mixer = Attention.Config(heads=4, kv_heads=2, head_dim=8, q=Linear.Config(bias=bias), o=Linear.Config(bias=bias))
    if "norms" in kind:
        mixer.q_norm, mixer.k_norm = RMSNorm.Config(), RMSNorm.Config()
    mlp: Any = GatedMLP.Config(hidden_dim=48, down=Linear.Config(bias=bias))
    if "moe" in kind:
        mlp = MoE.Config(hidden_dim=16, experts=4, router=TopK.Config(k=2))
    block = Block.Config(mixer=mixer, mlp=mlp)
    return Decoder.Config(
        vocab=40, dim=32, context=64, stack=Stack.Config(layers=[block.clone() for _ in range(layers)]), head=None
    ).complete()


def built(cfg: Any) -> Decoder:
    torch.manual_seed(0)
    model: Decoder = cfg.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def weights(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Tracks -----------------------------------------------------------------------------------------------------------------


def test_tracks_have_as_many_weights_as_the_model_they_come_from() -> None:
    plain, apart = tree(), ParallelTracks(tracks=2, depth=2)(tree())
    assert [type(layer) for layer in apart.stack.layers] == [Tracks.Config] * 2
    first = apart.stack.layers[0].tracks[1].layers[0]
    assert (first.mixer.heads, first.mixer.kv_heads, first.mlp.hidden_dim) == (2, 1, 24)
    norms = 4 * 2 * 32  # every track has its own
    assert weights(apart.build()) == weights(plain.build()) + norms
    assert apart == apart.complete()


def test_a_tree_without_a_vocabulary_waits_for_it() -> None:
    open_tree = tree().clone(vocab=REQUIRED)
    made = LocalGlobal(window=8)(ParallelTracks(tracks=2, depth=2)(open_tree))
    assert made.vocab is REQUIRED and made.clone(vocab=40).complete() == LocalGlobal(window=8)(
        ParallelTracks(tracks=2, depth=2)(tree())
    )


@pytest.mark.parametrize("kind", ["", "moe", "bias norms"])
@pytest.mark.parametrize("combine", ["mean", "sum"])
@torch.no_grad()
def test_dealt_out_weights_say_the_same_where_nothing_is_lost(kind: str, combine: str) -> None:
    """With one track at any depth; with several, where attention adds nothing: an MLP then has nothing to wait for. In a mixture
    every track routes as the whole did, and each of its experts has half of the channels."""
    model = built(tree(kind=kind))
    one = ParallelTracks(tracks=1, depth=2, combine=combine).apply(model)
    torch.testing.assert_close(one(IDS), model(IDS), atol=1e-5, rtol=1e-5)
    for layer in model.stack.layers:
        for parameter in layer.mixer.o.parameters():  # type: ignore[union-attr]
            parameter.zero_()
    several = ParallelTracks(tracks=2, depth=1, combine=combine).apply(model)
    torch.testing.assert_close(several(IDS), model(IDS), atol=1e-5, rtol=1e-5)


def test_heads_are_dealt_out_whole() -> None:
    model = built(tree())
    made: Any = ParallelTracks(tracks=2, depth=2, combine="sum").apply(model)
    x, context = torch.randn(1, 6, 32), Context.whole(torch.zeros(1, 6, dtype=torch.long))
    whole: Any = model.stack.layers[3].mixer
    parts = [track.layers[1].mixer(x, context) for track in made.stack.layers[1].tracks]
    torch.testing.assert_close(parts[0] + parts[1], whole(x, context), atol=1e-5, rtol=1e-5)


def test_what_was_trained_is_trained() -> None:
    model = built(tree())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mlp." in name)
    made = ParallelTracks(tracks=2, depth=2).apply(model)
    assert all(p.requires_grad is (".mlp." in name) for name, p in made.named_parameters())


def test_what_tracks_cannot_share_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="kv_heads 2, which 4 tracks"):
        ParallelTracks(tracks=4, depth=2)(tree())
    with pytest.raises(ConfigError, match="after every 3"):
        ParallelTracks(tracks=2, depth=3)(tree())
    with pytest.raises(UnsupportedPair, match="no plain block"):
        ParallelTracks(tracks=2, depth=1)(ParallelTracks(tracks=2, depth=2)(tree()))
    joined = tree(kind="norms")
    for layer in joined.stack.layers:
        layer.mixer.norm_over = "all"
    with pytest.raises(UnsupportedPair, match="one vector"):
        ParallelTracks(tracks=2, depth=2)(joined)
    for bad in ({"tracks": 0, "depth": 2}, {"tracks": 2, "depth": True}, {"tracks": 2, "depth": 2, "combine": "max"}):
        with pytest.raises(ConfigError):
            ParallelTracks(**bad)  # type: ignore[arg-type]


# Windows between global layers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tracks", [0, 2])
def test_three_layers_look_near_and_the_fourth_everywhere(tracks: int) -> None:
    start = tree(8) if not tracks else ParallelTracks(tracks=tracks, depth=2)(tree(8))
    made = LocalGlobal(window=6)(start)
    layers = made.stack.layers
    columns = (
        [layers] if not tracks else [[b for layer in layers for b in layer.tracks[t].layers] for t in range(tracks)]
    )
    for column in columns:
        for place, block in enumerate(column):
            mixer = block.mixer
            if place % 4 == 3:
                assert mixer.window is None and mixer.rotary is None and type(mixer.store.policy) is KeepAll.Config
            else:
                assert mixer.window == 6 and mixer.rotary is not None
                assert mixer.store.policy == Window.Config(window=6)
    cache, whole = (built(one).cache(batch=1, length=24).nbytes for one in (made, start))
    # One slot more than asked for is a bin for padding.
    assert cache / whole == pytest.approx((6 * 7 + 2 * 25) / (8 * 25))


@torch.no_grad()
def test_a_global_layer_without_positions_knows_no_order() -> None:
    made: Any = built(LocalGlobal(window=4)(tree(4)))
    mixer = made.stack.layers[3].mixer
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    context = Context.whole(torch.zeros(1, 9, dtype=torch.long))
    mixed = torch.cat([x[:, torch.tensor([5, 0, 7, 2, 1, 4, 6, 3])], x[:, 8:]], 1)
    torch.testing.assert_close(mixer(x, context)[:, 8], mixer(mixed, context)[:, 8])
    near = made.stack.layers[0].mixer
    other = torch.cat([torch.randn(1, 5, 32), x[:, 5:]], 1)
    torch.testing.assert_close(near(x, context)[:, 8], near(other, context)[:, 8])  # what is further away is not seen


def test_windows_are_refused_where_they_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="no global one of every 4"):
        LocalGlobal(window=4)(tree(3))
    with pytest.raises(UnsupportedPair, match="reads the keys and values of layer"):
        LocalGlobal(window=4)(ShareKV(last=1)(tree()))
    with pytest.raises(ConfigError, match="window is 0"):
        LocalGlobal(window=0)


# Other transforms, on a model with tracks -----------------------------------------------------------------------------------


def texts() -> list[Batch]:
    ids = IDS.numpy()
    places = np.broadcast_to(np.arange(12), (2, 12)).copy()
    return [Batch(ids, np.roll(ids, -1, 1), places, np.zeros_like(places), plain=True, full=True).to("cpu")]


def test_compression_knows_tracks() -> None:
    model = built(LocalGlobal(window=6)(ParallelTracks(tracks=2, depth=2)(tree())))
    with torch.no_grad():
        was = model(IDS)
    for made, off in (
        (Rtn(format=Int8.Config()).apply(model, texts()), 0.05),
        (Gptq(bits=8, group=8).apply(model, texts()), 0.05),
        (Qat(bits=4, group=8).apply(model, texts()), 1.0),
        (KV8().apply(model, texts()), 1e-6),
        (Lora(r=2, alpha=4).attach(model), 1e-6),
    ):
        with torch.no_grad():
            assert float((made(IDS) - was).abs().max()) <= off * float(was.abs().max())
    with pytest.raises(UnsupportedPair, match="made of tracks"):
        ShareKV(last=1).apply(model, texts())
