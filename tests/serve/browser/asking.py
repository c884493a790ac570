"""What tests do with our page, in words: ask something, set a field, read the figures."""

from __future__ import annotations

import json
from typing import Any

from tests.serve.browser.devtools import Page

DONE = "!document.querySelector('.running') && document.querySelector('#stop').hidden"
"""That no answer is being written."""


def ask(page: Page, words: str, done: str = DONE) -> None:
    turns = page.count(".turn")
    page.fill("#question", words)
    page.press("Enter")
    page.until(f"document.querySelectorAll('.turn').length > {turns + 1} && {done}")


def sent(page: Page) -> dict[str, Any]:
    """The body of the last question."""
    return json.loads([request for request in page.requests if request["method"] == "POST"][-1]["postData"])


def set_field(page: Page, name: str, value: str) -> None:
    page.js(
        f"(() => {{ const field = document.getElementById({json.dumps(name)}); field.value = {json.dumps(value)};"
        "field.dispatchEvent(new Event('input')) })()"
    )


def figures(page: Page) -> dict[str, str]:
    """Those under the last answer."""
    return dict(
        page.each(".figures", "[...it.children].map((pair) => [...pair.children].map((part) => part.innerText))")[-1]
    )
