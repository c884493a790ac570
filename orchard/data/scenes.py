"""Images without files: simple drawings in eight families, each at any place, size and angle, in some tint, with noise.

Sixty-four classes in eight super-classes (the families), made from a seed, so that nothing has to be fetched and any number of
images is at hand. A class has several looks, as things have: it is four drawings of its family, one in each tint, and which ones
is another matter in every family. So telling the drawing is not enough, and what tells classes apart depends on the family.
What a model is taught and what it is tested on are other names of the same seed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from orchard.core.batch import ImageBatch
from orchard.core.config import BaseConfig, config
from orchard.core.errors import UsageError
from orchard.core.seeds import generator
from orchard.data.errors import at_least
from orchard.data.scene_families import FAMILIES, KINDS
from orchard.data.shares import Shares

CLASSES = len(FAMILIES) * KINDS
VIEW = 1.25
"""How far an image shows to either side of its middle; a drawing fills about -1..1."""
TINTS = ((1.0, 0.6, -0.2), (-0.2, 0.6, 1.0), (-1.0, -0.6, 0.2), (0.2, -0.6, -1.0))
"""From the colour of the ground to that of the ink: warmer or colder, lighter or darker."""


@cache
def meanings() -> Tensor:
    """The class within a family [families, tints, drawings] of each drawing in each tint. It belongs to the set and has no seed:
    in every tint of a family, each of its drawings is of another class."""
    rows = [torch.randperm(KINDS, generator=generator(0, "meaning", row)) for row in range(len(FAMILIES) * len(TINTS))]
    return torch.stack(rows).view(len(FAMILIES), len(TINTS), KINDS)


def draw(
    count: int, seed: int, name: str | int, *, side: int = 32, jitter: float = 1.0, noise: float = 0.1
) -> ImageBatch:
    """Images [count, 3, side, side] of mean 0 a channel and spread 1, their classes and families, as arrays.

    `jitter` scales how far drawings are shifted, turned, stretched and grown; `noise` is its spread where colours are 0..1.
    """
    at_least("count", count, 1)
    at_least("side", side, 4)
    if jitter < 0 or noise < 0:
        raise UsageError(f"jitter {jitter} and noise {noise}", hint="use numbers from 0 on")
    chance = generator(seed, "scenes", name)

    def uniform(low: float, high: float, channels: int | None = None) -> Tensor:
        shape = (count, 1, 1) if channels is None else (count, channels, 1, 1)
        return torch.rand(shape, generator=chance) * (high - low) + low

    families, tints, drawings = (
        torch.randint(0, size, (count,), generator=chance) for size in (len(FAMILIES), len(TINTS), KINDS)
    )
    labels = families * KINDS + meanings()[families, tints, drawings]
    line = ((torch.arange(side) + 0.5) / side * 2 - 1) * VIEW
    x = line[None, None, :] - jitter * uniform(-0.15, 0.15)
    y = line[None, :, None] - jitter * uniform(-0.15, 0.15)
    angle, size, long = jitter * uniform(-0.3, 0.3), 1 - jitter * uniform(-0.1, 0.15), 1 + jitter * uniform(-0.1, 0.1)
    u = (x * angle.cos() + y * angle.sin()) / size * long
    v = (y * angle.cos() - x * angle.sin()) / size / long
    ink = torch.empty(count, side, side)
    for number, family in enumerate(FAMILIES):
        rows = (families == number).nonzero()[:, 0]
        ink[rows] = family(u[rows], v[rows], drawings[rows][:, None, None], 0.64 * side)
    apart = torch.tensor(TINTS)[tints][:, :, None, None] + uniform(-0.35, 0.35, 3)
    apart = apart / apart.norm(dim=1, keepdim=True) * uniform(0.45, 1.1, 1)
    images = uniform(0, 1, 3) + apart * ink[:, None]
    images += noise * torch.randn(images.shape, generator=chance)
    images -= images.mean((2, 3), keepdim=True)
    images /= images.std((1, 2, 3), keepdim=True).clamp_min(1e-6)
    return ImageBatch(images.numpy(), labels.numpy(), families.numpy())


class Scenes(Shares[ImageBatch]):
    """Batches of such images. Every epoch of a source with an end shows the same images."""

    @config
    class Config(BaseConfig):
        rows: int = 64
        """Images a batch."""
        batches: int | None = None
        """None: without end, every image seen once."""
        side: int = 32
        jitter: float = 1.0
        noise: float = 0.1
        part: str = "train"
        """Other names give other images."""
        seed: int = 0

    def __init__(self, cfg: Config, *, tokenizer: Any = None) -> None:
        at_least("rows", cfg.rows, 1)
        if cfg.batches is not None:
            at_least("batches", cfg.batches, 1)
        look: dict[str, Any] = {"side": cfg.side, "jitter": cfg.jitter, "noise": cfg.noise}
        super().__init__(cfg.rows, batches=cfg.batches, part=cfg.part, seed=cfg.seed, **look)
        self.cfg = cfg
        self._look = look

    def __next__(self) -> ImageBatch:
        cfg = self.cfg
        if cfg.batches is not None and self.given >= cfg.batches:
            raise StopIteration
        batch = draw(cfg.rows, cfg.seed, f"{cfg.part} {self.given}", **self._look)
        self.given += 1
        return batch.part(self.mine.start, self.mine.stop)
