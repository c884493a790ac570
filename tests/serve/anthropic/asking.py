"""What the tests of Anthropic's protocol ask with."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2

from tests.serve.serving import Serving

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK: dict[str, Any] = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}


def client(serving: Serving, **more: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=serving.url, api_key="none", max_retries=0, **more)


def post(serving: Serving, **body: Any) -> httpx2.Response:
    return httpx2.post(
        f"{serving.url}/v1/messages", json={"model": "scripted", "max_tokens": 9, "messages": HELLO} | body
    )
