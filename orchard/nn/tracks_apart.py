"""Tracks in several processes: each keeps some of them, whole, and everything that is outside of tracks.

    keep_tracks(model, group)        # in each process, after all of them have built or loaded the same model

What each process reads is the same, and so is what comes out: nothing but `Tracks` knows that there are others, and generation,
objectives and measuring go on as they were. Every process makes the same calls at the same time. It keeps keys and values of its
own tracks only.

At a meeting each process sends what its tracks have made, once; losses that they left behind (`Context.collected`) go along as a
few more numbers, so that every process knows all of them. On the way back gradients of what was read are added up, once.
Parameters outside of tracks get the whole gradient everywhere: with the same optimiser they stay the same without an exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchard.core.context import Context
from orchard.core.errors import ConfigError, UnsupportedPair, UsageError
from orchard.nn.tracks import Track, Tracks
from orchard.ops.collective import AddBack, AddUp

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Losses = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Talk:
    """What a model's tracks have had to say to each other."""

    meetings: int
    """Forward passes to the end of a block of tracks."""
    messages: int
    """Sums over processes on the way forward, one for each meeting where tracks are apart."""
    sent: int
    """Bytes that this process gave to them."""


class Elsewhere(nn.Module):
    """Where a track was that another process has."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        raise UsageError("this track is in another process", hint="call the layer of tracks, not one of them")


class Apart:
    """How the tracks of one layer meet."""

    def __init__(self, group: ProcessGroup | None, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self.messages = self.sent = 0

    def run(self, layer: Tracks, x: Tensor, context: Context) -> Tensor:
        before = {name: len(values) for name, values in context.collected.items()}
        read: Tensor = AddBack.apply(x, self.group) if torch.is_grad_enabled() else x
        total = layer.share(read, layer.inside(), context)
        left = _taken(context, before)
        total, losses = self._meet(total, left)
        for name, value in losses:
            context.collect(name, value)
        return layer.met(x, total)

    def _meet(self, total: Tensor, left: Losses) -> tuple[Tensor, Losses]:
        """The sum over processes, and what the tracks of all of them left behind, in the order of tracks."""
        if not left:
            return self._added(total), []
        mine = torch.stack([value.to(total.dtype) for _, value in left])
        slots = [mine if rank == self.rank else torch.zeros_like(mine) for rank in range(self.size)]
        found = self._added(torch.cat([total.flatten(), *slots]))
        names = [(name, value.dtype) for name, value in left] * self.size
        numbers = found[total.numel() :].unbind()
        losses = [(name, number.to(dtype)) for (name, dtype), number in zip(names, numbers, strict=True)]
        return found[: total.numel()].view_as(total), losses

    def _added(self, x: Tensor) -> Tensor:
        self.messages += 1
        self.sent += x.numel() * x.element_size()
        if torch.is_grad_enabled():
            added: Tensor = AddUp.apply(x, self.group)
            return added
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x


def keep_tracks(model: nn.Module, group: ProcessGroup | None = None) -> int:
    """Leave in a model this process's tracks of every layer of tracks, in place; how many of each (at least). `group`: the
    processes that have the model together, None for all there are. Names of parameters stay what they were."""
    if not dist.is_initialized():
        raise UsageError("this process belongs to no group", hint="start it with torchrun, inside `with world()`")
    layers = {path: module for path, module in model.named_modules() if isinstance(module, Tracks)}
    if not layers:
        raise ConfigError("the model has no tracks to share out", hint="build it with tracks, or use mesh.tensor")
    for path, layer in layers.items():  # all of them before any is changed
        refuse_apart(layer, path, dist.get_world_size(group))
    return min(keep_here(layer, group) for layer in layers.values())


def keep_here(layer: Tracks, group: ProcessGroup | None) -> int:
    """Leave in a layer the tracks of this process; how many."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    each = len(layer.tracks) // size
    for place in range(len(layer.tracks)):
        if place // each != rank:
            layer.tracks[place] = Elsewhere()
    layer.apart = Apart(group, rank, size)
    return each


def refuse_apart(layer: Tracks, path: str, size: int) -> None:
    """Say why the tracks of a layer cannot be in so many processes, where they cannot."""
    if layer.apart is not None:
        raise UsageError(f"{path} is shared out already", hint="keep tracks once, of a whole model")
    count = len(layer.tracks)
    if count % size:
        raise ConfigError(f"{path} has {count} tracks for {size} processes", hint="use a divisor of the tracks")
    shapes = [_shape(track) for track in layer.config.tracks]
    if any(shape != shapes[0] for shape in shapes):
        raise UnsupportedPair(
            f"the tracks of {path} differ from each other, and tracks that are apart have to be of one shape",
            hint="run them in one process",
        )


def talk(model: nn.Module) -> Talk:
    """What the tracks of a model have said so far."""
    layers = [module for module in model.modules() if isinstance(module, Tracks)]
    apart = [layer.apart for layer in layers if layer.apart is not None]
    return Talk(
        meetings=sum(layer.meetings for layer in layers),
        messages=sum(one.messages for one in apart),
        sent=sum(one.sent for one in apart),
    )


def _taken(context: Context, before: dict[str, int]) -> Losses:
    """Take what the tracks of this process left out of the context."""
    left: Losses = []
    for name, values in context.collected.items():
        fresh = values[before.get(name, 0) :]
        del values[before.get(name, 0) :]
        for value in fresh:
            if value.ndim:
                raise UnsupportedPair(
                    f"a layer left {name} as a tensor of shape {list(value.shape)}, and tracks exchange single numbers",
                    hint="leave a sum or a mean, or run all tracks in one process",
                )
            left.append((name, value))
    return left


def _shape(cfg: Track.Config) -> Any:
    """A track's tree without the numbers of its stores."""
    tree = cfg.clone(layer=0)
    for _, node in tree.walk():
        if hasattr(node, "layer"):
            node.layer = 0
    return tree
