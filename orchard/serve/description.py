"""What the server says of itself: `/openapi.json` for programs, `/docs` for people: a page without scripts and without a CDN."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.openapi.utils import get_openapi

from orchard.serve.bodies import DEFINITIONS

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin: 2.5rem 0 .25rem; font-size: 1.1rem; }
code { font: .9em ui-monospace, monospace; }
b.method { display: inline-block; min-width: 3.5rem; font-weight: 600; }
table { border-collapse: collapse; width: 100%; margin-top: .5rem; }
td { border-top: 1px solid #8884; padding: .25rem .75rem .25rem 0; vertical-align: top; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
DEEPEST = 3


def router(app: FastAPI) -> APIRouter:
    routes = APIRouter()

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            parts = found.setdefault("components", {}).setdefault("schemas", {})
            for name, schema in DEFINITIONS.items():
                parts.setdefault(name, schema)
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]

    @routes.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        page = "".join(_page(described()))
        return Response(page, media_type="text/html", headers={"content-security-policy": POLICY})

    return routes


def _page(description: dict[str, Any]) -> Iterator[str]:
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(description['info']['title'])}: routes</title>"
    yield f"<meta name=viewport content='width=device-width'><style>{STYLE}</style><h1>Routes</h1>"
    yield "<p>The same for programs: <a href=openapi.json>openapi.json</a>. Errors have a stable <code>code</code>."
    parts = description.get("components", {}).get("schemas", {})
    for path, methods in description["paths"].items():
        for method, route in methods.items():
            yield f"<h2><b class=method>{escape(method.upper())}</b> <code>{escape(path)}</code></h2>"
            yield f"<p>{escape(route.get('description', ''))}"
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body is not None:
                yield from _fields(body, parts)


def _fields(schema: dict[str, Any], parts: dict[str, Any]) -> Iterator[str]:
    schema = parts.get(schema.get("$ref", "").rpartition("/")[2], schema)
    needed = set(schema.get("required", ()))
    yield "<table>"
    for name, field in schema.get("properties", {}).items():
        kind = escape(_kind(field)) + (", required" if name in needed else "")
        yield f"<tr><td><code>{escape(name)}</code><td>{kind}<td>{escape(field.get('description', ''))}"
    yield "</table>"


def _kind(field: dict[str, Any], depth: int = 0) -> str:
    """A type in words."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "anyOf" in field and depth < DEEPEST:
        kinds = [_kind(one, depth + 1) for one in field["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if field.get("type") == "array" and depth < DEEPEST:
        return f"list of {_kind(field.get('items', {}), depth + 1)}"
    return str(field.get("type", "anything"))
