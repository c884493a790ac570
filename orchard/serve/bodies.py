"""Reading what clients send: bounded, checked, and with a word about everything that was not understood.

Bodies are pydantic models. A field that a model does not have is kept, and named in the header `x-orchard-ignored` of the answer:
nothing is swallowed in silence. What would change the answer and cannot be done is refused by whoever reads the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, WithJsonSchema
from starlette.requests import Request

from orchard.serve.errors import ApiError, invalid

IGNORED = "x-orchard-ignored"
REFERENCE = "#/components/schemas/{model}"
DEFINITIONS: dict[str, Any] = {}
"""The parts that descriptions of bodies refer to, by name: those of all routes, since each has its own name."""
NAMED = 20
"""Ignored fields that are named; more are counted."""


class Body(BaseModel):
    """A request, or a part of one."""

    model_config = ConfigDict(extra="allow", protected_namespaces=(), hide_input_in_errors=True)


def one_of(*words: str) -> Any:
    """For a field of text that these are the sense of: descriptions list them, and whoever reads the field says what is wrong
    with another one, in better words than a parser has."""
    return WithJsonSchema({"type": "string", "enum": list(words)})


B = TypeVar("B", bound=Body)


async def read(request: Request, kind: type[B]) -> B:
    """The body of a request. The size was bounded on the way in (`orchard.serve.security`)."""
    declared = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if declared and declared != "application/json" and not declared.endswith("+json"):
        raise ApiError(415, "unsupported_media_type", f"the body is {declared[:60]}: send application/json")
    return parsed(await request.body(), kind)


def parsed(data: bytes, kind: type[B]) -> B:
    """JSON of that shape. Depth is bounded by the parser, which gives up long before the stack does."""
    if not data.strip():
        raise invalid("the body is empty: send a JSON object", code="invalid_json")
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _wrong(error) from None
    except (RecursionError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not JSON: {type(error).__name__}", code="invalid_json") from None


def _wrong(error: ValidationError) -> ApiError:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    first = found[0]
    if first["type"] == "json_invalid":
        return invalid(f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json")
    # A union tells the same thing once for each of its members: the path without their names is what the client wrote.
    place = ".".join(str(part) for part in first["loc"] if not _is_member(part))
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    words = first["msg"][:300]
    return invalid(f"{place}: {words}{more}" if place else f"{words}{more}: send a JSON object", place or None)


def _is_member(part: int | str) -> bool:
    return isinstance(part, str) and (part[:1].isupper() or "[" in part or part in ("str", "int", "float", "bool"))


def ignored(body: Body) -> list[str]:
    """Paths of the fields that were not understood."""
    return list(_extras(body, ""))


def _extras(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Body):
        for name in value.model_extra or {}:
            yield f"{path}{name}"
        for name in type(value).model_fields:
            yield from _extras(getattr(value, name), f"{path}{name}.")
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _extras(item, f"{path}{place}.")


def ignored_header(body: Body, *harmless: str) -> dict[str, str]:
    """The header that names what was not understood; `harmless`: names that everybody sends and that change no answer."""
    names = [name for name in ignored(body) if name not in harmless]
    if not names:
        return {}
    shown = ["".join(c if c.isascii() and c.isprintable() and c != "," else "?" for c in n)[:80] for n in names[:NAMED]]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return {IGNORED: ", ".join(shown) + more}


def described(kind: type[Body]) -> dict[str, Any]:
    """What OpenAPI says of a route that reads its body itself."""
    schema = kind.model_json_schema(ref_template=REFERENCE)
    DEFINITIONS.update(schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
