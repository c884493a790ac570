"""A native sequence under a budget against the model's own modules over the same keys and values, and its own promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.cache.codecs import Int8
from orchard.cache.policies import Window
from orchard.cache.store import Store
from orchard.core.errors import BadFile, ConfigError, UnsupportedPair, UsageError
from orchard.generate.lowering import lower
from orchard.generate.memory.choose import choose
from orchard.generate.memory.native_kept import NativeKept
from orchard.generate.native import NativeRunner
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from tests.generate.memory.forgetful import after

VOCAB = 61
EXACT = {"f32": 2e-4, "bf16": 2e-3, "int8": 2e-3}


def tiny(
    codec: str = "f32", *, window: int | None = None, softcap: float | None = None, shared: bool = False
) -> Decoder:
    """Three layers; the last reads what the second keeps where keys and values are shared."""
    torch.manual_seed(5)

    def store(layer: int) -> Store.Config:
        owner = 1 if shared and layer == 2 else None
        return Store.Config(codec=Int8.Config(), owner=owner) if codec == "int8" else Store.Config(owner=owner)

    layers = [
        Block.Config(
            mixer=Attention.Config(
                heads=6, kv_heads=2, head_dim=16, store=store(layer), window=window, softcap=softcap
            ),
            mlp=GatedMLP.Config(hidden_dim=32),
        )
        for layer in range(3)
    ]
    model = Decoder.Config(vocab=VOCAB, dim=24, context=512, stack=Stack.Config(layers=layers)).build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


def runner(model: Decoder, codec: str = "f32", *, threads: int = 1, level: int = 2) -> NativeRunner:
    return NativeRunner(
        lower(model, stores="f32" if codec == "f32" else "bf16"), decoder=lambda: model, threads=threads, level=level
    )


def some(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("f32", {}, {"scoring": "probe"}),
    ("f32", {"shared": True}, {"scoring": "probe", "heads": "flat"}),
    ("f32", {"window": 12, "softcap": 5.0}, {"scoring": "probe", "heads": "flat"}),
    ("bf16", {"softcap": 5.0}, {"scoring": "probe", "heads": "flat"}),
    ("int8", {"shared": True}, {"scoring": "probe"}),
]


@pytest.mark.parametrize(("codec", "shape", "options"), CASES, ids=lambda value: str(value))
def test_reads_probes_and_forgets_like_the_modules(codec: str, shape: dict[str, Any], options: dict[str, Any]) -> None:
    model = tiny(codec, **shape)
    kept = NativeKept(runner(model, codec), budget=20, block=13, sinks=2, **options)
    stores = len(kept.budgets)
    budgets: list[list[int] | None] = [None, [26, 14, 20][:stores], [26, 14, 20][:stores], [20] * stores]
    for turn in range(7):
        block = some(13, seed=turn)
        expected, _ = after(model, kept, block)
        found = kept.read(block, wanted=5)
        assert np.abs(found - expected[-5:]).max() < EXACT[codec] * np.abs(expected).max()
        probe = some(9 if turn < 5 else 40, seed=turn + 50)  # the last ones want more scratch than there is
        _, shares = after(model, kept, probe)
        kept.probe(probe[:4])
        kept.probe(probe)
        assert kept._seen is not None
        for seen, share in zip(kept._seen, shares, strict=True):
            assert np.abs(seen - share).max() < 10 * EXACT[codec]
        before = [kept._kept.read(store) for store in range(stores)], kept._kept.tokens
        worth = [seen.copy() for seen in kept._seen]
        kept.evict(budgets[turn % 4])
        assert all(used <= budget for used, budget in zip(kept._kept.used, kept.budgets, strict=True))
        check_turned(kept, *before, worth, flat=options.get("heads") == "flat")
    expected, _ = after(model, kept, [7])
    assert np.abs(kept.read([7], wanted=1) - expected).max() < EXACT[codec] * np.abs(expected).max()


def check_turned(
    kept: NativeKept, keys: list[list[np.ndarray]], tokens: int, worth: list[np.ndarray], *, flat: bool
) -> None:
    """What stayed are the best, and their keys are those of before, turned by as many places as they moved."""
    at = 0
    for store, (heads, budget) in enumerate(zip(keys, kept.budgets, strict=True)):
        slots = choose(worth[at : at + len(heads)], budget, sinks=2, flat=flat)
        at += len(heads)
        codec = kept.runner.plan.stores[store].codec
        for before, stays, now in zip(heads, slots, kept._kept.read(store), strict=True):
            old = tokens - len(before) + stays
            new = kept._kept.tokens - len(stays) + np.arange(len(stays))
            exact = turned(before[stays], new - old)
            size = np.abs(exact).max(1, keepdims=True)
            # Keys that are rounded wait until a turn is worth it (kept.h), and are rounded then.
            assert (np.abs(now - exact) <= {"f32": 1e-5, "bf16": 0.05, "int8": 0.05}[codec] * size).all()


def turned(keys: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Rotary positions over the whole width, with the default base."""
    half = keys.shape[1] // 2
    angles = by[:, None] / 10000.0 ** (np.arange(half) / half)
    low, high = keys[:, :half], keys[:, half:]
    return np.concatenate(
        [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)], 1
    )


@pytest.mark.parametrize("scoring", ["recent", "keydiff", "snap"])
@pytest.mark.parametrize("heads", ["uniform", "flat"])
def test_memory_is_fixed_however_much_is_read(scoring: Any, heads: Any) -> None:
    kept = NativeKept(runner(tiny()), budget=24, block=16, sinks=3, scoring=scoring, heads=heads)
    sizes = set()
    for turn in range(12):
        kept.read(some(11 if turn % 2 else 50, seed=turn))
        for token in some(5, seed=turn):
            scores = kept.read([token], wanted=1)
        assert np.isfinite(scores).all()
        assert kept.used <= kept.peak <= 24 + 16
        sizes.add(kept.nbytes)
    assert len(sizes) == 1 and kept.peak == 24 + 16


def test_sinks_and_the_newest_stay() -> None:
    model = tiny()
    ids = some(100)
    kept = NativeKept(runner(model), budget=10, block=20, sinks=3, scoring="recent")
    kept.read(ids)
    first = NativeKept(runner(model), budget=20, block=20, sinks=3)
    first.read(ids[:20])
    values = [part._kept.read(0, values=True) for part in (kept, first)]
    for now, begin in zip(*values, strict=True):
        assert np.array_equal(now[:3], begin[:3])  # values of the first layer depend on their own token alone
    last = NativeKept(runner(model), budget=40, block=20)
    last.read(ids[60:])
    for now, end in zip(values[0], last._kept.read(0, values=True), strict=True):
        assert np.allclose(now[-7:], end[-7:], atol=1e-5)


def test_a_sequence_that_fits_is_an_ordinary_one() -> None:
    native = runner(tiny(), threads=1)
    ids = some(50)
    kept = NativeKept(native, budget=48, block=10)
    assert np.array_equal(kept.read(ids, wanted=50), native.scores(ids))


def test_sequences_with_and_without_a_budget_share_a_call() -> None:
    native = runner(tiny(), threads=2)
    options: dict[str, Any] = {"budget": 12, "block": 8, "scoring": "keydiff", "heads": "flat"}
    stores = native.program.stores(3, 0)
    together = [NativeKept(native, stores=stores, sequence=number, **options) for number in (0, 2)]
    stores.open(1, 64)
    alone = [NativeKept(native, **options) for _ in together]
    for number, kept in enumerate(zip(together, alone, strict=True)):
        for one in kept:
            one.read(some(90 + 7 * number, seed=number))
            one.evict()
    ordinary = native.begin([[3, 4]], length=64)
    ordinary.read(0, 2)
    stores_rows = [np.array([3, 4], np.int32), np.array([1, 1], np.int32), np.array([0, 1], np.int32)]
    parts = [together[0]._kept.rows(np.array([9])), stores_rows, together[1]._kept.rows(np.array([5, 8]))]
    rows = [np.concatenate([part[place] for part in parts]) for place in range(3)]
    scores = np.empty((5, VOCAB), np.float32)
    native.program.run(stores, *rows, np.arange(5, dtype=np.int32), scores)
    for kept, count in zip(together, (1, 2), strict=True):
        kept._kept.keep(count)
    expected = np.concatenate([alone[0].read([9], 1), ordinary.first(), alone[1].read([5, 8], 2)])
    assert np.abs(scores[[0, 2, 3, 4]] - expected).max() < 1e-4
    assert [kept.used for kept in together] == [kept.used for kept in alone]
    assert sum(kept.nbytes for kept in together) <= stores.memory()
    assert together[0].nbytes == alone[0].nbytes


def test_ten_times_the_tokens_in_the_same_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    kept = NativeKept(runner(tiny("bf16"), "bf16"), budget=64, block=256)
    for turn in range(4):
        kept.read(some(250, seed=turn))
    size, before = kept.nbytes, resident() if Path("/proc/self/statm").exists() else 0
    for turn in range(36):
        kept.read(some(250, seed=turn))
    assert kept.nbytes == size and kept.peak <= 64 + 256
    if before:
        assert resident() - before < 2 << 20


def test_threads_and_instructions_agree() -> None:
    model, ids = tiny(), some(300)
    seen = []
    for threads, level in ((1, 2), (3, 2), (2, 0), (2, 1)):
        kept = NativeKept(runner(model, threads=threads, level=level), budget=280, block=40, scoring="probe")
        kept.read(ids)
        kept.probe(ids[:37])
        again = kept._kept.watch(np.array(ids[-30:], np.int32), again=True)
        assert kept._seen is not None
        seen.append(np.concatenate([*kept._seen, *again]))
    assert np.array_equal(seen[0], seen[1])
    for other in seen[2:]:
        assert np.abs(other - seen[0]).max() < 1e-5


def test_saved_and_restored() -> None:
    native = runner(tiny("int8"), "int8")
    options: dict[str, Any] = {"budget": 20, "block": 10, "scoring": "snap", "heads": "flat"}
    kept = NativeKept(native, **options)
    kept.read(some(95))
    kept.evict([26, 14, 20])
    kept.read(some(4, seed=3))
    arrays = kept.save()
    other = NativeKept(native, **options)
    other.read(some(30, seed=9))
    other.load(arrays)
    assert other.used == kept.used and other.peak == kept.peak and other.budgets == kept.budgets
    for turn in range(4):
        ids = some(9, seed=turn)
        assert np.array_equal(kept.read(ids, wanted=9), other.read(ids, wanted=9))
    for bad, why in (
        ({**arrays, "held": arrays["held"][:-1]}, "damaged"),
        ({**arrays, "counts": arrays["counts"] + 40}, "damaged"),
        ({**arrays, "last": np.array([VOCAB])}, "damaged"),
        ({**arrays, "model": arrays["model"][::-1]}, "another model"),
        ({**arrays, "budgets": arrays["budgets"] + 1}, "21 \\+ 11"),
        ({"held": arrays["held"]}, "no saved"),
    ):
        before = other.save()
        with pytest.raises(BadFile, match=why):
            other.load(bad)
        assert all(np.array_equal(before[name], value) for name, value in other.save().items())


def test_going_back_and_beginning_again() -> None:
    native = runner(tiny())
    kept = NativeKept(native, budget=16, block=12, scoring="snap", heads="flat")
    kept.read(some(70))
    kept.evict()
    more = some(7, seed=2)
    first = kept.read(more, wanted=7)
    kept.back(7)
    assert np.array_equal(kept.read(more, wanted=7), first)
    with pytest.raises(ValueError, match="fewer than the 99"):
        kept.back(99)
    size = kept.nbytes
    kept.clear()
    assert kept.used == 0 and kept.nbytes == size
    fresh = NativeKept(native, budget=16, block=12, scoring="snap", heads="flat")
    ids = some(60, seed=4)
    assert np.array_equal(kept.read(ids, wanted=9), fresh.read(ids, wanted=9))


@pytest.mark.parametrize(("codec", "step"), [("int8", 1 / 127), ("bf16", 2**-8)])
def test_many_small_turns_add_up(codec: str, step: float) -> None:
    """Turns that rounding would swallow, each by itself, are all there in the end; what is lost stays a few steps."""
    kept = NativeKept(runner(tiny(codec), codec), budget=60, block=8, sinks=0, scoring="probe")
    for turn in range(10):
        kept.read(some(6, seed=turn))
    before = kept._kept.read(0)
    for turn in range(50):
        kept.read(some(1, seed=turn))
        kept._kept.compact(
            [np.arange(1, 61, dtype=np.int32) for _ in kept._kept.counts]
        )  # all others move by one place
    for old, now in zip(before, kept._kept.read(0), strict=True):
        exact = turned(old[50:], np.full(10, -50))
        error = np.abs(now[:10] - exact) / np.abs(exact).max(1, keepdims=True) / step
        assert np.sqrt(np.mean(error**2)) < 4
        assert error[:, [6, 7, 14, 15]].max() < 6  # slow pairs turn once in many moves, if at all


def test_bad_input() -> None:
    native = runner(tiny())
    with pytest.raises(ConfigError, match="no room beside"):
        NativeKept(native, budget=4, block=8, sinks=4)
    with pytest.raises(ConfigError, match="blocks of 0"):
        NativeKept(native, budget=8, block=0)
    with pytest.raises(ConfigError, match="no scoring"):
        NativeKept(native, budget=8, block=8, scoring="best")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="above 8"):
        NativeKept(native, budget=8, block=8, budgets=[9, 8, 8])
    kept = NativeKept(native, budget=8, block=8, sinks=2, scoring="probe")
    with pytest.raises(UsageError, match="no tokens"):
        kept.read([])
    with pytest.raises(UsageError, match="vocabulary"):
        kept.probe([VOCAB])
    with pytest.raises(UsageError, match="nothing has looked"):
        kept.evict()
    with pytest.raises(UsageError, match="do not fit"):
        kept.read(some(17))
    assert kept.used == 16
    kept.probe(some(3))
    with pytest.raises(UsageError, match="above 8"):
        kept.evict([9, 8, 8])
    with pytest.raises(UsageError, match="2 budgets"):
        kept.evict([8, 8])
    with pytest.raises(ConfigError, match="no room beside"):
        kept.evict([8, 8, 2])
    kept.evict()
    assert kept.used == 8 and kept.keys(0).shape == (2, 8, 16)
    with pytest.raises(UsageError, match="no store of its own"):
        kept.keys(9)


def test_stores_that_cannot_are_refused_by_name() -> None:
    model = Decoder.Config(
        vocab=VOCAB,
        dim=24,
        context=64,
        stack=Stack.Config(
            layers=[
                Block.Config(
                    mixer=Attention.Config(
                        heads=2, kv_heads=1, head_dim=8, store=Store.Config(policy=Window.Config(window=8))
                    ),
                    mlp=GatedMLP.Config(hidden_dim=32),
                )
            ]
        ),
    ).build()
    with pytest.raises(UnsupportedPair, match="layer 0 is a window"):
        NativeKept(runner(model), budget=8, block=8)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=12), min_size=1, max_size=3),
    st.integers(1, 8),
    st.integers(0, 3),
    st.integers(0, 3),
    st.booleans(),
)
def test_the_best_stay(scores: list[list[int]], budget: int, sinks: int, newest: int, flat: bool) -> None:
    worth = [np.array(score, np.float32) for score in scores]
    if budget <= sinks + newest:
        with pytest.raises(ConfigError):
            choose(worth, budget, sinks=sinks, newest=newest, flat=flat)
        return
    slots = choose(worth, budget, sinks=sinks, newest=newest, flat=flat)
    total = sum(len(kept) for kept in slots)
    assert total == (
        min(budget * len(worth), sum(map(len, worth))) if flat else sum(min(budget, len(w)) for w in worth)
    )
    gone, stay = [], []
    for score, kept in zip(worth, slots, strict=True):
        assert (np.diff(kept) > 0).all()
        always = {*range(min(sinks, len(score))), *range(max(0, len(score) - newest), len(score))}
        assert always <= set(kept.tolist())
        mine = [score[slot] for slot in kept if slot not in always]
        others = [score[slot] for slot in range(len(score)) if slot not in kept]
        gone.append(max(others, default=-1.0))
        stay.append(min(mine, default=9.0))
        assert stay[-1] >= gone[-1]
    assert not flat or min(stay) >= max(gone)
