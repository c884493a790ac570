"""Where the parts of a schema are: names that `$id` and `$anchor` give, and what a `$ref` points to.

Everything is looked up in the one document. A reference out of it is refused: nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from orchard.generate.errors import UnsupportedSchema

MOST_DEPTH = 60
MOST_PARTS = 20_000

ONE: tuple[str, ...] = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
ONE += ("unevaluatedItems", "unevaluatedProperties", "contentSchema")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
TABLES = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties", "dependencies")


class Document:
    """The parts of one schema by their places. A part is known by its `id`, which lasts as long as the document."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.bases: dict[int, str] = {}
        self.pointers: dict[int, str] = {}
        self.resources: dict[str, Any] = {"": root}
        self.anchors: dict[tuple[str, str], Any] = {}
        self.dynamic: dict[str, int] = {}
        """How often a name is given by `$dynamicAnchor`, or by `$anchor`."""
        self._walk(root)

    def _walk(self, root: Any) -> None:
        waiting = [(root, "", "", 0)]
        while waiting:
            part, pointer, base, depth = waiting.pop()
            if depth > MOST_DEPTH:
                raise UnsupportedSchema("schema", pointer, f"parts are more than {MOST_DEPTH} deep")
            if isinstance(part, bool):
                continue
            if not isinstance(part, dict):
                raise UnsupportedSchema(pointer.rpartition("/")[2] or "schema", pointer, "not a schema")
            if len(self.bases) >= MOST_PARTS:
                raise UnsupportedSchema("schema", pointer, f"more than {MOST_PARTS:,} parts")
            base = self._names(part, pointer, base)
            waiting += [(inner, f"{pointer}/{place}", base, depth + 1) for place, inner in parts_of(part)]

    def _names(self, part: dict[str, Any], pointer: str, base: str) -> str:
        """Note what a part is called; the address that references in it start from."""
        own = part.get("$id")
        if own is not None:
            if not isinstance(own, str) or urldefrag(own)[1]:
                raise UnsupportedSchema("$id", pointer, "not an address without a fragment")
            base = _absolute(base, own)
            if base in self.resources:
                raise UnsupportedSchema("$id", pointer, f"{base!r} is there twice")
            self.resources[base] = part
        self.bases[id(part)], self.pointers[id(part)] = base, pointer
        for keyword in ("$anchor", "$dynamicAnchor"):
            name = part.get(keyword)
            if name is None:
                continue
            if not isinstance(name, str) or self.anchors.get((base, name), part) is not part:
                raise UnsupportedSchema(keyword, pointer, "not a name, or one that is there twice")
            self.anchors[base, name] = part
            self.dynamic[name] = self.dynamic.get(name, 0) + 1
        return base

    def find(self, reference: Any, part: dict[str, Any], keyword: str) -> Any:
        """The part that a reference in `part` points to: an object of the document, or True or False."""
        pointer = self.pointers[id(part)]
        if not isinstance(reference, str):
            raise UnsupportedSchema(keyword, pointer, "not a text")
        address, fragment = urldefrag(_absolute(self.bases[id(part)], reference))
        resource = self.resources.get(address)
        if resource is None:
            why = f"{reference!r} is not in this schema, and nothing is fetched"
            raise UnsupportedSchema(keyword, pointer, why, hint="put what it refers to under $defs")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = self.anchors.get((address, fragment))
        else:
            found = _at(resource, fragment)
        known = isinstance(found, bool) or (isinstance(found, dict) and id(found) in self.bases)
        if not known:
            raise UnsupportedSchema(keyword, pointer, f"there is no schema at {reference!r}")
        dynamic = keyword == "$dynamicRef" and isinstance(found, dict) and found.get("$dynamicAnchor") == fragment
        if dynamic and self.dynamic[fragment] > 1:
            raise UnsupportedSchema(keyword, pointer, f"several parts are called {fragment!r}")
        return found


def parts_of(part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema, each with its place. What has the wrong form is left for the reader to refuse."""
    for keyword in ONE:
        if keyword in part and not isinstance(part[keyword], list):
            yield keyword, part[keyword]
    for keyword in LISTS:
        if isinstance(part.get(keyword), list):
            yield from ((f"{keyword}/{place}", inner) for place, inner in enumerate(part[keyword]))
    for keyword in TABLES:
        if isinstance(part.get(keyword), dict):
            for name, inner in part[keyword].items():
                if keyword != "dependencies" or not isinstance(inner, list):
                    yield f"{keyword}/{escaped(name)}", inner


def escaped(name: str) -> str:
    """A name as a step of a JSON pointer."""
    return str(name).replace("~", "~0").replace("/", "~1")


def _absolute(base: str, reference: str) -> str:
    if reference.startswith("#"):
        return urldefrag(base)[0] + reference
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference


def _at(found: Any, fragment: str) -> Any:
    for step in fragment.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and step in found:
            found = found[step]
        elif isinstance(found, list) and step.isascii() and step.isdigit() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found
