"""From any decoder to one with parallel tracks: every track gets its share of heads and hidden channels (`orchard.nn.tracks`).

The tree has as many parameters as before, but for norms (and routers), which every track has. So it is what a model with tracks
is compared with, and how one is asked for: `ParallelTracks(tracks=4, depth=2)(tree).build()`, or `--with tracks:count=4,depth=2`.

A trained model can be taken along (`apply`): its heads and channels are dealt out. What then is missing is what the tracks of a
block would have told each other inside of it, so it has to be healed by training (`heals`); with one track nothing changes. The
paper trains from nothing. Where the tracks' results are averaged, what each adds is made `tracks` times as large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from orchard.core.batch import Batch
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.attention.attention import Attention
from orchard.nn.stack import Block
from orchard.nn.tensors import dense_tensor, fill, tensor_names
from orchard.nn.tracks import Tracks, in_tracks
from orchard.transforms.base import Tell, Transform, silent
from orchard.transforms.local_global import completed

M = TypeVar("M", bound=nn.Module)
ROWS = ("q", "k", "v", "gate", "up", "near_norm", "far_norm")
"""Maps into heads and hidden channels, which are dealt out by rows; those out of them by columns."""
COLUMNS = ("o", "down")


@dataclass(frozen=True)
class ParallelTracks(Transform):
    """`tracks`: how many. `depth`: layers between two meetings. `combine`: see `Tracks`."""

    tracks: int
    depth: int
    combine: str = "mean"

    heals: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("tracks", "depth"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}", hint="use a whole number from 1")
        if self.combine not in ("mean", "sum"):
            raise ConfigError(f"combine cannot be {self.combine!r}", hint="use 'mean' or 'sum'")

    def __call__(self, tree: Any) -> Any:
        """The completed tree; of one whose vocabulary is not known yet, the tree as far as it goes."""
        tree = tree.clone()
        blocks = list(tree.stack.layers)
        for layer, block in enumerate(blocks):
            self._divide(block, layer)
        tree.stack.layers = [*in_tracks(blocks, self.tracks, self.depth, self.combine)]
        return completed(tree)

    def _divide(self, block: Any, layer: int) -> None:
        """Make of a block what one track has of it."""
        if isinstance(block, Tracks.Config) or not isinstance(block, Block.Config):
            raise UnsupportedPair(f"layer {layer} is no plain block", hint="make tracks of a model that has none")
        mixer = block.mixer
        if not isinstance(mixer, Attention.Config):
            raise UnsupportedPair(f"layer {layer} mixes tokens by something else than attention", hint="use attention")
        if mixer.norm_over == "all" and mixer.q_norm is not None and self.tracks > 1:
            raise UnsupportedPair(
                f"layer {layer} normalises all heads as one vector", hint="use norms of single heads (norm_over='head')"
            )
        for node, name in ((mixer, "heads"), (mixer, "kv_heads"), *_widths(block.mlp)):
            whole = getattr(node, name)
            if whole % self.tracks:
                raise ConfigError(
                    f"layer {layer} has {name} {whole}, which {self.tracks} tracks cannot share",
                    hint=f"use a divisor of {whole}, or another {name}",
                )
            setattr(node, name, whole // self.tracks)

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        source: Any = model
        old, tree = tensor_names(model), self(source.config)
        with torch.device("meta"):
            made: Any = tree.build()
        for ours, (module, attribute) in tensor_names(made).items():
            theirs, track = self._source(ours)
            if theirs not in old:
                raise UnsupportedPair(f"the model has no {theirs} to deal out", hint="merge its side paths first")
            whole = dense_tensor(*old[theirs]).detach()
            part = whole if track is None else self._part(ours, whole, track)
            dtype = part.dtype if part.is_floating_point() else torch.float32
            fill(module, attribute, ours, part.clone(), dtype, part.device)
        learns = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        for ours, parameter in made.named_parameters():
            parameter.requires_grad_(learns.get(self._source(ours)[0], parameter.requires_grad))
        tell(1.0)
        whole_model: M = made.train(model.training)
        return whole_model

    def _source(self, ours: str) -> tuple[str, int | None]:
        """The tensor that one of the new model's comes from, and the track that it is for."""
        parts = ours.split(".")
        if "tracks" not in parts:
            return ours, None
        layer, track, inner = int(parts[2]), int(parts[4]), int(parts[6])
        return ".".join(["stack", "layers", str(layer * self.depth + inner), *parts[7:]]), track

    def _part(self, ours: str, whole: Tensor, track: int) -> Tensor:
        name, kind = ours.split(".")[-2:]
        routed = ".router." in ours
        gain = float(self.tracks) if self.combine == "mean" else 1.0
        if name in ROWS and not routed:
            return whole.chunk(self.tracks, whole.dim() - (2 if kind == "weight" else 1))[track]
        if name in COLUMNS and kind == "weight":
            return gain * whole.chunk(self.tracks, -1)[track]
        if name in COLUMNS:
            return whole * (gain / self.tracks)  # every track adds its share of a bias
        return whole


def _widths(mlp: Any) -> list[tuple[Any, str]]:
    """Every hidden width of an MLP or a mixture: each expert is divided, so that a token meets as many as before."""
    found = [(node, "hidden_dim") for _, node in mlp.walk() if hasattr(node, "hidden_dim")]
    if not found:
        raise UnsupportedPair(
            f"{mlp.builds.__name__} has no hidden width to share", hint="use a gated MLP or a mixture"
        )
    return found
