"""The files of the chat page as the server gives them out: types, headers, what a browser may keep, and what is not there."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from orchard.serve import static
from orchard.serve.errors import ApiError, openai_body
from orchard.serve.service import Service
from orchard.serve.settings import ModelSpec, Settings

PAGE = Path(static.__file__).parent / "page"
FILES = static.page_files()
NAMES = sorted(path.name for path in PAGE.iterdir() if path.is_file())


def client_of(**settings: Any) -> TestClient:
    service = SimpleNamespace(settings=Settings(models=(ModelSpec("m", "m"),), **settings))
    app = FastAPI()
    app.include_router(static.router(cast(Service, service)))

    @app.exception_handler(ApiError)
    async def told(request: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(openai_body(error), error.status)

    return TestClient(app)


@pytest.fixture(scope="module")
def client() -> TestClient:
    return client_of()


def test_the_page_has_its_headers(client: TestClient) -> None:
    found = client.get("/")
    assert found.status_code == 200 and found.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(rule.split(" ", 1) for rule in found.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    for kind in ("script-src", "style-src", "connect-src", "img-src"):
        assert policy[kind] == "'self'"
    assert "unsafe" not in found.headers["content-security-policy"]
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["referrer-policy"] == "no-referrer"
    assert found.headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "index.html"])
def test_every_file_is_there_with_its_type(client: TestClient, name: str) -> None:
    found = client.get(f"/page/{name}")
    assert found.status_code == 200 and found.content == (PAGE / name).read_bytes()
    assert found.headers["content-type"] == static.TYPES[Path(name).suffix]
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["content-security-policy"] == static.POLICY
    # A browser that has it is told so, and is given nothing.
    tag = found.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = client.get(f"/page/{name}", headers={"If-None-Match": known})
        assert again.status_code == 304 and again.content == b"" and again.headers["etag"] == tag
    assert client.get(f"/page/{name}", headers={"If-None-Match": '"other"'}).status_code == 200
    head = client.head(f"/page/{name}")
    assert head.content == b"" and int(head.headers["content-length"]) == len(found.content)


def test_tags_differ_between_files() -> None:
    assert sorted(FILES) == NAMES and len({one.etag for one in FILES.values()}) == len(FILES)


@pytest.mark.parametrize(
    "name",
    ["nothing.js", "index.html", "../static.py", "..%2Fstatic.py", "%2e%2e%2fstatic.py", "page.js%00", "a" * 5000],
)
def test_what_is_not_there(client: TestClient, name: str) -> None:
    found = client.get(f"/page/{name}")
    assert found.status_code == 404 and len(found.content) < 500
    assert b"def " not in found.content


@given(st.text(min_size=1, max_size=60))
def test_no_name_leads_elsewhere(name: str) -> None:
    """Names are looked up as they are; whatever else they hold, there is no file."""
    assert (name in FILES) == (name in NAMES)


def test_the_page_can_be_switched_off() -> None:
    client = client_of(page=False)
    assert client.get("/").status_code == 404 and client.get("/page/page.js").status_code == 404


class Links(HTMLParser):
    """Collects what a page loads, and what it must not have."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [value for name in ("src", "href") if (value := given.get(name))]
        self.wrong += [f"{tag} {name}" for name in given if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and not given.get("src")):
            self.wrong.append(tag)


def test_the_page_needs_nothing_from_elsewhere() -> None:
    """No CDN, nothing inline, and every file that is named is one of ours."""
    links = Links()
    links.feed((PAGE / "index.html").read_text("utf-8"))
    assert links.wrong == []
    assert links.links and all(link.removeprefix("page/") in NAMES for link in links.links), links.links
    for path in PAGE.glob("*.js"):
        text = path.read_text("utf-8")
        imported = re.findall(r'from "([^"]+)"|import\("([^"]+)"\)', text)
        assert all((one or other).removeprefix("./") in NAMES for one, other in imported), path.name
        assert not re.search(
            r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        ), path.name
    assert "url(" not in (PAGE / "page.css").read_text("utf-8")


def test_ids_that_scripts_ask_for_are_in_the_page() -> None:
    ids = re.findall(r'\bid="([^"]+)"', (PAGE / "index.html").read_text("utf-8"))
    assert len(ids) == len(set(ids))
    for path in PAGE.glob("*.js"):
        asked = re.findall(r'byId\("([^"]+)"\)', path.read_text("utf-8"))
        assert set(asked) <= set(ids), path.name
