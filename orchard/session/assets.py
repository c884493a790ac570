"""What stands behind a session: the executor for a name, a path or a model; whether models may be loaded at all.

Sessions that name the same model share it, for as long as any of them lives. With `ORCHARD_FORBID_MODELS=1` no real model is
loaded: a test suite that sets it cannot depend on weights by accident.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from orchard.core.errors import ModelNotFound, UnsupportedPair, UsageError
from orchard.session.errors import AssetsUnavailableError
from orchard.session.turn import Executor

if TYPE_CHECKING:
    from orchard.session.memory import Remembering
    from orchard.session.model import Model

DEFAULT_MODEL = "smollm2"
FORBID = "ORCHARD_FORBID_MODELS"

_shared: WeakValueDictionary[str, Executor] = WeakValueDictionary()
_loading = threading.Lock()
_stand_ins: list[Executor] = []


def models_forbidden() -> bool:
    """Whether the environment forbids real models."""
    return os.environ.get(FORBID, "").strip().lower() not in ("", "0", "false", "no")


def refuse_if_forbidden(name: str | Path) -> None:
    """Called before a real model is loaded, whoever asks for it."""
    if models_forbidden():
        raise AssetsUnavailableError(
            f"the model {str(name)!r} may not be loaded: {FORBID} is set",
            hint=f"give the session an orchard.testing.ScriptedModel, or unset {FORBID}",
        )


class ModelRef:
    """A model that is loaded when it is first needed. Cheap to make; safe to share."""

    def __init__(self, model: str | Path | Model | Executor = DEFAULT_MODEL) -> None:
        if not isinstance(model, str | Path) and not _is_executor(model) and not _is_model(model):
            raise UsageError(
                f"{type(model).__name__} is no model",
                hint="give the name of a pulled model, a path, an orchard.Model, or an executor",
            )
        self.name = str(model) if isinstance(model, str | Path) else model.name
        self._given = model
        self._executor: Executor | None = None

    def executor(self) -> Executor:
        """What answers; loads the model at the first call."""
        if _stand_ins and isinstance(self._given, str | Path):
            return _stand_ins[-1]
        if self._executor is None:
            self._executor = executor_of(self._given)
        return self._executor

    def why_not(self) -> str:
        """Why this model cannot be used now, in words; empty where it can. Nothing is loaded to find out."""
        if _stand_ins or not isinstance(self._given, str | Path):
            return ""
        if models_forbidden():
            return f"{FORBID} is set"
        from orchard.weights.library import Library

        try:
            Library().resolve(str(self._given))
        except (ModelNotFound, OSError) as error:
            return str(error)
        return ""

    def __repr__(self) -> str:
        return f"ModelRef({self.name!r})"


class MemoryRef:
    """A model whose conversation stays within some bytes; made when it is first needed."""

    def __init__(self, memory: Any, ref: ModelRef) -> None:
        from orchard.session.memory import Memory

        self.memory = Memory.of(memory)
        self._ref = ref
        self._made: tuple[Remembering, Executor] | None = None

    def remembering(self) -> Remembering:
        return self._both()[0]

    def executor(self) -> Executor:
        return self._both()[1]

    def _both(self) -> tuple[Remembering, Executor]:
        if self._made is None:
            from orchard.session.executors.local import LocalExecutor
            from orchard.session.memory import Remembering

            executor = self._ref.executor()
            if not isinstance(executor, LocalExecutor):
                raise UnsupportedPair(
                    f"{self._ref.name!r} keeps its own memory", hint="memory= is for models of this machine"
                )
            found = Remembering(executor.model, self.memory)
            self._made = found, LocalExecutor(found.model)
        return self._made


def remembered(memory: Any, ref: ModelRef) -> MemoryRef | None:
    return None if memory is None else MemoryRef(memory, ref)


def executor_of(model: str | Path | Model | Executor) -> Executor:
    """The executor for a model; one for each name, shared while it is in use."""
    if not isinstance(model, str | Path):
        if _is_executor(model):
            return model  # type: ignore[return-value]
        from orchard.session.executors.local import LocalExecutor

        return LocalExecutor(model)  # type: ignore[arg-type]
    refuse_if_forbidden(model)
    from orchard.weights.library import Library

    try:
        path = str(Library().resolve(str(model)))
    except ModelNotFound as error:
        raise AssetsUnavailableError(str(error), hint=error.hint) from error
    with _loading:
        found = _shared.get(path)
        if found is None:
            found = _shared[path] = _load(model)
        return found


def tokens_of(executor: Executor, value: Any = None, instructions: str | None = None) -> int:
    """Tokens that a prompt, a schema, a transcript, a list of tools, or instructions take in the context."""
    from orchard.session.prompt import compose
    from orchard.session.schema import GenerationSchema
    from orchard.session.tools import ToolBox
    from orchard.session.transcript import Transcript
    from orchard.text.messages import Message

    if (value is None) == (instructions is None):
        raise CountError(
            "tokens are counted of one thing at a time", hint="give a value, or instructions=…, and not both"
        )
    if instructions is not None:
        return executor.count([Message("system", instructions)], answer=False) if instructions else 0
    if isinstance(value, GenerationSchema):
        return executor.count([Message("user", value.for_prompt())], answer=False)
    if isinstance(value, Transcript):
        messages = value.messages()
        return executor.count(messages, answer=False) if messages else 0
    if isinstance(value, list | tuple) and not any(_is_prompt_part(item) for item in value):
        if not value:
            return 0
        asked = [Message("user", "?")]  # a template may need something to put the tools before
        specs = ToolBox(tuple(value)).specs()
        return executor.count(asked, specs, answer=False) - executor.count(asked, answer=False)
    text = compose(value, vision="vision" in executor.capabilities).text
    return executor.count([Message("user", text)], answer=False)


def _is_prompt_part(item: Any) -> bool:
    from orchard.session.prompt import Attachment

    return isinstance(item, str | Attachment)


class CountError(UsageError, ValueError):
    """Tokens of nothing, or of two things; a ValueError, as in the SDK."""

    code = "count"


@contextmanager
def stand_in(executor: Executor) -> Iterator[Executor]:
    """Every session that names a model gets this one instead, until the block ends; for tests."""
    _stand_ins.append(executor)
    try:
        yield executor
    finally:
        _stand_ins.remove(executor)


def _load(name: str | Path) -> Executor:
    from orchard.session.executors.local import LocalExecutor
    from orchard.session.model import load

    return LocalExecutor(load(name))


def _is_executor(thing: Any) -> bool:
    return isinstance(thing, Executor)


def _is_model(thing: Any) -> bool:
    """An `orchard.Model`, without importing it: what has an engine and a tokenizer can be run here."""
    return hasattr(thing, "engine") and hasattr(thing, "tokenizer")
