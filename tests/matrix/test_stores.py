"""Every store (codec × policy × owner) against a plain recomputation without one, however the input is cut and padded."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from orchard.cache.codecs import Codec
from orchard.cache.policies import KeepAll, Scored, Window
from orchard.cache.store import Cache, Store
from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.context import Context, KVView
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.ops.attention import attend, visible
from tests.matrix import axes

HEADS, QUERY_HEADS, DIM, LENGTH = 2, 4, 4, 16
CODECS, POLICIES = axes.codecs(DIM), axes.policies()
LAYER_WINDOWS = (None, 3, 6)
LAYERS = 2
GARBAGE = 1e4
SCALE = 0.7
UNEVEN = (11, 4, 7)
CHUNKS = ("whole", "ones", "threes", "long", "ragged")

_angles = torch.arange(-1, LENGTH, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3], dtype=torch.float64)
COS, SIN = _angles.cos().float(), _angles.sin().float()


def rotate(keys: Tensor, positions: Tensor) -> Tensor:
    """A rotation from tables, element by element: the same bits however the keys are cut into chunks."""
    cos, sin = COS[positions + 1], SIN[positions + 1]
    a, b = keys.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@dataclass(frozen=True, eq=False)
class Tokens:
    """One sequence: q [Hq, L, D], and for each layer its own keys and values [layers, H, L, D]."""

    q: Tensor
    k: Tensor
    v: Tensor

    def __len__(self) -> int:
        return self.q.shape[1]

    def spliced(self, at: int, other: Tokens) -> Tokens:
        """The first `at` tokens of this sequence, then the others of another."""
        pairs = ((self.q, other.q), (self.k, other.k), (self.v, other.v))
        return Tokens(*(torch.cat([a[..., :at, :], b[..., at:, :]], dim=-2) for a, b in pairs))


@functools.cache
def tokens(length: int, seed: int) -> Tokens:
    make = torch.Generator().manual_seed(seed)
    shapes = ((QUERY_HEADS, length, DIM), (LAYERS, HEADS, length, DIM), (LAYERS, HEADS, length, DIM))
    return Tokens(*(torch.randn(shape, generator=make) for shape in shapes))


@functools.cache
def oracle(sequence: Tokens, layer: int, codec_name: str, policy_name: str, window: int | None) -> Tensor:
    """Attention for each token by loops in float64 [Hq, L, D]: no store, no mask tensor, no batch, no chunks."""
    codec: Codec = ALL_CODECS[codec_name].build()
    policy = POLICIES[policy_name]
    kept, sinks = getattr(policy, "window", None), getattr(policy, "sinks", 0)
    positions = torch.arange(len(sequence))[None, None]
    k, v = sequence.k[layer][None], sequence.v[layer][None]
    late = codec.before_rotation or policy.builds.unrotated
    k = k if late else rotate(k, positions)
    k = codec.decode(codec.encode(k, "k"), "k", torch.float32)
    k = (rotate(k, positions) if late else k)[0].double()
    v = codec.decode(codec.encode(v, "v"), "v", torch.float32)[0].double()
    out = torch.zeros(QUERY_HEADS, len(sequence), DIM, dtype=torch.float64)
    for p in range(len(sequence)):
        seen = [
            s
            for s in range(p + 1)
            if (window is None or p - s < window) and (kept is None or p - s < kept or s < sinks)
        ]
        for h in range(QUERY_HEADS):
            group = h // (QUERY_HEADS // HEADS)
            scores = [SCALE * float(sequence.q[h, p].double() @ k[group, s]) for s in seen]
            weights = [math.exp(score - max(scores)) for score in scores]
            for s, weight in zip(seen, weights):
                out[h, p] += weight / sum(weights) * v[group, s]
    return out


def schedule(lengths: list[int], chunks: str) -> list[list[int]]:
    """How many tokens each sequence brings in each step."""
    left, steps = list(lengths), []
    make = torch.Generator().manual_seed(len(lengths))
    while any(left):
        sizes = {"whole": max(left), "ones": 1, "threes": 3, "long": 7}
        if chunks == "ragged":
            wish = torch.randint(0, 5, (len(left),), generator=make).tolist()
        else:
            wish = [sizes[chunks]] * len(left)
        step = [min(a, b) for a, b in zip(wish, left)]
        left = [a - b for a, b in zip(left, step)]
        if any(step):
            steps.append(step)
    return steps


def look(q: Tensor, view: KVView, mask: Tensor) -> Tensor:
    """As attention does it: straight from how slots are kept, where the view can."""
    if view.attend is not None:
        return view.attend(q, mask, SCALE, None)
    return attend(q, view.k, view.v, mask, scale=SCALE)


class Run:
    """Feeds sequences to a cache step by step and remembers what each layer saw, for every layer window."""

    def __init__(self, stores: list[Any], sequences: list[Tokens], *, pad: str = "right", upto: str = "all") -> None:
        self.cache = Cache([cfg.complete() for cfg in stores], batch=len(sequences), length=LENGTH, dtype=torch.float32)
        self.stores, self.sequences, self.pad, self.upto = stores, sequences, pad, upto
        self.done = [0] * len(sequences)
        self.seen: dict[tuple[int, int, int, int | None], Tensor] = {}
        self.poison = False

    def feed(self, chunks: str, until: list[int] | None = None) -> Run:
        ends = until or [len(one) for one in self.sequences]
        for step in schedule([end - done for end, done in zip(ends, self.done)], chunks):
            self.step(step)
            if self.poison:
                fill_bins(self.cache)
        return self

    def step(self, counts: list[int]) -> None:
        width, rows = max(counts), len(counts)
        positions = torch.full((rows, width), -1)
        q = torch.full((rows, QUERY_HEADS, width, DIM), GARBAGE)
        k, v = torch.full((2, LAYERS, rows, HEADS, width, DIM), GARBAGE)
        for row, count in enumerate(counts):
            start = width - count if self.pad == "left" else 0
            here, there = slice(start, start + count), slice(self.done[row], self.done[row] + count)
            positions[row, here] = torch.arange(LENGTH)[there]
            one = self.sequences[row]
            q[row, :, here], k[:, row, :, here], v[:, row, :, here] = (
                one.q[:, there],
                one.k[:, :, there],
                one.v[:, :, there],
            )
        before, self.done = self.done, [a + b for a, b in zip(self.done, counts)]
        context = Context(positions, cache=self.cache, upto=max(self.done) if self.upto == "exact" else None)
        for layer, cfg in enumerate(self.stores):
            view = (
                context.views[cfg.owner] if cfg.owner is not None else context.append(layer, k[layer], v[layer], rotate)
            )
            for window in LAYER_WINDOWS:
                y = look(q, view, visible(positions, view, window))
                for row, count in enumerate(counts):
                    start = width - count if self.pad == "left" else 0
                    for i in range(count):
                        self.seen[row, layer, before[row] + i, window] = y[row, :, start + i]

    def check(self, codecs: list[str], policies: list[str]) -> None:
        """Every token of every layer equals the recomputation (a borrowed store holds its owner's keys)."""
        expected = {}
        for row, layer, p, window in self.seen:
            owner = self.stores[layer].owner
            source = layer if owner is None else owner
            truth = oracle(self.sequences[row], source, codecs[source], policies[source], window)
            expected[row, layer, p, window] = truth[:, p]
        got = torch.stack([self.seen[key] for key in expected]).double()
        torch.testing.assert_close(got, torch.stack(list(expected.values())), atol=1e-5, rtol=1e-5)


def stores(codec: str, policy: str, owner: str = "self") -> list[Any]:
    own = Store.Config(heads=HEADS, dim=DIM, codec=ALL_CODECS[codec].clone(), policy=POLICIES[policy].clone())
    return [own, own.clone(owner=0 if owner == "another" else None)]


def fill_bins(cache: Cache) -> None:
    for slots in cache.tables.values():
        slots.positions[:, :, slots.capacity :] = 0
    for store in cache.stores.values():
        for parts in store.parts.values():
            for part in parts.values():
                part[:, :, store.slots.capacity :] = float("nan") if part.is_floating_point() else 127


UNEVEN_BATCH = [tokens(length, seed) for seed, length in enumerate(UNEVEN)]
BATCHES = {"one": ([tokens(11, 0)], "right"), "right": (UNEVEN_BATCH, "right"), "left": (UNEVEN_BATCH, "left")}


class Late(Configurable, Codec):
    """A codec for these tests: unrotated keys, in parts of every rank that the contract allows."""

    before_rotation = True

    @config
    class Config(BaseConfig):
        pass

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def layout(self, dim: int, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"first": ((), dtype), "rest": ((dim - 1,), dtype), "square": ((2, dim // 2), dtype)}

    def encode(self, x: Tensor, role: str) -> dict[str, Tensor]:
        return {"first": x[..., 0], "rest": x[..., 1:], "square": x.unflatten(-1, (2, -1))}

    def decode(self, parts: dict[str, Tensor], role: str, dtype: torch.dtype) -> Tensor:
        whole = torch.cat([parts["first"][..., None], parts["rest"]], dim=-1)
        return (whole + parts["square"].flatten(-2)) / 2


ALL_CODECS: dict[str, Any] = {**CODECS, "Late": Late.Config()}

codec_axis = pytest.mark.parametrize("codec", ALL_CODECS)
# Policies with budgets differ only in what they forget (tests/matrix/test_budgets.py): one of each kind of table stands for all.
SCORED = [name for name, cfg in POLICIES.items() if issubclass(cfg.builds, Scored)]
policy_axis = pytest.mark.parametrize("policy", [name for name in POLICIES if name not in SCORED or "KeyDiff" in name])
EVERY_STORE = [
    (codec, policy, owner, batch, chunks)
    for codec in ALL_CODECS
    for policy in POLICIES
    for owner in axes.OWNERS
    for batch, chunks in (
        itertools.product(BATCHES, CHUNKS) if policy not in SCORED else [("right", "ones"), ("left", "ragged")]
    )
]


# The matrix -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "policy", "owner", "batch", "chunks"), EVERY_STORE)
def test_every_store_equals_recomputation(codec: str, policy: str, owner: str, batch: str, chunks: str) -> None:
    sequences, pad = BATCHES[batch]
    for upto in ("all", "exact"):
        run = Run(stores(codec, policy, owner), sequences, pad=pad, upto=upto).feed(chunks)
        kept = 1 if owner == "another" else 2
        assert len(run.cache.stores) == kept and len(run.cache.tables) == (kept if policy in SCORED else 1)
        assert len(run.seen) == LAYERS * len(LAYER_WINDOWS) * sum(map(len, sequences))
        run.check([codec] * LAYERS, [policy] * LAYERS)


@pytest.mark.parametrize("chunks", CHUNKS)
@policy_axis
@codec_axis
def test_the_bin_is_never_read(codec: str, policy: str, chunks: str) -> None:
    for pad in ("left", "right"):
        run = Run(stores(codec, policy), UNEVEN_BATCH, pad=pad)
        fill_bins(run.cache)
        run.poison = True
        run.feed(chunks).check([codec] * LAYERS, [policy] * LAYERS)


@policy_axis
@codec_axis
def test_keeping_some_sequences(codec: str, policy: str) -> None:
    """Rows of different lengths are dropped, reordered and doubled; the doubles then go different ways."""
    done, rows = [7, 2, 5], [2, 0, 2]
    for chunks in ("ones", "threes"):
        run = Run(stores(codec, policy, "another"), [tokens(12, seed) for seed in range(3)]).feed(chunks, done)
        run.cache.keep(torch.tensor(rows))
        run.done = [done[row] for row in rows]
        run.sequences = [tokens(12, row).spliced(done[row], tokens(12, 50 + i)) for i, row in enumerate(rows)]
        run.seen.clear()
        run.feed(chunks)
        assert len(run.seen) == LAYERS * len(LAYER_WINDOWS) * (7 + 5 + 7)
        run.check([codec] * LAYERS, [policy] * LAYERS)


@policy_axis
@codec_axis
def test_going_back_or_refusing_by_name(codec: str, policy: str) -> None:
    run = Run(stores(codec, policy), UNEVEN_BATCH).feed("threes", [8, 4, 7])
    lengths = [6, 4, 2]
    if POLICIES[policy].build().can_rewind:
        run.cache.rewind(torch.tensor(lengths))
        for slots in run.cache.tables.values():
            for row, length in enumerate(lengths):
                assert int(slots.positions[row].max()) == length - 1
        run.done = lengths
        run.sequences = [
            one.spliced(at, tokens(len(one), 70 + row)) for row, (one, at) in enumerate(zip(UNEVEN_BATCH, lengths))
        ]
        run.seen.clear()
    else:
        with pytest.raises(UnsupportedPair, match=type(POLICIES[policy]).builds.__name__):
            run.cache.rewind(torch.tensor(lengths))
    run.feed("ragged").check([codec] * LAYERS, [policy] * LAYERS)


@policy_axis
@codec_axis
def test_a_position_that_is_sent_again_is_replaced(codec: str, policy: str) -> None:
    """Not shown twice. A window forgets what the old token pushed out, so only tokens before that can be sent again."""
    kept = getattr(POLICIES[policy], "window", LENGTH)
    start, again = (6, 4) if kept >= LENGTH else (kept, kept - 1)
    for chunks in ("ones", "threes"):
        run = Run(stores(codec, policy), [tokens(12, 0)]).feed("threes", [start])
        run.sequences, run.done = [tokens(12, 0).spliced(again, tokens(12, 9))], [again]
        run.seen.clear()
        run.feed(chunks).check([codec] * LAYERS, [policy] * LAYERS)


def test_a_refused_rewind_changes_no_table() -> None:
    configs = [*stores("Plain", "KeepAll"), *stores("Plain", "Window.window")]
    cache = Cache([cfg.complete() for cfg in configs], batch=1, length=8, dtype=torch.float32)
    for slots in cache.tables.values():
        slots.place(torch.arange(3)[None], None)
    before = [slots.positions.clone() for slots in cache.tables.values()]
    with pytest.raises(UnsupportedPair):
        cache.rewind(torch.tensor([1]))
    assert all(old.equal(new.positions) for old, new in zip(before, cache.tables.values()))


def test_layers_of_every_kind_in_one_cache() -> None:
    """Neighbouring layers with different codecs and policies do not disturb each other."""
    names = [(codec, policy) for codec in ALL_CODECS for policy in POLICIES]
    for first, second in zip(names, names[1:] + names[:1]):
        run = Run([stores(*first)[0], stores(*second)[0]], UNEVEN_BATCH, pad="left").feed("ragged")
        run.check(*(list(pair) for pair in zip(first, second)))


# Size and shape -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@policy_axis
@codec_axis
def test_bytes_are_what_the_tensors_take(codec: str, policy: str, dtype: torch.dtype) -> None:
    cache = Cache([cfg.complete() for cfg in stores(codec, policy)], batch=3, length=LENGTH, dtype=dtype)
    for store in cache.stores.values():
        tensors = [part for parts in store.parts.values() for part in parts.values()]
        real = sum(part.untyped_storage().nbytes() for part in tensors)
        slots = 3 * (store.slots.capacity + 1)  # one more than the capacity: the bin
        assert store.nbytes == real == slots * store.codec.bytes_per_slot(HEADS, DIM, dtype)
    assert cache.nbytes == sum(store.nbytes for store in cache.stores.values()) > 0


def test_a_window_takes_the_same_memory_for_any_length() -> None:
    policy = Window.Config(window=4, sinks=2).build()
    assert [policy.capacity(length) for length in (1, 3, 6, 7, 10**9)] == [1, 3, 6, 6, 6]
    assert KeepAll.Config().build().capacity(77) == 77


@pytest.mark.parametrize("arguments", [{"window": 0}, {"window": -1}, {"window": 3, "sinks": -1}])
def test_an_impossible_window_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Window.Config(**arguments).build()


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("sinks", [0, 1, 3])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 8])
def test_a_window_keeps_exactly_the_sinks_and_the_last_tokens(window: int, sinks: int, length: int) -> None:
    """Also where the whole sequence is shorter than the sinks or the window."""
    cfg = Store.Config(heads=1, dim=2, policy=Window.Config(window=window, sinks=sinks)).complete()
    for chunk in (1, 2, 5):
        cache = Cache([cfg], batch=1, length=length, dtype=torch.float32)
        (slots,) = cache.tables.values()
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            placement = slots.place(torch.arange(start, end)[None], None)
            taken = [slot for slot in placement.index[0].tolist() if slot < slots.capacity]
            assert len(set(taken)) == len(taken)  # two writes to one slot would come in any order on a GPU
            held = sorted(p for p in slots.positions.flatten().tolist() if p >= 0)
            assert held == [p for p in range(end) if p < sinks or p >= end - window]


# Compiling ------------------------------------------------------------------------------------------------------------


@policy_axis
@codec_axis
def test_a_decode_step_compiles_whole_and_only_once(codec: str, policy: str) -> None:
    torch._dynamo.reset()
    sequences = [tokens(12, 0), tokens(12, 1)]
    plain, compiled = (Run(stores(codec, policy, "another"), sequences).feed("threes", [6, 6]) for _ in range(2))

    def decode(cache: Cache, positions: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        context = Context(positions, cache=cache, upto=12)
        view = context.append(0, k, v, rotate)
        own = look(q, view, visible(positions, view, None))
        view = context.views[0]
        return own, look(q, view, visible(positions, view, 3))

    fast = torch.compile(decode, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for p in range(6, 11):
            here = slice(p, p + 1)
            q = torch.stack([one.q[:, here] for one in sequences])
            k, v = (
                torch.stack([side[0][:, here] for side in sides]) for sides in zip(*((s.k, s.v) for s in sequences))
            )
            positions = torch.tensor([[p], [p if p < 9 else -1]])  # the second sequence ends early
            want, got = (step(run.cache, positions, q, k, v) for step, run in ((decode, plain), (fast, compiled)))
            real = positions[:, 0] >= 0  # padding sees every slot that is shown, and compiled steps show more of them
            for one, other in zip(want, got):
                torch.testing.assert_close(other[real], one[real], atol=1e-6, rtol=1e-6)
