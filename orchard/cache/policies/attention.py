"""How much attention queries give to each slot, a few queries at a time, so that no large table is made.

Shapes: B sequences, Hq query heads in groups over H key/value heads, T queries, S slots, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TOGETHER = 64
"""Queries of one piece."""


def shares(
    q: Tensor, k: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Iterator[tuple[Tensor, slice]]:
    """Pieces [B, H, group, t, S] of the softmax over the slots, and which queries each is of. q: [B, Hq, T, D], k: [B, H, S, D],
    mask: [B, 1|H, T, S]. A query that sees nothing gives nothing."""
    heads = k.shape[1]
    grouped = q.float().unflatten(1, (heads, -1))
    keys = k.float()[:, :, None].transpose(-1, -2)
    for start in range(0, q.shape[2], TOGETHER):
        part = slice(start, min(start + TOGETHER, q.shape[2]))
        scores = (grouped[:, :, :, part] @ keys) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores.masked_fill(~mask[:, :, None, part], float("-inf"))
        yield scores.softmax(-1).nan_to_num(0.0), part
