"""Every attention kernel at every level this machine has, against the plain twin."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from orchard.ops.kernels import attention_twin as twin
from orchard.ops.kernels.native import library, why_not

pytestmark = pytest.mark.skipif(library() is None, reason=why_not())

DIMS = (8, 16, 64, 80, 96, 128, 256, 320)


class NativeStore(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("codec", "heads", "dim", "width", "capacity")),
        *((name, ctypes.c_void_p) for name in ("k", "v", "k_scale", "v_scale")),
    ]


class NativeSeen(ctypes.Structure):
    _fields_ = [
        ("positions", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("first", "last", "query", "window", "keep", "sinks")),
    ]


def levels() -> list[int]:
    """Levels that differ on this machine, lowest first."""
    if (found := library()) is None:
        return []
    found.orchard_attention_name.restype = ctypes.c_char_p
    names = [found.orchard_attention_name(level) for level in range(4)]
    return [level for level in range(4) if names[level] not in names[:level]]


each_level = pytest.mark.parametrize("level", levels())
each_many_level = pytest.mark.parametrize(
    "level", [level for level in levels() if (found := library()) and found.orchard_attention_has_many(level)]
)


def align(store: twin.Store) -> twin.Store:
    """The same with keys and values at multiples of 64 bytes, as the kernels want them."""

    def moved(x: Tensor) -> Tensor:
        raw = torch.zeros(x.numel() * x.element_size() + 64, dtype=torch.uint8)
        start = -raw.data_ptr() % 64
        return raw[start : start + x.numel() * x.element_size()].view(x.dtype).view(x.shape).copy_(x)

    return replace(store, k=moved(store.k), v=moved(store.v))


def native_store(store: twin.Store) -> NativeStore:
    pointers = (x.data_ptr() for x in (store.k, store.v, store.k_scale, store.v_scale))
    return NativeStore(twin.CODECS.index(store.codec), store.heads, store.dim, store.width, store.capacity, *pointers)


def native_seen(seen: twin.Seen) -> NativeSeen:
    positions = None if seen.positions is None else seen.positions.data_ptr()
    return NativeSeen(positions, seen.first, seen.last, seen.query, seen.window, seen.keep, seen.sinks)


def call(name: str, *arguments: int | float | Tensor | ctypes.Structure) -> int:
    """One exported function, with tensors by their address, structures by reference and numbers as C takes them."""

    def native(x: int | float | Tensor | ctypes.Structure) -> object:
        if isinstance(x, Tensor):
            return ctypes.c_void_p(x.data_ptr())
        if isinstance(x, ctypes.Structure):
            return ctypes.byref(x)
        return ctypes.c_float(x) if isinstance(x, float) else x

    return getattr(library(), f"orchard_attention_{name}")(*map(native, arguments))


def part(
    level: int, store: twin.Store, head: int, q: Tensor, scale: float, softcap: float, seen: twin.Seen
) -> tuple[Tensor, Tensor, Tensor]:
    """As the twin's `part`; rows of `out` are further apart than they are long, and what lies between must stay."""
    count, dim = q.shape
    out = torch.full((count, dim + 3), 7.0)
    most, total = torch.full((2, count), math.nan)
    where = native_store(store), head, q, q.stride(0), count, scale, softcap, native_seen(seen)
    call("part", level, *where, out, out.stride(0), most, total)
    assert (out[:, dim:] == 7).all()
    return out[:, :dim].double(), most.double(), total.double()


def many(level: int, store: twin.Store, head: int, q: Tensor, scale: float, softcap: float, seen: twin.Seen) -> Tensor:
    T, count, dim = q.shape
    out = torch.full((T, count * dim + 5), 7.0)
    where = native_store(store), head, q, q.stride(0), count, T, scale, softcap, native_seen(seen)
    assert call("many", level, *where, out, out.stride(0))
    assert (out[:, count * dim :] == 7).all()
    return out[:, : count * dim].reshape(T, count, dim).double()


# How far an average of values may be off, as a share of the largest value, and a score as a share of its size.
# f32 and bf16: stored elements widen to float32 without loss, queries and weights stay float32; sums of some hundred terms in
# another order. int8: queries and weights are rounded to 16 bits, far finer than the codes themselves.
PART_BOUND = {"f32": 1e-5, "bf16": 1e-5, "int8": 3e-4}
# By matrix tiles queries and weights are rounded to 8 bits of mantissa (half a unit is 2^-9 = 0.2 %). With queries and keys of
# about unit variance a score is off by some 2^-9 (rounding errors of single channels average out), weights by twice that in all.
MANY_BOUND = 1e-2


def largest_value(store: twin.Store) -> float:
    return float(twin.decode(store)[1].abs().max())


def check_part(level: int, store: twin.Store, head: int, q: Tensor, softcap: float, seen: twin.Seen) -> None:
    arguments = store, head, q, q.shape[1] ** -0.5, softcap, seen
    check_against(twin.part(*arguments), part(level, *arguments), store)


def check_against(
    wanted: tuple[Tensor, Tensor, Tensor], given: tuple[Tensor, Tensor, Tensor], store: twin.Store
) -> None:
    (out, most, total), (w_out, w_most, w_total) = given, wanted
    dark = w_total == 0
    assert (most[dark] == -torch.inf).all() and (total[dark] == 0).all() and (out[dark] == 0).all()
    assert out.isfinite().all() and total.isfinite().all() and most[~dark].isfinite().all()
    slack = PART_BOUND[store.codec]
    torch.testing.assert_close(most[~dark], w_most[~dark], rtol=slack, atol=slack)
    # `total` and `out` are relative to `most`, which may differ a little: compare what does not depend on it.
    log_mass, wanted_mass = most[~dark] + total[~dark].log(), w_most[~dark] + w_total[~dark].log()
    torch.testing.assert_close(log_mass, wanted_mass, rtol=slack, atol=slack)
    mean, wanted_mean = out[~dark] / total[~dark, None], w_out[~dark] / w_total[~dark, None]
    torch.testing.assert_close(mean, wanted_mean, rtol=0, atol=slack * largest_value(store))


def filled(codec: str, heads: int, dim: int, capacity: int, slots: int, seed: int) -> twin.Store:
    k, v = torch.randn(2, heads, slots, dim, generator=torch.Generator().manual_seed(seed))
    return align(twin.encode(codec, capacity, k, v * 3))


def queries(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 1))


stores = st.builds(
    lambda codec, dim, blocks, seed: filled(codec, 2, dim, 32 * blocks, 32 * blocks, seed),
    st.sampled_from(twin.CODECS),
    st.sampled_from(DIMS),
    st.integers(1, 20),
    st.integers(0, 1000),
)


@each_level
@given(
    codec=st.sampled_from(twin.CODECS),
    dim=st.sampled_from((*DIMS, 7)),
    slot=st.integers(0, 63),
    seed=st.integers(0, 99),
)
def test_put_writes_what_the_twin_writes(level: int, codec: str, dim: int, slot: int, seed: int) -> None:
    ours, twins = align(twin.empty(codec, 3, dim, 64)), twin.empty(codec, 3, dim, 64)
    k, v = torch.randn(2, dim, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 9 - 4)
    v *= seed % 5 != 0
    call("put", level, native_store(ours), 1, slot, k, v)
    twin.put(twins, 1, slot, k, v)
    for name in ("k", "v", "k_scale", "v_scale"):
        assert torch.equal(*(getattr(store, name).view(torch.uint8) for store in (ours, twins)))


@each_level
def test_put_does_not_lose_what_is_no_number(level: int) -> None:
    """A NaN with all its bits low would round to infinity or zero; codes of 8 bits have no NaN, so their scale is one."""
    k = torch.tensor([0x7F800001, -0x00000001, 0x7F800000, 0x3F808000], dtype=torch.int32).view(torch.float32)
    store = align(twin.empty("bf16", 1, 4, 32))
    call("put", level, native_store(store), 0, 5, k, k)
    for x in twin.decode(store):
        assert x[0, 5, :2].isnan().all() and x[0, 5, 2:].tolist() == [math.inf, 1.0]
    store = align(twin.empty("int8", 1, 4, 32))
    call("put", level, native_store(store), 0, 5, k, torch.tensor([1.0, 2.0, math.inf, 0.0]))
    assert all(x[0, 5].isnan().all() for x in twin.decode(store))


@pytest.mark.parametrize("codec", twin.CODECS)
def test_the_twin_reads_what_it_writes(codec: str) -> None:
    k, v = torch.randn(2, 2, 40, 24, generator=torch.Generator().manual_seed(0))
    whole, single = twin.encode(codec, 64, k, v), twin.empty(codec, 2, 24, 64)
    for head in range(2):
        for slot in range(40):
            twin.put(single, head, slot, k[head, slot], v[head, slot])
    assert all(torch.equal(getattr(whole, name), getattr(single, name)) for name in ("k", "v", "k_scale", "v_scale"))
    rk, rv = twin.decode(whole)
    slack = {"f32": 0.0, "bf16": 2**-8, "int8": 1 / 127}[codec]
    torch.testing.assert_close((rk[:, :40], rv[:, :40]), (k, v), rtol=slack, atol=slack * 2)
    assert not rk[:, 40:].any() and not rv[:, 40:].any()


@each_level
@given(store=stores, count=st.integers(1, 16), softcap=st.sampled_from((0.0, 0.0, 2.5, 30.0)), data=st.data())
def test_part_over_a_plain_range(
    level: int, store: twin.Store, count: int, softcap: float, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, store.capacity - 1))
    last = data.draw(st.integers(first, store.capacity))
    check_part(level, store, 1, queries(count, count, store.dim), softcap, twin.Seen(first, last, max(last - 1, 0)))


@each_level
@pytest.mark.parametrize("codec", twin.CODECS)
def test_part_of_wide_heads(level: int, codec: str) -> None:
    """Sums of 16-bit products must not overflow. All elements are the largest there are, so that nothing cancels."""
    ones = torch.ones(1, 64, 1000)
    store = align(twin.encode(codec, 64, ones, ones))
    check_part(level, store, 0, torch.ones(2, 1000) / 32, 0.0, twin.Seen(0, 64, 63))


@each_level
@given(
    store=stores,
    count=st.integers(1, 5),
    window=st.sampled_from((0, 1, 7, 40, 1000)),
    keep=st.sampled_from((0, 5, 33)),
    sinks=st.integers(0, 5),
    written=st.integers(1, 900),
    data=st.data(),
)
def test_part_over_a_ring(
    level: int, store: twin.Store, count: int, window: int, keep: int, sinks: int, written: int, data: st.DataObject
) -> None:
    """Positions 0 .. written - 1 in a ring that keeps the first `sinks` slots; the query may be older than the newest slot."""
    positions = ring(store.capacity, written, sinks)
    first = data.draw(st.integers(0, store.capacity - 1))
    last = data.draw(st.integers(first, store.capacity))
    query = data.draw(st.integers(max(0, written - 50), written))
    seen = twin.Seen(first, last, query, positions, window, keep, sinks)
    check_part(level, store, 0, queries(written, count, store.dim), 0.0, seen)


def ring(capacity: int, written: int, sinks: int) -> Tensor:
    positions = torch.full((capacity,), -1, dtype=torch.int32)
    for position in range(written):
        positions[position if position < capacity else sinks + (position - sinks) % (capacity - sinks)] = position
    return positions


@each_level
@given(
    store=stores,
    count=st.integers(1, 4),
    cuts=st.lists(st.integers(0, 640), max_size=4),
    softcap=st.sampled_from((0.0, 5.0)),
)
def test_parts_of_a_split_make_the_whole(
    level: int, store: twin.Store, count: int, cuts: list[int], softcap: float
) -> None:
    q, scale, last = queries(1, count, store.dim) * 3, store.dim**-0.5, store.capacity - 3
    edges = [2, *sorted(min(max(cut, 2), last) for cut in cuts), last]
    parts = [part(level, store, 0, q, scale, softcap, twin.Seen(a, b, last - 1)) for a, b in pairwise(edges)]
    merged = twin.merge(parts)
    whole = part(level, store, 0, q, scale, softcap, twin.Seen(2, last, last - 1))
    # int8: weights are rounded at other places.
    torch.testing.assert_close(merged[1], whole[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged[2], whole[2], rtol=1e-4, atol=0)
    slack = PART_BOUND[store.codec] * largest_value(store)
    torch.testing.assert_close(merged[0] / merged[2][:, None], whole[0] / whole[2][:, None], rtol=0, atol=slack)


def overwritten(store: twin.Store, slots: Tensor, k: float, v: float) -> twin.Store:
    """A copy with one number in all of some slots, or with scales of that number where the codec has some."""
    if store.codec == "int8":
        k_scale, v_scale = store.k_scale.clone(), store.v_scale.clone()
        k_scale[:, slots], v_scale[:, slots] = k, v
        return replace(store, k_scale=k_scale, v_scale=v_scale)
    keys, values = twin.decode(store)
    keys[:, slots], values[:, slots] = k, v
    return align(twin.encode(store.codec, store.capacity, keys, values))


@each_level
@given(
    store=stores,
    count=st.integers(1, 4),
    hidden=st.sets(st.integers(0, 639), min_size=1, max_size=40),
    ranged=st.booleans(),
)
def test_what_is_masked_does_not_leak(
    level: int, store: twin.Store, count: int, hidden: set[int], ranged: bool
) -> None:
    if ranged:
        middle = store.capacity // 2
        first, last = middle - min(hidden) % middle, middle + max(hidden) % middle
        bad = torch.tensor([*range(first), *range(last, store.capacity)])
        seen = twin.Seen(first, last, max(last - 1, 0))
    else:
        bad = torch.tensor(sorted({slot % store.capacity for slot in hidden}))
        positions = torch.arange(store.capacity, dtype=torch.int32)
        positions[bad] = -1
        seen = twin.Seen(0, store.capacity, store.capacity, positions)
    good = overwritten(store, bad, 0, 0)  # the twin cannot stand what is no number either
    q, scale = queries(5, count, store.dim), store.dim**-0.5
    wanted = twin.part(good, 0, q, scale, 0.0, seen)
    for k, v in ((math.nan, math.inf), (math.inf, math.nan), (-math.inf, -math.inf)):
        check_against(wanted, part(level, overwritten(store, bad, k, v), 0, q, scale, 0.0, seen), good)


@each_level
@pytest.mark.parametrize("codec", twin.CODECS)
def test_large_scores_do_not_overflow(level: int, codec: str) -> None:
    store = filled(codec, 1, 64, 320, 320, 0)
    q = queries(0, 3, 64) * 100
    arguments = store, 0, q, 1.0, 0.0, twin.Seen(0, 320, 319)
    (out, most, total), wanted = part(level, *arguments), twin.part(*arguments)
    assert out.isfinite().all() and (total >= 0.99).all()
    torch.testing.assert_close(most, wanted[1], rtol=PART_BOUND[codec], atol=0)


def check_many(level: int, store: twin.Store, q: Tensor, softcap: float, seen: twin.Seen) -> None:
    scale = store.dim**-0.5
    wanted = twin.many(store, 1, q, scale, softcap, seen)
    torch.testing.assert_close(
        many(level, store, 1, q, scale, softcap, seen), wanted, rtol=0, atol=MANY_BOUND * largest_value(store)
    )


MANY_CODECS = st.sampled_from(("bf16", "int8"))


@each_many_level
@given(
    codec=MANY_CODECS,
    dim=st.sampled_from(DIMS),
    count=st.integers(1, 9),
    T=st.integers(1, 100),
    before=st.sampled_from((0, 1, 31, 32, 100, 300)),
    first=st.sampled_from((0, 0, 3, 40)),
    window=st.sampled_from((0, 0, 1, 7, 50, 130)),
    keep=st.sampled_from((0, 0, 20)),
    sinks=st.integers(0, 5),
    softcap=st.sampled_from((0.0, 0.0, 3.0, 50.0)),
)
def test_many_over_a_plain_range(
    level: int,
    codec: str,
    dim: int,
    count: int,
    T: int,
    before: int,
    first: int,
    window: int,
    keep: int,
    sinks: int,
    softcap: float,
) -> None:
    """T queries after `before` positions of earlier chunks; slot = position."""
    last = before + T
    store = filled(codec, 2, dim, -(-(last + 9) // 32) * 32, last + 9, dim + T)  # old data lies past the end
    seen = twin.Seen(min(first, before), last, before, None, window, keep, sinks)
    check_many(level, store, queries(T, T, count, dim), softcap, seen)


@each_many_level
@given(
    codec=MANY_CODECS,
    dim=st.sampled_from((16, 64, 80)),
    count=st.integers(1, 4),
    T=st.integers(1, 60),
    blocks=st.integers(2, 12),
    before=st.integers(0, 400),
    window=st.sampled_from((0, 9, 64)),
    keep=st.sampled_from((0, 20, 70)),
    sinks=st.integers(0, 5),
)
def test_many_over_a_ring(
    level: int, codec: str, dim: int, count: int, T: int, blocks: int, before: int, window: int, keep: int, sinks: int
) -> None:
    store = filled(codec, 2, dim, 32 * blocks, 32 * blocks, before)
    positions = ring(store.capacity, before + T, sinks)
    seen = twin.Seen(0, store.capacity, before, positions, window, keep, sinks)
    check_many(level, store, queries(T, T, count, dim), 0.0, seen)


@each_many_level
@pytest.mark.parametrize("codec", ["bf16", "int8"])
@pytest.mark.parametrize("where", ["outside", "later"])
def test_many_does_not_let_masked_slots_leak(level: int, where: str, codec: str) -> None:
    """What is no number is kept from those who do not see it, be it past the end or in the run's own later tokens."""
    store, q = filled(codec, 2, 64, 128, 128, 0), queries(0, 70, 3, 64)
    bad = torch.arange(100, 128) if where == "outside" else torch.arange(80, 128)
    good, seen, blessed = overwritten(store, bad, 0, 0), twin.Seen(0, 100, 30), 70 if where == "outside" else 50
    wanted = twin.many(good, 0, q, 0.125, 0.0, seen)[:blessed]
    for k, v in ((math.nan, math.inf), (0.0, math.nan), (math.inf, 0.0)):
        given = many(level, overwritten(store, bad, k, v), 0, q, 0.125, 0.0, seen)[:blessed]
        torch.testing.assert_close(given, wanted, rtol=0, atol=MANY_BOUND * largest_value(good))


@each_many_level
def test_many_that_see_nothing_get_zeros(level: int) -> None:
    store, positions = filled("bf16", 2, 64, 64, 64, 0), torch.full((64,), -1, dtype=torch.int32)
    positions[40:] = torch.arange(24, dtype=torch.int32) + 10
    check_many(level, store, queries(0, 20, 2, 64), 0.0, twin.Seen(0, 64, 0, positions))
