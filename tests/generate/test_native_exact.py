"""Bit for bit, in every family and at every level: prompts in any pieces, tokens one by one or together, kept beginnings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.cache.codecs import Int8
from orchard.cache.policies import Window
from orchard.cache.store import Store
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.generate.prefix import GRAIN, Prefixes
from orchard.generate.protocol import Use
from orchard.models.language.decoder import Decoder
from orchard.ops.kernels.native import library, why_not
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.load import load_decoder
from tests.generate.test_native_runner import small
from tests.parity.families import CASES, reference, save

pytestmark = pytest.mark.skipif(library() is None, reason=why_not())

LENGTH = 80
LEVELS = (0, 1, 2, 3)


def ids_of(vocab: int, count: int = LENGTH) -> list[int]:
    return np.random.default_rng(7).integers(0, vocab, count).tolist()


def read(native: NativeRunner, ids: list[int], cuts: list[int], use: Use | None = None, more: int = 32) -> object:
    run = native.begin([ids], length=len(ids) + more, held=[use])
    at = run.starts[0]
    for cut in [*sorted(cut for cut in cuts if at < cut < len(ids)), len(ids)]:
        run.read(at, cut)
        at = cut
    return run


@pytest.fixture(scope="module", params=sorted(CASES))
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = save(reference(request.param), tmp_path_factory.mktemp(request.param))
    with open_checkpoint(folder) as checkpoint:
        return load_decoder(checkpoint)


@pytest.mark.parametrize("level", LEVELS)
def test_the_cut_of_a_prompt_changes_nothing(decoder: Decoder, level: int) -> None:
    native = NativeRunner(lower(decoder), decoder=lambda: decoder, threads=2, level=level)
    ids = ids_of(native.plan.vocab)
    whole = read(native, ids, []).first().copy()
    for cuts in ([1], [3, 4, 40], [64], [79], [17, 33, 70]):
        assert np.array_equal(read(native, ids, cuts).first(), whole), cuts


@pytest.mark.parametrize("level", LEVELS)
def test_several_tokens_at_once_are_several_steps(decoder: Decoder, level: int) -> None:
    native = NativeRunner(lower(decoder), decoder=lambda: decoder, threads=2, level=level)
    ids, new = ids_of(native.plan.vocab, 40), ids_of(native.plan.vocab, 60)[40:]
    one, more = read(native, ids, []), read(native, ids, [])
    one.first(), more.first()
    for token in new:
        alone = one.step([token]).copy()
    assert np.array_equal(more.extend([new]), alone)
    assert one.lengths == more.lengths == [60]


def test_rows_may_grow_unevenly() -> None:
    native = NativeRunner(lower(small(Store.Config(), Store.Config())), threads=2)
    run = native.begin([[1, 2, 3], [4, 5, 6, 7]], length=40)
    run.read(0, 4)
    run.first()
    scores = run.extend([[8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [19]]).copy()
    for row, ids in enumerate([[8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [19]]):
        alone = native.begin([[[1, 2, 3], [4, 5, 6, 7]][row]], length=40)
        alone.read(0, 4)
        alone.first()
        for token in ids:
            last = alone.step([token])
        assert np.array_equal(scores[row], last[0])


STORES = {
    "plain": lambda: Store.Config(),
    "int8": lambda: Store.Config(codec=Int8.Config()),
    "ring": lambda: Store.Config(policy=Window.Config(window=48, sinks=2)),
    "int8 ring": lambda: Store.Config(codec=Int8.Config(), policy=Window.Config(window=48, sinks=2)),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("stores", ["bf16", "f32"])
@pytest.mark.parametrize("name", sorted(STORES))
def test_what_was_kept_gives_what_reading_gives(name: str, stores: str, level: int) -> None:
    native = NativeRunner(
        lower(small(STORES[name](), Store.Config(), window=70), stores=stores), threads=2, level=level
    )
    first, ids = ids_of(native.plan.vocab, 3 * GRAIN), ids_of(native.plan.vocab, 5 * GRAIN)
    held = read(native, first, [50]).hold(0, 3 * GRAIN)
    assert held is not None and held.whole == ("ring" in name) and native.fits(held)
    tokens = 3 * GRAIN if held.whole else 2 * GRAIN
    cold, hot = read(native, ids, []), read(native, ids, [201], Use(held, tokens))
    assert hot.starts == [tokens] and cold.starts == [0]
    assert np.array_equal(cold.first(), hot.first())
    for token in (5, 6, 7):
        assert np.array_equal(cold.step([token]), hot.step([token]))


@settings(max_examples=15)
@given(st.lists(st.integers(1, 5 * GRAIN - 1), max_size=5))
def test_any_cut_with_a_window(cuts: list[int]) -> None:
    """Matrix units take queries in tiles; a window makes them see different slots."""
    native = NATIVE.setdefault(0, NativeRunner(lower(small(Store.Config(), Store.Config(), window=70)), threads=1))
    ids = ids_of(native.plan.vocab, 5 * GRAIN)
    assert np.array_equal(read(native, ids, cuts).first(), read(native, ids, []).first())


NATIVE: dict[int, NativeRunner] = {}


def test_a_file_of_what_was_kept(tmp_path: Path) -> None:
    native = NativeRunner(lower(small(Store.Config(), Store.Config())), threads=1)
    other = NativeRunner(lower(small(Store.Config())), threads=1)
    ids, path = ids_of(native.plan.vocab, 150), tmp_path / "kept"
    kept = Prefixes(native)
    assert kept.save(path, ids) == 0 and not path.exists()
    held = read(native, ids, []).hold(0, 2 * GRAIN)
    assert held is not None
    kept.add(held)
    assert kept.save(path, ids) == 2 * GRAIN
    again = Prefixes(native)
    assert again.load(path) == 2 * GRAIN
    found = again.find(ids)
    assert found is not None and found.tokens == 2 * GRAIN
    assert np.array_equal(read(native, ids, [], found).first(), read(native, ids, []).first())
    with pytest.raises(Exception, match="another model"):
        Prefixes(other).load(path)
