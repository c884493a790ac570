"""A row that is to be answered becomes the ids that a model reads: the very ones of inference, as everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchard.data.source import Row
from orchard.text.chat import chat_ids
from orchard.text.tokenizer import Tokenizer


def prompt_ids(
    tokenizer: Tokenizer, row: Row, *, chat: bool = True, variables: Mapping[str, Any] | None = None
) -> list[int]:
    """`row` has the form of `orchard.data.rows.asked`. `chat`: a prompt that is a text is a user's message, as `orchard respond`
    would put it; otherwise it is a text that goes on. `variables`: what else the chat template may ask for."""
    data = row.data
    if "messages" not in data and not chat:
        return tokenizer.encode(data["prompt"], bos=tokenizer.add_bos)
    messages = data.get("messages") or data["prompt"]
    return chat_ids(tokenizer, messages, tools=data.get("tools"), variables=variables or None)
