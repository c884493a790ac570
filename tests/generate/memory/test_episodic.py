"""Episodic memory: each question meets the cache of its topic, switches lose nothing, and the budget holds throughout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchard.core.errors import BadFile, UsageError
from orchard.generate.memory.episodes import Utterance
from orchard.generate.memory.episodic import EpisodicMemory, prefill
from orchard.generate.memory.lexical import Lexical
from orchard.generate.memory.shelf import Shelf
from tests.generate.memory.test_torch_kept import kept

TOPICS = ("tea", "sea", "sky")


def talk(count: int = 24) -> list[Utterance]:
    """Two utterances about a topic, then two about the next."""
    dice = np.random.default_rng(0)
    words = [TOPICS[number // 2 % 3] for number in range(count)]
    return [
        Utterance(f"{word} number{number}", (TOPICS.index(word), *dice.integers(3, 29, 3).tolist()))
        for number, word in enumerate(words)
    ]


def memory(**more: Any) -> EpisodicMemory:
    given = {"episodes": 3, "medoids": 2, "segment": 2, "begin": [28]} | more
    return EpisodicMemory(kept("probe"), Lexical(), **given)


def test_each_topic_has_a_cache_made_by_its_own_words() -> None:
    one = memory()
    one.add(talk())
    assert [one.select(f"the {topic}") for topic in TOPICS] == [0, 1, 2] and one.builds == 1
    assert one.episodes is not None
    for number, topic in enumerate(TOPICS):
        assert {one.segments[place].utterances[0].tokens[0] for place in one.episodes.members[number]} == {number}
        assert one.prompt(number)[::4] == [TOPICS.index(topic)] * 4
    assert one.tokens_read == 3 * 97 and one.tokens_looked > 0 and one.peak == 20
    one.select("the sky")
    alone = kept("probe")
    prefill(alone, [28, *(token for said in talk() for token in said.tokens)], lambda _: one.prompt(2))
    assert np.array_equal(alone.read([5], wanted=1), one.read([5], wanted=1))


@pytest.mark.parametrize("on_disk", [False, True])
def test_switching_writes_back(on_disk: bool, tmp_path: Path) -> None:
    one = memory(shelf=Shelf(tmp_path if on_disk else None))
    one.add(talk())
    one.select("tea")
    one.tell(Utterance("tea again", (0, 5, 6)))
    used = one.kept.used
    want = one.kept.save()
    one.select("sea")
    assert one.kept.used == used - 3
    one.select("tea")
    assert all(np.array_equal(array, one.kept.save()[name]) for name, array in want.items())
    assert one.shelf.nbytes > 0 and len(list(tmp_path.iterdir())) == (3 if on_disk else 0)
    if on_disk:
        (tmp_path / "episode-1.safetensors").write_bytes(b"nothing")
        with pytest.raises(BadFile):
            one.select("sea")
        one.build()  # the conversation is still there
        assert one.select("sea") == 1


def test_a_conversation_grows_and_is_clustered_again_within_its_budget() -> None:
    one = memory(tau=0.3)
    said = talk(60)
    before = one.nbytes
    for each in said:
        scores = one.tell(each, wanted=1)
        assert scores.shape == (1, 29) and np.isfinite(scores).all()
        assert one.kept.used <= one.kept.peak <= 20 and one.nbytes == before
    assert one.builds >= 2 and len(one.history) == 60 and one.peak <= 20
    assert [one.select(topic) for topic in TOPICS] == [0, 1, 2]
    built = one.builds
    assert one.select("a quite different matter") == 3 and one.kept.used == 1  # only what every cache begins with
    one.said(Utterance("a quite different matter", (9, 9)))
    assert one.select("the sky") == 2 and one.select("a quite different matter") == 3 and one.builds == built


def test_bad_input() -> None:
    one = memory()
    with pytest.raises(UsageError):
        one.build()
    with pytest.raises(UsageError):
        one.read([1])
    wrong = EpisodicMemory(kept("probe"), lambda texts: np.ones(3))
    wrong.add(talk())
    with pytest.raises(UsageError, match="embedder"):
        wrong.select("tea")
