"""From token ids to token ids and text: the engine, its requests and its sampling rules.

`Engine(model, tokenizer).answer([Request(ids=…)])` is all that most callers need. Nothing here imports torch, except for
a model that runs in it; the engine is imported when it is first named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchard.generate.errors import NumericError
from orchard.generate.request import Answer, Finish, Piece, Request, Sampling, TokenLogprob, Usage

if TYPE_CHECKING:
    from orchard.generate.engine import Engine
    from orchard.generate.speculative import Speculation
    from orchard.generate.stream import Stream

__all__ = [
    "Answer",
    "Engine",
    "Finish",
    "NumericError",
    "Piece",
    "Request",
    "Sampling",
    "Speculation",
    "Stream",
    "TokenLogprob",
    "Usage",
]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from orchard.generate.engine import Engine

        return Engine
    if name == "Speculation":
        from orchard.generate.speculative import Speculation

        return Speculation
    if name == "Stream":
        from orchard.generate.stream import Stream

        return Stream
    raise AttributeError(f"module 'orchard.generate' has no attribute {name!r}")
