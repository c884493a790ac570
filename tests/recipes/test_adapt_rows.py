"""Rows to learn from are, token by token, what a session puts before the model; what inference could not write is refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from orchard.data.chat import conversation
from orchard.data.errors import BadSample
from orchard.recipes.adapt_data import look, parted, share_of, stop_at
from orchard.recipes.adapt_rows import Renderer, ordered, talk_of
from orchard.session.executors.local import LocalExecutor
from orchard.session.model import Model, load
from orchard.session.session import Session
from orchard.session.turn import Turn
from tests.tiny import tiny_gguf

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PERSON = {
    "type": "object",
    "title": "Person",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-order": ["name", "age"],
}
FORM = {"type": "json_schema", "json_schema": {"name": "Person", "strict": "true", "schema": PERSON}}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "zone": {"enum": ["utc", "local"]}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("rows") / "tiny.gguf"
    return load(tiny_gguf(path, **{"tokenizer.chat_template": CHATML}))


def call(city: str, **more: Any) -> dict[str, Any]:
    arguments = json.dumps({**more, "city": city})
    return {"id": f"c-{city}", "type": "function", "function": {"name": "clock", "arguments": arguments}}


def rows(model: Model, value: Any) -> list[dict[str, Any]]:
    return Renderer(model.tokenizer).rows(talk_of(value, "x.jsonl:1"), split=False)


class Listening(LocalExecutor):
    """Remembers what the model was given to read."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.asked: list[list[int]] = []

    def run(self, turn: Turn, cancel: threading.Event) -> Any:
        self.asked.append(self.format.ids(self.model.tokenizer, turn.messages, ()))
        return super().run(turn, cancel)


def test_a_guided_answer_stands_behind_the_words_of_a_session(model: Model) -> None:
    for line in (
        [{"role": "user", "content": "Anna, 30", "response_format": FORM}, _said('{"age": 30, "name": "Anna"}')],
        {"prompt": "Anna, 30", "completion": '{"age":30,"name":"Anna"}', "schema": PERSON},
        {"messages": [_asked("Anna, 30"), _said('{"name":"Anna","age":30}')], "response_format": FORM},
    ):
        (row,) = rows(model, line)
        assert row["messages"][-1]["content"] == '{"name":"Anna","age":30}', (
            "in the order of the grammar, without spaces"
        )
        executor = Listening(model)
        list(Session(model=executor).stream("Anna, 30", json_schema=PERSON))  # type: ignore[arg-type]
        sample = conversation(model.tokenizer, row["messages"], turns="last")
        prompt = executor.asked[0]
        assert sample.ids[: len(prompt)].tolist() == prompt
        assert sample.learnt.tolist() == [False] * len(prompt) + [True] * (len(sample.ids) - len(prompt))


def test_schemas_stay_out_of_the_prompt_where_they_are_asked_to(model: Model) -> None:
    line = {"prompt": "Anna", "completion": '{"name":"A","age":1}', "schema": PERSON, "include_schema_in_prompt": False}
    assert rows(model, line)[0]["messages"][0]["content"] == "Anna"
    assert "Answer with JSON" in rows(model, line | {"include_schema_in_prompt": True})[0]["messages"][0]["content"]


def test_only_the_turn_that_asks_for_a_form_is_told_of_it(model: Model) -> None:
    asked = {**_asked("Anna, 30"), "response_format": FORM}
    talk = [_asked("Hi"), _said("Hello."), asked, _said('{"name":"Anna","age":30}'), _asked("Thanks"), _said("Bye.")]
    found = rows(model, talk)
    assert [row["messages"][-1]["content"] for row in found] == ["Hello.", '{"name":"Anna","age":30}', "Bye."]
    told = [["Answer with JSON" in message["content"] for message in row["messages"]] for row in found]
    assert told == [[False, False], [False, False, True, False], [False] * 6]


def test_calls_of_a_model_that_was_not_taught_them(model: Model) -> None:
    talk = {
        "messages": [
            _asked("What time is it in Rome and Oslo?"),
            {"role": "assistant", "content": "", "tool_calls": [call("Rome", zone="utc"), call("Oslo")]},
            {"role": "tool", "name": "clock", "tool_call_id": "c-Rome", "content": "10:00"},
            {"role": "tool", "name": "clock", "tool_call_id": "c-Oslo", "content": "11:00"},
            _said("Ten and eleven."),
        ],
        "tools": [CLOCK],
    }
    first, second, last = rows(model, talk)
    assert first["messages"][-1]["content"] == '{"name": "clock", "arguments": {"city": "Rome", "zone": "utc"}}'
    assert "clock: The time in a city" in first["messages"][0]["content"]
    assert second["messages"][-1]["content"] == '{"name": "clock", "arguments": {"city": "Oslo"}}'
    assert second["messages"][-2]["content"] == "Result of clock: 10:00"
    assert "10:00" in last["messages"][0]["content"] and "11:00" in last["messages"][0]["content"]
    assert [message["role"] for message in last["messages"]] == ["user", "assistant"] and "tools" not in last
    format_ = LocalExecutor(model).format
    shown = format_.ids(model.tokenizer, talk_of(talk, "").messages[:1], talk_of(talk, "").tools)
    sample = conversation(model.tokenizer, first["messages"], turns="last")
    assert sample.ids[: len(shown)].tolist() == shown, "what the executor reads before a call"


def test_calls_of_a_model_that_was(tmp_path: Path) -> None:
    taught = load(tiny_gguf(tmp_path / "t.gguf", **{"tokenizer.chat_template": HERMES}))
    talk = {"messages": [_asked("Rome?"), {"role": "assistant", "tool_calls": [call("Rome")]}], "tools": [CLOCK]}
    (row,) = rows(taught, talk)
    assert row["tools"][0]["function"]["name"] == "clock"
    read = talk_of(talk, "")
    shown = LocalExecutor(taught).format.ids(taught.tokenizer, read.messages[:1], read.tools)
    sample = conversation(taught.tokenizer, row["messages"], tools=row["tools"], turns="last")
    assert sample.ids[: len(shown)].tolist() == shown
    learnt = taught.tokenizer.decode(sample.ids[sample.learnt].tolist(), skip_special=False)
    assert learnt.startswith("<tool_call>") and '"city": "Rome"' in learnt


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"chosen": "a", "rejected": "b", "prompt": "c"}, "no-form"),
        (7, "wrong-type"),
        ([], "empty"),
        ([{"role": "user", "content": "x"}], "no-answer"),
        ({"prompt": "x", "completion": "no JSON", "schema": PERSON}, "schema"),
        ({"prompt": "x", "completion": '{"name":"A"}', "schema": PERSON}, "schema"),
        ({"prompt": "x", "completion": '{"name":"A","age":1}', "schema": {"type": "nonsense"}}, "schema"),
        ({"prompt": "x", "completion": "y", "response_format": {"type": "json_schema"}}, "schema"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "response_format": FORM}], "schema"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call("Rome")]}]},
            "tools",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "tool_calls": [call("Rome", zone="mars")]},
                ],
                "tools": [CLOCK],
            },
            "tools",
        ),
        ({"prompt": "x", "completion": "y", "tools": [{"function": {"description": "no name"}}]}, "tools"),
    ],
)
def test_what_is_refused(model: Model, line: Any, reason: str) -> None:
    with pytest.raises(BadSample, match=r"x\.jsonl:1") as said:
        rows(model, line)
    assert said.value.reason == reason


def test_properties_come_in_the_order_of_the_schema() -> None:
    root = {
        "properties": {
            "b": {"$ref": "#/$defs/B"},
            "a": {"items": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/B"}]}},
        },
        "$defs": {"B": {"type": "object", "properties": {"y": {}, "x": {}}, "required": ["x", "y"]}},
    }
    value = {"z": 0, "a": ["t", {"x": 1, "y": 2}], "b": {"x": 3, "y": 4}}
    assert json.dumps(ordered(value, root, root)) == ('{"b": {"y": 4, "x": 3}, "a": ["t", {"y": 2, "x": 1}], "z": 0}')


def test_every_line_is_looked_at(model: Model, tmp_path: Path) -> None:
    good = [{"prompt": f"say {n}", "completion": f"{n}!"} for n in range(30)]
    bad = ['{"prompt": ', '{"prompt": "x"}', json.dumps({"prompt": "long", "completion": "y" * 400}), "\ufeff"]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join([*map(json.dumps, good[:10]), *bad, *map(json.dumps, good[5:])]) + "\n")
    found = look(path, model.tokenizer, 128)
    assert (found.samples, found.repeated, len(found.rows), found.turns) == (35, 5, 35, "all")
    assert [(problem.place.rpartition(":")[2], problem.reason) for problem in found.problems] == [
        ("11", "not-json"),
        ("12", "no-form"),
        ("13", "too-long"),
        ("14", "not-json"),
    ]
    assert found.longest <= 128 and found.learnt < found.tokens
    with pytest.raises(BadSample, match=r"data.jsonl:11: .* and 3 more lines"):
        stop_at(found.problems, found.samples)
    train, held = parted(found, 0.2, seed=1)
    assert len(train) + len(held) == 35 and not {found.keys[n] for n in train} & {found.keys[n] for n in held}
    path.write_text("\n".join(map(json.dumps, reversed(good))))
    again = look(path, model.tokenizer, 128)
    first = {json.dumps(found.rows[number]) for number in held}
    assert first == {json.dumps(again.rows[number]) for number in parted(again, 0.2, seed=1)[1]}, "whatever the order"
    assert first != {json.dumps(again.rows[number]) for number in parted(again, 0.2, seed=2)[1]}


def test_shares() -> None:
    assert share_of(None, 10) == 0 and share_of(None, 100) == 0.1 and share_of(None, 10_000) == 0.02
    assert share_of("0.25", 9) == 0.25 and share_of("held.jsonl", 9) is None
    with pytest.raises(Exception, match="held out"):
        share_of("1.5", 9)


def _asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_the_lines_of_the_page_are_good(model: Model, tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "adapt.md"
    blocks = page.read_text(encoding="utf-8").split("```json\n")[1:]
    lines = [line for block in blocks for line in block.partition("```")[0].splitlines()]
    (tmp_path / "page.jsonl").write_text("\n".join(lines))
    found = look(tmp_path / "page.jsonl", model.tokenizer, 1024)
    assert len(lines) == 6 and found.samples == 6 and not found.problems
