"""The nets of the study: a small ResNet (arXiv 1512.03385), a small DenseNet (arXiv 1608.06993), and their training."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchard.core.progress import track
from orchard.core.seeds import generator
from orchard.studies._upscale_shapes import CLASSES, pictures


class Residual(nn.Module):
    """relu(x + two convolutions of x), with a convolution beside where the width changes."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(out)
        same = width == out and stride == 1
        beside = (nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.beside = nn.Identity() if same else nn.Sequential(*beside)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second_norm(self.second(functional.relu(self.first_norm(self.first(x)))))
        return functional.relu(y + self.beside(x))


class ResNet(nn.Module):
    """Three stages of residual blocks."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64), blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, widths[0], 3, 2, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU())
        layers, before = [], widths[0]
        for stage, width in enumerate(widths):
            for place in range(blocks):
                layers.append(Residual(before, width, 2 if stage and not place else 1))
                before = width
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(before, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(functional.adaptive_avg_pool2d(self.layers(self.stem(x)), 1).flatten(1))
        return scores


class Grown(nn.Module):
    """Some layers, each of which reads all that came before it."""

    def __init__(self, width: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(width + place * growth),
                nn.ReLU(),
                nn.Conv2d(width + place * growth, growth, 3, 1, 1, bias=False),
            )
            for place in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer in self.layers:
            made.append(layer(torch.cat(made, 1)))
        return torch.cat(made, 1)


class DenseNet(nn.Module):
    """Dense blocks with halving in between."""

    def __init__(self, width: int = 16, growth: int = 12, layers: int = 4, blocks: int = 3) -> None:
        super().__init__()
        parts: list[nn.Module] = [nn.Conv2d(1, width, 3, 2, 1, bias=False)]
        for place in range(blocks):
            parts.append(Grown(width, growth, layers))
            width += growth * layers
            if place + 1 < blocks:
                parts += [
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                    nn.Conv2d(width, width // 2, 1, bias=False),
                    nn.AvgPool2d(2),
                ]
                width //= 2
        self.parts = nn.Sequential(*parts, nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.parts(x).mean((2, 3)))
        return scores


NETS: dict[str, Callable[[], nn.Module]] = {"resnet": ResNet, "densenet": DenseNet}


def train(name: str, *, steps: int, batch: int, rate: float, seed: int) -> tuple[nn.Module, list[float]]:
    """A trained net of a kind, and its loss on the way. Every picture is seen once."""
    with torch.random.fork_rng():
        torch.manual_seed(generator(seed, "net", name).initial_seed())
        net = NETS[name]().train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.2)
    curve = []
    for step in track(range(steps), f"training a {name}"):
        images, labels = pictures(batch, seed, f"{name} {step}")
        loss = functional.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        curve.append(float(loss.detach()))
    return net.eval(), curve


@torch.no_grad()
def right(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Which pictures a net knows, [count], bool."""
    return torch.cat([net(part).argmax(1) for part in images.split(500)]) == labels


def doubled(net: nn.Module) -> nn.Module:
    """The net in double precision."""
    return copy.deepcopy(net).double()
