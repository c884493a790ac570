"""Stores of codes in the native engine against `orchard.ops.vq`, at every level this machine has."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from orchard.ops import vq
from orchard.ops.kernels.native import library, why_not
from orchard.ops.plan.codes import ARRAYS, Books
from orchard.ops.rope import frequencies, rotate, tables
from orchard.ops.vq_grid import on_grid, units

pytestmark = pytest.mark.skipif(library() is None, reason=why_not())

CAPACITY = 320


def levels() -> list[int]:
    """Levels that differ on this machine, lowest first."""
    if (found := library()) is None:
        return []
    found.orchard_attention_name.restype = ctypes.c_char_p
    names = [found.orchard_attention_name(level) for level in range(4)]
    return [level for level in range(4) if names[level] not in names[:level]]


each_level = pytest.mark.parametrize("level", levels())


def random_books(
    heads: int, dim: int, rounds: tuple[int, int], words: tuple[int, int], seed: int, grid: bool = True
) -> vq.Codebooks:
    """Codewords that shrink from round to round, as fitted ones do; offsets and metrics of all kinds."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    size = dim**-0.5
    keys = normal(heads, rounds[0], words[0], dim // 2, 2) * size * 0.7 ** torch.arange(rounds[0])[:, None, None, None]
    values = normal(heads, rounds[1], words[1], dim) * size * 0.8 ** torch.arange(rounds[1])[:, None, None]
    half = normal(heads, dim, dim) * 0.1
    metric = torch.eye(dim) + half @ half.transpose(-1, -2)
    weight = torch.rand(heads, dim // 2, generator=source) + 0.5
    books = vq.Codebooks(keys, values, normal(heads, dim), normal(heads, dim) * 0.5, weight, metric)
    return on_grid(books) if grid else books


@dataclass
class Coded:
    """Native books, and the bytes of one store."""

    books: vq.Codebooks
    exact: int = 0
    rotated: bool = True
    capacity: int = CAPACITY
    kept: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        heads, dim = self.books.heads, self.books.dim
        plain = Books.of(self.books, self.exact)
        self.frequencies = frequencies(10_000.0, dim) if self.rotated else None
        self.kept = [np.ascontiguousarray(getattr(plain, name), np.float32) for name in ARRAYS]
        if self.frequencies is not None:
            self.kept.append(np.ascontiguousarray(self.frequencies.numpy()))
        sizes = [self.books.key_rounds, self.books.keys.shape[2], self.books.value_rounds, self.books.values.shape[2]]
        numbers = np.array([heads, dim, *sizes, self.exact, dim // 2 if self.rotated else 0], np.int32)
        addresses = np.array([array.ctypes.data for array in self.kept] + [0], np.uint64)
        self.native = library()
        assert self.native is not None
        self.native.orchard_vq_new.restype = ctypes.c_void_p
        self.handle = ctypes.c_void_p(
            self.native.orchard_vq_new(at(numbers), at(addresses), ctypes.c_float(1.0))  # the arrays stay: self.kept
        )
        self.key_bytes = -(-2 * self.books.key_rounds * self.books.key_bits // 8) + 2
        self.value_bytes = -(-self.books.value_rounds * self.books.value_bits // 8) + 2
        # Slots that nobody wrote hold no numbers: their prescale is none.
        self.k = np.full((heads, self.capacity, self.key_bytes), 255, np.uint8)
        self.v = np.full((heads, self.capacity, self.value_bytes), 255, np.uint8)
        self.exact_rows = np.full((2, heads, max(self.exact, 1), dim), np.nan, np.float32)

    @property
    def store(self) -> tuple[int | ctypes.c_void_p, ...]:
        return self.capacity, at(self.k), at(self.v), at(self.exact_rows)

    def __del__(self) -> None:
        self.native.orchard_vq_delete(self.handle)

    def put(self, k: Tensor, v: Tensor, first: int = 0) -> None:
        """k, v: [heads, tokens, dim]."""
        for head in range(k.shape[0]):
            for token in range(k.shape[1]):
                rows = [np.ascontiguousarray(x[head, token].numpy()) for x in (k, v)]
                self.native.orchard_vq_put(self.handle, *self.store, head, first + token, at(rows[0]), at(rows[1]))

    def part(self, level: int, head: int, q: Tensor, softcap: float, first: int, last: int) -> tuple[Tensor, ...]:
        count, dim = q.shape
        out, most, total = torch.zeros(count, dim), torch.zeros(count), torch.zeros(count)
        q = q.contiguous()
        given_scale, given_cap = ctypes.c_float(dim**-0.5), ctypes.c_float(softcap)
        where = at(q), count, given_scale, given_cap, first, last, at(out), at(most), at(total)
        self.native.orchard_vq_part(level, self.handle, *self.store, head, *where)
        return out, most, total

    def many(self, level: int, head: int, q: Tensor, softcap: float, first: int, query: int, window: int) -> Tensor:
        T, count, dim = q.shape
        out, q = torch.full((T, count, dim), torch.nan), q.contiguous()
        scales = ctypes.c_float(dim**-0.5), ctypes.c_float(softcap)
        self.native.orchard_vq_many(
            level, self.handle, *self.store, head, at(q), count, T, *scales, first, query, window, at(out)
        )
        return out

    def read(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What attention is to see, by the plain twin, from the bytes of the store: rotated keys, values [heads, tokens, dim]."""
        tokens = k.shape[1]
        packed_k, packed_v = torch.from_numpy(self.k)[:, :tokens], torch.from_numpy(self.v)[:, :tokens]
        b = self.books
        codes = vq.unpacked(packed_k[..., :-2], b.key_bits, 2 * b.key_rounds).unflatten(-1, (-1, 2))
        keys = vq.decode_keys(b, codes[None], packed_k[..., -2:].contiguous().view(torch.float16)[None])[0]
        indices = vq.unpacked(packed_v[..., :-2], b.value_bits, b.value_rounds)
        values = vq.decode_values(b, indices[None], packed_v[..., -2:].contiguous().view(torch.float16)[None])[0]
        keys[:, : self.exact], values[:, : self.exact] = k[:, : self.exact], v[:, : self.exact]
        if self.frequencies is not None:
            cos, sin = tables(torch.arange(tokens), self.frequencies)
            keys = rotate(keys[None], cos, sin)[0]
        return keys, values


def at(array: np.ndarray | Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.data_ptr() if isinstance(array, Tensor) else array.ctypes.data)


def attended(keys: Tensor, values: Tensor, q: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    """(average of values, log of the mass) of queries [count, dim], in double precision."""
    scores = q.double() @ keys.double().T * q.shape[-1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    return scores.softmax(-1) @ values.double(), scores.logsumexp(-1)


@cache
def filled(
    seed: int, tokens: int, dim: int, rounds: tuple[int, int], words: tuple[int, int], exact: int, rotated: bool
) -> tuple[Coded, Tensor, Tensor]:
    coded = Coded(random_books(2, dim, rounds, words, seed), exact, rotated)
    k, v = torch.randn(2, 2, tokens, dim, generator=torch.Generator().manual_seed(seed + 1))
    k, v = k + coded.books.key_offset[:, None], v * 2 + coded.books.value_offset[:, None]
    coded.put(k, v)
    return coded, k, v


SHAPES = (  # dim, rounds and words of keys and of values: 4-bit, 6-bit and odd codes, narrow and wide heads
    (64, (14, 28), (16, 16)),
    (64, (9, 18), (64, 64)),
    (16, (3, 2), (8, 256)),
    (80, (5, 4), (32, 128)),
    (6, (1, 2), (2, 4)),
    (128, (2, 4), (128, 2)),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slots_are_coded_as_torch_codes_them(shape: tuple[int, tuple[int, int], tuple[int, int]]) -> None:
    dim, rounds, words = shape
    coded, k, v = filled(0, 24, dim, rounds, words, 0, False)
    b = coded.books
    (key_codes, key_scale), (value_codes, value_scale) = vq.encode_keys(b, k[None]), vq.encode_values(b, v[None])
    for rows, codes, bits, scale in (
        (coded.k, key_codes[0].flatten(-2), b.key_bits, key_scale[0]),
        (coded.v, value_codes[0], b.value_bits, value_scale[0]),
    ):
        wanted = torch.cat([vq.packed(codes, bits), scale.view(torch.uint8)], -1)
        same = (torch.from_numpy(rows)[:, :24] == wanted).all(-1)
        # Sums in another order may tip a choice that was nearly even, or the last bit of a prescale.
        assert same.float().mean() > 0.85
    read_k, read_v = coded.read(k, v)
    ours, theirs = (read_k - k).square().sum(-1), (vq.decode_keys(b, key_codes, key_scale)[0] - k).square().sum(-1)
    torch.testing.assert_close(ours.mean(), theirs.mean(), rtol=1e-2, atol=0)
    theirs = (vq.decode_values(b, value_codes, value_scale)[0] - v).square().sum(-1)
    torch.testing.assert_close((read_v - v).square().sum(-1).mean(), theirs.mean(), rtol=1e-2, atol=0)


@each_level
@given(
    shape=st.sampled_from(SHAPES),
    ends=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    count=st.integers(1, 7),
    exact=st.sampled_from((0, 35)),
    softcap=st.sampled_from((0.0, 0.0, 3.0)),
    rotated=st.booleans(),
)
def test_parts_are_what_the_codes_say(
    level: int,
    shape: tuple[int, tuple[int, int], tuple[int, int]],
    ends: tuple[int, int],
    count: int,
    exact: int,
    softcap: float,
    rotated: bool,
) -> None:
    """Any range of slots; what lies outside of it is no number."""
    dim, rounds, words = shape
    coded, k, v = filled(7, 100, dim, rounds, words, exact, rotated)
    first, last = min(ends), max(ends) + 1
    q = torch.randn(count, dim, generator=torch.Generator().manual_seed(first))
    keys, values = coded.read(k, v)
    whole = coded.k, coded.v, coded.exact_rows
    coded.k, coded.v, coded.exact_rows = (array.copy() for array in whole)
    for side in (coded.k, coded.v):
        side[:, :first], side[:, last:] = 255, 255
    coded.exact_rows[:, :, :first], coded.exact_rows[:, :, last:] = np.nan, np.nan
    out, most, total = coded.part(level, 1, q, softcap, first, last)
    coded.k, coded.v, coded.exact_rows = whole
    mean, mass = attended(keys[1, first:last], values[1, first:last], q, softcap)
    torch.testing.assert_close(most.double() + total.double().log(), mass, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close((out / total[:, None]).double(), mean, rtol=0, atol=1e-4 * float(values.abs().max()))


@each_level
def test_long_parts_add_weights_up_by_code(level: int) -> None:
    """More slots than there are codewords: another way through the values, to the same result."""
    coded, k, v = filled(3, 300, 64, (9, 28), (64, 16), 4, True)
    keys, values = coded.read(k, v)
    q = torch.randn(3, 64, generator=torch.Generator().manual_seed(5))
    out, _, total = coded.part(level, 0, q, 0.0, 0, 300)
    wanted = attended(keys[0], values[0], q, 0.0)[0]
    torch.testing.assert_close((out / total[:, None]).double(), wanted, rtol=0, atol=1e-4 * float(values.abs().max()))


def test_codewords_go_on_a_grid() -> None:
    """Rounding twice changes nothing, sums keep within 16 bits, and what is off the grid is still read nearly right."""
    plain = random_books(2, 64, (9, 4), (16, 4), 0, grid=False)
    books = on_grid(plain)
    unit = units(books.keys)[:, None, None, :, None]
    assert torch.equal(on_grid(books).keys, books.keys) and torch.equal((books.keys / unit).round() * unit, books.keys)
    assert ((books.keys / unit).abs().amax(2).sum((1, 3)) <= 32767).all()
    assert ((books.keys - plain.keys).abs() <= unit).all() and not torch.equal(books.keys, plain.keys)
    coded = Coded(plain)
    k, v = torch.randn(2, 2, 40, 64, generator=torch.Generator().manual_seed(0))
    coded.put(k, v)
    out, _, total = coded.part(0, 0, k[0, :1], 0.0, 0, 40)
    keys, values = (x[0] for x in coded.read(k, v))
    torch.testing.assert_close((out / total).double(), attended(keys, values, k[0, :1], 0.0)[0], rtol=0, atol=3e-3)


@each_level
def test_nothing_to_see(level: int) -> None:
    coded, *_ = filled(0, 40, 64, (2, 2), (4, 4), 0, True)
    out, most, total = coded.part(level, 0, torch.ones(2, 64), 0.0, 32, 32)
    assert (out == 0).all() and (most == -torch.inf).all() and (total == 0).all()


@each_level
@given(
    before=st.sampled_from((0, 3, 32, 90)),
    T=st.integers(1, 70),
    count=st.integers(1, 5),
    window=st.sampled_from((0, 0, 1, 20)),
    exact=st.sampled_from((0, 4)),
    softcap=st.sampled_from((0.0, 3.0)),
)
def test_runs_are_what_single_queries_give(
    level: int, before: int, T: int, count: int, window: int, exact: int, softcap: float
) -> None:
    dim = 16
    coded, k, v = filled(7, 160, dim, (3, 4), (8, 16), exact, True)
    q = torch.randn(T, count, dim, generator=torch.Generator().manual_seed(T))
    keys, values = coded.read(k, v)
    first = max(0, before - window + 1) if window else 0
    out = coded.many(level, 1, q, softcap, first, before, window)
    for t in range(T):
        low = max(0, before + t - window + 1) if window else 0
        seen = slice(low, before + t + 1)
        wanted = attended(keys[1, seen], values[1, seen], q[t], softcap)[0]
        torch.testing.assert_close(out[t].double(), wanted, rtol=0, atol=1e-4 * float(values.abs().max()))


def test_what_is_no_number_is_not_lost() -> None:
    coded, *_ = filled(0, 8, 16, (2, 2), (4, 4), 0, True)
    bad = torch.ones(2, 1, 16)
    bad[..., 3] = torch.nan
    coded.put(bad, bad, first=8)
    out, *_ = coded.part(0, 0, torch.ones(1, 16), 0.0, 0, 9)
    assert out.isnan().any()
