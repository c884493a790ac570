"""Config trees as text and data: the round trip, what reading refuses, the dump and the difference."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from dataclasses import field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.config_text import diff
from orchard.core.errors import ConfigError


class Box(Configurable):
    """A config that can hold anything."""

    @config
    class Config(BaseConfig):
        first: Any = None
        second: Any = REQUIRED
        items: Any = field(default_factory=list)


class Mark(Configurable):
    @config
    class Config(BaseConfig):
        value: Any = 0


class NoDefault(Configurable):
    @config
    class Config(BaseConfig):
        value: int


WORDS = st.sampled_from(["kind", "tuple", "dict", "required", "", "a", "é\n[0].b"])
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8), WORDS, st.just(REQUIRED)
)


def _grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(WORDS, inner, max_size=3),
        st.builds(Box.Config, first=inner, second=inner, items=inner),
        st.builds(Mark.Config, value=inner),
    )


VALUES = st.recursive(PLAIN, _grow, max_leaves=12)
TREES = st.builds(Box.Config, first=VALUES, second=VALUES, items=VALUES)


# The round trip -------------------------------------------------------------------------------------------------------


@given(TREES)
def test_a_tree_survives_json(cfg: Any) -> None:
    data = cfg.to_dict()
    assert BaseConfig.from_dict(data) == cfg
    assert BaseConfig.from_dict(json.loads(json.dumps(data))) == cfg


@given(TREES)
def test_what_was_read_shares_nothing_with_the_data(cfg: Any) -> None:
    data = cfg.to_dict()
    before = json.dumps(data)
    read = BaseConfig.from_dict(data)
    if isinstance(read.items, list):
        read.items.append(1)
    read.first = "changed"
    assert json.dumps(data) == before


@given(TREES, TREES)
def test_diff_is_empty_exactly_for_equal_trees(one: Any, other: Any) -> None:
    assert diff(one, one.clone()) == []
    assert (diff(one, other) == []) == (one == other)


@given(TREES)
def test_describe_never_fails(cfg: Any) -> None:
    assert cfg.describe().startswith("Box") and repr(cfg).startswith("Box(")


def test_a_required_field_stays_required() -> None:
    assert BaseConfig.from_dict(Box.Config().to_dict()).second is REQUIRED


def test_a_tree_of_real_parts_is_imported_from_orchard() -> None:
    code = (
        "import sys, json; from orchard.core.config import BaseConfig\n"
        "assert 'orchard.nn.mlp' not in sys.modules\n"
        "cfg = BaseConfig.from_dict({'kind': 'orchard.nn.mlp:GatedMLP', 'hidden_dim': 4})\n"
        "assert type(cfg).builds.__name__ == 'GatedMLP' and cfg.hidden_dim == 4"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        *("this:that", "antigravity:X", "os:system", "os.path:join", "subprocess:Popen", "builtins:object"),
        *("orchard:X", "orchard.nothing:X", "orchard.core.config:Config", "orchard.core.config:Configurable"),
        *("orchard..core:X", "orchard.a/b:X", "orchard.\x00:X", "orchardx.nn:X", "orchard", ":", "", "a:b:c"),
        *("orchard.nn.mlp:GatedMLP.Config", "orchard.nn.mlp:GatedMLP.__init__.__globals__", "orchard.nn.mlp:Linear2"),
    ],
)
def test_unknown_kinds_are_refused_and_nothing_is_imported(kind: str) -> None:
    before = {name for name in sys.modules if not name.startswith("orchard")}
    with pytest.raises(ConfigError) as caught:
        BaseConfig.from_dict({"kind": kind})
    assert caught.value.hint
    assert {name for name in sys.modules if not name.startswith("orchard")} <= before


def test_a_lazy_module_is_not_made_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    lazy = types.ModuleType("lazy_module")
    lazy.__getattr__ = lambda name: asked.append(name)  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    with pytest.raises(ConfigError):
        BaseConfig.from_dict({"kind": "lazy_module:Something"})
    assert asked == []


@pytest.mark.parametrize(
    "data",
    [
        *(None, 5, "x", [], {}, {"kind": 5}, {"first": 1}),
        *({"first": {"tuple": 5}}, {"first": {"tuple": "ab"}}, {"first": {"dict": [1]}}, {"first": {"other": 1}}),
        *({"first": {}}, {"first": [{"required": False}]}, {"first": {"kind": None}}, {"unknown": 1, "second": 2}),
    ],
)
def test_malformed_data_is_a_config_error(data: Any) -> None:
    if isinstance(data, dict) and data and "kind" not in data and data != {"first": 1}:
        data = {"kind": f"{__name__}:Box", **data}
    with pytest.raises(ConfigError):
        BaseConfig.from_dict(data)


def test_unknown_and_missing_fields_are_named() -> None:
    with pytest.raises(ConfigError, match="frist"):
        BaseConfig.from_dict({"kind": f"{__name__}:Box", "frist": 1})
    with pytest.raises(ConfigError, match="value"):
        BaseConfig.from_dict({"kind": f"{__name__}:NoDefault"})


def test_what_json_cannot_hold_is_refused_with_its_path() -> None:
    for bad in (object(), {1: 2}, {1, 2}, [b"bytes"]):
        with pytest.raises(ConfigError, match="first"):
            Box.Config(first=bad).to_dict()


def test_a_config_that_belongs_to_no_class_is_refused() -> None:
    @config
    class Loose(BaseConfig):
        x: int = 1

    with pytest.raises(ConfigError, match="belongs to no class"):
        Box.Config(first=Loose()).to_dict()


# Reading --------------------------------------------------------------------------------------------------------------


def marks(*values: Any) -> list[Any]:
    return [Mark.Config(value=value) for value in values]


def test_describe_folds_equal_neighbours() -> None:
    text = Box.Config(items=marks(1, 1, 1, 2, 1)).describe()
    assert text.splitlines() == [
        "Box",
        "  first: None",
        "  second: REQUIRED",
        "  items: 5 items",
        "    [0..2] Mark",
        "      value: 1",
        "    [3] Mark",
        "      value: 2",
        "    [4] Mark",
        "      value: 1",
    ]


def told(base: Any, other: Any) -> list[str]:
    return [str(change) for change in diff(base, other)]


def test_diff_folds_the_same_change_in_many_items() -> None:
    base = Box.Config(items=marks(*[0] * 8), first=1)
    other = base.clone(first=2)
    for i in (0, 1, 2, 5, 7):
        other.items[i].value = 9
    other.items[3].value = 8
    assert told(base, other) == [
        "first: 1 → 2",
        "items[0..2,5,7].value: 0 → 9",
        "items[3].value: 0 → 8",
    ]


def test_diff_tells_added_removed_and_replaced_parts() -> None:
    base = Box.Config(first=Mark.Config(), second={"a": 1, "b": None}, items=marks(1, 2))
    other = Box.Config(first=Box.Config(), second={"a": 2, "c": None}, items=marks(1))
    assert told(base, other) == [
        "first: Mark(value=0) → Box",
        "second[a]: 1 → 2",
        "second[b]: None → nothing",
        "second[c]: nothing → None",
        "items[1]: Mark(value=2) → nothing",
    ]
    assert told(Box.Config(items=[]), Box.Config(items=marks(3, 3))) == ["items[0..1]: nothing → Mark(value=3)"]
    assert told(Box.Config(second=REQUIRED), Box.Config(second=3)) == ["second: REQUIRED → 3"]


def test_a_transform_reads_as_one_line_over_all_layers() -> None:
    base = Box.Config(items=[Box.Config(first=Mark.Config()) for _ in range(30)])
    other = base.rewrite(Mark, lambda node: Box.Config(first=node))
    assert told(base, other) == ["items[0..29].first: Mark(value=0) → Box"]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0, 1, 2, 3), ["[0..3] Mark: 0..3"]),
        ((5, 5, 5), ["[0..2] Mark: 5"]),
        ((0, 1, 0), ["[0..1] Mark: 0..1", "[2] Mark: 0"]),
        ((0, 0, 2), ["[0..1] Mark: 0", "[2] Mark: 2"]),
        ((3, 2), ["[0] Mark: 3", "[1] Mark: 2"]),
    ],
)
def test_describe_folds_numbers_that_count(numbers: tuple[int, ...], expected: list[str]) -> None:
    lines = Box.Config(items=marks(*numbers)).describe().splitlines()
    heads = [line.strip() for line in lines if line.strip().startswith("[")]
    values = [lines[i + 1].split(": ")[1] for i, line in enumerate(lines) if line.strip().startswith("[")]
    assert [f"{head}: {value}" for head, value in zip(heads, values, strict=True)] == expected
