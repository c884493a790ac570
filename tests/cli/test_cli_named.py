"""What a user names on the command line: found, or told why not; and schemas out of examples."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.cli.infer import infer
from orchard.cli.named import looks_named, thing_named
from orchard.core.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine_named.py").write_text(
        "class Cat:\n    class Tail: pass\ndef weather(city: str) -> str: return city\n"
    )
    (tmp_path / "json.py").write_text("value = 'a file with the name of a known module'\n")
    (tmp_path / "breaks_named.py").write_text("raise RuntimeError('no\\n  luck')\n")
    (tmp_path / "leaves_named.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "needs_named.py").write_text("import nothing_of_this_name\n")
    yield tmp_path
    for name in [name for name in sys.modules if name.endswith("_named") or name.startswith("orchard_user_")]:
        del sys.modules[name]


def test_things_are_found(folder: Path) -> None:
    assert thing_named("mine_named:weather", "--tool")("Oslo") == "Oslo"
    assert thing_named("mine_named:Cat.Tail", "--schema").__name__ == "Tail"
    assert thing_named("mine_named.py:Cat", "--schema").__name__ == "Cat"
    assert thing_named(f"{folder}/json.py:value", "--schema").startswith("a file") and sys.modules["json"] is json
    assert (
        looks_named("mine_named:Cat")
        and looks_named("mine_named:Cat.Tail")
        and not looks_named("schema.json")
        and not looks_named("C:/a/b.json")
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mine_named", "not module:name"),
        ("mine_named:", "not module:name"),
        (":weather", "not module:name"),
        ("mine_named:wether", "no 'wether'"),
        ("nowhere_named:x", "no module called 'nowhere_named'"),
        ("nowhere.py:x", "no file"),
        ("breaks_named:x", "RuntimeError: no luck"),
        ("leaves_named:x", "SystemExit"),
        ("needs_named:x", "no module called 'nothing_of_this_name'"),
    ],
)
def test_what_is_not_there_is_told(folder: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        thing_named(text, "--tool")
    assert says in caught.value.message and caught.value.hint and caught.value.message.startswith("--tool")


values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
KINDS: dict[str, Any] = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}


def matches(value: Any, schema: dict[str, Any]) -> bool:
    """A small judge of the few keywords that `infer` uses, written apart from it."""
    if "anyOf" in schema:
        return any(matches(value, part) for part in schema["anyOf"])
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return not isinstance(value, bool) and isinstance(value, int if kind == "integer" else (int, float))
    if kind is not None and not isinstance(value, KINDS[kind]):
        return False
    if kind == "array":
        return all(matches(item, schema["items"]) for item in value)
    if kind == "object":
        known = schema["properties"]
        assert schema["additionalProperties"] is False and schema["x-order"] == list(known)
        return set(schema["required"]) <= set(value) <= set(known) and all(
            matches(value[name], known[name]) for name in value
        )
    return True


@given(st.lists(values, min_size=1, max_size=4))
def test_every_example_matches_its_schema(examples: list[Any]) -> None:
    schema = infer(examples)
    assert all(matches(example, schema) for example in examples)
    assert json.loads(json.dumps(schema)) == schema


def test_what_is_inferred() -> None:
    schema = infer(
        [{"name": "Tom", "age": 3, "tags": []}, {"name": "Kit", "home_address": {"street": "x"}, "age": 2.5}]
    )
    assert schema["required"] == ["name", "age"] and schema["properties"]["age"] == {"type": "number"}
    assert schema["properties"]["tags"] == {"type": "array", "items": {}}
    assert schema["properties"]["home_address"]["title"] == "HomeAddress"
    assert infer([True, 1, None]) == {"anyOf": [{"type": "boolean"}, {"type": "integer"}, {"type": "null"}]}
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    assert infer([deep])["type"] == "array"
