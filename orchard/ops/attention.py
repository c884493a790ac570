"""Attention over whatever a view shows: one mask rule, one function.

Shapes: B sequences, Hq query heads, H key/value heads (Hq a multiple of H), T queries, S slots, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from orchard.core.context import KVView


def visible(q_positions: Tensor, view: KVView, window: int | None) -> Tensor:
    """Who may see whom: bool [B, 1|H, T, S]. Causal by position, inside the layer's window and what the policy keeps. Where rows
    hold several documents, slots are the queries themselves, and each sees its own document only.

    A padding query (position -1) would see nothing, and a softmax over nothing is NaN that spreads through later layers;
    it is shown every slot instead, and its result is never used.
    """
    q = q_positions[:, None, :, None]
    k = view.positions[:, :, None, :]
    seen = view.valid[:, :, None, :] & (k <= q)
    if window is not None:
        seen = seen & (k > q - window)
    if view.window is not None:
        seen = seen & ((k > q - view.window) | (k < view.sinks))
    if view.documents is not None:
        seen = seen & (view.documents[:, :, None, :] == view.documents[:, :, :, None])
    return seen | (q < 0)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, softcap: float | None = None
) -> Tensor:
    """Softmax attention [B, Hq, T, D]; query heads share key/value heads in groups. `softcap` bounds the scores (Gemma 2).
    Without a mask each query sees its own slot and those before it: kernels then skip half of the work."""
    groups = q.shape[1] // k.shape[1]
    if mask is None:
        if softcap is None:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=groups > 1)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
    if q.is_cuda and q.shape[2] == 1 and groups > 1 and softcap is None:
        # One new token: its heads stand in for queries of the head they share, whose keys and values are then read once.
        joined = q.unflatten(1, (-1, groups)).flatten(2, 3)
        shown = mask.expand(-1, -1, groups, -1)
        return functional.scaled_dot_product_attention(joined, k, v, attn_mask=shown, scale=scale).reshape(q.shape)
    if mask.shape[1] != 1 and groups > 1:
        mask = mask.repeat_interleave(groups, dim=1)
    if softcap is None:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=groups > 1)
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(-1, -2)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    weights = scores.float().masked_fill(~mask, float("-inf")).softmax(-1).to(q.dtype)
    return weights @ v
