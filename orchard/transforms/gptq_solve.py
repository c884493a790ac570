"""One weight rounded so that what it gives on known inputs changes least (GPTQ, arXiv 2210.17323).

The error of a rounded weight Q is tr((W - Q) H (W - Q)ᵀ), a sum over rows. Columns are rounded one after another, and the columns
that are still to come move to make good for the error as far as they can: by the rows of the upper Cholesky factor of H⁻¹.
Updates inside a block of columns are done at once, those of the columns behind it when the block is finished.

The scale of a group is searched when its first column is reached, on the values as they are then, among those its format tries:
an error e in column i is counted as e² over root[i, i]², which is what it costs when all columns behind it make good for it. In
another order than that of the weight (`order`: columns with large inputs first, while many others can still make good for them)
groups stay what they are, so nothing is stored but codes and scales.

What this finds is held against rounding to nearest row by row, and the better of the two is kept: the sum above is never larger
than that of rounding to nearest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from orchard.nn.formats import Format, Grouped, GroupedFormat
from orchard.transforms.ptq import NotFinite
from orchard.transforms.ptq_scales import either, half_scales, levels, nearest_codes, spent, weighted_scales

BLOCK = 128
TRIES = 8


@dataclass(frozen=True)
class Curvature:
    """H of a map's inputs, with what rounding needs of it."""

    hessian: Tensor
    root: Tensor
    """The upper Cholesky factor of the damped H⁻¹, with rows and columns in `order`."""
    order: Tensor
    """The columns in the order in which they are rounded."""

    @classmethod
    def of(cls, hessian: Tensor, *, damp: float = 0.01, order: bool = False) -> Curvature:
        """`damp` times the mean of the diagonal is added to it, and more where that is not enough to be inverted. Channels that
        are always zero count as the mean: nothing is known of them, and they are rounded to nearest."""
        diagonal = hessian.diagonal()
        mean = diagonal[diagonal > 0].mean() if (diagonal > 0).any() else hessian.new_ones(())
        columns = torch.arange(len(hessian), device=hessian.device)
        if order:
            columns = diagonal.argsort(descending=True, stable=True)
        whole = hessian.double() + torch.diag((diagonal <= 0).double() * mean)
        whole = whole[columns][:, columns]
        for _ in range(TRIES):
            damped = whole + torch.eye(len(whole), device=whole.device, dtype=whole.dtype) * (damp * mean)
            lower, failed = torch.linalg.cholesky_ex(damped)
            if not failed:
                upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and upper.isfinite().all():
                return cls(hessian, upper.float(), columns)
            damp = max(damp, 1e-4) * 10
        raise NotFinite("the inputs of a map have no usable covariance", hint="use other texts, or round to nearest")

    def error(self, weight: Tensor, other: Tensor) -> Tensor:
        """By how much the outputs of two weights differ, for each row: the mean square."""
        return spent(weight - other, self.hessian)


def solve(weight: Tensor, curvature: Curvature, format: Format) -> Grouped:
    """Codes and scales for a weight [out, in], float32: per row the better of rounding with feedback and to nearest."""
    near = nearest_codes(weight, format)
    fed = with_feedback(weight, curvature, half_scales(format))
    better = curvature.error(weight, fed.dense()) < curvature.error(weight, near.dense())
    return either(better, fed, near)


def with_feedback(weight: Tensor, curvature: Curvature, format: GroupedFormat) -> Grouped:
    """Column after column, as the paper has it."""
    out, width = weight.shape
    group = format.group(width)
    order, root = curvature.order, curvature.root
    rest = weight.float().mT[order].contiguous()  # [in, out]: a column lies in one piece
    places = order.argsort().unflatten(0, (-1, group))  # where the columns of each group are in this order
    scales = torch.zeros(width // group, out, dtype=torch.float16, device=weight.device)
    minima = torch.zeros_like(scales) if format.has_minimum else None
    codes = torch.zeros(width, out, dtype=torch.uint8, device=weight.device)
    zero = Grouped(codes, scales, minima, format.bits, group).zero
    known: set[int] = set()
    groups = (order // group).tolist()
    for first in range(0, width, BLOCK):
        last = min(first + BLOCK, width)
        errors = torch.empty(last - first, out, device=weight.device)
        for i in range(first, last):
            at = groups[i]
            if at not in known:
                known.add(at)
                scales[at], found = weighted_scales(rest[places[at]].mT, root.diagonal()[places[at]] ** -2, format)
                if minima is not None and found is not None:
                    minima[at] = found
            step = scales[at].float()
            low = 0.0 if minima is None else minima[at].float()
            level = levels(rest[i], step, low, zero, format.bits)
            codes[i] = level.to(torch.uint8)
            errors[i - first] = (rest[i] - level.sub_(zero).mul_(step).add_(low)) / root[i, i]
            rest[i + 1 : last].addr_(root[i, i + 1 : last], errors[i - first], alpha=-1)
        rest[last:].addmm_(root[first:last, last:].mT, errors, alpha=-1)
    lows = None if minima is None else minima.mT.contiguous()
    back = order.argsort()
    return Grouped(codes[back].mT.contiguous(), scales.mT.contiguous(), lows, format.bits, group)
