"""The format contract. A format holds no state: the module keeps the packed tensors, the format reads and writes them.

Weights are [..., out, in]; leading dimensions are experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

Packed = dict[str, Tensor]


@dataclass(frozen=True)
class PackedPart:
    """One tensor of a packed weight. `dtype` None means the dtype the model computes in."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    trained: bool = False


class Format(ABC):
    """How a weight lives."""

    @abstractmethod
    def layout(self, shape: tuple[int, ...]) -> dict[str, PackedPart]:
        """The tensors that hold a weight of this shape."""

    @abstractmethod
    def pack(self, weight: Tensor) -> Packed: ...

    @abstractmethod
    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        """The dense weight."""

    @abstractmethod
    def fake(self, weight: Tensor) -> Tensor:
        """`unpack(pack(weight))` with gradients straight through, for training."""

    def matmul(self, x: Tensor, packed: Packed) -> Tensor:
        """x [..., in] times the weight [out, in] transposed. Formats with kernels of their own do better than this."""
        return torch.nn.functional.linear(x, self.unpack(packed, x.dtype))

    def nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Exact bytes of a packed weight."""
        parts = self.layout(shape).values()
        return sum(torch.Size(part.shape).numel() * (part.dtype or dtype).itemsize for part in parts)
