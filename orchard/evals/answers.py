"""Tasks as a file of JSON lines: a prompt, and what has to be in the answer.

    {"prompt": "What is the capital of France?", "expected": "Paris"}
    {"messages": [{"role": "user", "content": "2 + 2 = ?"}], "expected": ["4", "four"], "exact": false, "task": "sums"}

An answer is right when it holds one of the expected texts (the whole of it, where `exact`), whatever the case of its letters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchard.core.errors import UsageError

LONGEST = 1 << 26
TASK = "tasks"


class BadTasks(UsageError):
    """A file of tasks that cannot be asked."""

    code = "bad-tasks"


@dataclass(frozen=True)
class Question:
    prompt: Any
    """A text, or messages."""
    expected: tuple[str, ...]
    exact: bool = False
    task: str = TASK

    def right(self, answer: str) -> bool:
        said = answer.strip().casefold()
        wanted = [text.strip().casefold() for text in self.expected]
        return said in wanted if self.exact else any(text in said for text in wanted)


@dataclass(frozen=True)
class Questions:
    """Asked of a model with `generate_many`, they give a score from 0 to 1 for each task."""

    questions: tuple[Question, ...]
    max_tokens: int = 64

    def __call__(self, model: Any) -> dict[str, float]:
        answers = model.generate_many([one.prompt for one in self.questions], max_tokens=self.max_tokens)
        found: dict[str, list[bool]] = {}
        for one, answer in zip(self.questions, answers, strict=True):
            found.setdefault(one.task, []).append(one.right(answer.text))
        return {task: sum(right) / len(right) for task, right in found.items()}


def read_questions(path: str | Path, max_tokens: int = 64) -> Questions:
    """The questions of a file; one that cannot be asked is refused by its line."""
    place = Path(path)
    try:
        if place.stat().st_size > LONGEST:
            raise BadTasks(f"{place} is larger than {LONGEST:,} bytes", hint="ask fewer questions")
        lines = place.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadTasks(f"{place} cannot be read: {error.strerror}", hint="name a .jsonl file of questions") from error
    except UnicodeDecodeError as error:
        raise BadTasks(f"{place} is not UTF-8", hint="convert it first") from error
    found = [_question(line, f"{place}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise BadTasks(f"{place} holds no questions", hint='write {"prompt": "…", "expected": "…"}')
    return Questions(tuple(found), max_tokens)


def _question(line: str, place: str) -> Question:
    hint = 'write {"prompt": "…", "expected": "…"}'
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadTasks(f"{place}: no JSON: {error}", hint=hint) from error
    if not isinstance(row, Mapping) or not (isinstance(row.get("prompt"), str) ^ isinstance(row.get("messages"), list)):
        raise BadTasks(f"{place}: neither a prompt nor messages, or both", hint=hint)
    wanted = row.get("expected", row.get("completion"))
    texts: Sequence[Any] = [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, list) else []
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise BadTasks(f"{place}: nothing is expected of the answer", hint=hint)
    exact, task = row.get("exact", False), row.get("task", TASK)
    if not isinstance(exact, bool) or not isinstance(task, str) or not task:
        raise BadTasks(f"{place}: exact is true or false, and task a name", hint=hint)
    return Question(row.get("prompt", row.get("messages")), tuple(texts), exact, task)
