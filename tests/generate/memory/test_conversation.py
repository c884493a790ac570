"""Conversations in fixed memory: as any other until something is forgotten, and never more than the budget after."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import BadFile, UsageError
from orchard.generate.engine import Engine
from orchard.generate.memory.conversation import Conversation
from orchard.generate.memory.episodes import Utterance
from orchard.generate.memory.episodic_conversation import EpisodicConversation
from orchard.generate.memory.native_kept import NativeKept
from orchard.generate.memory.runner import MemoryRunner
from orchard.generate.native import NativeRunner
from orchard.generate.request import Request
from orchard.text.tokenizer import Tokenizer
from tests.generate.memory.test_native_kept import VOCAB, runner, some, tiny

BUDGET, BLOCK = 24, 16


@pytest.fixture(scope="module")
def native() -> NativeRunner:
    return runner(tiny())


def conversation(native: NativeRunner, scoring: str = "recent", budget: int = BUDGET) -> Conversation:
    return Conversation(NativeKept(native, budget=budget, block=BLOCK, sinks=2, scoring=scoring), [1, 2])  # type: ignore[arg-type]


def spoken(ids: list[int]) -> list[Utterance]:
    """Five tokens each, about one of two topics."""
    cut = [tuple(ids[at : at + 5]) for at in range(0, len(ids), 5)]
    return [Utterance("low words" if one[0] < VOCAB // 2 else "high tones", one) for one in cut]


@settings(max_examples=25)
@given(turns=st.lists(st.integers(1, 30), min_size=1, max_size=8), scoring=st.sampled_from(["recent", "snap", "probe"]))
def test_never_more_than_the_budget_and_a_block(turns: list[int], scoring: str) -> None:
    talk = conversation(runner(tiny()), scoring)
    ids: list[int] = []
    memory = None
    for number, turn in enumerate(turns):
        ids += some(turn, number)
        known = talk.resume(ids)
        assert known == talk.kept.used if not talk.forgotten else known == len(talk.ids)
        scores = talk.read(ids[known:], wanted=1)
        assert scores.shape == (1, VOCAB) and np.isfinite(scores).all()
        assert talk.ids == ids and talk.kept.used <= talk.kept.peak <= BUDGET + BLOCK
        memory = memory or talk.nbytes
    assert not talk.restarts


def test_before_anything_is_forgotten_it_is_the_plain_model(native: NativeRunner) -> None:
    talk, ids = conversation(native, budget=100), some(60)
    for upto in (20, 41, 60):
        known = talk.resume(ids[:upto])
        scores = talk.read(ids[known:upto], wanted=1)
    slots = native.begin([ids], length=64)
    slots.read(0, 60)
    np.testing.assert_allclose(scores, slots.first(), atol=1e-4)


def test_what_differs_is_taken_back_or_all_is_read_again(native: NativeRunner) -> None:
    talk, ids = conversation(native), some(20)
    talk.read(ids)
    other = [*ids[:15], *some(9, 3)]
    assert talk.goes_on(other) == 15 and talk.resume(other) == 15 and talk.ids == ids[:15]
    first = talk.read(other[15:], wanted=1)
    fresh = conversation(native)
    np.testing.assert_allclose(first, fresh.read(other, wanted=1), atol=1e-4)
    talk.read(some(60, 4))
    assert talk.forgotten and talk.goes_on(other) == 0
    assert talk.resume(other) == 0 and talk.restarts == 1 and talk.ids == []
    np.testing.assert_allclose(talk.read(other, wanted=1), first, atol=1e-4)


def test_the_last_token_is_always_left_to_read(native: NativeRunner) -> None:
    talk, ids = conversation(native), some(12)
    talk.read(ids)
    assert talk.resume(ids) == 11


def test_saved_and_restored_it_goes_on(native: NativeRunner) -> None:
    talk, other, ids = conversation(native, "snap"), conversation(native, "snap"), some(70)
    talk.read(ids)
    other.load(talk.save())
    assert other.ids == ids and other.facts() == talk.facts()
    assert (talk.read(some(9, 1), wanted=2) == other.read(some(9, 1), wanted=2)).all()
    with pytest.raises(BadFile, match="tokens with"):
        conversation(native, "snap", budget=32).load(talk.save())
    with pytest.raises(BadFile, match="no saved"):
        other.load({})


def test_an_episode_is_open_for_what_is_asked(native: NativeRunner) -> None:
    kept = NativeKept(native, budget=BUDGET, block=BLOCK, sinks=2, scoring="probe")

    def embed(texts: list[str]) -> np.ndarray:
        return np.array([[1.0, 0.0] if "low" in text else [0.0, 1.0] for text in texts])

    talk = EpisodicConversation(kept, embed, spoken, episodes=2, segment=1)  # type: ignore[arg-type]
    low, high = [3] * 5, [VOCAB - 3] * 5
    ids: list[int] = []
    opened = []
    for turn in range(24):
        ids += [*(low if turn % 3 else high), *some(5, turn)]
        ids[-5] = low[0]
        known = talk.resume(ids)
        talk.read(ids[known:], wanted=1)
        assert talk.ids == ids and kept.peak <= BUDGET + BLOCK
        opened.append(talk.open)
    facts = talk.facts()
    assert facts["episodes"] == 2 and facts["switches"] > 3 and set(opened[-6:]) == {0, 1}
    assert opened[-3:] == opened[-6:-3]  # the same topic opens the same episode


# Through the engine -----------------------------------------------------------------------------------------------------------


def engines(
    native: NativeRunner, tokenizer: Tokenizer, most: int = 1, budget: int = BUDGET
) -> tuple[Engine, MemoryRunner]:
    memory = MemoryRunner(lambda: conversation(native, budget=budget), VOCAB, most)
    return Engine(memory, tokenizer, slots=most), memory


def test_turn_after_turn_in_the_same_memory(native: NativeRunner, tokenizer: Tokenizer) -> None:
    engine, memory = engines(native, tokenizer)
    ids, sizes, known = tuple(some(10)), set(), 0
    for turn in range(40):
        answer = engine.answer([Request(ids, max_tokens=5)])[0]
        assert answer.usage.cached == known
        known = len(ids) + len(answer.ids) - (answer.finish == "length")  # the last token was not read
        ids = (*ids, *answer.ids, *some(8, turn))
        sizes.add(memory.nbytes)
    (talk,) = memory.conversations
    assert len(ids) > 400 and len(sizes) == 1 and talk.kept.peak <= BUDGET + BLOCK and not talk.restarts


def test_conversations_side_by_side_keep_apart(native: NativeRunner, tokenizer: Tokenizer) -> None:
    engine, memory = engines(native, tokenizer, most=2, budget=100)
    plain = Engine(native, tokenizer)
    talks = [tuple(some(12, seed)) for seed in range(2)]
    for turn in range(4):
        requests = [Request(ids, max_tokens=4) for ids in talks]
        found = engine.answer(requests)
        assert [one.ids for one in found] == [one.ids for one in plain.answer(requests)]
        assert turn == 0 or all(one.usage.cached > 10 for one in found)
        talks = [(*ids, *one.ids, *some(3, turn)) for ids, one in zip(talks, found, strict=True)]
    third = Request(tuple(some(20, 9)), max_tokens=4)
    assert engine.answer([third])[0].ids == plain.answer([third])[0].ids  # takes the place of the first
    assert len(memory.conversations) == 2


def test_a_request_that_fails_harms_no_other(native: NativeRunner, tokenizer: Tokenizer) -> None:
    engine, _ = engines(native, tokenizer, budget=100)
    ids = tuple(some(10))
    first = engine.answer([Request(ids, max_tokens=4)])[0]

    def broken(scores: np.ndarray, state: object) -> np.ndarray:
        raise RuntimeError("a rule that fails")

    with pytest.raises(RuntimeError):
        engine.answer([Request((*ids, *first.ids, 5), max_tokens=4, rules=(broken,))])
    assert engine.answer([Request(ids, max_tokens=4)])[0].ids == first.ids
    with pytest.raises(UsageError, match="no adapter"):
        engine.answer([Request(ids, adapter="other")])


def test_a_file_of_a_conversation(native: NativeRunner, tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine, _ = engines(native, tokenizer)
    ids = tuple(some(90))
    engine.answer([Request(ids, max_tokens=4)])
    assert engine.prefixes.save(tmp_path / "talk", ids) >= 90
    other, memory = engines(native, tokenizer)
    assert other.prefixes.load(tmp_path / "talk") >= 90
    longer = Request((*ids, 7, 8), max_tokens=4)
    assert other.answer([longer])[0].usage.cached >= 89 and memory.conversations[0].restarts == 0
    (tmp_path / "talk").write_bytes(b"nothing")
    with pytest.raises(BadFile, match="no saved conversation"):
        other.prefixes.load(tmp_path / "talk")
    with pytest.raises(UsageError, match="conversations"):
        MemoryRunner(lambda: conversation(native), VOCAB, 0)
