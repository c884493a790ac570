"""Conversations from files: LoCoMo and RealTalk, with their own questions.

LoCoMo (`locomo10.json`): a list of conversations, or one; each has `conversation`, with `session_N` lists of `speaker`, `dia_id`
and `text`, and `qa`. RealTalk (`Chat_*.json`, or a folder of them): one conversation a file, the sessions beside `qa`, text in
`clean_text`. Their questions have one answer in words. Here it stands among answers to other questions of the same kind about
the same people: what is measured is not what papers measure by F1 or by a judge, and does not compare with it. Questions without
an answer in the conversation are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from orchard.bench.memory_tasks import Question, Talk, distractors
from orchard.core.errors import BadFile

CHOICES = 8
_SESSION = re.compile(r"session_(\d+)")
_TURN = re.compile(r"D:?(\d+):(\d+)")
ADVERSARIAL = 5
"""LoCoMo's kind of question that the conversation does not answer."""


def locomo(path: Path, seed: int = 0) -> list[Talk]:
    data = _json(path)
    items = data if isinstance(data, list) else [data]
    return [
        _talk(path, f"locomo {item.get('sample_id', number)}", _part(path, item, "conversation"), item, "text", seed)
        for number, item in enumerate(_objects(path, items))
    ]


def realtalk(path: Path, seed: int = 0) -> list[Talk]:
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise BadFile(f"there are no .json files in {path}", hint="name a RealTalk file, or a folder of them")
    talks = []
    for file in files:
        (item,) = _objects(file, [_json(file)])
        talks.append(_talk(file, f"realtalk {file.stem}", item, item, "clean_text", seed))
    return talks


READERS = {"locomo": locomo, "realtalk": realtalk}


def _talk(path: Path, name: str, sessions: dict[str, Any], item: dict[str, Any], key: str, seed: int) -> Talk:
    lines: list[str] = []
    places: dict[tuple[int, int], int] = {}
    numbers = sorted(int(found[1]) for field in sessions if (found := _SESSION.fullmatch(field)))
    for number in numbers:
        turns = sessions[f"session_{number}"]
        if not isinstance(turns, list):
            raise BadFile(f"{path}: session {number} is no list of turns", hint="give a file as its authors publish it")
        when = sessions.get(f"session_{number}_date_time")
        for turn in _objects(path, turns):
            text = " ".join(str(turn.get(key) or turn.get("text") or "").split())
            picture = turn.get("blip_caption")
            text += f" (shows a picture: {picture})" if isinstance(picture, str) and picture else ""
            if not text:
                continue
            stamp = f"[{when}] " if isinstance(when, str) else ""
            when = None
            for found in _TURN.findall(str(turn.get("dia_id", ""))):
                places[int(found[0]), int(found[1])] = len(lines)
            lines.append(f"{stamp}{turn.get('speaker', 'Somebody')}: {text}\n")
    questions = _questions(path, item.get("qa"), places, seed)
    if not lines or not questions:
        raise BadFile(f"{path} holds no conversation with questions", hint="give a file as its authors publish it")
    return Talk(name, "This is a conversation over several days.\n", tuple(lines), tuple(questions))


def _questions(path: Path, items: Any, places: dict[tuple[int, int], int], seed: int) -> list[Question]:
    if not isinstance(items, list):
        raise BadFile(f"{path} has no list of questions (`qa`)", hint="give a file as its authors publish it")
    known = [
        item for item in _objects(path, items) if item.get("category") != ADVERSARIAL and _answer(item) is not None
    ]
    found = []
    for number, item in enumerate(known):
        right, asked = str(_answer(item)), str(item.get("question", ""))
        others = [str(_answer(other)) for other in known if other.get("category") == item.get("category")]
        dice = Random(f"{seed} {number} {asked}")
        choices, answer = distractors(right, others, CHOICES, dice)
        turns = [(int(a), int(b)) for a, b in _TURN.findall(str(item.get("evidence", "")))]
        if len(choices) < 2 or not turns or any(turn not in places for turn in turns):
            continue
        evidence = tuple(sorted(places[turn] for turn in turns))
        prompt = f"Question: {asked}\nAnswer:"
        found.append(Question(asked, prompt, tuple(f" {one}" for one in choices), answer, evidence))
    return found


def _answer(item: dict[str, Any]) -> str | None:
    given = item.get("answer")
    text = " ".join(str(given).split()) if isinstance(given, str | int | float) else ""
    return text or None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}", hint="name a file that is there") from error
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path} is no JSON: {error}", hint="give a file as its authors publish it") from error


def _part(path: Path, item: dict[str, Any], name: str) -> dict[str, Any]:
    (part,) = _objects(path, [item.get(name)])
    return part


def _objects(path: Path, items: Sequence[Any]) -> list[dict[str, Any]]:
    for item in items:
        if not isinstance(item, dict):
            raise BadFile(
                f"{path} has a {type(item).__name__} where an object belongs",
                hint="give a file as its authors publish it",
            )
    return list(items)
