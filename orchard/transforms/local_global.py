"""Windows between global layers: of every few layers one sees everything and knows no positions, the others see a window.

Apple's server model of 2025 (arXiv 2507.13575) has three layers with a window and rotary positions to one that attends globally
without any (NoPE, arXiv 2305.19466). Stores of the first stay small however long a text gets, and nothing that depends on how
far away something is has to hold beyond the lengths that were learnt from. With `mixer="rattention"` the others also see a sum of
all that lies behind their window (RATTENTION, arXiv 2506.15545), so that a much shorter window does.

A rewrite of the tree. What a trained model loses by it has to be healed by training (`heals`); weights stay bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from orchard.cache.policies import Window
from orchard.core.batch import Batch
from orchard.core.config import REQUIRED
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.attention.attention import Attention
from orchard.nn.attention.rattention import RAttention
from orchard.nn.norm import HeadNorm
from orchard.nn.tensors import carried
from orchard.nn.tracks import Tracks
from orchard.transforms.base import Tell, Transform, silent
from orchard.transforms.reformat import learning_like

M = TypeVar("M", bound=nn.Module)
MIXERS = {"attention": Attention, "rattention": RAttention}
"""What the layers with a window can be."""


@dataclass(frozen=True)
class LocalGlobal(Transform):
    """Of `every` layers the last is global. `window`: how many tokens back the others see, themselves included. `positions`:
    leave global layers their rotary positions. `mixer`: what the layers with a window are, "attention" or "rattention". In a
    model with tracks each track has the pattern, over all its layers."""

    window: int
    every: int = 4
    positions: bool = False
    mixer: str = "attention"

    heals: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("window", "every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}", hint="use a whole number from 1")
        if self.mixer not in MIXERS:
            raise ConfigError(f"no mixer is called {self.mixer!r}", hint="use one of " + ", ".join(MIXERS))

    def __call__(self, tree: Any) -> Any:
        """The completed tree; of one whose vocabulary is not known yet, the tree as far as it goes."""
        tree = tree.clone()
        columns = columns_of(tree)
        if len(columns[0]) < self.every:
            raise ConfigError(
                f"a model of {len(columns[0])} layers has no global one of every {self.every}",
                hint=f"use every={len(columns[0])} or less",
            )
        for column in columns:
            for place, block in enumerate(column):
                self._change(block, place)
        return completed(tree)

    def _change(self, block: Any, place: int) -> None:
        mixer = block.mixer
        if not isinstance(mixer, Attention.Config) or isinstance(mixer, RAttention.Config):
            raise UnsupportedPair(
                f"layer {place} mixes tokens by {mixer.builds.__name__}, not by attention: it can be given no window",
                hint="use LocalGlobal in models whose layers are all attention",
            )
        if mixer.store.owner is not None:
            raise UnsupportedPair(
                f"layer {place} reads the keys and values of layer {mixer.store.owner}, which may see less than it",
                hint="give windows to a model first, and let layers share keys and values afterwards",
            )
        if (place + 1) % self.every:
            mixer.window = self.window
            mixer.store.policy = Window.Config(window=self.window)
            if MIXERS[self.mixer] is not Attention:
                block.mixer = mixer.derive(MIXERS[self.mixer])
        elif not self.positions:
            mixer.rotary = None

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        source: Any = model
        tree, like = self(source.config.complete()), next(model.parameters())
        gains = {f"{_module(path)}.weight": node.dim for path, node in tree.find(HeadNorm)}  # which begin as nothing
        begins = {name: partial(torch.ones, size, dtype=like.dtype, device=like.device) for name, size in gains.items()}
        made: M = learning_like(carried(model, tree, begins=begins), model)
        learns = any(parameter.requires_grad for parameter in model.parameters())
        for name in gains:
            made.get_parameter(name).requires_grad_(learns)
        tell(1.0)
        return made


def _module(path: str) -> str:
    return path.replace("[", ".").replace("]", "")


def completed(tree: Any) -> Any:
    """A changed tree with every dimension filled in, if its vocabulary is known: that of a fresh model comes from a tokenizer."""
    return tree if tree.vocab is REQUIRED else tree.complete()


def columns_of(tree: Any) -> list[list[Any]]:
    """The blocks that tokens go through from the first layer to the last: of every track, or of the one way that there is."""
    layers = tree.stack.layers
    count = max(len(layer.tracks) if isinstance(layer, Tracks.Config) else 1 for layer in layers)
    columns: list[list[Any]] = [[] for _ in range(count)]
    for layer in layers:
        if not isinstance(layer, Tracks.Config):
            for column in columns:
                column.append(layer)
        elif len(layer.tracks) == count:
            for column, track in zip(columns, layer.tracks, strict=True):
                column.extend(track.layers)
        else:
            raise UnsupportedPair(
                f"layers of {len(layer.tracks)} and of {count} tracks in one model", hint="give all of them as many"
            )
    return columns
