"""Keys and values as sums of codewords: additive vector codes whose key codebooks commute with rotary positions (CommVQ, arXiv
2506.18879).

A key of one head is seen as D/2 complex numbers (pair p: channels p and p + D/2, as `ops/rope.py` pairs them):

    key   = key_offset   + prescale · Σ_r (c_{r,A_r} + i · c_{r,B_r})     n complex codewords c a round, two indices a round
    value = value_offset + prescale · Σ_r e_{r,code_r}                    m plain codewords e a round, one index a round

A rotation multiplies each pair by a unit complex number, so it may be done to codewords, or never (to the query instead).
The n codewords stand for n² because their multiples by i come for free. Encoding is greedy, round by round, nearest in a metric
that says which errors matter: a weight for each pair of a key (it commutes too), any positive matrix for a value. The prescale
is one float16 a token and head, refitted by least squares after the codes are chosen.

Shapes: B sequences, H key/value heads, T tokens, D head width, P = D/2 pairs, R rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from orchard.core.errors import ConfigError

CHUNK = 1 << 22
"""Candidates compared at once: bounds the memory of encoding."""


@dataclass(frozen=True, eq=False)
class Codebooks:
    """One layer's, all float32. Codewords are as they are added up; the metrics serve encoding alone."""

    keys: Tensor  # [H, R, n, P, 2]
    values: Tensor  # [H, R_v, m, D]
    key_offset: Tensor  # [H, D]
    value_offset: Tensor  # [H, D]
    key_weight: Tensor  # [H, P], positive
    value_metric: Tensor  # [H, D, D], symmetric and positive

    def __post_init__(self) -> None:
        heads, _, n, pairs, _ = self.keys.shape
        m, dim = self.values.shape[2:]
        expected = {
            "keys": (heads, self.keys.shape[1], n, dim // 2, 2),
            "values": (heads, self.values.shape[1], m, 2 * pairs),
            "key_offset": (heads, dim),
            "value_offset": (heads, dim),
            "key_weight": (heads, pairs),
            "value_metric": (heads, dim, dim),
        }
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
                raise ConfigError(f"codebooks: {name} is {tuple(tensor.shape)}, not {shape}", hint="fit them again")
        for count in (n, m):
            if count & (count - 1) or not 2 <= count <= 256:
                raise ConfigError(f"codebooks of {count} codewords", hint="use a power of two up to 256")

    @classmethod
    def plain(cls, keys: Tensor, values: Tensor) -> Codebooks:
        """Without offsets, every error as bad as any other."""
        heads, dim = values.shape[0], values.shape[-1]
        none = torch.zeros(heads, dim)
        return cls(keys, values, none, none, torch.ones(heads, dim // 2), torch.eye(dim).expand(heads, dim, dim))

    @property
    def heads(self) -> int:
        return self.keys.shape[0]

    @property
    def dim(self) -> int:
        return self.values.shape[-1]

    @property
    def key_rounds(self) -> int:
        return self.keys.shape[1]

    @property
    def value_rounds(self) -> int:
        return self.values.shape[1]

    @property
    def key_bits(self) -> int:
        """Bits of one index; a round has two."""
        return self.keys.shape[2].bit_length() - 1

    @property
    def value_bits(self) -> int:
        return self.values.shape[2].bit_length() - 1

    def to(self, device: torch.device) -> Codebooks:
        if self.keys.device == device:
            return self
        return Codebooks(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    @cached_property
    def key_words(self) -> Tensor:
        """c and i·c as plain channels: [H, R, 2n, D]."""
        return torch.cat([flat(self.keys), flat(turned(self.keys))], dim=2)

    @cached_property
    def key_probes(self) -> tuple[Tensor, Tensor]:
        """What a residual is multiplied with [H, R, 2n, D], and what each pair (A, B) costs [H, R, n, n]."""
        weight = torch.cat([self.key_weight, self.key_weight], dim=-1)
        words = self.key_words
        probes = words * weight[:, None, None, :]
        n = self.keys.shape[2]
        half = (words * probes).sum(-1) / 2
        # |c_A + i c_B|² / 2 = |c_A|²/2 + |c_B|²/2 + <c_A, i c_B>
        cross = probes[:, :, :n] @ words[:, :, n:].transpose(-1, -2)
        return probes, half[:, :, :n, None] + half[:, :, None, n:] + cross

    @cached_property
    def value_probes(self) -> tuple[Tensor, Tensor]:
        """The same for values: [H, R_v, m, D] and [H, R_v, m]."""
        probes = self.values @ self.value_metric[:, None]
        return probes, (probes * self.values).sum(-1) / 2


def paired(x: Tensor) -> Tensor:
    """[..., D] → [..., P, 2]: channels p and p + D/2 side by side, real and imaginary."""
    return torch.stack(x.chunk(2, dim=-1), dim=-1)


def flat(x: Tensor) -> Tensor:
    """[..., P, 2] → [..., D], the way back."""
    return torch.cat([x[..., 0], x[..., 1]], dim=-1)


def turned(x: Tensor) -> Tensor:
    """[..., P, 2] times i."""
    return torch.stack([-x[..., 1], x[..., 0]], dim=-1)


def encode_keys(books: Codebooks, k: Tensor) -> tuple[Tensor, Tensor]:
    """Unrotated keys [B, H, T, D] → codes uint8 [B, H, T, R, 2] (A and B of each round) and prescale float16 [B, H, T, 1]."""
    x, shape = _by_head(k, books.key_offset)
    norm = x.norm(dim=-1, keepdim=True)
    probes, costs = books.key_probes
    n = costs.shape[-1]
    left, codes = x / norm.clamp_min(1e-12), []
    for r in range(books.key_rounds):
        dots = left @ probes[:, r].transpose(-1, -2)
        best = _best_pair(dots[..., :n], dots[..., n:], costs[:, r])
        pair = torch.stack([best // n, best % n], dim=-1)
        left = left - _taken(books.key_words[:, r], pair[..., 0]) - _taken(books.key_words[:, r], pair[..., 1] + n)
        codes.append(pair)
    weight = torch.cat([books.key_weight, books.key_weight], dim=-1)[:, None, :]
    made = torch.stack(codes, dim=2).to(torch.uint8)
    return _back(made, shape), _back(_refitted(x, norm, left, left * weight, x * weight), shape)


def decode_keys(books: Codebooks, codes: Tensor, prescale: Tensor) -> Tensor:
    """Float32 [B, H, T, D], unrotated."""
    n = books.keys.shape[2]
    index = codes.long() + torch.tensor([0, n], device=codes.device)
    return _sum_of(books.key_words, index.flatten(-2), 2) * prescale.float() + books.key_offset[:, None, :]


def encode_values(books: Codebooks, v: Tensor) -> tuple[Tensor, Tensor]:
    """Values [B, H, T, D] → codes uint8 [B, H, T, R_v] and prescale float16 [B, H, T, 1]."""
    x, shape = _by_head(v, books.value_offset)
    norm = x.norm(dim=-1, keepdim=True)
    probes, costs = books.value_probes
    left, codes = x / norm.clamp_min(1e-12), []
    for r in range(books.value_rounds):
        best = (left @ probes[:, r].transpose(-1, -2) - costs[:, r, None, :]).argmax(-1)
        left = left - _taken(books.values[:, r], best)
        codes.append(best)
    made = torch.stack(codes, dim=2).to(torch.uint8)
    metric = books.value_metric
    return _back(made, shape), _back(_refitted(x, norm, left, left @ metric, x @ metric), shape)


def decode_values(books: Codebooks, codes: Tensor, prescale: Tensor) -> Tensor:
    """Float32 [B, H, T, D]."""
    return _sum_of(books.values, codes.long(), 1) * prescale.float() + books.value_offset[:, None, :]


def packed(indices: Tensor, bits: int) -> Tensor:
    """Indices [..., K] below 2^bits in as few bytes as they take, [..., ceil(K · bits / 8)]: index j begins at bit j · bits,
    lowest bit first. With 4 bits a byte is A | B << 4."""
    if bits == 8:
        return indices
    if bits == 4 and indices.shape[-1] % 2 == 0:
        return indices[..., 0::2] | (indices[..., 1::2] << 4)
    each = (indices[..., None] >> torch.arange(bits, device=indices.device, dtype=torch.uint8)) & 1
    each = each.flatten(-2)
    each = torch.nn.functional.pad(each, (0, -each.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (each << torch.arange(8, device=indices.device, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def unpacked(data: Tensor, bits: int, count: int) -> Tensor:
    """The way back: uint8 [..., count]."""
    if bits == 8:
        return data
    if bits == 4 and count % 2 == 0:
        return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)
    each = (data[..., None] >> torch.arange(8, device=data.device, dtype=torch.uint8)) & 1
    each = each.flatten(-2)[..., : count * bits].unflatten(-1, (count, bits))
    return (each << torch.arange(bits, device=data.device, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


# Inside ---------------------------------------------------------------------------------------------------------------


def _by_head(x: Tensor, offset: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """[B, H, T, D] → [H, B·T, D] in float32 without its offset."""
    batch, _, tokens, _ = x.shape
    return x.float().transpose(0, 1).flatten(1, 2) - offset[:, None, :], (batch, tokens)


def _back(x: Tensor, shape: tuple[int, int]) -> Tensor:
    return x.unflatten(1, shape).transpose(0, 1)


def _best_pair(a: Tensor, b: Tensor, costs: Tensor) -> Tensor:
    """The index A·n + B [H, N] with the largest a_A + b_B - cost_AB, in pieces that fit memory."""
    step = max(CHUNK // costs.numel(), 1)
    pieces = []
    for some_a, some_b in zip(a.split(step, dim=1), b.split(step, dim=1), strict=True):
        pieces.append((some_a[..., :, None] + some_b[..., None, :] - costs[:, None]).flatten(-2).argmax(-1))
    return torch.cat(pieces, dim=1)


def _taken(words: Tensor, index: Tensor) -> Tensor:
    """words [H, n, D], index [H, N] → [H, N, D]."""
    return words.gather(1, index[..., None].expand(-1, -1, words.shape[-1]))


def _refitted(x: Tensor, norm: Tensor, left: Tensor, weighted: Tensor, weighted_x: Tensor) -> Tensor:
    """The prescale that makes prescale · (x/norm - left) nearest to x in the metric; the norm where nothing better is found."""
    unit, weighted_unit = x / norm.clamp_min(1e-12), weighted_x / norm.clamp_min(1e-12)
    made, weighted_made = unit - left, weighted_unit - weighted
    best = (weighted_made * x).sum(-1, keepdim=True) / (weighted_made * made).sum(-1, keepdim=True).clamp_min(1e-12)
    return torch.where(best > 0, best, norm).clamp_max(65504.0).to(torch.float16)


def _sum_of(words: Tensor, index: Tensor, a_round: int) -> Tensor:
    """words [H, R, n, D], index [B, H, T, R · a_round] → their sum [B, H, T, D], a round at a time."""
    total: Tensor | None = None
    heads = torch.arange(words.shape[0], device=words.device)[None, :, None]
    for j in range(index.shape[-1]):
        some = words[heads, j // a_round, index[..., j]]
        total = some if total is None else total + some
    assert total is not None
    return total
