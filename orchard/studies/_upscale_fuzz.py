"""Random nets with random patterns of zeros, to be exported and compared: what tracing, ordering or cutting gets wrong shows."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchard.transforms.upscale_channels import channels_of, columns
from orchard.transforms.upscale_export import Export, export, mock
from orchard.transforms.upscale_net import ChannelNet, plain_torch
from orchard.transforms.upscale_trace import trace

SIDE = 5
WIDTHS = (1, 3, 4, 6, 8)


class RandomNet(nn.Module):
    """A graph of convolutions, norms, sums, products, concatenations and slices. Some layers are grouped or used twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.chance = random.Random(seed)
        self.layers = nn.ModuleList()
        self.program: list[tuple[Any, ...]] = []
        """What is done, with which value, and how: a copy of the net has to do it with its own layers."""
        self.widths: list[int] = [self.chance.choice((1, 2, 3))]
        self.first = self.widths[0]
        self._conv(0)
        for _ in range(self.chance.randint(4, 12)):
            kinds = (self._conv, self._conv, self._conv, self._each, self._pair, self._pair, self._cat, self._slice)
            self.chance.choice(kinds)(self._any())
        parts = sorted({len(self.widths) - 1, *(self._any() for _ in range(2))})
        self.pooled = self.chance.random() < 0.5
        self._add("cat", parts, None, sum(self.widths[part] for part in parts))
        self.head = nn.Linear(self.widths[-1] * (1 if self.pooled else SIDE * SIDE), 3)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for kind, at, how in self.program:
            values.append(self._run(kind, at, how, values))
        scores: Tensor = self.head(values[-1].mean((2, 3)) if self.pooled else values[-1].flatten(1))
        return scores

    def _run(self, kind: str, at: Any, how: Any, values: list[Tensor]) -> Tensor:
        match kind:
            case "layer":
                made: Tensor = self.layers[how](values[at])
                return made
            case "tanh":
                return torch.tanh(values[at]) * 0.5
            case "relu":
                return functional.relu(values[at] - 0.1)
            case "add":
                return values[at] + values[how]
            case "mul":
                return values[at] * torch.sigmoid(values[how])
            case "cat":
                return torch.cat([values[part] for part in at], 1)
            case "halves":
                one, other = values[at].chunk(2, 1)
                return one + other
        return values[at][:, how[0] : how[1]]

    def _any(self) -> int:
        """Rather one of the last values: nets get deep."""
        return max(self.chance.randrange(len(self.widths)), self.chance.randrange(len(self.widths)))

    def _add(self, kind: str, at: Any, how: Any, width: int) -> None:
        self.program.append((kind, at, how))
        self.widths.append(width)

    def _layer(self, at: int, layer: nn.Module, width: int) -> None:
        self.layers.append(layer)
        self._add("layer", at, len(self.layers) - 1, width)

    def _conv(self, at: int, width: int | None = None) -> None:
        out = width or self.chance.choice(WIDTHS)
        groups = 2 if self.widths[at] % 2 == 0 and out % 2 == 0 and self.chance.random() < 0.08 else 1
        size, bias = self.chance.choice((1, 3)), self.chance.random() < 0.5
        self._layer(at, nn.Conv2d(self.widths[at], out, size, padding=size // 2, groups=groups, bias=bias), out)
        if self.widths[at] == out and self.chance.random() < 0.15:
            self._add("layer", len(self.widths) - 1, len(self.layers) - 1, out)

    def _each(self, at: int) -> None:
        width = self.widths[at]
        match self.chance.randrange(5):
            case 0:
                self._layer(at, nn.BatchNorm2d(width), width)
            case 1:
                self._layer(at, nn.Conv2d(width, width, 3, padding=1, groups=width), width)
            case 2:
                self._layer(at, nn.MaxPool2d(3, 1, 1), width)
            case 3:
                self._add("tanh", at, None, width)
            case _:
                self._add("relu", at, None, width)

    def _pair(self, at: int) -> None:
        others = [place for place, width in enumerate(self.widths) if width in (1, self.widths[at])]
        if others == [at]:
            self._conv(at, self.widths[at])
            others = [len(self.widths) - 1]
        self._add("mul" if self.chance.random() < 0.2 else "add", at, self.chance.choice(others), self.widths[at])

    def _cat(self, at: int) -> None:
        parts = [at, *(self._any() for _ in range(self.chance.randint(1, 2)))]
        self.chance.shuffle(parts)
        self._add("cat", parts, None, sum(self.widths[part] for part in parts))

    def _slice(self, at: int) -> None:
        width = self.widths[at]
        if width < 2:
            self._conv(at)
        elif width % 2 == 0 and self.chance.random() < 0.3:
            self._add("halves", at, None, width // 2)
        else:
            start = self.chance.randrange(width)
            stop = self.chance.randint(start + 1, width)
            self._add("slice", at, (start, stop), stop - start)


def random_case(seed: int) -> tuple[ChannelNet, Tensor]:
    """A random net with zeros at random, in double precision, and something to read."""
    torch.manual_seed(seed)
    model = RandomNet(seed).eval().double()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for part in (layer.weight, layer.bias):
                part.data.normal_()
            layer.running_mean.normal_()  # type: ignore[union-attr]
            layer.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    x = torch.randn(2, model.first, SIDE, SIDE, dtype=torch.float64)
    net = trace(model, x)
    return zeroed(net, x, random.Random(seed)), x


def zeroed(net: ChannelNet, x: Tensor, chance: random.Random) -> ChannelNet:
    net, channels = copy.deepcopy(net), channels_of(net, x)
    steps = {step.name: step for step in net.steps}
    with torch.no_grad():
        for name, value in channels.consumers.items():
            share, row = chance.choice((0.0, 0.3, 0.5, 0.5, 0.8, 1.0)), channels.rows[value]
            gone = [place for place in channels.free(name).tolist() if chance.random() > share]
            net.tensors_of(steps[name])["weight"][:, columns(torch.tensor(gone, dtype=torch.long), row.each)] = 0
    return net


@torch.no_grad()
def mismatches(seed: int) -> tuple[list[str], Export, Export]:
    """What is wrong about the exports of one random net; and its plain export and the reordered one."""
    net, x = random_case(seed)
    want = net(x)
    wrong = []
    made = {(reorder, push): export(net, x, reorder=reorder, push=push) for reorder in (0, 1) for push in (0, 1)}  # type: ignore[arg-type]
    for kind, one in made.items():
        for what, got in (("export", one.net(x)), ("mock", mock(net, one)(x)), ("torch", plain_torch(one.net)(x))):
            if not torch.allclose(got, want, rtol=1e-9, atol=1e-9):
                wrong.append(f"{what} {kind}: {float((got - want).abs().max()):.2g}")
    for push in (0, 1):
        if made[1, push].copied > made[0, push].copied:
            wrong.append(f"{made[1, push].copied} channels are copied instead of {made[0, push].copied}")
    return wrong, made[0, 0], made[1, 1]
