"""Which channels of a net belong together: what every value is made of, and which channels may change places.

Each output channel of a convolution or linear map is a source. Channels that are added are one *class*: they are kept, moved and
dropped together, wherever they appear. A value is then a row of classes. Classes that follow each other in every value that has
one of them form a *block*: within it any order is as good as any other, and changes nothing but the order of weights. So sums,
concatenations and slices need no rules of their own. Where one value mixes two channels of the same layer, blocks fall apart into
single classes, and nothing moves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orchard.core.errors import UnsupportedPair
from orchard.transforms.upscale_net import OPS, SAME, ChannelNet, Step


@dataclass(frozen=True)
class Row:
    """A value: its classes in order, and how many columns each has (height · width after flattening)."""

    classes: tuple[int, ...]
    each: int = 1


@dataclass
class Channels:
    """All channels of a net. Steps and values have the same names."""

    rows: dict[str, Row]
    consumers: dict[str, str]
    """Convolutions and linear maps that may read less than all of a value → that value."""
    producers: tuple[str, ...]
    """Those that may write less than all of theirs, or in another order."""
    pinned: frozenset[int]
    """Classes that stay, where they are: inputs and outputs of the net and of layers that cannot be changed."""
    why_pinned: dict[str, str]
    depthwise: frozenset[str]
    """Convolutions of each channel by itself: their channels are those of their input."""
    blocks: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blocks = _blocks(self.rows.values(), self.pinned)
        self.block_of = {kind: place for place, block in enumerate(self.blocks) for kind in block}
        self.segment_of = _segments(self.rows.values())

    def free(self, consumer: str) -> Tensor:
        """The channels of its input that a consumer may drop."""
        kinds = self.rows[self.consumers[consumer]].classes
        return torch.tensor([place for place, kind in enumerate(kinds) if kind not in self.pinned], dtype=torch.long)


def channels_of(net: ChannelNet, *examples: Tensor) -> Channels:
    """Follow all channels of a net through its steps. `examples` only say shapes."""
    shapes: dict[str, torch.Size] = {name: given.shape for name, given in zip(net.inputs, examples, strict=True)}
    with torch.no_grad():
        net(*examples, watch=lambda name, value: shapes.__setitem__(name, value.shape))
    return _Following(net, shapes).run()


def columns(positions: Tensor, each: int) -> Tensor:
    """Columns of channels, where a channel has several."""
    return positions if each == 1 else (positions[:, None] * each + torch.arange(each)).flatten()


class _Following:
    def __init__(self, net: ChannelNet, shapes: dict[str, torch.Size]) -> None:
        self.net, self.shapes = net, shapes
        self.rows: dict[str, Row] = {}
        self.parent: list[int] = []
        self.pins: set[int] = set()
        self.why: dict[str, str] = {}
        self.uses = Counter(step.tensors for step in net.steps if step.tensors)

    def run(self) -> Channels:
        for name in self.net.inputs:
            self.rows[name] = self.fresh(self.shapes[name][1])
            self.pin(name, name, "it is given to the net")
        consumers: dict[str, str] = {}
        producers: list[str] = []
        single: set[str] = set()
        for step in self.net.steps:
            x = self.rows[step.inputs[0]]
            if step.op not in ("conv", "linear"):
                self.rows[step.name] = self.follow(step, x)
                continue
            if self.depthwise(step):
                self.rows[step.name] = x
                single.add(step.name)
                continue
            self.rows[step.name] = self.fresh(self.shapes[step.name][1])
            reason = self.fixed(step)
            if reason:
                self.pin(step.inputs[0], step.name, reason)
                self.pin(step.name, step.name, reason)
            else:
                consumers[step.name] = step.inputs[0]
                producers.append(step.name)
        self.pin(self.net.output, self.net.output, "the net returns it")
        rows = {name: Row(tuple(map(self.root, row.classes)), row.each) for name, row in self.rows.items()}
        pinned = frozenset(map(self.root, self.pins))
        return Channels(rows, consumers, tuple(producers), pinned, self.why, frozenset(single))

    def follow(self, step: Step, x: Row) -> Row:
        if step.op == "cat":
            rows = [self.rows[name] for name in step.inputs]
            if len({row.each for row in rows}) > 1:
                raise UnsupportedPair(f"{step.name} joins values of different sizes", hint="flatten after joining")
            return Row(tuple(kind for row in rows for kind in row.classes), x.each)
        if step.op == "narrow":
            start, length = int(step.settings["start"]), int(step.settings["length"])
            if start % x.each or length % x.each:
                raise UnsupportedPair(f"{step.name} cuts a channel in two", hint="slice before flattening")
            return Row(x.classes[start // x.each : (start + length) // x.each], x.each)
        if step.op == "flatten":
            _, _, height, width = self.shapes[step.inputs[0]]
            return Row(x.classes, x.each * height * width)
        if OPS[step.op].channels == SAME:
            if self.uses[step.tensors] > 1:
                self.pin(step.inputs[0], step.name, "its layer is used more than once")
            return x
        if len(step.inputs) == 2:
            return self.pair(step)
        raise UnsupportedPair(
            f"{step.name}: {step.op} is not for nets that are still to be pruned", hint="trace a model"
        )

    def pair(self, step: Step) -> Row:
        """Channels that meet are one class. A single channel that meets many stays what it is."""
        one, other = (self.rows[name] for name in step.inputs)
        if len(one.classes) != len(other.classes):
            small, name = (one, step.inputs[0]) if len(one.classes) == 1 else (other, step.inputs[1])
            if len(small.classes) != 1:
                raise UnsupportedPair(f"{step.name} adds {len(one.classes)} to {len(other.classes)}", hint="make equal")
            self.pin(name, step.name, "one channel meets many")
            return other if small is one else one
        if one.each != other.each:
            raise UnsupportedPair(f"{step.name} joins values of different sizes", hint="flatten after joining")
        for a, b in zip(one.classes, other.classes, strict=True):
            self.parent[self.root(a)] = self.root(b)
        return one

    def depthwise(self, step: Step) -> bool:
        """Each channel by itself, one to one."""
        channels = self.shapes[step.inputs[0]][1]
        return (
            step.op == "conv"
            and 1 < step.settings["groups"] == channels == self.shapes[step.name][1]
            and self.uses[step.tensors] == 1
        )

    def fixed(self, step: Step) -> str:
        if self.uses[step.tensors] > 1:
            return "its layer is used more than once"
        return "it ties groups of channels" if step.settings.get("groups", 1) != 1 else ""

    def fresh(self, count: int) -> Row:
        first = len(self.parent)
        self.parent += range(first, first + count)
        return Row(tuple(range(first, first + count)))

    def root(self, kind: int) -> int:
        while self.parent[kind] != kind:
            self.parent[kind] = kind = self.parent[self.parent[kind]]
        return kind

    def pin(self, value: str, where: str, reason: str) -> None:
        self.pins.update(self.rows[value].classes)
        self.why[where] = reason


def _blocks(rows: Iterable[Row], pinned: frozenset[int]) -> list[tuple[int, ...]]:
    """Runs of classes that follow each other everywhere."""
    after: dict[int, set[int | None]] = defaultdict(set)
    before: dict[int, set[int | None]] = defaultdict(set)
    kinds: dict[int, None] = {}
    for row in rows:
        for a, b in zip((None, *row.classes), (*row.classes, None), strict=True):
            if a is not None:
                after[a].add(b)
                kinds[a] = None
            if b is not None:
                before[b].add(a)
    blocks, placed = [], set()

    def follower(kind: int) -> int | None:
        (found,) = after[kind] if len(after[kind]) == 1 else (None,)
        together = found is not None and before[found] == {kind} and not pinned & {kind, found}
        return found if together else None

    joined = {follower(kind) for kind in kinds}
    for kind in kinds:  # those that nothing leads to begin a block; in a ring of followers any one would
        if kind in joined:
            continue
        run: list[int] = [kind]
        while (found := follower(run[-1])) is not None:
            run.append(found)
        placed.update(run)
        blocks.append(tuple(run))
    return blocks + [(kind,) for kind in kinds if kind not in placed]


def _segments(rows: Iterable[Row]) -> dict[int, int]:
    """Classes that are in one value, directly or through others: a number for each such set."""
    parent: dict[int, int] = {}

    def root(kind: int) -> int:
        while parent.setdefault(kind, kind) != kind:
            parent[kind] = kind = parent[parent[kind]]
        return kind

    for row in rows:
        for kind in row.classes:
            parent[root(kind)] = root(row.classes[0])
    numbers: dict[int, int] = {}
    return {kind: numbers.setdefault(root(kind), len(numbers)) for kind in list(parent)}
