"""Conversations with questions: made from a seed, and read from files in the formats of LoCoMo and RealTalk."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.bench.memory_files import locomo, realtalk
from orchard.bench.memory_tasks import FACTS, TOGETHER, recall, recalls
from orchard.bench.memory_words import OPENERS, PEOPLE, TOPICS
from orchard.core.errors import BadFile, UsageError


def count(text: str) -> int:
    return len(text.split())


def test_small_talk_gives_nothing_away() -> None:
    for topic in TOPICS:
        said = " ".join([*OPENERS, *PEOPLE, *topic.chatter]).lower()
        values = {value.lower() for one in topic.relations for value in one.values}
        assert not values & set(said.replace(".", " ").replace(",", " ").split())
    assert all(len(set(one.values)) == 8 for topic in TOPICS for one in topic.relations)
    stems = [one.stem for topic in TOPICS for one in topic.relations]
    assert len(set(stems)) == len(stems)


@settings(max_examples=25)
@given(seed=st.integers(0, 999), tokens=st.integers(64, 900), tellers=st.integers(1, 4), questions=st.integers(1, 30))
def test_every_question_was_answered_in_passing_and_only_once(
    seed: int, tokens: int, tellers: int, questions: int
) -> None:
    talk = recall(seed, tokens=tokens, questions=questions, count=count, tellers=tellers)
    assert talk == recall(seed, tokens=tokens, questions=questions, count=count, tellers=tellers)
    length = sum(count(line) for line in talk.utterances)
    assert tokens - count(talk.begin) <= length < tokens + 20 * TOGETHER and len(talk.utterances) % TOGETHER == 0
    assert 1 <= len(talk.questions) <= min(questions, FACTS * len(talk.utterances) // TOGETHER)
    assert len({one.text for one in talk.questions}) == len(talk.questions)
    for one in talk.questions:
        who, stem = one.prompt.split("\n")[1].split(": ")
        right = one.choices[one.answer]
        said = [
            at
            for at, line in enumerate(talk.utterances)
            if line.startswith(f"{who}: ") and f" {stem}".lower() in line.lower()
        ]
        assert tuple(said) == one.evidence and talk.utterances[said[0]].endswith(f"{right}.\n")
        assert len(set(one.choices)) == 8 and one.prompt.endswith(stem) and right not in one.prompt


def test_who_said_it_matters_and_answers_are_anywhere() -> None:
    talks = recalls(3, 20, tokens=1200, questions=20, count=count)
    assert len({talk.name for talk in talks}) == 20
    for talk in talks[:3]:
        stems = Counter(line.split(": ", 1)[1].rsplit(" ", 1)[0].split(", ", 1)[-1] for line in talk.utterances)
        assert max(stems.values()) >= 2
    places = Counter(one.answer for talk in talks for one in talk.questions)
    assert set(places) == set(range(8)) and max(places.values()) < 0.25 * places.total()


@pytest.mark.parametrize("wrong", [{"tokens": 8}, {"questions": 0}, {"tellers": 0}, {"tellers": 99}])
def test_chats_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        recall(0, **{"tokens": 200, "questions": 3, "count": count, **wrong})


# Files ----------------------------------------------------------------------------------------------------------------


def turn(number: str, text: str, key: str, **more: Any) -> dict[str, Any]:
    return {"speaker": "Ann" if number[-1] in "13" else "Bo", "dia_id": number, key: text, **more}


def conversation(key: str) -> dict[str, Any]:
    return {
        "session_2": [turn("D2:1", "My hat is red.", key, blip_caption="a hat"), turn("D2:2", "I like   it.", key)],
        "session_1": [turn("D1:1", "Tea is ready.", key), turn("D1:2", "", key), turn("D1:3", "I was in Rome.", key)],
        "session_1_date_time": "1 May",
        "session_2_date_time": "2 May",
        "speaker_a": "Ann",
    }


QA = [
    {"question": "What is ready?", "answer": "tea", "evidence": ["D1:1"], "category": 1},
    {"question": "What colour?", "answer": "red", "evidence": ["D2:1; D1:1"], "category": 1},
    {"question": "Which year?", "answer": 2022, "evidence": ["D:1:3"], "category": 1},
    {"question": "Alone in its kind?", "answer": "yes", "evidence": ["D1:1"], "category": 2},
    {"question": "Without evidence?", "answer": "no", "evidence": [], "category": 1},
    {"question": "Elsewhere?", "answer": "far", "evidence": ["D9:9"], "category": 1},
    {"question": "Not said?", "adversarial_answer": "x", "evidence": ["D1:1"], "category": 5},
]


@pytest.mark.parametrize("kind", ["locomo", "realtalk"])
def test_files_of_both_kinds(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    if kind == "locomo":
        path.write_text(json.dumps([{"sample_id": "c1", "conversation": conversation("text"), "qa": QA}]))
        (talk,) = locomo(path)
        assert talk.name == "locomo c1"
    else:
        path.write_text(json.dumps({"name": {"speaker_1": "Ann"}, **conversation("clean_text"), "qa": QA}))
        (talk,) = realtalk(tmp_path)
        assert talk.name == "realtalk talk" and realtalk(path) == [talk]
    assert talk.utterances[:2] == ("[1 May] Ann: Tea is ready.\n", "Ann: I was in Rome.\n")
    assert talk.utterances[2] == "[2 May] Ann: My hat is red. (shows a picture: a hat)\n"
    assert talk.utterances[3] == "Bo: I like it.\n"
    assert {one.text: one.evidence for one in talk.questions} == {
        "What is ready?": (0,),
        "What colour?": (0, 2),
        "Which year?": (1,),
    }
    for one in talk.questions:
        assert one.choices[one.answer] in (" tea", " red", " 2022") and one.prompt == f"Question: {one.text}\nAnswer:"
        assert set(one.choices) == {" tea", " red", " 2022", " no", " far"}
    start = talk.cut(count(talk.begin) + 11, 9, count)
    assert len(start.utterances) == 2 and {one.text for one in start.questions} == {"What is ready?", "Which year?"}
    assert talk.cut(None, 1, count).utterances == talk.utterances and len(talk.cut(None, 1, count).questions) == 1


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[3]",
        "[{}]",
        '[{"conversation": {"session_1": 5}, "qa": []}]',
        '[{"conversation": {"session_1": []}, "qa": []}]',
        '[{"conversation": {"session_1": [7]}, "qa": []}]',
        '[{"conversation": {"session_1": []}}]',
    ],
)
def test_files_that_are_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(BadFile):
        locomo(path)
    with pytest.raises(BadFile):
        realtalk(path)
    with pytest.raises(BadFile):
        locomo(tmp_path / "missing.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadFile):
        realtalk(tmp_path / "empty")
