"""A schema by asking for its fields one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchard.cli.common import note
from orchard.core.errors import UsageError

KINDS = {"text": "string", "whole": "integer", "number": "number", "yes/no": "boolean"}
WORDS = "text, whole, number, yes/no, choice; with `list` in front a list of them; with ? at the end it may be missing"


def ask_schema(ask: Callable[[str], str]) -> dict[str, Any]:
    """Ask until an empty name ends it. `ask` shows a question and gives the line that was typed; EOFError ends it too."""
    title = _identifier(ask("What is described, in one word [Answer]: ").strip() or "Answer")
    properties: dict[str, Any] = {}
    required: list[str] = []
    note(f"Kinds: {WORDS}")
    try:
        while name := ask("Field (empty: done): ").strip():
            if name in properties:
                note(f"{name} is there already")
                continue
            part, optional = _asked_kind(ask, name)
            described = ask(f"What {name} means (may be empty): ").strip()
            properties[name] = ({"description": described} if described else {}) | part
            required += [] if optional else [name]
    except EOFError:
        note()
    if not properties:
        raise UsageError("a schema without fields describes nothing", hint="name at least one field")
    return {
        "title": title,
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        "x-order": list(properties),
    }


def _asked_kind(ask: Callable[[str], str], name: str) -> tuple[dict[str, Any], bool]:
    """The schema of a field, and whether it may be missing; asks again until it is understood."""
    while True:
        typed = ask(f"Kind of {name} [text]: ").strip().lower() or "text"
        optional = typed.endswith("?")
        kind = typed.removesuffix("?").strip()
        many = kind.startswith("list")
        kind = kind.removeprefix("list").removeprefix(" of").strip() or "text" if many else kind
        if kind == "choice":
            texts = [text.strip() for text in ask("The choices, with commas between them: ").split(",")]
            part: dict[str, Any] = {"type": "string", "enum": list(dict.fromkeys(text for text in texts if text))}
            if not part["enum"]:
                note("that was no choice")
                continue
        elif kind in KINDS:
            part = {"type": KINDS[kind]}
        else:
            note(f"{typed!r} is none of: {WORDS}")
            continue
        return ({"type": "array", "items": part} if many else part), optional


def _identifier(text: str) -> str:
    words = "".join(letter if letter.isalnum() or letter == "_" else " " for letter in text).split()
    return "".join(words) or "Answer"
