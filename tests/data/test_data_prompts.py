"""Rows that are to be answered: what they may look like, and that nothing of them is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchard.core.errors import ConfigError
from orchard.data import BadSample, Jsonl
from orchard.data.rows import asked

USER = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": "Hello!"}


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"prompt": "q"}, {"prompt": "q"}),
        ({"prompt": "q", "completion": "a", "level": 3}, {"prompt": "q", "completion": "a", "level": 3}),
        ({"prompt": [USER], "answer": ["x", 1]}, {"messages": [USER], "answer": ["x", 1]}),
        ({"messages": [USER, SAID]}, {"messages": [USER], "completion": "Hello!"}),
        ({"messages": [USER, SAID], "completion": "other"}, {"messages": [USER], "completion": "other"}),
        ({"messages": [USER, SAID, USER]}, {"messages": [USER, SAID, USER]}),
        ({"messages": [USER], "tools": [{"type": "function"}]}, {"messages": [USER], "tools": [{"type": "function"}]}),
    ],
)
def test_questions_keep_all_their_fields(row: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert asked(row, "here") == wanted


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "wrong-type"),
        ({"text": "t"}, "no-form"),
        ({"prompt": " "}, "empty"),
        ({"prompt": 3}, "wrong-type"),
        ({"messages": []}, "empty"),
        ({"messages": [USER, USER]}, "roles"),
        ({"messages": [{"role": "system", "content": "Be kind."}]}, "roles"),
        ({"prompt": "q", "tools": "none"}, "wrong-type"),
    ],
)
def test_what_is_no_question_is_refused(row: Any, reason: str) -> None:
    with pytest.raises(BadSample, match=r"^here: ") as said:
        asked(row, "here")
    assert said.value.reason == reason


def test_files_of_questions(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in ({"prompt": "q"}, {"text": "t"}, {"prompt": "r", "x": 1}))
    )
    for order in ("file", "shuffled"):
        reader = Jsonl.Config(paths=str(path), form="prompts", on_bad="skip", order=order).build()
        found = sorted(reader, key=lambda row: row.place)
        assert [row.data for row in found] == [{"prompt": "q"}, {"prompt": "r", "x": 1}]
        assert reader.counts()["bad"] == 1
    with pytest.raises(ConfigError, match="form"):
        Jsonl.Config(paths=str(path), form="questions").build()
