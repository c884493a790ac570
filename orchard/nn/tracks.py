"""Parallel tracks: a layer of several small transformers that read the same, run side by side and meet only at their ends.

The server model of Apple's report of 2025 (arXiv 2507.13575) is made of such layers, and the architecture has a paper of its own
(Parallel Track Transformers, arXiv 2602.07306). A model of L layers that is cut over devices by tensor parallelism has to add up
2 L times for each token. Cut into T tracks whose blocks are D layers deep it does so L / D times: every track has its own share
of the heads, of the hidden channels, or of the experts, and keys and values of its own; within a block nothing is exchanged.

`Tracks` is what a stack takes in place of D blocks. `tracks_apart.py` runs one track (or some) in each of several processes;
`orchard.transforms.tracks` makes such a tree of any other.

Shapes: B sequences, S tokens, as wide as the model in every track.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.core.errors import ConfigError
from orchard.nn.formats.base import NotLowered
from orchard.nn.lowering import part_of
from orchard.nn.stack import Block, Layer
from orchard.ops.plan.builder import Builder, Value

if TYPE_CHECKING:
    from orchard.nn.tracks_apart import Apart

DROWNS = 2.0**60
"""So much is added to a mean square that nothing is left of it. A power of four: its root is exact."""


class Track(Configurable, nn.Module):
    """The blocks of one track between two meetings."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        layer: int = REQUIRED
        """The number of the first block's store."""
        layers: list[Block.Config] = REQUIRED

        def wire(self) -> None:
            for place, block in enumerate(self.layers):
                block.dim, block.layer = self.dim, self.layer + place

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.layers = nn.ModuleList(block.build() for block in cfg.layers)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        for layer in self.layers:
            x = layer(x, context)
        return x

    def inside(self) -> list[nn.Module]:
        return list(self.layers)

    def lower(self, builder: Builder, x: Value, path: str) -> Value:
        for place, block in enumerate(self.layers):
            x = part_of(builder, block, x, f"{path}.layers.{place}")
        return x


class Tracks(Configurable, nn.Module):
    """T tracks of D blocks each, and one meeting after them.

    `mean`: what the tracks made of the same input is averaged, as in the paper. `sum`: what each of them added to it is added up,
    as tensor parallelism does after every part of every layer. `meetings` counts forward passes to the end: one each, for any D.
    """

    @config
    class Config(Layer):
        tracks: list[Track.Config] = REQUIRED
        combine: Literal["mean", "sum"] = "mean"

        def wire(self) -> None:
            if self.combine not in ("mean", "sum"):
                raise ConfigError(f"combine cannot be {self.combine!r}", hint="use 'mean' or 'sum'")
            depths = {len(track.layers) for track in self.tracks}
            if len(depths) != 1 or 0 in depths:
                raise ConfigError(
                    f"{len(self.tracks)} tracks of {sorted(depths)} layers",
                    hint="give every track as many, at least one",
                )
            number = self.layer
            for track in self.tracks:
                track.dim, track.layer = self.dim, number
                number += len(track.layers)

        def mixers(self) -> list[Any]:
            return [mixer for track in self.tracks for block in track.layers for mixer in block.mixers()]

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.tracks = nn.ModuleList(track.build() for track in cfg.tracks)
        self.apart: Apart | None = None
        """How to meet tracks that other processes have; None: all are here."""
        self.meetings = 0

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.apart is not None:
            out = self.apart.run(self, x, context)
        else:
            out = self.met(x, self.share(x, self.tracks, context))
        if not torch.compiler.is_compiling():  # a number that changes would be compiled anew each time
            self.meetings += 1
        return out

    def share(self, x: Tensor, tracks: Any, context: Context) -> Tensor:
        """What some of the tracks bring to the meeting."""
        total: Tensor | None = None
        for track in tracks:
            y = track(x, context)
            y = y - x if self.config.combine == "sum" else y
            total = y if total is None else total + y
        assert total is not None
        return total

    def met(self, x: Tensor, total: Tensor) -> Tensor:
        """What comes out, from what all tracks together bring."""
        return x + total if self.config.combine == "sum" else total / len(self.tracks)

    def keep(self, model: nn.Module, group: Any) -> int:
        """`keep_tracks`, for those who have a model with such layers and nothing else of `orchard.nn`."""
        from orchard.nn.tracks_apart import keep_tracks

        return keep_tracks(model, group)

    def inside(self) -> list[nn.Module]:
        return [track for track in self.tracks if isinstance(track, Track)]

    def elsewhere(self) -> set[int]:
        """The numbers of stores that belong to tracks of other processes."""
        here = {id(track) for track in self.inside()}
        depth = len(self.config.tracks[0].layers)
        away = [place for place, track in enumerate(self.tracks) if id(track) not in here]
        return {self.config.layer + place * depth + layer for place in away for layer in range(depth)}

    def obstacle(self) -> str | None:
        return None if self.apart is None else "some of its tracks are in other processes"

    def lower(self, builder: Builder, x: Value, path: str) -> Value:
        if (reason := self.obstacle()) is not None:
            raise NotLowered(reason)
        outs = [part_of(builder, track, x, f"{path}.tracks.{place}") for place, track in enumerate(self.tracks)]
        total = outs[0]
        for out in outs[1:]:
            total = builder.add(total, out)
        if len(outs) == 1:
            return total
        if self.config.combine == "mean":
            return _times(builder, total, 1 / len(outs), path)
        return builder.add(total, _times(builder, x, 1 - len(outs), path))  # each track's sum has the input in it


def in_tracks(blocks: Sequence[Block.Config], count: int, depth: int, combine: str = "mean") -> list[Tracks.Config]:
    """Layers of tracks for blocks that are given as one track has them: `depth` of them in a row make a layer, `count` times."""
    if count < 1 or depth < 1:
        raise ConfigError(f"{count} tracks of {depth} layers", hint="use whole numbers from 1")
    if len(blocks) % depth:
        raise ConfigError(
            f"{len(blocks)} layers cannot meet after every {depth}",
            hint=f"use a divisor of {len(blocks)} for the depth",
        )
    return [
        Tracks.Config(
            tracks=[Track.Config(layers=[one.clone() for one in blocks[at : at + depth]]) for _ in range(count)],
            combine=combine,  # type: ignore[arg-type]  # `wire` looks at it
        )
        for at in range(0, len(blocks), depth)
    ]


def _times(builder: Builder, x: Value, factor: float, path: str) -> Value:
    """A value times a number. Plans have no step for that, but norms, which multiply by a vector what they divide by the root of
    a mean square: with enough added to the mean square, what is divided by is a number that is known beforehand."""
    weight = np.full(x.width, factor * DROWNS**0.5, np.float32)
    return builder.norm(x, weight, DROWNS, path=f"{path}.meeting")
