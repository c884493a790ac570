"""What answers are worth, and what is said of judges that give no rewards."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import ConfigError
from orchard.data import BadSample
from orchard.train.rollout_rewards import BadReward, ExactMatch, Length, Matches, Reward, Several, ValidJson
from orchard.train.rollout_schema import Schema
from tests.generate.conftest import make_tokenizer
from tests.train.rolling import rollouts
from tests.train.test_rollout import following, model_of


def test_exact_match() -> None:
    exact = ExactMatch.Config().build()
    assert exact({"completion": "4"}, " 4\n", []) == 1 and exact({"completion": "4"}, "4.", []) == 0
    assert exact({"completion": ["4", "four"]}, "four", []) == 1 and exact({"completion": 4}, "4", []) == 1
    assert ExactMatch.Config(strip=False).build()({"completion": "4"}, "4 ", []) == 0
    assert ExactMatch.Config(ignore_case=True, field="answer").build()({"answer": "Straße"}, "STRASSE", []) == 1
    for row in ({}, {"completion": None}, {"completion": []}, {"completion": {"a": 1}}, {"completion": True}):
        with pytest.raises(BadSample, match="completion") as said:
            exact(row, "4", [])
        assert said.value.hint


def test_regular_expressions() -> None:
    assert Matches.Config(pattern=r"\d+").build()({}, "so 12.", []) == 1
    assert Matches.Config(pattern=r"\d+", whole=True).build()({}, "so 12", []) == 0
    assert Matches.Config(pattern=r"\d+", whole=True).build()({}, " 12\n", []) == 1
    last = Matches.Config(pattern=r"= *(\d+)", field="completion").build()
    assert last({"completion": "7"}, "3+4 = 5, no, = 7", []) == 1 and last({"completion": "5"}, "= 5 = 7", []) == 0
    assert last({"completion": "7"}, "seven", []) == 0
    with pytest.raises(ConfigError, match="regular expression"):
        Matches.Config(pattern="(").build()


def test_length() -> None:
    length = Length.Config(least=2, most=4, soft=1).build()
    assert [length({}, "", range(n)) for n in range(7)] == [0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0]
    assert [Length.Config(most=1).build()({}, "", range(n)) for n in range(3)] == [1.0, 1.0, 0.0]
    with pytest.raises(ConfigError):
        Length.Config(least=3, most=2).build()


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "pattern": "^[a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 200},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 1]}, "maxItems": 2, "uniqueItems": True},
        "more": {"anyOf": [{"$ref": "#/$defs/pair"}, {"type": "null"}]},
    },
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"pair": {"type": "array", "prefixItems": [{"type": "number"}, {"const": False}], "items": False}},
}


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        ({"age": 3, "name": "ab"}, True),
        ({"name": "ab", "age": 3.0}, True),
        ({"age": 3}, False),
        ({"name": "ab", "age": True}, False),
        ({"name": "ab", "age": 200}, False),
        ({"name": "Ab"}, False),
        ({"name": ""}, False),
        ({"name": "a", "other": 1}, False),
        ({"name": "a", "tags": ["a", "b"]}, True),
        ({"name": "a", "tags": ["a", "a"]}, False),
        ({"name": "a", "tags": [1.0, "a"]}, True),
        ({"name": "a", "tags": [True]}, False),
        ({"name": "a", "tags": ["a", "b", 1]}, False),
        ({"name": "a", "more": [1.5, False]}, True),
        ({"name": "a", "more": [1.5, 0]}, False),
        ({"name": "a", "more": [1.5, False, 2]}, False),
        ({"name": "a", "more": None}, True),
        ([], False),
    ],
)
def test_json_by_schema(value: Any, valid: bool) -> None:
    reward = ValidJson.Config(schema=SCHEMA, parses=0.25).build()
    assert reward({}, f" {json.dumps(value)}\n", []) == (1.0 if valid else 0.25)
    assert reward({}, json.dumps(value)[:-1], []) == 0.0


def test_json_without_a_schema_and_what_is_no_json() -> None:
    reward = ValidJson.Config().build()
    assert reward({}, "[1, {}]", []) == 1.0
    for wrong in ("", "NaN", "{'a': 1}", "[" * 100_000, "1 2"):
        assert reward({}, wrong, []) == 0.0


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"minmum": 1}, "minmum"),
        ({"type": "text"}, "text"),
        ({"$ref": "#/$defs/none"}, "nothing"),
        ({"properties": {"a": {"if": True}}}, "properties/a/if"),
        ({"pattern": "("}, "regular expression"),
        ({"anyOf": {"type": "null"}}, "anyOf"),
        ({"items": 3}, "items"),
    ],
)
def test_schemas_that_cannot_be_held_to_are_refused(schema: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        ValidJson.Config(schema=schema).build()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


@given(JSON, JSON)
def test_choices_of_schemas_are_logic(value: Any, other: Any) -> None:
    one, two = {"const": value}, {"type": "object"}
    is_object = isinstance(value, dict)
    assert Schema(one).allows(value) and Schema({"enum": [other, value]}).allows(value)
    assert not Schema({"not": one}).allows(value)
    assert Schema({"allOf": [one, two]}).allows(value) == is_object
    assert Schema({"oneOf": [one, two]}).allows(value) == (not is_object)
    assert Schema({"anyOf": [one, False]}).allows(value) and not Schema(False).allows(value)


class Said(Configurable, Reward):
    """Gives what it is told to, one after the other."""

    said: Sequence[Any] = ()

    @config
    class Config(BaseConfig):
        pass

    def __init__(self, cfg: Config) -> None:
        self.number = -1

    def __call__(self, row: Mapping[str, Any], text: str, ids: Sequence[int]) -> Any:
        self.number += 1
        return self.said[min(self.number, len(self.said) - 1)]


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ([math.nan], "not finite"),
        ([1.0, [math.inf]], "not finite"),
        (["1"], "no number"),
        ([None], "no number"),
        ([{"a": 1}], "no number"),
        ([[]], "no number at all"),
        ([[1.0, 2.0], 1.0], "1 numbers .* and 2 before"),
        ([[[1.0]]], "no number"),
    ],
)
def test_rewards_that_are_none_are_named_with_the_prompt(
    tmp_path: Path, said: list[Any], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Said, "said", said)
    tokenizer = make_tokenizer()
    with pytest.raises(BadReward, match=rf"(?s)Said gave.*{word}") as found:
        next(following(rollouts(tmp_path, reward=Said.Config()), tokenizer, model_of(tokenizer)))
    assert "asked.jsonl:1" in found.value.message and found.value.hint


def test_several_rewards_side_by_side(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    reward = Several.Config(rewards=[ExactMatch.Config(), Length.Config(most=0), Length.Config(most=3)])
    batch = next(following(rollouts(tmp_path, reward=reward), tokenizer, model_of(tokenizer)))
    assert batch.rewards.shape == (64, 3) and batch.rewards[:, 1].max() == 0 and batch.rewards[:, 2].min() == 1
    with pytest.raises(ConfigError):
        Several.Config().build()
