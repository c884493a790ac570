"""`orchard respond` as people mostly write it, read without a parser's machinery, which takes longer than the answer begins.

Typer, and the checking of types behind it, cost a third of the time from the start of the process to the first token. Here
only what cannot be misread is read: known options, each once, with plain values in their range. Anything else (a mistake, a
question for help, an unusual spelling) is left to typer, which says what there is to say. A test holds both to the same answers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

_WHOLE = re.compile(r"[0-9]{1,9}")
_DECIMAL = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")


def _text(value: str) -> str | None:
    return value


def _whole(least: int) -> Callable[[str], int | None]:
    return lambda value: int(value) if _WHOLE.fullmatch(value) and int(value) >= least else None


def _number(least: float, most: float = 1e9) -> Callable[[str], float | None]:
    return lambda value: float(value) if _DECIMAL.fullmatch(value) and least <= float(value) <= most else None


# Option → the argument of `respond_to`, and what reads its value (None: not understood).
VALUES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--model": ("model", _text),
    "-m": ("model", _text),
    "--draft": ("draft", _text),
    "--experts-budget": ("experts_budget", _text),
    "--system": ("system", _text),
    "--instructions": ("system", _text),
    "--max-tokens": ("max_tokens", _whole(1)),
    "--temperature": ("temperature", _number(0)),
    "--top-k": ("top_k", _whole(1)),
    "--top-p": ("top_p", _number(0, 1)),
    "--min-p": ("min_p", _number(0, 1)),
    "--repetition-penalty": ("repetition_penalty", _number(0.01)),
    "--stop": ("stop", _text),
    "--seed": ("seed", _whole(0)),
}
FLAGS = {"--offline": "offline", "--json": "as_json"}


def parse(arguments: Sequence[str]) -> dict[str, Any] | None:
    """The arguments of `respond_to` for a command line of `orchard respond`; None where typer should read it."""
    if not arguments or arguments[0] != "respond" or "ORCHARD_OFFLINE" in os.environ:
        return None
    found: dict[str, Any] = {}
    words = iter(arguments[1:])
    for word in words:
        name: str
        value: Any
        if word in FLAGS:
            name, value = FLAGS[word], True
        elif word in VALUES:
            name, read = VALUES[word]
            given = next(words, "-")
            value = None if given.startswith("-") else read(given)
        else:
            name, value = "prompt", None if word.startswith("-") and word != "-" else word
        if value is None or (name in found and name != "stop"):
            return None
        if name == "stop":
            found.setdefault("stop", []).append(value)
        else:
            found[name] = value
    return found
