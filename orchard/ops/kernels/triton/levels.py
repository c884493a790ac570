"""Weights rounded to a few levels by the scale of their group, and what a gradient of those says of weights and scales, on a GPU:
one pass over memory each. In torch both are a dozen small kernels, and a model has hundreds of weights.

The plain twins are in `orchard.nn.formats.learned`. A weight exactly between two levels goes up here and to the even one there.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 8192
"""Weights that a program holds, about."""
OUTSIDE = {"stop": 0, "inward": 1, "pass": 2}


@triton.jit
def _place(weight, scale, count, width, ZERO, TOP, MANY: tl.constexpr, BLOCK: tl.constexpr):
    """Some groups: where their weights are, which are there, weights, scales, places among the levels, and values."""
    group = tl.program_id(0) * MANY + tl.arange(0, MANY)
    column = tl.arange(0, BLOCK)
    there = (group[:, None] < count) & (column[None, :] < width)
    at = group.to(tl.int64)[:, None] * width + column[None, :]
    w = tl.load(weight + at, mask=there, other=0.0)
    s = tl.load(scale + group, mask=group < count, other=0.0)[:, None]
    place = w * tl.where(s != 0.0, 1.0 / s, 0.0) + ZERO
    code = tl.minimum(tl.maximum(tl.floor(place + 0.5), 0.0), TOP)
    return group, at, there, w, s, place, (code - ZERO) * s


@triton.jit
def _level(weight, scale, out, count, width, ZERO, TOP, MANY: tl.constexpr, BLOCK: tl.constexpr):
    _group, at, there, _w, _s, _at_level, value = _place(weight, scale, count, width, ZERO, TOP, MANY, BLOCK)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _slope(
    weight,
    scale,
    grad,
    of_weight,
    of_scale,
    count,
    width,
    ZERO,
    TOP,
    factor,
    OUTSIDE: tl.constexpr,
    MANY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group, at, there, w, s, place, value = _place(weight, scale, count, width, ZERO, TOP, MANY, BLOCK)
    g = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
    inside = (place >= -0.5) & (place <= TOP + 0.5)
    alive = s != 0.0
    total = tl.sum(g * (value - tl.where(inside & alive, w, 0.0)), axis=1)
    tl.store(of_scale + group, total * factor, mask=group < count)
    through = inside
    if OUTSIDE == 1:
        back = g * s
        through = inside | tl.where(place > 0.0, back > 0.0, back < 0.0)
    if OUTSIDE == 2:
        through = place == place
    tl.store(of_weight + at, tl.where(through & alive, g, 0.0), mask=there)


def level_on_gpu(weight: Tensor, scale: Tensor, zero: float, top: int, dtype: torch.dtype) -> Tensor:
    """Values of a float32 weight [..., n], contiguous, with float32 scales [..., groups]."""
    weight, scale = weight.contiguous(), scale.contiguous()
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    if weight.numel():
        count, width, many, block = _cut(weight, scale)
        with torch.cuda.device(weight.device):
            _level[(triton.cdiv(count, many),)](
                weight, scale, out, count, width, float(zero), float(top), MANY=many, BLOCK=block
            )
    return out


def slope_on_gpu(
    weight: Tensor, scale: Tensor, grad: Tensor, zero: float, top: int, outside: str, factor: float
) -> tuple[Tensor, Tensor]:
    """The gradients of weight and log-scale, float32, from that of the values."""
    weight, scale, grad = weight.contiguous(), scale.contiguous(), grad.contiguous()
    of_weight = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    of_scale = torch.empty(scale.shape, dtype=torch.float32, device=weight.device)
    if weight.numel():
        count, width, many, block = _cut(weight, scale)
        with torch.cuda.device(weight.device):
            _slope[(triton.cdiv(count, many),)](
                weight,
                scale,
                grad,
                of_weight,
                of_scale,
                count,
                width,
                float(zero),
                float(top),
                float(factor),
                OUTSIDE=OUTSIDE[outside],
                MANY=many,
                BLOCK=block,
            )
    return of_weight, of_scale


def _cut(weight: Tensor, scale: Tensor) -> tuple[int, int, int, int]:
    """Groups, columns of each, groups of a program, and the power of two that holds a group's columns."""
    width = weight.shape[-1] // scale.shape[-1]
    block = triton.next_power_of_2(width)
    return scale.numel(), width, max(1, NUMBERS // block), block
