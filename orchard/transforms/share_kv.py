"""Shared keys and values: the last layers of a model read what an earlier one keeps, and keep nothing themselves.

Retrofitted to a trained model as in Apple's on-device model (arXiv 2507.13575, where the last 37.5 % of the layers do so): they
lose their key and value maps. The memory of a conversation shrinks by their share, and a prompt needs them for its last token
only. Where texts are at hand, their output maps are fitted to what they read now (share_kv_fit.py); without, all else stays bit
for bit. What is still lost has to be healed by training (`heals`).

Each reads the last layer before them that keeps keys and values and sees as far as it does: layers with a window of 512 tokens
read one with a window of 512 tokens (Gemma), others read one that sees everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from orchard.core.batch import Batch
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.attention.attention import Attention
from orchard.transforms.base import Tell, Transform, silent
from orchard.transforms.owners import attentions, sees
from orchard.transforms.reformat import learning_like
from orchard.transforms.share_kv_fit import fit_readers, refine

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class ShareKV(Transform):
    """`last`: how many layers read another's keys and values; or `share`: which part of all layers, to the nearest number."""

    last: int | None = None
    share: float | None = None
    refine: int = 0
    """Steps by which attentions that read another's keys and values learn, each from what it gave before."""
    notes: list[str] = field(default_factory=list, compare=False, repr=False)
    """What was left as it is, once it was applied."""

    heals: ClassVar[bool] = True
    """Whether the model should be trained afterwards, though nothing new has to be learnt."""

    def __post_init__(self) -> None:
        if (self.last is None) == (self.share is None):
            raise ConfigError("how many layers share keys and values?", hint="give last=11 or share=0.375, one of them")
        if self.last is not None and (isinstance(self.last, bool) or not isinstance(self.last, int) or self.last < 1):
            raise ConfigError(f"the last {self.last!r} layers", hint="use a whole number from 1")
        if self.refine < 0:
            raise ConfigError(f"{self.refine} steps of refining", hint="use a whole number from 0")
        if self.share is not None and not 0 < self.share < 1:
            raise ConfigError(f"a share of {self.share!r} of the layers", hint="use a number between 0 and 1")

    def count(self, layers: int) -> int:
        """How many of so many layers read another's; `ConfigError` where that leaves nothing to read, or changes nothing."""
        asked = self.last if self.last is not None else round(float(self.share or 0) * layers)
        if layers < 2:
            raise ConfigError(f"a model of {layers} layer has nothing to share", hint="leave ShareKV out of the plan")
        if not 1 <= asked < layers:
            raise ConfigError(
                f"{asked} of {layers} layers cannot read the keys and values of others",
                hint=f"use last=1 to last={layers - 1}: the first layers keep their own",
            )
        return asked

    def __call__(self, tree: Any) -> Any:
        tree = tree.complete()
        blocks: list[Any] = tree.stack.layers
        own = len(blocks) - self.count(len(blocks))
        attentions(tree)
        for layer in range(own, len(blocks)):
            blocks[layer].mixer.store.owner = _owner(blocks, layer, own)
        return tree.complete()

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        made = learning_like(super().apply(model, texts, tell), model)
        if texts:
            self.notes[:] = fit_readers(model, made, texts, tell)
            if self.refine:
                refine(model, made, texts, self.refine, tell)
        tell(1.0)
        return made


def kv_bytes(tree: Any, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of keys and values that one token leaves behind, of all layers that keep their own, coded as their stores say."""
    total = 0
    for _, mixer in tree.complete().find(Attention):
        if mixer.store.owner is None:
            total += mixer.store.codec.build().bytes_per_slot(mixer.kv_heads, mixer.head_dim, dtype)
    return total


def _owner(blocks: list[Any], layer: int, own: int) -> int:
    """The layer among the first `own` whose keys and values this one is to read."""
    mine = blocks[layer].mixer
    keeping = [at for at in range(own) if blocks[at].mixer.store.owner is None]
    alike = [at for at in keeping if blocks[at].mixer.window == mine.window]
    if not alike:
        raise UnsupportedPair(
            f"layer {layer} sees {sees(mine)}, and none of the first {own} layers that keep keys and values does",
            hint="share fewer layers, so that one of each window keeps its own",
        )
    found = alike[-1]
    other = blocks[found].mixer
    if (other.kv_heads, other.head_dim) != (mine.kv_heads, mine.head_dim):
        raise UnsupportedPair(
            f"layer {layer} reads {mine.kv_heads} key/value heads of {mine.head_dim}, and layer {found} keeps "
            f"{other.kv_heads} of {other.head_dim}",
            hint="share keys and values only among layers with the same heads",
        )
    if other.rotary != mine.rotary:
        raise UnsupportedPair(
            f"layers {found} and {layer} turn keys by position in different ways",
            hint="share keys and values only among layers with the same rotary positions",
        )
    return found
