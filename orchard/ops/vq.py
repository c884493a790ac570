"""Keys and values as sums of codewords: additive vector codes whose key codebooks commute with rotary positions (CommVQ, arXiv
2506.18879).

A key of one head is seen as D/2 complex numbers (pair p: channels p and p + D/2, as `ops/rope.py` pairs them):

    key   = key_offset   + prescale · Σ_r (c_{r,A_r} + i · c_{r,B_r})     n complex codewords c a round, two indices a round
    value = value_offset + prescale · Σ_r e_{r,code_r}                    m plain codewords e a round, one index a round, R_v even

A rotation multiplies each pair by a unit complex number, so it may be done to codewords, or never (to the query instead).
The n codewords stand for n² because their multiples by i come for free. Encoding is greedy, two indices at a time (A and B of
a key's round, two rounds of a value), nearest in a metric that says which errors matter: a weight for each pair of a key (it
commutes too), any positive matrix for a value. With a `beam` the best few beginnings are gone on with instead of the best alone:
what codes mean is the same, and less is lost. The prescale is one float16 a token and head, found by least squares after the
codes.

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
        if self.values.shape[1] % 2:
            raise ConfigError(f"{self.values.shape[1]} rounds of values", hint="use an even number")
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

    def for_heads(self, heads: int) -> Codebooks:
        """Codebooks of one head for several."""
        if self.heads == heads:
            return self
        each = {field.name: getattr(self, field.name) for field in fields(self)}
        return Codebooks(**{name: tensor.expand(heads, *tensor.shape[1:]) for name, tensor in each.items()})

    @cached_property
    def key_words(self) -> Tensor:
        """c and i·c as plain channels: [H, R, 2n, D]."""
        return torch.cat([flat(self.keys), flat(turned(self.keys))], dim=2)

    @cached_property
    def key_probes(self) -> tuple[Tensor, Tensor]:
        """What a residual is multiplied with [H, R, 2n, D], and what each pair (A, B) costs [H, R, n, n]."""
        weight = torch.cat([self.key_weight, self.key_weight], dim=-1)
        return _probes(self.key_words, self.key_words * weight[:, None, None, :])

    @cached_property
    def value_words(self) -> Tensor:
        """The codewords of two rounds side by side, as keys have them: [H, R_v/2, 2m, D]."""
        return self.values.unflatten(1, (-1, 2)).flatten(2, 3)

    @cached_property
    def value_probes(self) -> tuple[Tensor, Tensor]:
        """The same for values: [H, R_v/2, 2m, D] and [H, R_v/2, m, m]."""
        words = self.value_words
        return _probes(words, words @ self.value_metric[:, None])


def _probes(words: Tensor, probes: Tensor) -> tuple[Tensor, Tensor]:
    n = words.shape[2] // 2
    half = (words * probes).sum(-1) / 2
    # |a + b|² / 2 = |a|²/2 + |b|²/2 + <a, b>
    cross = probes[:, :, :n] @ words[:, :, n:].mT
    return probes, half[:, :, :n, None] + half[:, :, None, n:] + cross


def paired(x: Tensor) -> Tensor:
    """[..., D] → [..., P, 2]: channels p and p + D/2 side by side, real and imaginary."""
    return torch.stack(x.chunk(2, dim=-1), dim=-1)


def flat(x: Tensor) -> Tensor:
    """[..., P, 2] → [..., D], the way back."""
    return torch.cat([x[..., 0], x[..., 1]], dim=-1)


def turned(x: Tensor) -> Tensor:
    """[..., P, 2] times i."""
    return torch.stack([-x[..., 1], x[..., 0]], dim=-1)


def encode_keys(books: Codebooks, k: Tensor, beam: int = 1) -> tuple[Tensor, Tensor]:
    """Unrotated keys [B, H, T, D] → codes uint8 [B, H, T, R, 2] (A and B of each round) and prescale float16 [B, H, T, 1]."""
    return _encode(k, books.key_offset, books.key_words, *books.key_probes, beam)


def decode_keys(books: Codebooks, codes: Tensor, prescale: Tensor) -> Tensor:
    """Float32 [B, H, T, D], unrotated."""
    return _sum_of(books.key_words, codes) * prescale.float() + books.key_offset[:, None, :]


def encode_values(books: Codebooks, v: Tensor, beam: int = 1) -> tuple[Tensor, Tensor]:
    """Values [B, H, T, D] → codes uint8 [B, H, T, R_v] and prescale float16 [B, H, T, 1]. Rounds are chosen two at a time."""
    codes, prescale = _encode(v, books.value_offset, books.value_words, *books.value_probes, beam)
    return codes.flatten(-2), prescale


def decode_values(books: Codebooks, codes: Tensor, prescale: Tensor) -> Tensor:
    """Float32 [B, H, T, D]."""
    made = _sum_of(books.value_words, codes.unflatten(-1, (-1, 2)))
    return made * prescale.float() + books.value_offset[:, None, :]


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


def _encode(
    x: Tensor, offset: Tensor, words: Tensor, probes: Tensor, costs: Tensor, beam: int
) -> tuple[Tensor, Tensor]:
    """In each round the pairs (A, B) whose codewords leave least, in the metric that probes and costs carry."""
    shape = (x.shape[0], x.shape[2])
    x = x.float().transpose(0, 1).flatten(1, 2) - offset[:, None, :]  # [H, B·T, D]
    norm = x.norm(dim=-1, keepdim=True)
    unit = x / norm.clamp_min(1e-12)
    step = max(CHUNK // (beam * costs[:, 0].numel()), 1)
    codes = torch.cat([_searched(some, words, probes, costs, beam) for some in unit.split(step, dim=1)], dim=1)
    made, weighed = (_sum_of(each, codes[None])[0] for each in (words, probes))
    overlap, energy = ((one * weighed).sum(-1, keepdim=True) for one in (unit, made))
    prescale = (norm * overlap / energy.clamp_min(1e-12)).clamp(0.0, 65504.0).to(torch.float16)
    return codes.unflatten(1, shape).transpose(0, 1), prescale.unflatten(1, shape).transpose(0, 1)


def _searched(unit: Tensor, words: Tensor, probes: Tensor, costs: Tensor, beam: int) -> Tensor:
    """Codes uint8 [H, N, R, 2] of vectors of length one. The best `beam` beginnings are gone on with, round by round."""
    n, dim = costs.shape[-1], unit.shape[-1]
    left, gained = unit[:, :, None], unit.new_zeros(*unit.shape[:2], 1)  # [H, N, beginnings, D], [H, N, beginnings]
    codes = torch.zeros(*gained.shape, 0, 2, dtype=torch.long, device=unit.device)
    for r in range(words.shape[1]):
        dots = left @ probes[:, r, None].mT
        gains = dots[..., :n, None] + dots[..., None, n:] - costs[:, r, None, None]
        every = (gained[..., None, None] + gains).flatten(2)
        best = every.argmax(-1, keepdim=True) if beam == 1 else every.topk(min(beam, every.shape[-1]), dim=-1).indices
        gained, begun, pair = every.gather(2, best), best // (n * n), best % (n * n)
        pair = torch.stack([pair // n, pair % n], dim=-1)
        taken = _taken(words[:, r], (pair + torch.tensor([0, n], device=unit.device)).flatten(1, 2))
        left = left.gather(2, begun[..., None].expand(-1, -1, -1, dim)) - taken.unflatten(1, pair.shape[1:3])
        codes = codes.gather(2, begun[..., None, None].expand(-1, -1, -1, r, 2))
        codes = torch.cat([codes, pair[..., None, :]], dim=3)
    return codes[:, :, 0].to(torch.uint8)  # the best comes first


def _taken(words: Tensor, pair: Tensor) -> Tensor:
    """words [H, 2n, D], pair [H, N, 2] → the sum of both [H, N, D]."""
    index = pair.flatten(1, 2)[..., None].expand(-1, -1, words.shape[-1])
    return words.gather(1, index).unflatten(1, (-1, 2)).sum(2)


def _sum_of(words: Tensor, codes: Tensor) -> Tensor:
    """words [H, R, 2n, D], codes [B, H, T, R, 2] → their sum [B, H, T, D], a round at a time."""
    heads = torch.arange(words.shape[0], device=words.device)[None, :, None]
    n = words.shape[2] // 2
    total = torch.zeros(*codes.shape[:3], words.shape[-1], device=words.device)
    for r in range(words.shape[1]):
        some = codes[..., r, :].long()
        total = total + words[heads, r, some[..., 0]] + words[heads, r, some[..., 1] + n]
    return total
