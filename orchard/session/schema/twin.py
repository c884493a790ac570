"""The twin of a class for half-made values: the same fields, all optional, and an `id` that stays while a stream goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Optional

from orchard.session.schema.content import GeneratedContent, GenerationID


def twin_of(kind: type, hints: Mapping[str, Any], shape: Callable[[], Any]) -> type:
    """`shape` gives the Record of the class, for `_from_generated_content`; it is asked when it is needed."""
    fields: list[Any] = [(name, _optional(hint), dataclasses.field(default=None)) for name, hint in hints.items()]
    if "id" not in hints:
        identity = dataclasses.field(default_factory=GenerationID, compare=False, repr=False)
        fields.append(("id", GenerationID, identity))

    def from_content(cls: type, content: GeneratedContent) -> Any:
        """A half-made object from whatever is there."""
        made = shape().grow(content.value(), 0, {})
        if "id" not in hints:
            made.id = content.id
        return made

    body = {
        "__doc__": f"What there is of a {kind.__name__} while it is generated; None for what is not there yet.",
        "__module__": kind.__module__,
        "_id_is_a_field": "id" in hints,
        "_from_generated_content": classmethod(from_content),
    }
    return dataclasses.make_dataclass(f"{kind.__name__}PartiallyGenerated", fields, namespace=body)


def _optional(hint: Any) -> Any:
    try:
        return Optional[hint]  # noqa: UP045  # `hint | None` refuses what is only a name yet
    except TypeError:
        return Any
