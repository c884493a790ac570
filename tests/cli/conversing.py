"""What tests of `respond` and `chat` share: the program, and conversations without a terminal."""

from __future__ import annotations

import sys
from pathlib import Path

from orchard.cli.conversation import Conversation, Setup
from orchard.testing import ScriptedModel

PROGRAM = [sys.executable, "-c", "from orchard.cli.main import run; run()"]


def scripted(*answers: object, system: str | None = None, **named: object) -> Conversation:
    return Conversation(Setup(ScriptedModel(list(answers)), **named), system)  # type: ignore[arg-type]


def said(conversation: Conversation) -> list[tuple[str, str]]:
    return [(type(entry).__name__, entry.text) for entry in conversation.transcript]


def on_small(small: Path, max_tokens: int) -> Conversation:
    import orchard
    from orchard.session.options import GenerationOptions

    options = GenerationOptions(maximum_response_tokens=max_tokens)
    return Conversation(Setup(orchard.load(small), options, guardrails=None))
