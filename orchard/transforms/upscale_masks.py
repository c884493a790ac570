"""Which input channels each layer of a convolutional net keeps, and the net with all others masked by zeros.

    net = trace(model, example)
    masked = Masks(keep=0.6).apply(net, example)                        # each layer chooses for itself
    masked = Masks(keep=0.6, constrained=True).apply(net, example)      # all layers that share channels choose together

Unconstrained, two layers that read one tensor may keep different channels of it, which is worth accuracy; `upscale_export` makes
a smaller net of any such pattern (UPSCALE, arXiv 2307.08771). A zero is a zero: whatever else sets weights to zero can be
exported as well. Choosing by what layers write (`side="output"`) makes sense only together: a channel that one of several
summed layers stopped writing is still there, so unconstrained it saves nothing, and is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.transforms.prune_scores import a_share, importance, keep_best, known_importance
from orchard.transforms.upscale_channels import Channels, channels_of, columns
from orchard.transforms.upscale_net import ChannelNet

Kept = dict[str, Tensor]
"""Consumer → the channels of its input that it keeps, in order."""


@dataclass(frozen=True)
class Masks:
    """`keep`: the share of channels that stay, in each layer (or each set of layers that share channels), or `together` of all by
    one threshold. `averaged`, for constrained masks: a channel is worth what a reader of it has on average, and not in sum."""

    keep: float = 0.6
    importance: str = "l2"
    side: str = "input"
    constrained: bool = False
    together: bool = False
    averaged: bool = False

    def __post_init__(self) -> None:
        known_importance(self.importance)
        a_share("keep", self.keep)
        if self.side not in ("input", "output"):
            raise ConfigError(f"no side is called {self.side!r}", hint="use 'input' or 'output'")
        if self.side == "output" and not self.constrained:
            hint = "set constrained=True, or choose by inputs"
            raise UnsupportedPair("what layers write cannot be pruned layer by layer", hint=hint)
        if self.side == "output" and self.importance == "activation":
            raise UnsupportedPair("activation is of what is read, and the side is 'output'", hint="use side='input'")

    def apply(self, net: ChannelNet, *examples: Tensor) -> ChannelNet:
        """The masked net. For importance "activation" the examples are also what is looked at."""
        return masked(net, channels_of(net, *examples), self.choose(net, *examples))

    def choose(self, net: ChannelNet, *examples: Tensor) -> Kept:
        channels = channels_of(net, *examples)
        vectors = self._vectors(net, channels, examples)
        if not self.constrained:
            scores = {
                name: self._scores(parts[channels.free(name)], name)
                for name, parts in vectors.items()
                if len(channels.free(name))
            }
            chosen = keep_best(scores, self.keep, together=self.together)
            return {name: _with_pinned(channels, name, channels.free(name)[kept]) for name, kept in chosen.items()}
        return self._together(net, channels, vectors)

    def _together(self, net: ChannelNet, channels: Channels, vectors: Mapping[str, Tensor]) -> Kept:
        """One choice for all layers that share channels: the vectors of a class are those of all its readers or writers."""
        if self.side == "output":
            vectors = {name: _outputs(net, name) for name in channels.producers}
            rows = {name: channels.rows[name].classes for name in vectors}
        else:
            rows = {name: channels.rows[channels.consumers[name]].classes for name in vectors}
        classes: dict[int, dict[int, int]] = {}  # segment → class → row
        for kinds in rows.values():
            for kind in kinds:
                if kind not in channels.pinned:
                    members = classes.setdefault(channels.segment_of[kind], {})
                    members.setdefault(kind, len(members))
        scores = {}
        for segment, places in classes.items():
            scores[str(segment)] = self._scores(self._stacked(places, rows, vectors), f"segment {segment}")
        chosen = keep_best(scores, self.keep, together=self.together)
        alive = set()
        for segment, places in classes.items():
            in_order = list(places)
            alive |= {in_order[place] for place in chosen[str(segment)].tolist()}
        kept = {}
        for name, value in channels.consumers.items():
            stay = [place for place, kind in enumerate(channels.rows[value].classes) if kind in alive]
            kept[name] = _with_pinned(channels, name, torch.tensor(stay, dtype=torch.long))
        return kept

    def _stacked(
        self, places: Mapping[int, int], rows: Mapping[str, tuple[int, ...]], vectors: Mapping[str, Tensor]
    ) -> Tensor:
        """[classes, all their weights]; zeros where a layer has nothing to do with a class."""
        parts, count = [], torch.zeros(len(places), 1)
        for name, kinds in rows.items():
            here = [(place, places[kind]) for place, kind in enumerate(kinds) if kind in places]
            if not here:
                continue
            source, target = (torch.tensor(side) for side in zip(*here, strict=True))
            part = vectors[name].new_zeros(len(places), vectors[name].shape[1])
            parts.append(part.index_add_(0, target, vectors[name][source]))
            count[target.unique()] += 1
        stacked = torch.cat(parts, 1)
        if self.averaged:
            stacked = stacked / (count if self.importance == "l1" else count.sqrt()).clamp_min(1)
        return stacked

    def _vectors(self, net: ChannelNet, channels: Channels, examples: tuple[Tensor, ...]) -> dict[str, Tensor]:
        vectors = {name: _inputs(net, channels, name) for name in channels.consumers}
        if self.importance == "activation":
            read = set(channels.consumers.values())
            looked: dict[str, Tensor] = dict(zip(net.inputs, examples, strict=True))
            with torch.no_grad():
                net(*examples, watch=lambda name, value: looked.__setitem__(name, value) if name in read else None)
            for name, value in channels.consumers.items():
                usual = looked[value].abs().mean([0, *range(2, looked[value].dim())])
                vectors[name] = vectors[name] * usual.unflatten(0, (-1, channels.rows[value].each)).mean(1)[:, None]
        return vectors

    def _scores(self, vectors: Tensor, where: str) -> Tensor:
        # Activations are in the vectors already.
        return importance("l2" if self.importance == "activation" else self.importance, vectors, where=where)


def masked(net: ChannelNet, channels: Channels, kept: Mapping[str, Tensor]) -> ChannelNet:
    """A copy of the net in which consumers read nothing from all other channels."""
    net = copy.deepcopy(net)
    steps = {step.name: step for step in net.steps}
    with torch.no_grad():
        for name, stay in kept.items():
            row = channels.rows[channels.consumers[name]]
            gone = torch.ones(len(row.classes), dtype=torch.bool).index_fill_(0, stay, False).nonzero()[:, 0]
            net.tensors_of(steps[name])["weight"][:, columns(gone, row.each)] = 0
    return net


def kept_by_zeros(net: ChannelNet, channels: Channels) -> Kept:
    """What consumers keep by the pattern of zeros in their weights. Channels that cannot go are kept."""
    found = {}
    for name in channels.consumers:
        kinds = channels.rows[channels.consumers[name]].classes
        used = (_inputs(net, channels, name) != 0).any(
            1
        )  # exactly: a small number is a weight; what is no number is one too
        found[name] = torch.tensor(
            [i for i, kind in enumerate(kinds) if used[i] or kind in channels.pinned], dtype=torch.long
        )
    return found


def _inputs(net: ChannelNet, channels: Channels, name: str) -> Tensor:
    """A consumer's weights by the channel they read: [channels, all others]."""
    weight = _weight(net, name).transpose(0, 1)
    row = channels.rows[channels.consumers[name]]
    return weight.reshape(len(row.classes), -1)


def _outputs(net: ChannelNet, name: str) -> Tensor:
    return _weight(net, name).flatten(1)


def _weight(net: ChannelNet, name: str) -> Tensor:
    held: Any = net.held.get_submodule(name)
    weight: Tensor = held.weight.detach()
    return weight


def _with_pinned(channels: Channels, name: str, chosen: Tensor) -> Tensor:
    kinds = channels.rows[channels.consumers[name]].classes
    stay = torch.tensor([kind in channels.pinned for kind in kinds])
    return stay.index_fill_(0, chosen, True).nonzero()[:, 0]
