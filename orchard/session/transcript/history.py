"""A conversation as a mutable sequence of entries.

It can be built by hand, sliced, edited, saved and loaded, and turned into the messages that a model is given. While an answer
is on its way it is locked (`busy`): an edit then would belong to no turn, so it raises.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, overload

from orchard.core.files import atomic_write
from orchard.session.errors import TranscriptError
from orchard.session.transcript import wire
from orchard.session.transcript.entries import (
    ENTRIES,
    Entry,
    Instructions,
    PromptEntry,
    Reasoning,
    Response,
    ToolCalls,
    ToolOutput,
    compact,
)
from orchard.text.messages import Message

ToolFormat = Literal["openai", "text"]
_SHOWN = 4000  # characters of one entry in a notebook
_NAMES = {Instructions: "Instructions", PromptEntry: "User", Response: "Assistant", Reasoning: "Thought"}


class Transcript(MutableSequence[Entry]):
    """What was said, oldest first. Equal to another with equal entries, ids included."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries = [_checked(entry) for entry in entries]
        self._extra: dict[str, Any] = {}
        self._busy = 0
        self._guard = threading.Lock()

    # A sequence

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._entries))

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> Transcript: ...
    def __getitem__(self, index: int | slice) -> Entry | Transcript:
        return Transcript(self._entries[index]) if isinstance(index, slice) else self._entries[index]

    @overload
    def __setitem__(self, index: int, value: Entry) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Iterable[Entry]) -> None: ...
    def __setitem__(self, index: int | slice, value: Entry | Iterable[Entry]) -> None:
        self._changing()
        if isinstance(index, slice):
            self._entries[index] = [_checked(entry) for entry in value]  # type: ignore[union-attr]
        else:
            self._entries[index] = _checked(value)

    def __delitem__(self, index: int | slice) -> None:
        self._changing()
        del self._entries[index]

    def insert(self, index: int, value: Entry) -> None:
        self._changing()
        self._entries.insert(index, _checked(value))

    def copy(self) -> Transcript:
        """One with the same entries, which are values and need no copy. It is not locked."""
        copied = Transcript(self._entries)
        copied._extra = dict(self._extra)
        return copied

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Transcript:
        return self.copy()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Transcript):
            return NotImplemented
        return self._entries == other._entries and self._extra == other._extra

    __hash__ = None  # type: ignore[assignment]

    # What is in it

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries)

    @property
    def history(self) -> Transcript:
        """Everything but the instructions."""
        return Transcript(entry for entry in self._entries if not isinstance(entry, Instructions))

    @property
    def instructions(self) -> str | None:
        """The text of all instructions; None where there are none."""
        texts = [entry.text for entry in self._entries if isinstance(entry, Instructions)]
        return "\n\n".join(texts) if texts else None

    def turns(self) -> list[tuple[Entry, ...]]:
        """The history cut before every prompt: what belongs to one question, with tool calls and their outputs."""
        turns: list[list[Entry]] = []
        for entry in self.history:
            if isinstance(entry, PromptEntry) or not turns:
                turns.append([])
            turns[-1].append(entry)
        return [tuple(turn) for turn in turns]

    # Locking

    @property
    def locked(self) -> bool:
        """Whether an answer is on its way."""
        return self._busy > 0

    @contextmanager
    def busy(self) -> Iterator[Callable[..., None]]:
        """Refuse changes until the block ends. Gives a function that adds entries all the same: `record(*entries)`."""
        with self._guard:
            self._busy += 1
        try:
            yield self._record
        finally:
            with self._guard:
                self._busy -= 1

    def _record(self, *entries: Entry) -> None:
        self._entries += [_checked(entry) for entry in entries]  # all or none of them

    def _changing(self) -> None:
        if self._busy:
            raise TranscriptError(
                "the transcript was changed while an answer is on its way",
                hint="wait for the answer, or change a copy: transcript.copy()",
            )

    # As messages

    def messages(self, *, tool_format: ToolFormat = "openai", reasoning: bool = False) -> list[Message]:
        """What a model is given. Instructions at the beginning become one system message; thoughts are left out unless
        asked for. With `tool_format` "text", calls and outputs are plain text, for models that know no tools."""
        if tool_format not in ("openai", "text"):
            raise TranscriptError(f"no tool format called {tool_format!r}", hint='use "openai" or "text"')
        messages: list[Message] = []
        for index, entry in enumerate(self._entries):
            before = self._entries[index - 1] if index else None
            if isinstance(entry, Instructions):
                self._instruct(messages, entry.text)
            elif isinstance(entry, PromptEntry):
                messages.append(Message("user", entry.text))
            elif isinstance(entry, Response):
                messages.append(Message("assistant", entry.text))
            elif isinstance(entry, Reasoning):
                messages += [Message("assistant", f"<think>\n{entry.text}\n</think>")] if reasoning else []
            elif isinstance(entry, ToolOutput):
                messages.append(_output(entry, tool_format))
            elif entry.calls:
                said = messages.pop().content if isinstance(before, Response) else ""
                messages.append(_calls(entry, said, tool_format))
        return messages

    @staticmethod
    def _instruct(messages: list[Message], text: str) -> None:
        if not text:
            return
        if len(messages) == 1 and messages[0].role == "system":  # templates know one system message, at the beginning
            messages[0] = Message("system", f"{messages[0].content}\n\n{text}")
        else:
            messages.append(Message("system", text))

    # As JSON

    def to_json_dict(self) -> dict[str, Any]:
        """Version 1 of the framework's format; see `orchard.session.transcript.wire`."""
        return wire.write_document(self._entries, self._extra)

    @classmethod
    def from_json_dict(cls, document: Mapping[str, Any]) -> Transcript:
        """A transcript from such a dict. Damage raises `TranscriptError`, which names the place."""
        entries, extra = wire.read_document(document)
        made = cls(entries)
        made._extra = extra
        return made

    async def to_dict(self) -> dict[str, Any]:
        """As in the SDK."""
        return self.to_json_dict()

    @classmethod
    async def from_dict(cls, dict: Mapping[str, Any]) -> Transcript:
        """As in the SDK. Tools that are named in it are history: a session has to be given its tools again."""
        return cls.from_json_dict(dict)

    def save(self, path: str | Path) -> None:
        """Write a JSON file, whole or not at all; what could not be read again is not written."""
        document = self.to_json_dict()
        wire.read_document(document)
        data = json.dumps(document, ensure_ascii=False, indent=2).encode() + b"\n"
        _allow(path, len(data))
        with atomic_write(Path(path)) as file:
            file.write(data)

    @classmethod
    def load(cls, path: str | Path) -> Transcript:
        """Read a JSON file that `save`, the SDK or an app wrote."""
        path = Path(path)
        try:
            _allow(path, path.stat().st_size)
            data = path.read_bytes()
        except OSError as error:
            raise TranscriptError(
                f"{path} cannot be read: {error.strerror or error}", hint="give the path of a transcript's JSON file"
            ) from error
        return cls.from_json_dict(wire.parse(data))

    # For people

    def __repr__(self) -> str:
        turns = len(self.turns())
        kinds = f"{len(self)} entries in {turns} turn{'' if turns == 1 else 's'}"
        return f"<Transcript: {kinds}{', locked' if self.locked else ''}>"

    def __str__(self) -> str:
        return "\n".join(f"{name}: {text}" for name, text in map(_lines, self._entries))

    def _repr_html_(self) -> str:
        import html

        rows = "".join(_row(*_lines(entry)) for entry in self._entries)
        return f'<div class="orchard-transcript">{html.escape(repr(self))}<table>{rows}</table></div>'


def _allow(path: str | Path, size: int) -> None:
    if size > wire.MOST_BYTES:
        hint = f"a transcript's file has at most {wire.MOST_BYTES:,} bytes"
        raise TranscriptError(f"{path} is too large: {size:,} bytes", hint=hint)


def _checked(entry: Any) -> Entry:
    if not isinstance(entry, ENTRIES):
        kinds = ", ".join(kind.__name__ for kind in ENTRIES)
        raise TranscriptError(f"a {type(entry).__name__} is no entry of a transcript", hint=f"entries are {kinds}")
    return entry


def _calls(entry: ToolCalls, said: str, tool_format: ToolFormat) -> Message:
    if tool_format == "text":
        calls = [compact({"name": call.name, "arguments": call.values}) for call in entry.calls]
        return Message("assistant", "\n".join([said, *calls] if said else calls))
    made = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.values}}
        for call in entry.calls
    ]
    return Message("assistant", said, tool_calls=made)


def _output(entry: ToolOutput, tool_format: ToolFormat) -> Message:
    if tool_format == "text":
        return Message("user", f"Result of {entry.tool_name}: {entry.text}")
    return Message("tool", entry.text, name=entry.tool_name, tool_call_id=entry.call_id)


def _lines(entry: Entry) -> tuple[str, str]:
    """Who speaks, and what."""
    if isinstance(entry, ToolCalls):
        return "Assistant calls", entry.text
    if isinstance(entry, ToolOutput):
        return f"Tool {entry.tool_name}", entry.text
    return _NAMES[type(entry)], entry.text


def _row(name: str, text: str) -> str:
    import html

    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text) - _SHOWN:,} characters more)"
    style = "text-align:left;white-space:pre-wrap"
    return f'<tr><th style="{style}">{html.escape(name)}</th><td style="{style}">{html.escape(shown)}</td></tr>'
