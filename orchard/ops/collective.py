"""Sums over processes that gradients go through: one for each end of a part that every process computes some of.

The same value goes into all processes (`AddBack`), each computes its share, and the shares are added up (`AddUp`). What is before
and after is computed everywhere alike, forwards and backwards.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class AddUp(torch.autograd.Function):
    """The sum over processes; each one's share of the gradient is the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class AddBack(torch.autograd.Function):
    """The same value on every process, each of which uses it for something else: gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        slope = gradients[0].contiguous().clone()
        dist.all_reduce(slope, group=ctx.group)
        return slope, None
