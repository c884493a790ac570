"""Pictures of ten shapes, 16 × 16: drawn at any place, size and angle, with noise. Made from a seed, so nothing is fetched."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from orchard.core.seeds import generator

SIDE, CLASSES = 16, 10
SOFT = 10.0
"""How sharp edges are."""
NOISE = 0.2


def pictures(count: int, seed: int, name: str) -> tuple[Tensor, Tensor]:
    """Pictures [count, 1, 16, 16] of mean 0 or so, and what they show [count]."""
    chance = generator(seed, "shapes", name)

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(count, 1, 1, generator=chance) * (high - low) + low

    labels = torch.randint(0, CLASSES, (count,), generator=chance)
    line = torch.linspace(-1.2, 1.2, SIDE)
    x, y = line[None, None, :] - uniform(-0.3, 0.3), line[None, :, None] - uniform(-0.3, 0.3)
    angle, size = uniform(0, 2 * math.pi), uniform(0.55, 1.0)
    u = (x * angle.cos() + y * angle.sin()) / size
    v = (y * angle.cos() - x * angle.sin()) / size
    inside = _insides(u, v).gather(0, labels[None, :, None, None].expand(1, -1, SIDE, SIDE))[0]
    drawn = torch.sigmoid(SOFT * inside) * uniform(0.6, 1.4)
    noise = NOISE * torch.randn(drawn.shape, generator=chance)
    return (drawn - 0.25 + noise)[:, None], labels


def _insides(u: Tensor, v: Tensor) -> Tensor:
    """How far inside of each shape a point is, about; negative outside. [shapes, pictures, height, width]"""
    r, turn = (u.square() + v.square()).sqrt(), torch.atan2(v, u)
    far, near = torch.maximum(u.abs(), v.abs()), torch.minimum(u.abs(), v.abs())
    third = torch.remainder(turn, 2 * math.pi / 3) - math.pi / 3
    dots = torch.minimum(((u - 0.55).square() + v.square()).sqrt(), ((u + 0.55).square() + v.square()).sqrt())
    return torch.stack(
        [
            0.75 - r,  # a disc
            0.18 - (r - 0.65).abs(),  # a ring
            0.65 - far,  # a square
            0.17 - (far - 0.62).abs(),  # a frame
            0.45 - r * third.cos(),  # a triangle
            torch.minimum(0.22 - near, 0.85 - far),  # a plus
            torch.minimum(0.22 - u.abs(), 0.9 - v.abs()),  # a bar
            0.33 - dots,  # two dots
            torch.minimum(0.8 - r, ((u - 0.4).square() + v.square()).sqrt() - 0.6),  # a crescent
            0.5 + 0.3 * (5 * turn).cos() - r,  # a star
        ]
    )
