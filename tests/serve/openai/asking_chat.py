"""What tests of `/v1/chat/completions` with OpenAI's own package ask, unless they ask for something else."""

from __future__ import annotations

from typing import Any

import openai
from openai.types.chat import ChatCompletionMessageParam

MODEL = "smollm2"
ASKED: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say hello to Ada."}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TIME = {
    "name": "get_time",
    "description": "The time of day in a zone",
    "parameters": {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]},
}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}, {"type": "function", "function": TIME}]


def asked(client: openai.OpenAI, **more: Any) -> Any:
    """One answer, greedy and short unless told otherwise."""
    settings = {"model": MODEL, "messages": ASKED, "temperature": 0, "max_tokens": 12} | more
    return client.chat.completions.create(**settings)


def said(client: openai.OpenAI, **more: Any) -> str:
    return str(asked(client, **more).choices[0].message.content)


def streamed(client: openai.OpenAI, **more: Any) -> str:
    chunks = asked(client, stream=True, **more)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
