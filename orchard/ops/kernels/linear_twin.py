"""The arithmetic of the linear kernels in plain torch: slow, easy to read, and what the kernels are tested against.

Sums are taken in float64, so that a kernel is compared with the exact result of its rounded inputs and not with another
order of rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Quantised:
    """Rows as 8-bit integers with a scale per group: x ≈ scale · q; `sum` is scale · (q added up over the group)."""

    q: torch.Tensor
    """int8 [rows, padded columns]."""
    scale: torch.Tensor
    """float32 [rows, groups]."""
    sum: torch.Tensor
    """float32 [rows, groups]."""

    def values(self) -> torch.Tensor:
        """float64 [rows, padded columns]."""
        rows, groups = self.scale.shape
        return (self.q.double().view(rows, groups, -1) * self.scale.double()[..., None]).view(rows, -1)


def quantise(x: torch.Tensor, group: int) -> Quantised:
    """float32 [rows, columns] → 8-bit rows. A group of zeros has scale 0; one with anything that is not finite, not-a-number."""
    rows, cols = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -cols % group)).view(rows, -1, group)
    most = padded.abs().amax(-1)
    finite = padded.isfinite().all(-1)
    live = finite & (most >= 1e-36)
    inverse = torch.where(live, 127 / torch.where(live, most, 1.0), 0.0)
    q = torch.where(live[..., None], (padded * inverse[..., None]).round(), 0.0)
    scale = torch.where(live, most / 127, torch.where(finite, 0.0, torch.nan))
    return Quantised(q.to(torch.int8).view(rows, -1), scale, scale * q.sum(-1))


def linear_q(x: Quantised, weight: torch.Tensor) -> torch.Tensor:
    """Quantised rows times dequantised weights [out, columns] → float64 [rows, out]."""
    return x.values()[:, : weight.shape[1]] @ weight.double().T


def linear_f(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 rows times weights [out, columns] → float64 [rows, out]."""
    return x.double() @ weight.double().T


def linear_matrix(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What matrix units compute: both sides rounded to bfloat16 → float64 [rows, out]."""
    return x.bfloat16().double() @ weight.bfloat16().double().T


def magnitude(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """|x| |W|, the scale on which the rounding of a sum of products is measured: float64 [rows, out]."""
    return x.double().abs() @ weight.double().abs().T
