"""A product with a packed weight whose gradient goes through: nothing dense is kept between the two passes.

dx = dy W. Left to itself torch would keep the dense weight of every layer until the backward pass has come by, which is what
packing was meant to spare (QLoRA, arXiv 2305.14314): here it is made again there. The packed weight itself gets no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from orchard.nn.formats.base import Format, Packed


class Through(torch.autograd.Function):
    """`apply(x, format, names, *parts)`: x [..., in] times the weight that the parts hold, [..., out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: Format, names: tuple[str, ...], *parts: Tensor) -> Tensor:
        ctx.save_for_backward(*parts)
        ctx.format, ctx.names, ctx.into = format, names, x.dtype
        ctx.dtype = _computed_in(x)
        with torch.autocast(x.device.type, enabled=False):
            dense = format.unpack(dict(zip(names, parts, strict=True)), ctx.dtype)
            return functional.linear(x.to(ctx.dtype), dense)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        with torch.autocast(dy.device.type, enabled=False):
            dense = ctx.format.unpack(dict(zip(ctx.names, ctx.saved_tensors, strict=True)), ctx.dtype)
            dx = (dy.to(ctx.dtype) @ dense).to(ctx.into)
        return dx, None, None, *([None] * len(ctx.names))


def through(x: Tensor, format: Format, packed: Packed) -> Tensor:
    """x times a packed weight. Where somebody wants a gradient of x, and none of the weight, without keeping it dense."""
    wanted = torch.is_grad_enabled() and x.requires_grad and not any(part.requires_grad for part in packed.values())
    if wanted and not torch.compiler.is_compiling():  # a compiler decides by itself what it makes again
        made: Tensor = Through.apply(x, format, tuple(packed), *packed.values())
        return made
    return functional.linear(x, format.unpack(packed, x.dtype))


def _computed_in(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
