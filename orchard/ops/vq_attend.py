"""Attention straight from additive codes: no keys and values of all slots are ever made.

Scores. One query a key head: a table of conj(q) · codeword for all codewords is made once (`key_tables`); a slot then adds up
table rows and takes one product with the cosines and sines of its position (`table_scores`): keys are neither put together nor
rotated. Several queries a key head (grouped heads): a block of slots is put together, rotated and shared among them.

Values. A weighted sum of sums of codewords is a sum of codewords weighted by how much attention goes to each of them: weights are
added up by code, and multiplied with the codewords once.

Shapes: B sequences, H key/value heads, G query heads a key head, T queries, S slots, D head width, P = D/2 pairs, R rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from orchard.core.context import Rotate
from orchard.ops.vq import Codebooks, decode_keys, packed

BLOCK = 1024
"""Slots put together at a time."""


@dataclass(frozen=True)
class Kept:
    """Slots that are kept as they are beside the codes: their unrotated keys and values [B, H, n, D], which slot each is in (S:
    none), and whether a slot is one of them [B, H, S]."""

    k: Tensor
    v: Tensor
    slot: Tensor
    first: Tensor


@dataclass(frozen=True)
class Coded:
    """Keys and values of S slots: codes [B, H, S, 2R] each, and prescales [B, H, S, 1]."""

    books: Codebooks
    k_codes: Tensor
    k_scale: Tensor
    v_codes: Tensor
    v_scale: Tensor

    def attend(
        self,
        q: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
        positions: Tensor,
        rotate: Rotate | None,
        kept: Kept | None = None,
    ) -> Tensor:
        """Queries [B, Hq, T, D] (rotated) over slots at positions [B, 1|H, S] → [B, Hq, T, D]."""
        if q.is_cuda and q.shape[2] == 1 and mask is not None and self.books.key_bits == 4:
            turns = turns_of(rotate, positions, q.shape[-1], q)
            if turns is not None:
                return self.on_gpu(q, mask, scale, softcap, positions, rotate, turns, kept)
        heads = self.books.heads
        x = q.float().unflatten(1, (heads, -1))  # [B, H, G, T, D]
        scores = self.scores(x, positions, rotate)
        if kept is not None:
            scores = _with_kept(scores, x, kept, positions, rotate)
        scores = scores * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
        weights = scores.softmax(-1)
        return self.weighted(weights, kept).flatten(1, 2).to(q.dtype)

    def on_gpu(
        self,
        q: Tensor,
        mask: Tensor,
        scale: float,
        softcap: float | None,
        positions: Tensor,
        rotate: Rotate | None,
        turns: Tensor,
        kept: Kept | None,
    ) -> Tensor:
        """The same for one query a sequence by a kernel; what is kept as it is comes as one more part of the slots."""
        from orchard.ops.kernels.triton.vq import attend_one

        seen = mask[:, :, 0].expand(-1, self.books.heads, -1)
        beside = None
        if kept is not None:
            beside = _part_of_kept(q, seen, scale, softcap, positions, rotate, kept)
            seen = seen & ~kept.first
        sides = [
            (packed(codes, 4), size) for codes, size in ((self.k_codes, self.k_scale), (self.v_codes, self.v_scale))
        ]
        table = torch.cat([turns.real, turns.imag], dim=-1)
        return attend_one(self.books, q, seen, sides[0], sides[1], table, scale=scale, softcap=softcap, beside=beside)

    def scores(self, q: Tensor, positions: Tensor, rotate: Rotate | None) -> Tensor:
        """[B, H, G, T, S]."""
        if q.shape[2] * q.shape[3] == 1 and not torch.compiler.is_compiling():
            turns = turns_of(rotate, positions, q.shape[-1], q)
            if turns is not None:
                return table_scores(self.books, q, self.k_codes, self.k_scale, turns)
        pieces = []
        for start in range(0, self.k_codes.shape[2], BLOCK):
            here = slice(start, start + BLOCK)
            keys = decode_keys(self.books, self.k_codes[:, :, here].unflatten(-1, (-1, 2)), self.k_scale[:, :, here])
            keys = keys if rotate is None else rotate(keys, positions[:, :, here])
            pieces.append(q @ keys[:, :, None].mT)
        return torch.cat(pieces, dim=-1)

    def weighted(self, weights: Tensor, kept: Kept | None) -> Tensor:
        """The values under weights [B, H, G, T, S]: [B, H, G, T, D]."""
        if kept is not None:
            extra = torch.nn.functional.pad(weights, (0, 1))
            own = extra.gather(-1, kept.slot[:, :, None, None].expand(*weights.shape[:-1], -1)) @ kept.v[:, :, None]
            weights = weights.masked_fill(kept.first[:, :, None, None], 0.0)
        by_code = code_weights(weights * self.v_scale[..., 0].float()[:, :, None, None], self.v_codes, self.books)
        made = by_code @ self.books.values.flatten(1, 2)[:, None]
        made = made + weights.sum(-1, keepdim=True) * self.books.value_offset[:, None, None]
        return made if kept is None else made + own


def code_weights(weights: Tensor, codes: Tensor, books: Codebooks) -> Tensor:
    """Weights [B, H, G, T, S] added up by code [B, H, S, R_v]: [B, H, G, T, R_v · m]."""
    m = books.values.shape[2]
    made = []
    for r in range(codes.shape[-1]):
        index = codes[..., r].long()[:, :, None, None].expand_as(weights)
        made.append(weights.new_zeros(*weights.shape[:-1], m).scatter_add(-1, index, weights))
    return torch.cat(made, dim=-1)


def key_tables(books: Codebooks, q: Tensor) -> Tensor:
    """conj(q) · codeword for queries [B, H, G, T, D]: complex [B, H, G, T, R, 2n, P]."""
    return _complex(q).conj()[..., None, None, :] * _complex(books.key_words)[:, None, None]


def table_scores(books: Codebooks, q: Tensor, codes: Tensor, scale: Tensor, turns: Tensor) -> Tensor:
    """Scores [B, H, G, T, S] of queries (rotated) from tables; `turns` complex [B, 1|H, S, P]: how far slots are turned."""
    tables = key_tables(books, q)
    n, shape = books.keys.shape[2], q.shape[:4]
    pairs = codes.unflatten(-1, (-1, 2)).long()
    total = torch.zeros(*shape, codes.shape[2], tables.shape[-1], dtype=tables.dtype, device=q.device)
    for r in range(books.key_rounds):
        for half in range(2):
            index = (pairs[..., r, half] + half * n)[:, :, None, None, :, None]
            total = total + tables[..., r, :, :].gather(-2, index.expand(*shape, -1, tables.shape[-1]))
    total = total * scale[:, :, None, None].float()
    total = total + (_complex(q).conj() * _complex(books.key_offset)[:, None, None])[..., None, :]
    return (total * turns[:, :, None, None]).real.sum(-1)


def turns_of(rotate: Rotate | None, positions: Tensor, dim: int, like: Tensor) -> Tensor | None:
    """What a rotation multiplies each pair with, complex [B, 1|H, S, P]; None where it turns other pairs than (p, p + D/2)."""
    one = torch.zeros(*positions.shape, dim, device=like.device)
    one[..., : dim // 2] = 1
    if rotate is None:
        return _complex(one)
    turned = rotate(one, positions)
    other = rotate(one.roll(dim // 2, dims=-1), positions)
    expected = torch.cat([-turned[..., dim // 2 :], turned[..., : dim // 2]], dim=-1)
    return _complex(turned) if torch.equal(other, expected) else None


def _complex(x: Tensor) -> Tensor:
    """[..., D] → complex [..., P]."""
    return torch.complex(*x.float().chunk(2, dim=-1))


def _with_kept(scores: Tensor, q: Tensor, kept: Kept, positions: Tensor, rotate: Rotate | None) -> Tensor:
    """Scores where those of slots that are kept as they are come from what is kept."""
    slots = scores.shape[-1]
    at = torch.nn.functional.pad(positions, (0, 1)).expand(-1, kept.k.shape[1], -1).gather(-1, kept.slot)
    k = kept.k if rotate is None else rotate(kept.k, at)
    own = q @ k.float()[:, :, None].mT
    index = kept.slot[:, :, None, None].expand_as(own)
    return torch.nn.functional.pad(scores, (0, 1)).scatter(-1, index, own)[..., :slots]


def _part_of_kept(
    q: Tensor, seen: Tensor, scale: float, softcap: float | None, positions: Tensor, rotate: Rotate | None, kept: Kept
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention to what is kept as it is, unfinished: a sum of values [B, Hq, 1, D], the highest score and the total of weights
    under it, [B, Hq, 1]."""
    groups = q.shape[1] // kept.k.shape[1]
    pad = torch.nn.functional.pad
    at = pad(positions, (0, 1)).expand(-1, kept.k.shape[1], -1).gather(-1, kept.slot)
    k = kept.k if rotate is None else rotate(kept.k, at)
    k, v = (side.float().repeat_interleave(groups, dim=1) for side in (k, kept.v))
    scores = (q.float() @ k.mT)[:, :, 0] * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    shown = pad(seen, (0, 1)).gather(-1, kept.slot).repeat_interleave(groups, dim=1)
    scores = scores.masked_fill(~shown, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    weights = torch.where(shown, (scores - top).exp(), 0.0)
    return (weights[..., None] * v).sum(2, keepdim=True), top, weights.sum(-1, keepdim=True)
