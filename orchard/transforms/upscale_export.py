"""The smaller net that a net with zeros is: unused channels are gone, and layers that read a part of a tensor read a view of it.

Zeroed input columns say what each layer keeps. A channel that no layer keeps is not made any more. Channels are put in an order
(`upscale_order`) in which most layers find what they keep in one run, so that a view (`narrow`) is enough; the others gather
theirs, which is a copy. Steps that work channel by channel, and concatenations, that only one layer reads are done on what that
layer keeps: a concatenation is then made of views of its parts.

`reorder=False, push=False` is the plain export that this is compared with: the same weights, every layer gathers for itself
unless what it keeps happens to be a run. `mock` is the original net with indexing in front of its layers: what an export has
to equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from orchard.transforms.upscale_channels import Channels, channels_of, columns
from orchard.transforms.upscale_masks import Kept, kept_by_zeros
from orchard.transforms.upscale_net import OPS, SAME, ChannelNet, Step
from orchard.transforms.upscale_order import LEFT, RIGHT, Reader, Wish, arrange

Read = tuple[str, tuple[int, ...]]
"""A value, and which of its channels (logical places) are wanted."""


@dataclass
class Export:
    """An exported net, and what it costs: channels that are copied by each gather, read through views, joined, in all."""

    net: ChannelNet
    gathers: dict[str, int] = field(default_factory=dict)
    views: dict[str, int] = field(default_factory=dict)
    dead: list[str] = field(default_factory=list)
    """Layers whose whole input was zero: one channel stays, so that there is something to read."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """Layer → the columns that it had before, in its order."""
    pinned: dict[str, str] = field(default_factory=dict)
    """What could not be changed, and why."""

    @property
    def copied(self) -> int:
        """Channels that gathers copy in one pass."""
        return sum(self.gathers.values())

    @property
    def parameters(self) -> int:
        return sum(part.numel() for part in self.net.parameters())


def export(net: ChannelNet, *examples: Tensor, reorder: bool = True, push: bool = True) -> Export:
    """A smaller net that computes what `net` does. `examples` only say shapes."""
    channels = channels_of(net, *examples)
    kept = kept_by_zeros(net, channels)
    dead = sorted(name for name, stay in kept.items() if not len(stay))
    for name in dead:
        kept[name] = torch.zeros(1, dtype=torch.long)
    return _Exporting(net, channels, kept, reorder=reorder, push=push, dead=dead).run()


def mock(net: ChannelNet, made: Export) -> ChannelNet:
    """The original net with an index in front of every layer, which picks what the export's layer reads in the same order."""
    steps: list[Step] = []
    tensors: dict[str, dict[str, Tensor]] = {}
    for step in net.steps:
        parts = dict(net.tensors_of(step))
        chosen = made.columns.get(step.name)
        if chosen is not None:
            pick = f"{step.name}_pick"
            steps.append(Step(pick, "gather", step.inputs, {"dim": 1}, pick))
            tensors[pick] = {"index": chosen}
            step = Step(step.name, step.op, (pick,), step.settings, step.tensors)
            parts["weight"] = parts["weight"][:, chosen]
        steps.append(step)
        if parts:
            tensors.setdefault(step.tensors, parts)
    return ChannelNet(net.inputs, steps, net.output, tensors)


class _Exporting:
    def __init__(
        self, net: ChannelNet, channels: Channels, kept: Kept, *, reorder: bool, push: bool, dead: list[str]
    ) -> None:
        self.net, self.channels, self.kept, self.push = net, channels, kept, push
        self.steps = {step.name: step for step in net.steps}
        self.alive = self._alive()
        self.wanted = {name: tuple(stay.tolist()) for name, stay in kept.items()}
        self.orders = [tuple(kind for kind in block if kind in self.alive) for block in channels.blocks]
        self.absorbed: set[str] = set()
        leaves = [
            leaf for name in channels.consumers for leaf in self._leaves(channels.consumers[name], self.wanted[name])
        ]
        if reorder:
            wishes = [self._reader(*leaf) for leaf in leaves]
            self.orders = arrange(self.orders, [wish for wish in wishes if wish is not None])
        self.places = {name: self._places(row.classes) for name, row in channels.rows.items()}
        self.made = Export(net, dead=dead, pinned=dict(channels.why_pinned))
        self.out: list[Step] = []
        self.tensors: dict[str, dict[str, Tensor]] = {}

    def run(self) -> Export:
        for step in self.net.steps:
            if step.name not in self.absorbed:
                self._emit(step)
        self.made.net = ChannelNet(self.net.inputs, self.out, self.net.output, self.tensors).eval()
        return self.made

    # What stays, and where --------------------------------------------------------------------------------------------

    def _alive(self) -> set[int]:
        rows = self.channels.rows
        alive = set(self.channels.pinned)
        for name, value in self.channels.consumers.items():
            alive |= {rows[value].classes[place] for place in self.kept[name].tolist()}
        for row in rows.values():  # a value without any channel is more than pooling can bear
            if not alive & set(row.classes):
                alive.add(row.classes[0])
        return alive

    def _places(self, classes: tuple[int, ...]) -> tuple[int, ...]:
        """Where the channels of an exported value were in the old one, in its order."""
        found: list[int] = []
        at = 0
        while at < len(classes):
            number = self.channels.block_of[classes[at]]
            block = self.channels.blocks[number]
            inside = {kind: place for place, kind in enumerate(block)}
            found += [at + inside[kind] for kind in self.orders[number]]
            at += len(block)
        return tuple(found)

    def _leaves(self, value: str, wanted: tuple[int, ...]) -> list[Read]:
        """The values of which a reader takes less than all, where it takes them."""
        classes = self.channels.rows[value].classes
        if len(wanted) == sum(kind in self.alive for kind in classes):
            return []
        step = self.steps.get(value)
        if step is not None and self._passes(step):
            self.absorbed.add(value)
            if step.op != "cat":
                return self._leaves(step.inputs[0], wanted)
            return [
                leaf for name, part in self._parts(step, wanted) for leaf in (self._leaves(name, part) if part else [])
            ]
        return [(value, wanted)]

    def _passes(self, step: Step) -> bool:
        """Whether a choice of channels may be made before a step instead of after it."""
        if not self.push or self.net.readers[step.name] > 1:
            return False
        return step.op == "cat" or self._by_channel(step)

    def _by_channel(self, step: Step) -> bool:
        return OPS[step.op].channels == SAME or step.name in self.channels.depthwise

    def _parts(self, step: Step, wanted: tuple[int, ...]) -> list[Read]:
        """What is wanted of each part of a concatenation."""
        parts, start = [], 0
        for name in step.inputs:
            stop = start + len(self.channels.rows[name].classes)
            parts.append((name, tuple(place - start for place in wanted if start <= place < stop)))
            start = stop
        return parts

    def _reader(self, value: str, wanted: tuple[int, ...]) -> Reader | None:
        """What has to hold for a run; None where it cannot be one: of several blocks, all but the outer ones go whole."""
        classes, chosen = self.channels.rows[value].classes, set(wanted)
        runs: list[tuple[int, frozenset[int]]] = []
        at = 0
        while at < len(classes):
            number = self.channels.block_of[classes[at]]
            size = len(self.channels.blocks[number])
            if self.orders[number]:
                here = frozenset(classes[place] for place in range(at, at + size) if place in chosen)
                runs.append((number, here))
            at += size
        used = [place for place, (_, here) in enumerate(runs) if here]
        first, last = used[0], used[-1]
        if any(len(here) < len(self.orders[number]) for number, here in runs[first + 1 : last]):
            return None
        if first == last:
            return Reader((Wish(*runs[first]),), len(wanted))
        outer = (Wish(*runs[first], RIGHT), Wish(*runs[last], LEFT))
        return Reader(outer, len(wanted))

    # Writing steps ----------------------------------------------------------------------------------------------------

    def _emit(self, step: Step) -> None:
        if step.name in self.channels.consumers:
            read, order = self._select(step.name, step.inputs[0], self.wanted[step.name])
            self._layer(step, read, order)
        elif step.op in ("conv", "linear") and step.name not in self.channels.depthwise:
            self._add(Step(step.name, step.op, step.inputs, step.settings, step.tensors), self.net.tensors_of(step))
        elif step.op == "narrow":
            each = self.channels.rows[step.inputs[0]].each
            start, length = int(step.settings["start"]) // each, int(step.settings["length"]) // each
            inside = [at for at, place in enumerate(self.places[step.inputs[0]]) if start <= place < start + length]
            settings = {"dim": 1, "start": inside[0] * each, "length": len(inside) * each}
            self._add(Step(step.name, "narrow", step.inputs, settings), {})
        else:
            self._same(step, step.name, step.inputs, self.places[step.name])

    def _layer(self, step: Step, read: str, order: tuple[int, ...]) -> None:
        """A convolution or linear map with the columns it reads and the rows that somebody reads."""
        parts = self.net.tensors_of(step)
        row, each = torch.tensor(self.places[step.name]), self.channels.rows[step.inputs[0]].each
        self.made.columns[step.name] = columns(torch.tensor(order), each)
        made = {"weight": parts["weight"][row][:, self.made.columns[step.name]]}
        if "bias" in parts:
            made["bias"] = parts["bias"][row]
        self._add(Step(step.name, step.op, (read,), step.settings, step.name), made)

    def _same(self, step: Step, name: str, inputs: tuple[str, ...], order: tuple[int, ...]) -> None:
        """A step without a mind of its own, on some channels; its tensors, if any, have one entry for each."""
        settings, parts = dict(step.settings), self.net.tensors_of(step)
        if not parts:
            self._add(Step(name, step.op, inputs, settings), {})
            return
        if step.op == "conv":
            settings["groups"] = len(order)
        each = 1 if step.op == "conv" else self.channels.rows[step.inputs[0]].each
        index = columns(torch.tensor(order), each)
        shared = step.tensors != step.name or any(
            other.tensors == step.tensors for other in self.net.steps if other is not step
        )
        holder = step.tensors if shared else name  # of a layer that is used twice all channels stay
        self._add(Step(name, step.op, inputs, settings, holder), {part: value[index] for part, value in parts.items()})

    def _select(self, reader: str, value: str, wanted: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """A value with only the wanted channels, and their old places in its order."""
        places, chosen = self.places[value], set(wanted)
        if len(wanted) == len(places):
            return value, places
        step = self.steps.get(value)
        if step is not None and self._passes(step):
            name = f"{value}_of_{reader}"
            if step.op != "cat":
                read, order = self._select(reader, step.inputs[0], wanted)
                self._same(step, name, (read,), order)
                return name, order
            return self._joined(reader, step, name, wanted)
        at = [place for place, old in enumerate(places) if old in chosen]
        order = tuple(places[place] for place in at)
        return self._cut(f"{value}_for_{reader}", value, at), order

    def _joined(self, reader: str, step: Step, name: str, wanted: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        reads: list[str] = []
        order: list[int] = []
        start = 0
        for part, here in self._parts(step, wanted):
            if here:
                read, own = self._select(reader, part, here)
                reads.append(read)
                order += [start + place for place in own]
            start += len(self.channels.rows[part].classes)
        if len(reads) == 1:
            return reads[0], tuple(order)
        self._add(Step(name, "cat", tuple(reads), {"dim": 1}), {})
        return name, tuple(order)

    def _cut(self, name: str, value: str, at: list[int]) -> str:
        """Some channels of an exported value: a view where they are a run, else a copy."""
        each = self.channels.rows[value].each
        taken = {step.name for step in self.out}
        while name in taken:  # one layer may take two parts of the same value
            name += "_"
        if at[-1] - at[0] + 1 == len(at):
            self.made.views[name] = len(at)
            self._add(Step(name, "narrow", (value,), {"dim": 1, "start": at[0] * each, "length": len(at) * each}), {})
        else:
            self.made.gathers[name] = len(at)
            self._add(Step(name, "gather", (value,), {"dim": 1}, name), {"index": columns(torch.tensor(at), each)})
        return name

    def _add(self, step: Step, parts: Mapping[str, Any]) -> None:
        self.out.append(step)
        if parts:
            self.tensors.setdefault(step.tensors, dict(parts))
