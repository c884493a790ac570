"""Sticky keys and the choice of a replica: pure functions, no Ray."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.serve.cluster.sticky import CHARACTERS, EASY, choose, order, sticky_key

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "You are kind."}
FIRST = {"role": "user", "content": "What is a fig?"}


def key(path: str, **fields: Any) -> str | None:
    return sticky_key(path, json.dumps(fields).encode())


def chat(*messages: dict[str, Any], model: str = "smollm2", **more: Any) -> str | None:
    return key(CHAT, model=model, messages=list(messages), **more)


def test_every_turn_of_a_conversation_has_the_key_of_its_first() -> None:
    later = [{"role": "assistant", "content": "A fruit."}, {"role": "user", "content": "And a plum?"}]
    assert chat(SYSTEM, FIRST) == chat(SYSTEM, FIRST, *later) == chat(SYSTEM, FIRST, *later, *later)
    assert chat(SYSTEM, FIRST, temperature=0.3, stream=True) == chat(SYSTEM, FIRST)


def test_what_begins_differently_has_another_key() -> None:
    base = chat(SYSTEM, FIRST)
    other = {"role": "user", "content": "What is a plum?"}
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    keys = [base, chat(FIRST), chat(SYSTEM, other), chat(SYSTEM, FIRST, model="x"), chat(SYSTEM, FIRST, tools=[tool])]
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_only_the_beginning_of_a_text_counts() -> None:
    same = "s" * CHARACTERS
    assert chat({"role": "user", "content": same + "a"}) == chat({"role": "user", "content": same + "b"})
    assert chat({"role": "user", "content": same[1:] + "a"}) != chat({"role": "user", "content": same[1:] + "b"})


def test_parts_and_plain_text_of_one_protocol_are_the_same_beginning() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "a fig?"}]}
    assert chat(parts) == chat(FIRST)


def test_every_protocol_has_keys() -> None:
    messages = key("/v1/messages", model="m", system="Be kind.", messages=[FIRST])
    listed = key("/v1/messages", model="m", system=[{"type": "text", "text": "Be kind."}], messages=[FIRST])
    assert messages == listed is not None
    said = key("/v1/responses", model="m", instructions="Be kind.", input="What is a fig?")
    items = key("/v1/responses", model="m", instructions="Be kind.", input=[FIRST])
    assert said == items is not None
    assert said != key("/v1/responses", model="m", instructions="Be rude.", input="What is a fig?")


def test_raw_prompts() -> None:
    path = "/v1/completions"
    text = "x" * CHARACTERS
    assert key(path, model="m", prompt=text + "one") == key(path, model="m", prompt=text + "two") is not None
    assert key(path, model="m", prompt=["a", "b"]) == key(path, model="m", prompt="a")
    ids = list(range(200))
    assert (
        key(path, model="m", prompt=ids) == key(path, model="m", prompt=[*ids, 7]) == key(path, prompt=[ids], model="m")
    )
    assert key(path, model="m", prompt=ids) != key(path, model="m", prompt=ids[1:])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", b'{"input": "a"}'),
        ("/v1/models", b""),
        ("/v1/messages/count_tokens", b'{"messages": [{"role": "user", "content": "a"}]}'),
        (CHAT, b"not json"),
        (CHAT, b"\xff\xfe"),
        (CHAT, b"[1, 2]"),
        (CHAT, b'{"messages": []}'),
        (CHAT, b'{"messages": 5}'),
        (CHAT, b"[" * 100_000),
        (CHAT, b'{"messages": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"),
        ("/v1/completions", b'{"prompt": null}'),
        ("/v1/completions", b'{"prompt": [[[1]]]}'),
        (CHAT, b'{"messages": [' + b"9" * 10_000 + b"]}"),
    ],
)
def test_without_a_beginning_there_is_no_key(path: str, body: bytes) -> None:
    assert sticky_key(path, body) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.dictionaries(
    st.sampled_from(["model", "messages", "input", "prompt", "system", "instructions", "tools"]), JSON
)


@given(st.sampled_from([CHAT, "/v1/messages", "/v1/responses", "/v1/completions"]), FIELDS)
def test_no_body_breaks_it(path: str, fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    assert sticky_key(path, body) == sticky_key(path, body)


KEYS = st.text(min_size=1, max_size=20)
NAMES = st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=8, unique=True)


@given(KEYS, NAMES)
def test_losing_a_replica_does_not_reorder_the_others(key: str, names: list[str]) -> None:
    ranked = order(key, names)
    assert sorted(ranked) == sorted(names)
    for lost in names:
        assert order(key, [name for name in names if name != lost]) == [name for name in ranked if name != lost]


@given(KEYS, st.dictionaries(st.text(min_size=1, max_size=6), st.integers(0, 40), min_size=1), st.integers(1, 40))
def test_a_choice_is_never_full_and_there_is_one_unless_all_are(key: str, loads: dict[str, int], capacity: int) -> None:
    choice = choose(key, loads, capacity)
    if all(load >= capacity for load in loads.values()):
        assert choice is None
        return
    assert choice is not None and loads[choice.name] < capacity
    home = order(key, loads)[0]
    assert choice.home == (choice.name == home)
    if not choice.home:  # it was left for a reason, and for the least loaded
        assert loads[home] >= min(EASY, capacity)
        assert loads[choice.name] == min(loads.values()) < loads[home]


def test_a_hot_prefix_is_spread() -> None:
    loads = {"0": 0, "1": 0, "2": 0}
    for _ in range(60):
        choice = choose("hot", loads, 160)
        assert choice is not None
        loads[choice.name] += 1
    home = order("hot", loads)[0]
    assert max(loads.values()) == loads[home] <= 26, loads
    assert min(loads.values()) >= 15, loads


def test_a_few_at_a_time_stay_together() -> None:
    loads = {"0": 0, "1": 0}
    names = set()
    for _ in range(EASY):
        choice = choose("k", loads, 160)
        assert choice is not None and choice.home
        names.add(choice.name)
        loads[choice.name] += 1
    assert len(names) == 1


def test_keys_are_spread_over_replicas() -> None:
    homes = [order(f"conversation {n}", ["0", "1", "2", "3"])[0] for n in range(400)]
    assert all(60 <= homes.count(name) <= 140 for name in "0123")
