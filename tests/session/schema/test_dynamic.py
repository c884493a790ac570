"""Schemas that are put together at run time."""

from __future__ import annotations

from typing import Any

import pytest

from orchard.session.errors import InvalidGenerationSchemaError, UnsupportedGuideError
from orchard.session.schema import DynamicGenerationSchema, GenerationGuide, SchemaError
from tests.session.schema.enforced import accepts

Dynamic = DynamicGenerationSchema
Property = DynamicGenerationSchema.Property
TEXT = Dynamic.of_type(str)


def menu(**options: Any) -> DynamicGenerationSchema:
    return Dynamic(
        "Menu",
        "What there is",
        properties=[
            Property("soup", Dynamic("Soup", any_of=["leek", "pea"]), "Of the day"),
            Property("price", Dynamic.of_type(float, [GenerationGuide.range((1, 20))])),
            Property("dishes", Dynamic.array_of(Dynamic.reference_to("Dish"), minimum=1, maximum=2)),
            Property("note", TEXT, is_optional=True),
        ],
        **options,
    )


DISH = Dynamic(
    "Dish", properties=[Property("name", TEXT), Property("sides", Dynamic.array_of(Dynamic.reference_to("Dish")))]
)


def test_an_object_with_references() -> None:
    schema = menu().build([DISH])
    assert schema.name == "Menu"
    written = schema.to_dict()
    assert written["description"] == "What there is"
    assert written["properties"]["soup"] == {"type": "string", "enum": ["leek", "pea"], "description": "Of the day"}
    assert written["properties"]["dishes"] == {
        "type": "array",
        "items": {"$ref": "#/$defs/Dish"},
        "minItems": 1,
        "maxItems": 2,
    }
    assert written["required"] == ["soup", "price", "dishes"]
    text = '{"soup":"pea","price":3.5,"dishes":[{"name":"a","sides":[{"name":"b","sides":[]}]}]}'
    assert accepts(schema, text)
    assert not accepts(schema, text.replace("pea", "fish"))
    content = schema.read(text)
    assert schema.instance(content) is content
    half = schema.partial('{"soup":"pea","dishes":[{"na')
    assert half is not None and half.content == {"soup": "pea", "dishes": [{}]}


def test_an_optional_property_can_be_an_explicit_null() -> None:
    left_out, explicit = menu().build([DISH]), menu(represent_nil=True).build([DISH])
    text = '{"soup":"pea","price":3.5,"dishes":[{"name":"a","sides":[]}]}'
    assert accepts(left_out, text) and not accepts(explicit, text)
    with_null = text[:-1] + ',"note":null}'
    assert accepts(explicit, with_null) and not accepts(left_out, with_null)


def test_a_choice_of_schemas_and_null() -> None:
    schema = Dynamic("Answer", "Or nothing", any_of=[DISH, Dynamic.null(), TEXT]).build()
    for text in ('{"name":"a","sides":[]}', "null", '"text"'):
        assert accepts(schema, text)
        assert schema.read(text).to_json() == text
    assert not accepts(schema, "3")
    assert schema.to_dict()["description"] == "Or nothing"


def test_a_list_and_a_type_as_roots() -> None:
    assert accepts(Dynamic.array_of(TEXT, maximum=1).build(), '["a"]')
    assert not accepts(Dynamic.array_of(TEXT, maximum=1).build(), '["a","b"]')
    assert Dynamic.of_type(list[int]).build().to_dict() == {"type": "array", "items": {"type": "integer"}}


@pytest.mark.parametrize(
    "build, kind, names",
    [
        (lambda: menu().build(), "undefinedReferences", ("Dish",)),
        (lambda: menu().build([DISH, Dynamic("Dish", properties=[])]), "duplicateType", ("Dish",)),
        (lambda: menu().build([DISH, Dynamic("Menu", properties=[])]), "duplicateType", ("Menu",)),
        (
            lambda: Dynamic("Two", properties=[Property("a", TEXT), Property("a", TEXT)]).build(),
            "duplicateProperty",
            ("Two", "a"),
        ),
        (lambda: Dynamic("None", any_of=[]).build(), "emptyTypeChoices", ("None",)),
        (lambda: Dynamic("Neither"), "emptyTypeChoices", ("Neither",)),
    ],
)
def test_what_does_not_fit_together_is_named(build: Any, kind: str, names: tuple[str, ...]) -> None:
    with pytest.raises(SchemaError) as caught:
        build()
    assert (caught.value.kind, caught.value.names) == (kind, names)
    assert isinstance(caught.value, InvalidGenerationSchemaError) and caught.value.hint


def test_guides_of_parts_are_checked() -> None:
    with pytest.raises(UnsupportedGuideError, match=r"T\.a"):
        Dynamic("T", properties=[Property("a", Dynamic.of_type(str, [GenerationGuide.count(1)]))]).build()


def test_an_endless_schema_is_refused() -> None:
    with pytest.raises(InvalidGenerationSchemaError, match="Loop"):
        Dynamic("Loop", properties=[Property("next", Dynamic.reference_to("Loop"))]).build()
