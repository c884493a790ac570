"""The codec contract. A codec holds no state: the store keeps the tensors, the codec says how to read and write them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from orchard.core.context import Rotate
from orchard.core.errors import UnsupportedPair
from orchard.ops.plan.codes import Books
from orchard.ops.vq_attend import Kept

Parts = dict[str, Tensor]
"""What one encoded tensor consists of: each part is [B, H, T, …]."""

Role = Literal["k", "v"]


class Attended(Protocol):
    """Slots as a codec keeps them, to attend to as they are."""

    def attend(
        self,
        q: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
        positions: Tensor,
        rotate: Rotate | None,
        kept: Kept | None = None,
    ) -> Tensor: ...


class Codec(ABC):
    """`decode(encode(x))` is what attention sees, also for the tokens of the current step."""

    before_rotation: ClassVar[bool] = False
    """Whether keys are encoded unrotated, and rotated each time they are read."""

    native: ClassVar[str | None] = None
    """How the native engine names this codec: "plain" (slots as they come) or one of `steps.CODECS`. A class says it itself:
    what a subclass inherits does not count."""

    sinks: int = 0
    """The first so many tokens of a sequence are kept beside the slots, as they are (`cache/exact.py`)."""

    def native_books(self, heads: int, dim: int) -> Books:
        """The codebooks of a codec whose native name is "vq"."""
        raise UnsupportedPair(f"the codec {type(self).__name__} has no codebooks", hint="it runs in torch")

    @abstractmethod
    def layout(self, dim: int, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Each part's shape per slot and head, and its dtype."""

    @abstractmethod
    def encode(self, x: Tensor, role: Role) -> Parts:
        """Encode x [B, H, T, D]."""

    @abstractmethod
    def decode(self, parts: Parts, role: Role, dtype: torch.dtype) -> Tensor:
        """The tensor [B, H, S, D] that attention reads."""

    def attended(self, k: Parts, v: Parts) -> Attended | None:
        """Attention straight from how slots are kept; None: slots have to be decoded."""
        return None

    def bytes_per_slot(self, heads: int, dim: int, dtype: torch.dtype) -> int:
        """Bytes for one position's keys and values."""
        sizes = (torch.Size(shape).numel() * kind.itemsize for shape, kind in self.layout(dim, dtype).values())
        return 2 * heads * sum(sizes)
