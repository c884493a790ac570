"""The models of the study `afm-2025-server`: one way through, parallel tracks, windows between global layers.

All of them have the same width, depth and number of heads. A model with T tracks has T times as many norms; the model with one
way through gets so many hidden channels more that both have exactly as many parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchard.core.errors import ConfigError
from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE, TopK
from orchard.nn.stack import Block, Stack
from orchard.studies._afm_ground import Ground
from orchard.studies._afm_text import VOCAB
from orchard.transforms.local_global import LocalGlobal
from orchard.transforms.tracks import ParallelTracks


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large the models are, and how they are cut."""

    ground: Ground
    tracks: int = 4
    depth: int = 2
    deep: int = 4
    """Layers between two meetings, in the deeper of the two cuts."""
    window: int = 64
    every: int = 4
    far: int = 4
    """So many times the length that was learnt from."""
    experts: int = 4

    @property
    def hidden(self) -> int:
        return 3 * self.ground.dim


def one_way(shape: Shape) -> Decoder.Config:
    """One way through, with as many parameters as the model with tracks."""
    norms = 2 * shape.ground.dim * (shape.tracks - 1)  # of every layer, that tracks have more
    more, rest = divmod(norms, 3 * shape.ground.dim)
    if rest:
        raise ConfigError(
            f"the norms of {shape.tracks} tracks are no whole number of channels", hint="use 1, 4 or 7 tracks"
        )
    return _tree(shape, shape.hidden + more)


def with_tracks(shape: Shape, depth: int) -> Decoder.Config:
    made: Decoder.Config = ParallelTracks(tracks=shape.tracks, depth=depth)(_tree(shape, shape.hidden))
    return made


def near_and_far(shape: Shape) -> Decoder.Config:
    """One way through, three layers with a window to one that sees everything and knows no positions."""
    made: Decoder.Config = LocalGlobal(window=shape.window, every=shape.every)(one_way(shape))
    return made


def server(shape: Shape) -> Decoder.Config:
    """All of the server model at once: tracks, windows between global layers, a mixture of experts in every other layer. An
    expert is half as wide as an MLP and a token meets two, so that it meets as many weights as without them."""
    tree: Any = _tree(shape, shape.hidden)
    for layer in tree.stack.layers[1::2]:
        layer.mlp = MoE.Config(hidden_dim=shape.hidden // 2, experts=shape.experts, router=TopK.Config(k=2))
    made: Decoder.Config = LocalGlobal(window=shape.window, every=shape.every)(
        ParallelTracks(tracks=shape.tracks, depth=shape.deep)(tree)
    )
    return made


def _tree(shape: Shape, hidden: int) -> Decoder.Config:
    """Llama-shaped, a key for every query (tracks have one head each), tied embeddings."""
    heads = shape.tracks
    block = Block.Config(
        mixer=Attention.Config(heads=heads, kv_heads=heads, head_dim=shape.ground.dim // heads),
        mlp=GatedMLP.Config(hidden_dim=hidden),
    )
    layers = [block.clone() for _ in range(shape.ground.layers)]
    context = shape.far * shape.ground.length
    return Decoder.Config(
        vocab=VOCAB, dim=shape.ground.dim, context=context, stack=Stack.Config(layers=layers), head=None
    ).complete()
