"""Settings written as text: read by the field's type, refused with what was expected, and the nearest paths offered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.config_parse import BadSetting, assigned, parsed


class Leaf(Configurable):
    @config
    class Config(BaseConfig):
        rate: float = 0.1
        steps: int = REQUIRED
        name: str | None = None

    def __init__(self, cfg: Config) -> None:
        self.config = cfg


class Twig(Configurable):
    @config
    class Config(BaseConfig):
        rate: float = 0.5
        other: bool = False

    def __init__(self, cfg: Config) -> None:
        self.config = cfg


class Tree(Configurable):
    @config
    class Config(BaseConfig):
        leaf: Leaf.Config = field(default_factory=Leaf.Config)
        maybe: Twig.Config | None = None
        part: BaseConfig = field(default_factory=Twig.Config)
        leaves: list[Leaf.Config] = field(default_factory=lambda: [Leaf.Config(), Leaf.Config()])
        betas: tuple[float, float] = (0.9, 0.95)
        paths: str | Sequence[str] = ""
        table: dict[str, float] = field(default_factory=dict)

    def __init__(self, cfg: Config) -> None:
        self.config = cfg


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("3", "int", 3),
        ("1e3", "int", 1000),
        ("-2", "int | None", -2),
        ("none", "int | None", None),
        ("None", "str | None", None),
        ("3", "float", 3.0),
        ("True", "bool", True),
        ("false", "bool | None", False),
        ("a=b", "str", "a=b"),
        ("", "str", ""),
        ("x.txt", "str | Sequence[str]", "x.txt"),
        ('["a", "b"]', "str | Sequence[str]", ["a", "b"]),
        ("[1, 2.5]", "tuple[float, float]", (1, 2.5)),
        ("[1, 2, 3]", "tuple[int, ...]", (1, 2, 3)),
        ("[]", "list[str]", []),
        ('{"a": 1}', "dict[str, float]", {"a": 1}),
        ('{"a": "x"}', "dict[str, Any]", {"a": "x"}),
    ],
)
def test_values(text: str, kind: str, value: Any) -> None:
    found = parsed(text, kind, "it")
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("1.5", "int", "a whole number"),
        ("x", "int | None", "a whole number or none"),
        ("nan", "float", "a number"),
        ("inf", "float", "a number"),
        ("1e999", "int", "a whole number"),
        ("1", "bool", "true or false"),
        ("none", "int", "a whole number"),
        ("[1]", "tuple[float, float]", "a list of 2 numbers in JSON"),
        ("[1, true]", "tuple[float, float]", "a list of 2 numbers in JSON"),
        ("[1]", "list[str]", "a list of texts in JSON"),
        ("[", "list[str]", "a list of texts in JSON"),
        ('{"a": "b"}', "dict[str, float]", "a table of numbers in JSON"),
    ],
)
def test_values_of_another_type(text: str, kind: str, expected: str) -> None:
    with pytest.raises(BadSetting) as caught:
        parsed(text, kind, "the.path")
    assert caught.value.message == f"the.path is {text!r}" and caught.value.hint == f"it has to be {expected}"
    assert caught.value.exit_code == 2


def test_settings() -> None:
    tree = Tree.Config()
    assert assigned(tree, "leaf.steps=7").leaf.steps == 7 and tree.leaf.steps is REQUIRED
    assert assigned(tree, "leaves[1].rate=2").leaves[1].rate == 2.0
    assert [leaf.rate for leaf in assigned(tree, "leaves[*].rate=2").leaves] == [2.0, 2.0]
    assert assigned(tree, "leaf.name=a=b").leaf.name == "a=b"
    assert assigned(tree, "maybe=Twig").maybe == Twig.Config()
    assert assigned(assigned(tree, "maybe=Twig"), "maybe=none").maybe is None


def test_a_part_is_replaced_by_another_and_keeps_what_both_have() -> None:
    tree: Any = assigned(Tree.Config(), "part.rate=0.25")
    from orchard.train.schedule import Cosine

    found = assigned(tree, "part=train.schedule:Cosine").part
    assert isinstance(found, Cosine.Config)


@pytest.mark.parametrize(
    ("setting", "message", "hint"),
    [
        ("rate=1", "Tree has no 'rate'", "leaf.rate or part.rate"),
        ("leaf.rat=1", "Tree has no 'leaf.rat'", "leaf.rate"),
        ("laef.steps=1", "Tree has no 'laef.steps'", "leaf.steps"),
        ("maybe.rate=1", "Tree has no 'maybe.rate'", "maybe is none; first set maybe=Twig"),
        ("leaves[7].rate=1", "Tree has no 'leaves[7].rate'", "leaf.rate"),
        ("twigs[*].rate=1", "Tree has no 'twigs[*].rate'", "leaf.rate"),
        ("leaf=3", "leaf is '3'", "set its own fields (rate, steps, name), or give Leaf"),
        ("part=none", "part is 'none'", "give a part by name"),
        ("part=orchard.nothing:Here", "no part called", ""),
        ("leaf.rate", "'leaf.rate' is no setting", "path=value"),
        ("=3", "'=3' is no setting", "path=value"),
    ],
)
def test_what_is_refused(setting: str, message: str, hint: str) -> None:
    with pytest.raises(BadSetting) as caught:
        assigned(Tree.Config(), setting)
    assert message in caught.value.message and hint in caught.value.hint


@given(st.text(max_size=30))
def test_any_text_is_set_or_refused(text: str) -> None:
    for path in ("leaf.rate", "leaf.steps", "leaf.name", "betas", "table", "paths", "maybe", "part", ""):
        try:
            assert isinstance(assigned(Tree.Config(), f"{path}={text}"), Tree.Config)
        except BadSetting as error:
            assert error.hint


@given(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans())
def test_what_is_written_is_what_is_read(whole: int, number: float, flag: bool) -> None:
    assert parsed(str(whole), "int | None", "x") == whole
    assert parsed(repr(number), "float", "x") == number
    assert parsed(str(flag), "bool", "x") is flag
