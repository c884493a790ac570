"""Attention straight from additive codes on a GPU: `ops/vq_attend.py` is the twin of what is here.

Slots are cut into parts, so that a single sequence keeps the whole GPU busy; parts are put together afterwards, with the first
tokens, which are kept as they are, as one more part.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from orchard.ops.kernels.triton import vq_kernels
from orchard.ops.vq import Codebooks

SPAN = 32
"""Slots put together at a time."""


def parts_of(
    books: Codebooks,
    q: Tensor,
    mask: Tensor,
    k: tuple[Tensor, Tensor],
    v: tuple[Tensor, Tensor],
    turns: Tensor,
    *,
    scale: float,
    softcap: float | None,
    splits: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, Hq, 1, D] over slots whose codes are bytes A | B << 4 [B, H, S, R], with prescales [B, H, S, 1]; mask bool
    [B, H, S], turns float32 [B, 1|H, S, D] (cosines, then sines). Sums [B, Hq, splits, D], highest scores and totals [B, Hq,
    splits]."""
    batch, heads, _, dim = q.shape
    kv, slots = k[0].shape[1], k[0].shape[2]
    shared = heads // kv
    sums = torch.empty(batch, heads, splits, dim, device=q.device)
    tops, totals = torch.empty(2, batch, heads, splits, device=q.device)
    each = triton.cdiv(triton.cdiv(slots, splits), SPAN) * SPAN
    vq_kernels.attend_codes[(batch, kv, splits)](
        q.float().contiguous(), mask.to(torch.uint8).contiguous(), sums, tops, totals,
        *(part.contiguous() for part in (*k, *v)), books.key_words.contiguous(), books.value_words.contiguous(),
        books.key_offset.contiguous(), books.value_offset.contiguous(), turns.contiguous(),
        slots, each, scale, softcap or 1.0, turns.shape[1],
        KV=kv, SHARED=shared, ROUNDS=books.key_rounds, WORDS=books.keys.shape[2], DIM=dim, BYTES=k[0].shape[-1],
        CAPPED=softcap is not None, LINES=max(16, triton.next_power_of_2(shared)), SPAN=SPAN,
        WIDTH=max(16, triton.next_power_of_2(dim // 2)), SPLITS=splits,
    )  # fmt: skip
    return sums, tops, totals


def attend_one(
    books: Codebooks,
    q: Tensor,
    mask: Tensor,
    k: tuple[Tensor, Tensor],
    v: tuple[Tensor, Tensor],
    turns: Tensor,
    *,
    scale: float,
    softcap: float | None,
    beside: tuple[Tensor, Tensor, Tensor] | None = None,
    splits: int | None = None,
) -> Tensor:
    """[B, Hq, 1, D]; `beside`: another part, as `parts_of` gives them. A query that sees nothing gets zeros."""
    if splits is None:
        busy = q.shape[0] * k[0].shape[1]
        splits = max(1, min(64, 264 // busy, -(-k[0].shape[2] // 256)))
    found = parts_of(books, q, mask, k, v, turns, scale=scale, softcap=softcap, splits=splits)
    if beside is not None:
        found = tuple(torch.cat(both, dim=2) for both in zip(found, beside, strict=True))  # type: ignore[assignment]
    sums, tops, totals = found
    most = tops.amax(-1, keepdim=True)
    factor = torch.where(tops == float("-inf"), 0.0, (tops - most).exp())
    total = (totals * factor).sum(-1, keepdim=True).clamp_min(1e-30)
    return ((sums * factor[..., None]).sum(2) / total)[:, :, None].to(q.dtype)
