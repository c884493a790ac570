"""What counts as a conversation, and what is said when something is wrong with one."""

from __future__ import annotations

from typing import Any

import pytest

from orchard.core.errors import UsageError
from orchard.text import Message, messages_from


def test_accepted_forms() -> None:
    assert messages_from("Hi") == [Message("user", "Hi")]
    assert messages_from([{"role": "developer", "content": "Be kind"}]) == [Message("system", "Be kind")]
    assert messages_from([Message("user", "Hi")]) == [Message("user", "Hi")]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages_from([{"role": "user", "content": parts}])[0].content == "ab"
    call = {"function": {"name": "f", "arguments": {}}}
    calling = messages_from([{"role": "assistant", "content": None, "tool_calls": [call]}])[0]
    assert calling.content == "" and calling.to_dict() == {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = messages_from([{"role": "tool", "content": "4", "tool_call_id": "1", "name": "f"}])[0]
    assert (answer.tool_call_id, answer.name) == ("1", "f")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "empty"),
        ("", "empty"),
        (" \n", "empty"),
        ([{"role": "user", "content": ""}], "empty"),
        (None, "NoneType"),
        (b"Hi", "bytes"),
        ({"role": "user", "content": "Hi"}, "dict"),
        ([5], "message 0 must be a dict"),
        ([{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}], "message 1 has the role 'robot'"),
        ([{"content": "a"}], "message 0 has the role None"),
        ([{"role": ["user"], "content": "a"}], "message 0 has the role"),
        ([{"role": "user"}], "message 0 has content of type NoneType"),
        ([{"role": "user", "content": 5}], "message 0 has content of type int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only text"),
        ([{"role": "user", "content": "a", "name": 5}], "'name'"),
        ([{"role": "user", "content": "a", "colour": 5}], "'colour'"),
        ([{"role": "user", "content": "a", "tool_calls": [{}]}], "only an assistant"),
        ([{"role": "assistant", "content": "a", "tool_calls": "x"}], "tool_calls"),
        ([{"role": "user", "content": "\udc80"}], "Unicode"),
    ],
)
def test_refused_forms(given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        messages_from(given)
    assert caught.value.hint and caught.value.exit_code == 2
