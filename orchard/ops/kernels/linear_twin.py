"""The arithmetic of the linear kernels in plain torch: slow, easy to read, and what the kernels are tested against.

Sums are taken in float64, so that a kernel is compared with the exact result of its rounded inputs and not with another
order of rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BASE = 16
"""What the high digit of an activation counts for."""


@dataclass(frozen=True)
class Quantised:
    """Rows as two 8-bit digits with a scale per group: x ≈ scale · (BASE · q + low); `sum` is the group's x added up."""

    q: torch.Tensor
    """int8 [rows, padded columns]."""
    low: torch.Tensor
    """int8 [rows, padded columns]."""
    scale: torch.Tensor
    """float32 [rows, groups]."""
    sum: torch.Tensor
    """float32 [rows, groups]."""

    def values(self) -> torch.Tensor:
        """float64 [rows, padded columns]."""
        rows, groups = self.scale.shape
        whole = BASE * self.q.double() + self.low.double()
        return (whole.view(rows, groups, -1) * self.scale.double()[..., None]).view(rows, -1)


def quantise(x: torch.Tensor, group: int) -> Quantised:
    """float32 [rows, columns] → digits. A group of zeros has scale 0; one with anything that is not finite, not-a-number."""
    rows, cols = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -cols % group)).view(rows, -1, group)
    most = padded.abs().amax(-1)
    finite = padded.isfinite().all(-1)
    live = finite & (most >= 1e-33)
    inverse = torch.where(live, torch.full_like(most, 127 * BASE) / torch.where(live, most, 1.0), 0.0)
    value = torch.where(live[..., None], padded * inverse[..., None], 0.0)
    whole, high = value.round(), (value * torch.tensor(1 / BASE)).round()
    scale = torch.where(live, most / (127 * BASE), torch.where(finite, 0.0, torch.nan))
    digits = [part.to(torch.int8).view(rows, -1) for part in (high, whole - BASE * high)]
    return Quantised(digits[0], digits[1], scale, scale * whole.sum(-1))


def linear_q(x: Quantised, weight: torch.Tensor) -> torch.Tensor:
    """Quantised rows times dequantised weights [out, columns] → float64 [rows, out]."""
    return x.values()[:, : weight.shape[1]] @ weight.double().T


def whole_tables(tables: torch.Tensor) -> torch.Tensor:
    """Palettes [..., entries] as dot products with digits read them: multiples of a unit of their own, in float32. The unit is
    2^-14 of the power of two that is not above the largest entry, so that whole numbers of 16 bits hold all of them."""
    values = tables.float()
    most = values.abs().amax(-1, keepdim=True)
    _, exponent = torch.frexp(most)  # most = m · 2^exponent with m from 0.5 to below 1
    unit = torch.where(most > 0, torch.ldexp(torch.ones_like(most), exponent - 15), 1.0)
    return (values / unit).round() * unit


def linear_f(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 rows times weights [out, columns] → float64 [rows, out]."""
    return x.double() @ weight.double().T


def linear_matrix(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What matrix units compute: both sides rounded to bfloat16 → float64 [rows, out]."""
    return x.bfloat16().double() @ weight.bfloat16().double().T


def magnitude(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """|x| |W|, the scale on which the rounding of a sum of products is measured: float64 [rows, out]."""
    return x.double().abs() @ weight.double().abs().T
