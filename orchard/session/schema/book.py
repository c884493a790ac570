"""A book collects the definitions of one JSON Schema while it is written: every named type once, under `$defs`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchard.session.schema.shapes import Shape


class Book:
    """`exact`: for a grammar, where patterns are anchored and what only a person reads (`title`, `x-order`) is left out."""

    def __init__(self, root: Shape, *, exact: bool) -> None:
        self.root = root
        self.exact = exact
        self.definitions: dict[str, dict[str, Any]] = {}
        self._names: dict[int, str] = {}

    def refer(self, shape: Shape) -> dict[str, Any]:
        """A `$ref` to a named shape, which is defined when it is first referred to."""
        if shape is self.root:
            return {"$ref": "#"}
        name = self._names.get(id(shape))
        if name is None:
            name = self._names[id(shape)] = self._free(shape.name)
            self.definitions[name] = {}  # taken, so that what it is made of cannot take the name
            self.definitions[name] = shape.definition(self, f"#/$defs/{name}")
        return {"$ref": f"#/$defs/{name}"}

    def written(self) -> dict[str, Any]:
        """The whole schema."""
        schema = dict(self.root.definition(self, "#"))
        if self.definitions:
            own = schema.pop("$defs", {})
            schema["$defs"] = {**own, **{name: self.definitions[name] for name in sorted(self.definitions)}}
        return schema

    def _free(self, name: str) -> str:
        plain = re.sub(r"\W+", "_", name).strip("_") or "Type"
        number, free = 1, plain
        while free in self.definitions:
            number += 1
            free = f"{plain}{number}"
        return free
