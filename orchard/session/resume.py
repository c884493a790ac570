"""Where a conversation begins, and how it is kept: one JSON file, and beside it what the model has read of it.

The file holds the transcript in the framework's format, what the context policy left of it, options, usage and properties. The
second file is the engine's own (keys and values, safetensors). It only saves time: a session without it reads its prompt
again and answers the same. Both are written whole or not at all, the JSON last.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.core.errors import OrchardError, UsageError
from orchard.core.files import write_text
from orchard.session.errors import TranscriptError
from orchard.session.options import GenerationOptions
from orchard.session.transcript import Entry, Instructions, ToolDefinition, Transcript
from orchard.session.turn import Usage

if TYPE_CHECKING:
    from orchard.session.session import Session
    from orchard.session.tools import ToolBox

KIND = "Orchard.Session"
VERSION = 1
MOST_BYTES = 2**28


def first_transcript(
    given: Transcript | Iterable[Entry] | None, instructions: str | None, tools: ToolBox
) -> Transcript:
    """The transcript to begin with: one that was given stays the same object, so that whoever gave it sees it grow."""
    made = given if isinstance(given, Transcript) else Transcript(given or ())
    if given is not None and instructions:
        made[:] = [Instructions(instructions), *made.history]
    elif given is None:
        specs = tools.specs()
        told_tools = tuple(ToolDefinition(spec.name, spec.description, dict(spec.parameters)) for spec in specs)
        if instructions or told_tools:
            made.append(Instructions(instructions or (), told_tools or None))
    return made


def prefix_path(path: Path) -> Path:
    """The file beside a session's that holds what the model has read."""
    return path.with_name(f"{path.name}.prefix")


def save_session(session: Session, path: Path, *, cache: bool) -> None:
    if session.is_responding:
        raise TranscriptError(
            "the session is answering and cannot be saved now", hint="wait for the answer, or cancel it"
        )
    if cache:
        _save_prefix(session, prefix_path(path))
    covered, view = session.view
    document = {
        "type": KIND,
        "version": VERSION,
        "model": session.executor.name,
        "transcript": session.transcript.to_json_dict(),
        "view": {"covered": len(covered), "transcript": Transcript(view).to_json_dict()} if covered else None,
        "usage": session.usage.to_dict(),
        "options": session.options.to_dict() if session.options is not None else None,
        "adapters": list(session.adapters),
        "properties": session.properties,
        "memory": None if session.memory is None else session.memory.memory.to_dict(),
    }
    try:
        text = json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the properties of this session cannot be saved: {error}",
            hint="keep only texts, numbers, lists and dicts there",
        ) from error
    write_text(path, text + "\n")


def resume_session(kind: type[Session], path: Path, model: Any, settings: Mapping[str, Any]) -> Session:
    document = _read(path)
    try:
        transcript = Transcript.from_json_dict(document["transcript"])
        options = None if document["options"] is None else GenerationOptions.from_dict(document["options"])
        usage = Usage(**{name: _whole(count) for name, count in document["usage"].items()})
        view = document["view"]
        covered = transcript.entries[: _whole(view["covered"])] if view else ()
        kept = Transcript.from_json_dict(view["transcript"]).entries if view else ()
        adapters = tuple(map(_text, document["adapters"]))
        given: dict[str, Any] = {"options": options, "adapters": adapters, "properties": dict(document["properties"])}
        name = _text(document["model"])
        if document.get("memory") is not None:
            from orchard.session.memory import Memory  # few sessions have one

            given["memory"] = Memory.from_dict(document["memory"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    session = kind(model=name if model is None else model, transcript=transcript, **{**given, **settings})
    session.continue_from(usage, (covered, kept))
    _load_prefix(session, prefix_path(path))
    return session


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise _damaged(path, f"it is longer than {MOST_BYTES:,} bytes")
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise TranscriptError(
            f"{path} cannot be read: {error.strerror or error}", hint="give the path that session.save wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "it is not JSON") from error
    if not isinstance(document, dict) or document.get("type") != KIND:
        raise _damaged(path, f"its type is not {KIND}")
    if document.get("version") != VERSION:
        raise TranscriptError(
            f"{path} is of version {document.get('version')!r}, and only {VERSION} is known", hint="use a newer Orchard"
        )
    return document


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _damaged(path: Path, why: str) -> TranscriptError:
    return TranscriptError(f"{path} is no saved session: {why}", hint="save the session again with session.save(path)")


def _save_prefix(session: Session, path: Path) -> None:
    """What the executor has read, where it can be kept. An older file is of an older conversation, and goes."""
    save = getattr(session.executor, "save_prefix", None)
    messages = session.transcript.messages()
    kept = save(messages, session.tools.specs(), path) if save is not None and messages else 0
    if not kept:
        path.unlink(missing_ok=True)


def _load_prefix(session: Session, path: Path) -> None:
    load = getattr(session.executor, "load_prefix", None)
    if load is None or not path.is_file():
        return
    try:
        load(path)
    except OrchardError:  # damaged, or of another model: the prompt is read again instead, with the same answer
        return
