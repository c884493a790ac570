"""Answers that must match something: tokens nobody has a choice about, batches of free and bound answers, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchard.generate.constraint import Constraint
from orchard.generate.engine import Engine
from orchard.generate.errors import BadGrammar, UnsupportedSchema
from orchard.generate.request import Request, Sampling
from orchard.session.model import Model, load

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "married": {"type": "boolean"},
    },
    "required": ["name", "age", "married"],
    "additionalProperties": False,
}

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Model:
    return load("smollm2")


@pytest.fixture(scope="module")
def ids(model: Model) -> tuple[int, ...]:
    return tuple(model.prompt_ids("Who are you? Answer in JSON."))


def ask(ids: tuple[int, ...], constraint: Constraint | None, **more: Any) -> Request:
    return Request(ids, constraint=constraint, **{"max_tokens": 60, "seed": 4, **more})


def test_tokens_without_a_choice_cost_no_run_of_the_model(model: Model, ids: tuple[int, ...]) -> None:
    answer = model.engine.answer([ask(ids, Constraint.json_schema(PERSON))])[0]
    found = json.loads(answer.text)
    assert list(found) == ["name", "age", "married"] and answer.finish == "stop"
    assert answer.usage.output == len(answer.ids) and answer.usage.calls <= 0.8 * answer.usage.output


def test_forced_tokens_are_marked_and_their_text_is_whole(model: Model, ids: tuple[int, ...]) -> None:
    pieces = list(model.engine.stream(ask(ids, Constraint.json_schema(PERSON))))
    assert pieces[0].forced and "".join(piece.text for piece in pieces).startswith('{"name":"')
    last = pieces[-1]
    assert last.usage is not None and sum(not piece.forced for piece in pieces) == last.usage.calls


def test_log_probabilities_come_from_the_model_for_every_token(model: Model, ids: tuple[int, ...]) -> None:
    answer = model.engine.answer([ask(ids, Constraint.json_schema(PERSON), logprobs=0)])[0]
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.ids)
    assert answer.usage.calls >= len(answer.ids) and json.loads(answer.text)


def test_free_and_bound_answers_in_one_batch_are_what_they_are_alone(model: Model, ids: tuple[int, ...]) -> None:
    warm = Sampling(temperature=1.0)
    requests = [
        ask(ids, Constraint.json_schema(PERSON), sampling=warm),
        ask(ids, None, max_tokens=12, sampling=warm),
        ask(ids[:-3], Constraint.regex(r"[a-z]{3}-\d{4}"), sampling=warm),
        ask(ids, Constraint.choices(["yes", "no", "perhaps tomorrow"])),
        ask(ids[5:], Constraint.json_schema(PERSON), sampling=warm, seed=9),
    ]
    together = model.engine.answer(requests)
    for request, answer in zip(requests, together, strict=True):
        alone = Engine(model.runner, model.tokenizer, prefix_bytes=0).answer([request])[0]
        assert alone.ids == answer.ids and alone.usage.calls == answer.usage.calls


def test_the_room_may_end_before_the_answer(model: Model, ids: tuple[int, ...]) -> None:
    answer = model.engine.answer([ask(ids, Constraint.json_schema(PERSON), max_tokens=2)])[0]
    assert answer.finish == "length" and len(answer.ids) == 2 and '{"name":"'.startswith(answer.text)


def test_an_answer_that_leaves_no_choice_at_all(model: Model, ids: tuple[int, ...]) -> None:
    answer = model.engine.answer([ask(ids, Constraint.choices(["only this"]))])[0]
    assert (answer.text, answer.finish, answer.usage.calls) == ("only this", "stop", 0)
    free = model.engine.answer([ask(ids, Constraint.choices(["only this"])), ask(ids, None, max_tokens=3)])
    assert free[0].text == "only this" and len(free[1].ids) == 3


@pytest.mark.parametrize(
    ("constraint", "error"),
    [
        (Constraint.regex("("), BadGrammar),
        (Constraint.lark("begin: x"), BadGrammar),
        (Constraint.json_schema({"$dynamicRef": "#x"}), UnsupportedSchema),
        (Constraint.json_schema({"type": "integer", "enum": ["a"]}), UnsupportedSchema),
    ],
)
def test_what_cannot_be_held_to_is_refused_before_anything_runs(
    model: Model, ids: tuple[int, ...], constraint: Constraint, error: type[Exception]
) -> None:
    with pytest.raises(error):
        model.engine.stream(ask(ids, constraint))
    with pytest.raises(error):
        model.engine.run([ask(ids, None), ask(ids, constraint)])
