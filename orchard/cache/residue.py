"""A store's residue: what is left of the tokens that a store no longer keeps, in a matrix a head that never grows.

A window forgets what falls out of it. With a residue, each key and value that leaves is added to the sum that linear attention
reads (`orchard.ops.linear_attention`; RATTENTION, arXiv 2506.15545): the store still takes the same memory for any length, and
nothing is ever lost whole. Any codec may keep the slots: what joins the sum is what the codec reads back. Policies have to tell
what leaves (`Policy.tells`); others are refused by name.

The sum is over keys before rotation, so a store with a residue keeps its keys unrotated and turns them each time they are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orchard.core.config import BaseConfig, Configurable, config
from orchard.ops.linear_attention import gathered


class Residue(Configurable):
    """The sums of one layer for a batch of sequences: [B, H, 2 D, D], float32."""

    @config
    class Config(BaseConfig):
        pass

    def __init__(
        self, cfg: Config, *, batch: int, heads: int, width: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        """`dtype`: the model's; a sum is never kept in less than float32."""
        self.config = cfg
        kind = torch.promote_types(dtype, torch.float32)
        self.sum = torch.zeros((batch, heads, 2 * width, width), dtype=kind, device=device)

    def add(self, k: Tensor, v: Tensor, left: Tensor | None) -> None:
        """Keys (unrotated) and values [B, H, S, D], of which `left` [B, 1, S] have gone."""
        if left is not None:
            gone = left[..., None]
            # What did not leave may be anything, even in the bin: neither side of a product may be NaN.
            self.sum.add_(gathered(torch.where(gone, k, 0), torch.where(gone, v, 0)))

    def keep(self, rows: Tensor) -> None:
        self.sum = self.sum.index_select(0, rows)

    @property
    def nbytes(self) -> int:
        return self.sum.nbytes
