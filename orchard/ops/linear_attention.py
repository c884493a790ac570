"""Linear attention over what lies behind a window, in three equal forms (the far half of RATTENTION, arXiv 2506.15545).

Queries and keys, as they are before any rotation or scale, become positive features φ(x) = [softmax(x), softmax(−x)] over their
channels. What token t gets is φ(q_t) · Σ φ(k_i)ᵀ v_i over all i ≤ t − shift. Nothing is divided by, so whoever uses it normalises
it. Sums are kept in float32 whatever comes in, also under autocast.

- `naive`: every query with every key, under a mask; O(T · S).
- `chunked`: pieces of a sequence, with the sum of all pieces before each: O(T), for training and prompts.
- `recurrent`: token after token with one matrix a head, which is what a store keeps.

Shapes: B sequences, Hq query heads, H key/value heads (Hq a multiple of H), T queries, S slots, D head width, F = 2 D features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from orchard.core.context import KVView


def features(x: Tensor) -> Tensor:
    """φ: [..., D] → [..., F], in float32 or better."""
    wide = _wide(x)
    return torch.cat([wide.softmax(-1), (-wide).softmax(-1)], dim=-1)


def gathered(k: Tensor, v: Tensor) -> Tensor:
    """Σ φ(k)ᵀ v over all slots: [B, H, F, D]."""
    with torch.autocast(k.device.type, enabled=False):
        return features(k).transpose(-1, -2) @ _wide(v)


def read(q: Tensor, state: Tensor) -> Tensor:
    """What queries get from one sum [B, H, F, D]: [B, Hq, T, D]."""
    with torch.autocast(q.device.type, enabled=False):
        return (_grouped(features(q), state.shape[1]) @ state[:, :, None]).flatten(1, 2)


def beyond(q_positions: Tensor, view: KVView, window: int) -> Tensor:
    """Who lies behind whose window: bool [B, 1, T, S], the counterpart of `ops.attention.visible`."""
    q, k = q_positions[:, None, :, None], view.positions[:, :, None, :]
    seen = view.valid[:, :, None, :] & (k <= q - window)
    if view.documents is not None:
        seen = seen & (view.documents[:, :, None, :] == view.documents[:, :, :, None])
    return seen


def naive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, state: Tensor | None = None) -> Tensor:
    """Every query with the keys that the mask [B, 1, T, S] shows it, and with the sum `state` of what is no longer there."""
    with torch.autocast(q.device.type, enabled=False):
        weights = _grouped(features(q), k.shape[1]) @ features(k).transpose(-1, -2)[:, :, None]
        y = (weights.masked_fill(~mask[:, :, None], 0.0) @ _wide(v)[:, :, None]).flatten(1, 2)
        return y if state is None else y + read(q, state)


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    shift: int,
    chunk: int = 64,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
    state: Tensor | None = None,
) -> Tensor:
    """The last query stands at the last slot, the one before it at the slot before, and so on (S ≥ T); each sees the slots that
    are at least `shift` before its own.

    `valid` [B, 1, S]: False where a slot holds nothing. `documents` [B, 1, S] (with S = T): which document a slot belongs to, in
    runs; nothing is seen of another one. `state` [B, H, F, D]: the sum of what was before the first slot.
    """
    with torch.autocast(q.device.type, enabled=False):
        heads, tokens = k.shape[1], q.shape[2]
        chunk = min(chunk, tokens)
        k, v = features(k), _wide(v)
        if valid is not None:
            v = torch.where(valid[..., None], v, 0.0)
        k, v, old = _shifted(k, v, shift, tokens)
        state = old if state is None else state if old is None else state + old
        short = -tokens % chunk
        q, k, v = (functional.pad(x, (0, 0, 0, short)).unflatten(2, (-1, chunk)) for x in (features(q), k, v))
        q = _grouped(q, heads)  # [B, H, G, N, C, F]; k [B, H, N, C, F], v [B, H, N, C, D]
        inside = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
        far: Tensor | float = 0.0
        if documents is None and chunk < tokens:
            far = q @ _before((k.transpose(-1, -2) @ v).cumsum(2))[:, :, None]
        elif documents is not None:
            behind = functional.pad(documents, (shift, 0), value=-1)[:, :, :tokens]
            readers, keys = (
                functional.pad(x, (0, short), value=-1).unflatten(2, (-1, chunk)) for x in (documents, behind)
            )
            inside = inside & (readers[..., :, None] == keys[..., None, :])  # [B, 1, N, C, C]
            before, last = _by_document(k, v, keys)
            far = (q * (readers == last)[:, :, None, ..., None]) @ before[:, :, None]
            inside = inside[:, :, None]
        near = (q @ k.transpose(-1, -2)[:, :, None]).masked_fill(~inside, 0.0) @ v[:, :, None]
        y = near + far if state is None else near + far + q @ state[:, :, None, None]
        return y.flatten(3, 4)[:, :, :, :tokens].flatten(1, 2)


def recurrent(q: Tensor, k: Tensor, v: Tensor, *, shift: int) -> Tensor:
    """Token after token: a key and value join the sum when they are `shift` behind. The plain twin of the other two."""
    state = gathered(k[:, :, :0], v[:, :, :0])
    seen = []
    for t in range(q.shape[2]):
        if t >= shift:
            gone = slice(t - shift, t - shift + 1)
            state = state + gathered(k[:, :, gone], v[:, :, gone])
        seen.append(read(q[:, :, t : t + 1], state))
    return torch.cat(seen, dim=2)


# Inside -----------------------------------------------------------------------------------------------------------------


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _grouped(q: Tensor, heads: int) -> Tensor:
    """[B, Hq, …] → [B, H, queries of one key, …]."""
    return q.unflatten(1, (heads, -1))


def _shifted(k: Tensor, v: Tensor, shift: int, tokens: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values moved so that a query sees the slot at its own place last, and the sum of the slots before those."""
    first = k.shape[2] - tokens - shift  # the slot that the first query sees last
    old = k[:, :, :first].transpose(-1, -2) @ v[:, :, :first] if first > 0 else None
    cut = slice(max(first, 0), max(first, 0) + tokens)
    ahead = min(max(-first, 0), tokens)
    k, v = (functional.pad(x, (0, 0, ahead, 0))[:, :, cut] for x in (k, v))
    return k, v, old


def _by_document(k: Tensor, v: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Before each piece, the sum of its document so far [B, H, N, F, D], and which document that is [B, 1, N, 1]. Documents are
    runs, so only the one that a piece ends with goes on behind it."""
    ends = keys[..., -1:]  # [B, 1, N, 1]
    sums = torch.where((keys == ends)[..., None], k, 0.0).transpose(-1, -2) @ v
    same = (ends == ends.transpose(-1, -2)).tril().to(sums.dtype)  # [B, 1, N, N]
    upto = (same @ sums.flatten(3)).unflatten(3, sums.shape[3:])
    return _before(upto), functional.pad(ends, (0, 0, 1, 0), value=-1)[:, :, :-1]


def _before(sums: Tensor) -> Tensor:
    """From sums up to the end of each piece [B, H, N, F, D] those up to its beginning."""
    return functional.pad(sums, (0, 0, 0, 0, 1, 0))[:, :, :-1]
