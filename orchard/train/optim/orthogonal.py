"""The nearest orthogonal matrix, roughly and quickly: Newton-Schulz iterations of fifth order.

With the coefficients of Muon (Keller Jordan 2024, "Muon: an optimizer for hidden layers in neural networks") five iterations
bring every singular value that is not vanishing into about 0.7 to 1.2, which is all that the optimiser needs, by matrix
products alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(x: Tensor, *, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """UVᵀ for x = USVᵀ, roughly; for a stack of matrices [..., n, m], each by itself. A zero matrix stays zero.

    `dtype`: what products are computed in; None: bfloat16 on a GPU, x's own on a CPU.
    """
    if dtype is None:
        dtype = torch.bfloat16 if x.device.type == "cuda" else x.dtype
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x
    size = torch.linalg.matrix_norm(y.float() if y.dtype == torch.bfloat16 else y, keepdim=True)
    y = (y / size.clamp_min(1e-30)).to(dtype)
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.mT if tall else y).to(x.dtype)
