"""Text in and out of a model: tokenizers, chat messages as token ids, model templates in a sandbox.

Names are loaded when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchard.text.chat import chat_ids, plain_prompt
    from orchard.text.messages import Message, messages_from
    from orchard.text.stream import StreamDecoder
    from orchard.text.templates import render
    from orchard.text.tokenizer import Tokenizer

__all__ = ["Message", "StreamDecoder", "Tokenizer", "chat_ids", "messages_from", "plain_prompt", "render"]

_HOME = {
    "Message": "messages",
    "StreamDecoder": "stream",
    "Tokenizer": "tokenizer",
    "chat_ids": "chat",
    "messages_from": "messages",
    "plain_prompt": "chat",
    "render": "templates",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
