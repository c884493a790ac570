"""The chat page at `/`: plain files of the package, read once and kept in memory.

What the page shows comes from models and so cannot be trusted. The page builds all of it from text, and the headers here
make sure twice: a browser that obeys them runs no script and takes no style but these files, lets no script write markup
(`require-trusted-types-for`), speaks to no other host, and shows the page in nobody's frame. Names are looked up in a
table of what the package holds, so no request can name another file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from orchard.serve.errors import ApiError

if TYPE_CHECKING:
    from orchard.serve.service import Service

INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    # Kept, but asked about each time: after an upgrade of the server no page is half old.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    content: bytes
    kind: str
    etag: str

    def answer(self, request: Request) -> Response:
        """The file, or 304 where the browser has it already."""
        headers = {**HEADERS, "ETag": self.etag}
        if _has(request.headers.get("if-none-match", ""), self.etag):
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.kind, headers=headers)


def _has(header: str, etag: str) -> bool:
    """Whether an If-None-Match names this file; weak tags count, as they do for every GET."""
    known = [tag.strip().removeprefix("W/") for tag in header.split(",")]
    return etag in known or known == ["*"]


def page_files() -> Mapping[str, PageFile]:
    """Every file of the page by its name. Files of other kinds than TYPES are none of it."""
    found = {}
    for item in files("orchard.serve").joinpath("page").iterdir():
        kind = TYPES.get(item.name[item.name.rfind(".") :]) if "." in item.name else None
        if kind is not None and item.is_file():
            content = item.read_bytes()
            found[item.name] = PageFile(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


def router(service: Service) -> APIRouter:
    """`GET /` and `GET /page/{name}`; nothing where the settings switch the page off."""
    routes = APIRouter()
    if not service.settings.page:
        return routes
    found = page_files()

    async def index(request: Request) -> Response:
        return found[INDEX].answer(request)

    async def one(request: Request, name: str) -> Response:
        if name not in found or name == INDEX:
            raise ApiError(404, "not_found", f"the page has no file {name[:100]!r}; it begins at /")
        return found[name].answer(request)

    # Not part of the API, so not part of its description.
    routes.add_api_route("/", index, methods=["GET", "HEAD"], include_in_schema=False)
    routes.add_api_route("/page/{name}", one, methods=["GET", "HEAD"], include_in_schema=False)
    return routes
