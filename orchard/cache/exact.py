"""The first few tokens of sequences in full precision, beside a store whose codec would lose too much of them.

Nearly every query looks at the first tokens (attention sinks), and their keys and values are unlike all others, which codebooks
are fitted to. So their slots hold, instead of codes, where to find them: a negative scale, and a row in the first byte. They stay
found wherever a policy moves their slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orchard.cache.codecs import Parts
from orchard.ops.vq_attend import Kept


class Exact:
    """Rows [B, H, sinks + 1, D] for keys and for values; the last one is a bin. Codecs have parts `codes` (bytes) and `scale`
    (never negative)."""

    def __init__(self, batch: int, heads: int, sinks: int, dim: int, dtype: torch.dtype, device: torch.device | None):
        self.sinks = sinks
        self.rows = {
            role: torch.zeros((batch, heads, sinks + 1, dim), dtype=dtype, device=device) for role in ("k", "v")
        }

    def put(self, new: Parts, x: Tensor, role: str, positions: Tensor) -> Parts:
        """Keep those of the new tokens x [B, H, T, D] that are the first of their sequences; parts that say where they are."""
        first = (positions >= 0) & (positions < self.sinks)  # [B, 1, T]
        row = torch.where(first, positions, self.sinks)
        rows = self.rows[role]
        rows.scatter_(2, row[..., None].expand_as(x), x.to(rows.dtype))
        codes = torch.where(first[..., None], row[..., None].to(torch.uint8), new["codes"])
        scale = torch.where(first[..., None], torch.full_like(new["scale"], -1.0), new["scale"])
        return {**new, "codes": codes, "scale": scale}

    def show(self, shown: Parts, decoded: Tensor, role: str) -> Tensor:
        """What was decoded [B, H, S, D], with the first tokens as they were."""
        row, first = self.where(shown)
        rows = self.rows[role]
        kept = rows.gather(2, row[..., None].expand(-1, -1, -1, rows.shape[-1]))
        return torch.where(first[..., None], kept, decoded)

    def where(self, shown: Parts) -> tuple[Tensor, Tensor]:
        """The row of every slot (0 where it has none), and whether it has one: [B, H, S]."""
        first = shown["scale"][..., 0] < 0
        return torch.where(first, shown["codes"][..., 0].long(), 0).clamp(max=self.sinks), first

    def kept(self, shown: Parts) -> Kept:
        """The same for attention straight from codes."""
        row, first = self.where(shown)
        slots = first.shape[-1]
        slot = torch.full((*first.shape[:2], self.sinks + 1), slots, dtype=torch.long, device=row.device)
        each = torch.arange(slots, device=row.device).expand_as(row)
        slot = slot.scatter(2, torch.where(first, row, self.sinks), torch.where(first, each, slots))[..., : self.sinks]
        k, v = (self.rows[role][:, :, : self.sinks].float() for role in ("k", "v"))
        return Kept(k, v, slot, first)

    def keep(self, sequences: Tensor) -> None:
        self.rows = {role: rows.index_select(0, sequences) for role, rows in self.rows.items()}

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows.values())
