"""Test an application that talks to a model, without one: answers are written down, and what was asked can be looked at.

from orchard.testing import ScriptedModel, ToolCall, scripted

def test_greeting():
    model = ScriptedModel(["Hello, Ada!"])
    assert greet("Ada", session=orchard.Session(model=model)) == "Hello, Ada!"
    assert "Ada" in model.prompts[0]

Where the application makes its sessions itself, `with scripted(["Hello!"]) as model:` stands in for every model it names. With
`ORCHARD_FORBID_MODELS=1` in the environment no real model is loaded, so that a test which needs one by accident fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from orchard.session.assets import FORBID, stand_in
from orchard.session.executors.scripted import Answer, ScriptedModel, ScriptError, ToolCall, matches

__all__ = ["FORBID", "Answer", "ScriptError", "ScriptedModel", "ToolCall", "matches", "scripted"]


@contextmanager
def scripted(answers: Sequence[Any] | ScriptedModel = (), **settings: Any) -> Iterator[ScriptedModel]:
    """Sessions that name a model, or none, get this script instead until the block ends. `settings`: as `ScriptedModel`."""
    model = answers if isinstance(answers, ScriptedModel) else ScriptedModel(answers, **settings)
    with stand_in(model):
        yield model
