"""What scenes show: eight families of eight drawings each, as functions of a point.

A family is `(u, v, which, sharp) → ink`: points [n, height, width] in the drawing's own frame (it fills about -1..1), which of
the eight [n, 1, 1] each image shows, how sharp edges are, and how much ink is there, 0..1. Within a family drawings differ in a
count, a frequency, a hand or a part, so that they are more alike than those of other families.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Family = Callable[[Tensor, Tensor, Tensor, float], Tensor]
KINDS = 8
"""Drawings of a family."""
_STEM = (-0.5, -0.8, -0.5, 0.8)
_TOP, _MIDDLE, _FOOT = (-0.5, -0.8, 0.5, -0.8), (-0.5, 0.0, 0.45, 0.0), (-0.5, 0.8, 0.5, 0.8)
_RIGHT = (0.5, -0.8, 0.5, 0.8)
_NOWHERE = (9.0, 9.0, 9.0, 9.0)
STROKES = (
    (_STEM, _FOOT),
    (_TOP, (0.0, -0.8, 0.0, 0.8)),
    (_STEM, _RIGHT, _MIDDLE),
    (_STEM, _TOP, _MIDDLE),
    (_STEM, _TOP, _MIDDLE, _FOOT),
    (_TOP, (0.5, -0.8, -0.5, 0.8), _FOOT),
    (_STEM, (-0.5, -0.8, 0.5, 0.8), _RIGHT),
    (_STEM, _FOOT, _RIGHT),
)
"""Lines (x, y to x, y) that look like the letters L, T, H, F, E, Z, N and U."""


def polygons(u: Tensor, v: Tensor, which: Tensor, sharp: float) -> Tensor:
    """Three to six sides, filled or as an outline."""
    r, turn = _polar(u, v)
    slice_ = 2 * math.pi / (3 + which % 4)
    far = r * torch.cos(torch.remainder(turn, slice_) - slice_ / 2)
    return _ink(torch.where(which < 4, 0.62 - far, 0.13 - (far - 0.62).abs()), sharp)


def petals(u: Tensor, v: Tensor, which: Tensor, sharp: float) -> Tensor:
    """Two to five petals, joined in the middle or not."""
    r, turn = _polar(u, v)
    flower = 0.5 + 0.4 * torch.cos((2 + which % 4) * turn) - r
    return _ink(torch.where(which < 4, flower, torch.minimum(flower, r - 0.3)), sharp)


def strokes(u: Tensor, v: Tensor, which: Tensor, sharp: float) -> Tensor:
    """Lines like those of letters."""
    table = torch.tensor([[*lines, *[_NOWHERE] * (4 - len(lines))] for lines in STROKES])
    near = torch.full_like(u, 9.0)
    lines = table[which.flatten()][..., None, None]  # [n, lines, 4, 1, 1]
    for line in lines.unbind(1):
        x0, y0, x1, y1 = line.unbind(1)
        dx, dy = x1 - x0, y1 - y0
        along = (((u - x0) * dx + (v - y0) * dy) / (dx.square() + dy.square()).clamp_min(1e-6)).clamp(0, 1)
        near = torch.minimum(near, torch.hypot(u - x0 - along * dx, v - y0 - along * dy))
    return _ink(0.13 - near, sharp)


def stripes(u: Tensor, v: Tensor, which: Tensor, sharp: float) -> Tensor:
    """Four widths of stripes, whole or broken; they fill the image."""
    often = torch.tensor([0.9, 1.28, 1.73, 2.25])[which % 4]
    across, along = torch.sin(2 * math.pi * often * u), torch.sin(1.07 * math.pi * often * v)
    return _ink(0.3 * torch.where(which < 4, across, torch.minimum(across, along + 0.4)), sharp)


def checks(u: Tensor, v: Tensor, which: Tensor, sharp: float) -> Tensor:
    """Four sizes of squares as on a board, or of dots in rows; they fill the image."""
    often = torch.tensor([0.68, 0.98, 1.35, 1.8])[which % 4]
    a, b = torch.sin(2 * math.pi * often * u), torch.sin(2 * math.pi * often * v)
    return _ink(torch.where(which < 4, 0.4 * a * b, 0.3 * (a + b - 0.9)), sharp)


def rings(u: Tensor, v: Tensor, which: Tensor, sharp: float) -> Tensor:
    """One to four rings inside each other, closed or open on one side."""
    r, turn = _polar(u, v)
    closed = torch.minimum(-0.25 * torch.cos(2 * math.pi * r * (1 + which % 4) / 0.95), 0.95 - r)
    return _ink(torch.where(which < 4, closed, torch.minimum(closed, (turn.abs() - 0.7) * r)), sharp)


def framed(u: Tensor, v: Tensor, which: Tensor, sharp: float) -> Tensor:
    """A dot, a bar, a plus or two dots in a round frame or a square one."""
    r, _ = _polar(u, v)
    far, near = torch.maximum(u.abs(), v.abs()), torch.minimum(u.abs(), v.abs())
    frame = 0.11 - torch.where(which < 4, r - 0.85, far - 0.75).abs()
    two = torch.minimum(torch.hypot(u - 0.33, v), torch.hypot(u + 0.33, v))
    things = [
        0.3 - r,
        torch.minimum(0.13 - u.abs(), 0.45 - v.abs()),
        torch.minimum(0.13 - near, 0.45 - far),
        0.2 - two,
    ]
    thing = torch.stack(things).gather(0, (which % 4).expand(u.shape)[None])[0]
    return _ink(torch.maximum(frame, thing), sharp)


def spirals(u: Tensor, v: Tensor, which: Tensor, sharp: float) -> Tensor:
    """One to four arms, left-handed or right-handed."""
    r, turn = _polar(u, v)
    arms = (1 + which % 4) * torch.where(which < 4, 1.0, -1.0)
    return _ink(torch.minimum(0.25 * torch.cos(arms * turn - 2.2 * math.pi * r), 0.95 - r), sharp)


FAMILIES: tuple[Family, ...] = (polygons, petals, strokes, stripes, checks, rings, framed, spirals)


def _polar(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.hypot(u, v), torch.atan2(v, u)


def _ink(inside: Tensor, sharp: float) -> Tensor:
    """From about how far inside of a drawing a point is (negative: outside)."""
    return torch.sigmoid(sharp * inside)
