"""Beginnings of prompts that are kept: what is found, what goes, files that are damaged, and engines that use them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import BadFile, UsageError
from orchard.generate.engine import Engine
from orchard.generate.prefix import GRAIN, Prefixes
from orchard.generate.protocol import Held
from orchard.generate.request import Request, Sampling
from orchard.session.model import load


class Owner:
    signature = "mine"

    def fits(self, held: Held) -> bool:
        return held.data.nbytes == 10 * len(held.ids)


def held(ids: tuple[int, ...], whole: bool = False) -> Held:
    return Held(ids, np.arange(10 * len(ids), dtype=np.uint8), whole)


LONG = tuple(range(4 * GRAIN))


def test_the_longest_beginning_is_found_and_one_token_is_left_to_read() -> None:
    kept = Prefixes()
    kept.add(held(LONG[:GRAIN] + (9,) * GRAIN))
    kept.add(held(LONG[: 2 * GRAIN]))
    assert kept.find(LONG).tokens == 2 * GRAIN  # type: ignore[union-attr]
    assert kept.find(LONG[: 2 * GRAIN]).tokens == GRAIN  # type: ignore[union-attr]
    assert kept.find(LONG[: GRAIN + 5] + (3,) * 90).tokens == GRAIN  # type: ignore[union-attr]
    assert kept.find((8, *LONG)) is None and kept.find(LONG[:GRAIN]) is None


def test_what_can_only_be_used_whole() -> None:
    kept = Prefixes()
    kept.add(held(LONG[: 2 * GRAIN], whole=True))
    assert kept.find(LONG[: 2 * GRAIN]) is None
    assert kept.find(LONG).tokens == 2 * GRAIN  # type: ignore[union-attr]


def test_a_longer_one_takes_the_place_of_its_beginning() -> None:
    kept = Prefixes()
    for count in (1, 2, 3):
        kept.add(held(LONG[: count * GRAIN]))
    kept.add(held((7,) * GRAIN))
    assert len(kept) == 2


def test_the_limit_holds_and_the_oldest_go_first() -> None:
    one = held((1,) * GRAIN).nbytes
    kept = Prefixes(limit=2 * one)
    for token in (1, 2):
        kept.add(held((token,) * GRAIN))
    assert kept.find((1,) * 100) is not None  # used, so the other one is the oldest now
    kept.add(held((3,) * GRAIN))
    assert kept.nbytes <= 2 * one and kept.find((2,) * 100) is None and kept.find((1,) * 100) is not None
    assert Prefixes(limit=0).worth(LONG, None) == 0
    with pytest.raises(UsageError):
        Prefixes(limit=-1)


def test_worth_only_what_is_new() -> None:
    kept = Prefixes()
    kept.add(held(LONG[: 2 * GRAIN]))
    assert kept.worth(LONG[: 2 * GRAIN + 5], kept.find(LONG[: 2 * GRAIN + 5])) == 0
    assert kept.worth(LONG, kept.find(LONG)) == 4 * GRAIN
    assert kept.worth(LONG[: GRAIN - 1], None) == 0


def saved(folder: Path) -> Path:
    kept, path = Prefixes(Owner()), folder / "kept"
    kept.add(held(LONG))
    assert kept.save(path, LONG) == len(LONG)
    return path


def test_a_file_round_trip(tmp_path: Path) -> None:
    again = Prefixes(Owner())
    assert again.load(saved(tmp_path)) == len(LONG)
    use = again.find((*LONG, 5))
    assert use is not None and use.held.ids == LONG and np.array_equal(use.held.data, held(LONG).data)


def test_files_for_others(tmp_path: Path) -> None:
    path = saved(tmp_path)
    other = Owner()
    other.signature = "another"
    with pytest.raises(BadFile, match="another model"):
        Prefixes(other).load(path)
    with pytest.raises(BadFile, match="no file of keys"):
        Prefixes(Owner()).load(tmp_path / "absent")
    assert Prefixes().save(tmp_path / "nobody", LONG) == 0 and not (tmp_path / "nobody").exists()


@given(st.data())
def test_damage_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = saved(tmp_path_factory.mktemp("damage"))
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    kept = Prefixes(Owner())
    try:
        kept.load(path)
    except BadFile:
        assert len(kept) == 0
    else:  # a change in the words of the header that changes no meaning, such as a key's white space
        use = kept.find((*LONG, 5))
        assert use is not None and use.held.ids == LONG and np.array_equal(use.held.data, held(LONG).data)


@pytest.mark.real
def test_an_answer_is_the_same_hot_and_cold(smollm2: Path) -> None:
    model = load("smollm2")
    engine = Engine(model.runner, model.tokenizer)
    ids = tuple(model.tokenizer.encode("A fox and a crow met by the river, and talked about the weather. " * 12))
    request = Request(ids, max_tokens=12, sampling=Sampling(temperature=1.0), seed=5)
    cold, hot = engine.answer([request])[0], engine.answer([request])[0]
    assert cold.usage.cached == 0 and hot.usage.cached == (len(ids) - 1) // GRAIN * GRAIN
    assert cold.ids == hot.ids and cold.usage.calls == hot.usage.calls == 12
    longer = Request((*ids, *cold.ids, 30, 31), max_tokens=8, sampling=Sampling(temperature=1.0), seed=6)
    apart = Engine(model.runner, model.tokenizer, prefix_bytes=0)
    assert engine.answer([longer])[0].ids == apart.answer([longer])[0].ids
    assert len(apart.prefixes) == 0


@pytest.mark.real
def test_a_warm_prompt_need_not_be_read(smollm2: Path) -> None:
    model = load("smollm2")
    engine = Engine(model.runner, model.tokenizer)
    ids = tuple(model.tokenizer.encode("One, two, three, four, five, six. " * 15))
    assert engine.warm(ids) == len(ids) // GRAIN * GRAIN == engine.warm(ids)
    assert engine.answer([Request((*ids, 5), max_tokens=1)])[0].usage.cached == len(ids) // GRAIN * GRAIN
    assert engine.warm(ids[:10]) == 0
