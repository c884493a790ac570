"""Whose keys and values a layer may read: what transforms that share, route or drop them have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchard.core.errors import UnsupportedPair
from orchard.nn.attention.attention import Attention


def attentions(tree: Any) -> list[Any]:
    """The mixers of all layers; `UnsupportedPair` where one of them has no keys and values that others could read."""
    for layer, block in enumerate(tree.stack.layers):
        if block.mixer is None:
            raise UnsupportedPair(
                f"layer {layer} is made of tracks, each of which keeps keys and values of its own",
                hint="share keys and values only in models without tracks",
            )
        if not isinstance(block.mixer, Attention.Config):
            what = block.mixer.builds.__name__
            raise UnsupportedPair(
                f"layer {layer} mixes tokens by {what}, not by attention: it has no keys and values to share",
                hint="share keys and values only in models whose layers are all attention",
            )
    return [block.mixer for block in tree.stack.layers]


def alike(one: Any, other: Any) -> bool:
    """Whether keys and values of one attention can stand for those of the other: as many heads of the same width, turned by
    position in the same way, seen as far back."""
    fields = ("kv_heads", "head_dim", "rotary", "window")
    return all(getattr(one, name) == getattr(other, name) for name in fields)


def readable(mixers: Sequence[Any], layer: int) -> list[int]:
    """The earlier layers that keep keys and values which this one could read."""
    return [at for at in range(layer) if mixers[at].store.owner is None and alike(mixers[at], mixers[layer])]


def sees(mixer: Any) -> str:
    """How far back an attention looks, in words."""
    return "everything" if mixer.window is None else f"{mixer.window} tokens back"
