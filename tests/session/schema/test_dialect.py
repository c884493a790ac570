"""The SDK's dialect of JSON Schema, and the constraint that is made of the same schema."""

from __future__ import annotations

import json
from typing import Any, List, Optional  # noqa: UP035

import pytest

from orchard.session.errors import InvalidGenerationSchemaError
from orchard.session.schema import GenerationGuide, GenerationSchema, Property, generable, guide, schema_for
from tests.session.schema.enforced import accepts, compiles


@generable()
class Size:
    height: int
    width: int


@generable("A tree in the orchard")
class Tree:
    kind: str
    size: Size = guide("In metres")
    note: str


@generable()
class Basket:
    label: str = guide("Written by hand")
    fruit: str = guide("What is in it", anyOf=["apple", "pear", "plum"])
    owner: str = guide(constant="the orchard")
    prices: list[float] = guide("In euros", count=3)
    codes: List[str] = guide(element=GenerationGuide.regex("[A-Z]{2}"), min_items=1)  # noqa: UP006


@generable()
class Branch:
    age: Optional[int] = guide(range=(1, 90))  # noqa: UP045
    branches: list[Branch] = guide("What grows on it", max_items=3)
    name: str


@generable
class Farm:
    trees: list[Tree]
    branch: Branch | None
    baskets: Optional[list[Basket]]  # noqa: UP045


def obj(title: str, properties: dict[str, Any], required: list[str], **more: Any) -> dict[str, Any]:
    return {
        "title": title,
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        "x-order": list(properties),
        **more,
    }


SIZE = obj("Size", {"height": {"type": "integer"}, "width": {"type": "integer"}}, ["height", "width"])
TREE = obj(
    "Tree",
    {
        "kind": {"type": "string"},
        "size": {"$ref": "#/$defs/Size", "description": "In metres"},
        "note": {"type": "string"},
    },
    ["kind", "size", "note"],
    description="A tree in the orchard",
)
BASKET = obj(
    "Basket",
    {
        "label": {"type": "string", "description": "Written by hand"},
        "fruit": {"type": "string", "enum": ["apple", "pear", "plum"], "description": "What is in it"},
        "owner": {"type": "string", "enum": ["the orchard"]},
        "prices": {
            "type": "array",
            "items": {"type": "number"},
            "minItems": 3,
            "maxItems": 3,
            "description": "In euros",
        },
        "codes": {"type": "array", "items": {"type": "string", "pattern": "[A-Z]{2}"}, "minItems": 1},
    },
    ["label", "fruit", "owner", "prices", "codes"],
)


def branch(itself: str) -> dict[str, Any]:
    return obj(
        "Branch",
        {
            "age": {"type": "integer", "minimum": 1, "maximum": 90},
            "branches": {
                "type": "array",
                "items": {"$ref": itself},
                "maxItems": 3,
                "description": "What grows on it",
            },
            "name": {"type": "string"},
        },
        ["branches", "name"],
    )


FARM = obj(
    "Farm",
    {
        "trees": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
        "branch": {"$ref": "#/$defs/Branch"},
        "baskets": {"type": "array", "items": {"$ref": "#/$defs/Basket"}},
    },
    ["trees"],
    **{"$defs": {"Size": SIZE, "Tree": TREE, "Basket": BASKET, "Branch": branch("#/$defs/Branch")}},
)
CASES = [
    (Size, SIZE),
    (Tree, {**TREE, "$defs": {"Size": SIZE}}),
    (Basket, BASKET),
    (Branch, branch("#")),
    (Farm, FARM),
]


@pytest.mark.parametrize("kind, wanted", CASES, ids=[kind.__name__ for kind, _ in CASES])
def test_the_dialect_of_a_generable_class(kind: Any, wanted: dict[str, Any]) -> None:
    schema = kind.generation_schema()
    assert isinstance(schema, GenerationSchema)
    assert schema.to_dict() == wanted
    assert list(schema.to_dict()["properties"]) == wanted["x-order"]
    assert schema.name == kind.__name__ == schema.type_class.__name__


@pytest.mark.parametrize("kind, wanted", CASES, ids=[kind.__name__ for kind, _ in CASES])
def test_the_constraint_is_the_dialect_without_what_a_person_reads(kind: Any, wanted: dict[str, Any]) -> None:
    schema = schema_for(kind)
    source = schema.constraint().source
    assert '"x-order"' not in source and '"title"' not in source
    assert list(json.loads(source)["properties"]) == wanted["x-order"]
    assert compiles(schema)
    again = schema_for(schema.to_dict())
    assert compiles(again)
    assert again.to_dict() == wanted


def test_descriptions_of_classes_reach_the_schema_apple_fails() -> None:
    assert Tree.generation_schema().to_dict()["description"] == "A tree in the orchard"
    assert Farm.generation_schema().to_dict()["$defs"]["Tree"]["description"] == "A tree in the orchard"


def test_descriptions_of_lists_of_classes_reach_the_schema_apple_fails() -> None:
    assert Branch.generation_schema().to_dict()["properties"]["branches"]["description"] == "What grows on it"


def test_a_description_can_be_given_with_the_schema() -> None:
    assert Tree.generation_schema(description="Only this one").to_dict()["description"] == "Only this one"
    assert Tree.generation_schema().to_dict()["description"] == "A tree in the orchard"


def test_optional_fields_may_be_left_out_and_the_order_is_kept() -> None:
    schema = schema_for(Branch)
    assert accepts(schema, '{"branches":[],"name":"a"}')
    assert accepts(schema, '{"age":4,"branches":[{"branches":[],"name":"b"}],"name":"a"}')
    assert not accepts(schema, '{"name":"a","branches":[]}')
    assert not accepts(schema, '{"age":4,"branches":[]}')
    assert not accepts(schema, '{"age":null,"branches":[],"name":"a"}')
    assert not accepts(schema, '{"branches":[],"name":"a","more":1}')


def test_two_classes_of_one_name_do_not_share_a_definition_apple_fails() -> None:
    def one() -> Any:
        @generable
        class Leaf:
            green: bool

        return Leaf

    def other() -> Any:
        @generable
        class Leaf:
            pages: int

        return Leaf

    first, second = one(), other()

    @generable
    class Both:
        a: first
        b: second

    schema = Both.generation_schema()
    names = [schema.to_dict()["properties"][key]["$ref"] for key in "ab"]
    assert sorted(names) == ["#/$defs/Leaf", "#/$defs/Leaf2"]
    made = schema.instance(schema.read('{"a":{"green":true},"b":{"pages":3}}'))
    assert made == Both(first(True), second(3))


def test_properties_and_nested_types_can_be_listed() -> None:
    schema = Farm.generation_schema()
    assert [one.name for one in schema.properties] == ["trees", "branch", "baskets"]
    assert {one.type_class for one in schema.dynamic_nested_types} == {Tree, Size, Branch, Basket}
    assert Basket.generation_schema().properties[1].guides == [GenerationGuide.anyOf(["apple", "pear", "plum"])]


def test_a_schema_put_together_by_hand() -> None:
    class Ladder:
        pass

    rung = GenerationSchema("Rung", "One of many", [Property("length", float, guides=[GenerationGuide.minimum(0.1)])])
    schema = GenerationSchema(
        Ladder,
        description="Leans on a tree",
        properties=[
            Property("rungs", list["Rung"], "From below"),  # noqa: F821
            Property("owner", str | None),
        ],
        dynamic_nested_types=[rung],
    )
    assert schema.to_dict() == obj(
        "Ladder",
        {
            "rungs": {"type": "array", "items": {"$ref": "#/$defs/Rung"}, "description": "From below"},
            "owner": {"type": "string"},
        },
        ["rungs"],
        description="Leans on a tree",
        **{
            "$defs": {
                "Rung": obj(
                    "Rung", {"length": {"type": "number", "minimum": 0.1}}, ["length"], description="One of many"
                )
            }
        },
    )
    content = schema.read('{"rungs":[{"length":0.5}]}')
    assert schema.instance(content) is content
    assert schema.values(content) == {"rungs": [{"length": 0.5}], "owner": None}


def test_properties_of_a_dataclass_make_its_objects() -> None:
    schema = GenerationSchema(Size, properties=[Property("height", int), Property("width", int, required=True)])
    assert schema.instance(schema.read('{"height":1,"width":2}')) == Size(1, 2)


def test_two_properties_of_one_name_are_refused() -> None:
    schema = GenerationSchema("Twice", properties=[Property("a", int), Property("a", str)])
    with pytest.raises(InvalidGenerationSchemaError, match="two fields 'a'"):
        schema.to_dict()


def test_a_name_that_nobody_knows_is_refused() -> None:
    schema = GenerationSchema("Lost", properties=[Property("a", "Nowhere")])
    with pytest.raises(InvalidGenerationSchemaError, match=r"Lost\.a.*Nowhere"):
        schema.constraint()


def test_a_class_that_needs_itself_without_end_is_refused() -> None:
    @generable
    class Chain:
        link: Chain

    with pytest.raises(InvalidGenerationSchemaError, match="Chain needs another Chain"):
        schema_for(Chain)
