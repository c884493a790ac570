"""Stores of codes in the native engine: what torch gives, bit for bit the same in any cut, copied whole, refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from orchard.cache.codecs import CommVQ
from orchard.cache.policies import Window
from orchard.cache.store import Store
from orchard.core.errors import BadFile
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.generate.protocol import Use
from orchard.models.language.decoder import Decoder
from orchard.ops.kernels.native import library, why_not
from orchard.ops.plan import steps
from orchard.ops.plan.check import check
from orchard.ops.plan.file import from_json, to_json
from orchard.ops.plan.reference import Reference
from tests.cache.vq_files import file_for
from tests.generate.test_native_exact import ids_of, read
from tests.generate.test_native_runner import cached, small

pytestmark = pytest.mark.skipif(library() is None, reason=why_not())

HEADS, DIM, ROUNDS, WORDS = 2, 16, 4, 16
LEVELS = (0, 1)


def codes(layer: int = 0, sinks: int = 3) -> CommVQ.Config:
    file = file_for(HEADS, ROUNDS, WORDS, DIM)
    return CommVQ.Config(file=file, model="a test", layer=layer, rounds=ROUNDS, words=WORDS, sinks=sinks)


def model(sinks: int = 3, **more: Any) -> Decoder:
    """A layer of codes, one that reads its store, and one more of codes."""
    return small(
        Store.Config(codec=codes(0, sinks)), Store.Config(owner=0), Store.Config(codec=codes(1, sinks)), **more
    )


def near(ours: np.ndarray, theirs: np.ndarray) -> None:
    """A choice of codes that is nearly even may fall either way; everything else is the same to 1e-4."""
    off = np.abs(ours - theirs).max(-1) / np.abs(theirs).max()
    assert np.quantile(off, 0.8) < 1e-4, off


@pytest.mark.parametrize("level", LEVELS)
def test_natively_as_in_torch(level: int) -> None:
    decoder, ids = model(), ids_of(96, 50)
    plan = lower(decoder)
    assert plan.whole and [spec.codec for spec in plan.stores] == ["vq", "vq"]
    native = NativeRunner(plan, threads=2, level=level)
    run = read(native, ids[:40], [])
    ours = [run.first()[0].copy(), *(run.step([token])[0].copy() for token in ids[40:])]
    near(np.stack(ours), cached(decoder, ids, 40))


def test_the_first_tokens_stay_as_they_are() -> None:
    """Against the plain twin of the plan, which knows about them too."""
    ids = ids_of(96, 24)
    plan = lower(model(sinks=5))
    native = NativeRunner(plan, threads=1)
    twin = Reference(plan, sequences=1, length=32)
    rows = np.arange(len(ids))
    wanted = twin.run(np.array(ids), np.zeros(len(ids), int), rows, rows)
    near(native.scores(ids), wanted)
    coded = lower(model(sinks=0))
    assert np.abs(NativeRunner(coded, threads=1).scores(ids)[:5] - wanted[:5]).max() > 1e-2


@pytest.mark.parametrize("level", LEVELS)
def test_cuts_and_copies_change_nothing(level: int) -> None:
    native = NativeRunner(lower(model(sinks=3, window=50)), threads=2, level=level)
    ids = ids_of(96, 200)
    whole = read(native, ids, [])
    first = whole.first().copy()
    for cuts in ([1], [2, 3, 64], [33, 150]):
        assert np.array_equal(read(native, ids, cuts).first(), first), cuts
    held = read(native, ids[:150], []).hold(0, 150)
    assert held is not None and native.fits(held)
    again = read(native, ids, [170], Use(held, 128))
    assert again.starts == [128] and np.array_equal(again.first(), first)
    together = read(native, ids, [])
    together.first()
    for token in (5, 6, 7):
        scores = whole.step([token]).copy()
        assert np.array_equal(again.step([token]), scores)
    assert np.array_equal(together.extend([[5, 6, 7]]), scores)


def test_bytes_are_those_of_the_codes() -> None:
    native = NativeRunner(lower(model(sinks=3)), threads=1)
    stores = native.program.stores(1, 4096)
    slot = 2 * (ROUNDS + 2)  # two indices of 4 bits a round, two rounds of values a byte; a prescale each
    assert stores.bytes(2048) - stores.bytes(1024) == 1024 * HEADS * slot * 2
    assert stores.bytes(32) == 32 * HEADS * slot * 2 + 2 * 3 * 2 * HEADS * DIM * 4


def test_a_plan_with_codebooks_goes_through_its_file() -> None:
    plan = lower(model(sinks=3))
    again = from_json(to_json(plan), plan.tensors)
    assert again.stores == plan.stores and again.stores[0].books is not None


def test_what_has_no_native_form_runs_in_torch() -> None:
    windowed = small(Store.Config(codec=codes(), policy=Window.Config(window=8)), Store.Config())
    tree = small(Store.Config(codec=codes()), Store.Config()).config.clone()
    tree.stack.layers[0].mixer.rotary.fraction = 0.5
    for made in (windowed, tree.build()):
        plan = lower(made)
        assert [spec.codec for spec in plan.stores] == ["bf16"]
        assert any(isinstance(step, steps.Torch) for step in plan.steps)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"key_words": 12}, "12 codewords"),
        ({"value_rounds": 5}, "5 rounds"),
        ({"key_rounds": 5}, "numbers, not"),
        ({"values": "codebooks.0.keys"}, "numbers, not"),
        ({"exact": 1 << 20}, "exact"),
        ({"key_rounds": 1 << 20}, "rounds"),
    ],
)
def test_damaged_codebooks_are_found(changes: dict[str, Any], problem: str) -> None:
    plan = lower(model())
    books = plan.stores[0].books
    assert books is not None
    plan.stores[0] = replace(plan.stores[0], books=replace(books, **changes))
    with pytest.raises(BadFile, match=problem):
        check(plan)


def test_numbers_that_are_none_are_found() -> None:
    plan = lower(model())
    plan.tensors["codebooks.0.key_offset"] = np.full_like(plan.tensors["codebooks.0.key_offset"], np.nan)
    with pytest.raises(BadFile, match="not finite"):
        check(plan)
    plan.stores[0] = replace(plan.stores[0], books=None)
    with pytest.raises(BadFile, match="codes without codebooks"):
        check(plan)
