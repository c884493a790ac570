"""What a transcript is made of: entries with ids, and segments of text or structure inside them.

All are frozen values: `dataclasses.replace` makes a changed one, and a transcript that was copied cannot change under anybody.
They hold JSON and text only, checked when they are made, so that whatever is in a transcript can be written to a file.
`extra` keeps fields of a stored transcript that are not known here; they are written back as they were.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

from orchard.core.frozen import frozen
from orchard.session.errors import TranscriptError

Fields = Mapping[str, Any]

DEEPEST = 64  # levels of lists and objects inside one another
MOST_VALUES = 4_000_000
MOST_CHARACTERS = 128 * 2**20
LONGEST_NUMBER = 1024  # bits of a whole number


def new_id() -> str:
    """A random UUID in capitals, as Apple's framework writes them. (`import uuid` alone would cost milliseconds.)"""
    number = bytearray(os.urandom(16))
    number[6], number[8] = number[6] & 0x0F | 0x40, number[8] & 0x3F | 0x80
    digits = number.hex().upper()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def compact(value: Any) -> str:
    """JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class _Budget:
    """How much of one document has been seen."""

    def __init__(self) -> None:
        self.values = self.characters = 0

    def spend(self, place: str, characters: int = 0) -> None:
        self.values += 1
        self.characters += characters
        if self.values > MOST_VALUES or self.characters > MOST_CHARACTERS:
            hint = f"at most {MOST_CHARACTERS:,} characters in {MOST_VALUES:,} values"
            raise TranscriptError(f"{place}: the transcript is too large", hint=hint)


def json_copy(value: Any, place: str, *, depth: int = 0, budget: _Budget | None = None) -> Any:
    """A copy of a JSON value; anything that JSON cannot say raises, with its place."""
    budget = budget or _Budget()
    budget.spend(place, len(value) if isinstance(value, str) else 0)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _unicode(value, place)
    if isinstance(value, int) and value.bit_length() <= LONGEST_NUMBER:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if depth >= DEEPEST:
        raise TranscriptError(f"{place} lies deeper than {DEEPEST} levels", hint="flatten it; nothing real is so deep")
    if isinstance(value, Mapping):
        copied = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise TranscriptError(f"{place} has the key {key!r}", hint="keys are texts in JSON")
            budget.spend(place, len(key))
            copied[_unicode(key, place)] = json_copy(item, f"{place}.{key}", depth=depth + 1, budget=budget)
        return copied
    if isinstance(value, list | tuple):
        return [json_copy(item, f"{place}[{n}]", depth=depth + 1, budget=budget) for n, item in enumerate(value)]
    named = f"the number {value}" if isinstance(value, float) else f"a {type(value).__name__} that JSON cannot hold"
    raise TranscriptError(f"{place} is {named}", hint="use dicts, lists, texts, finite numbers, true, false and null")


def _unicode(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        hint = "half a surrogate pair is no character; decode the text again from its bytes"
        raise TranscriptError(f"{place} is not valid Unicode text", hint=hint) from None
    return str(text)


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise TranscriptError(f"{place} is of type {type(value).__name__}", hint="it must be text")
    return _unicode(value, place)


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TranscriptError(f"{place} is of type {type(value).__name__}", hint="it must be a dict")
    copied: dict[str, Any] = json_copy(value, place)
    return copied


def _settle(part: Any, **values: Any) -> None:
    """Put checked values into a frozen part that is being made."""
    kind = type(part).__name__
    made = _text(part.id, f"{kind}.id") or new_id()
    part.__dict__.update(values, id=made, extra=_object(part.extra, f"{kind}.extra"))


@frozen
class TextSegment:
    """Some text."""

    text: str
    id: str = ""
    extra: Fields = field(default_factory=dict)

    def __post_init__(self) -> None:
        _settle(self, text=_text(self.text, "TextSegment.text"))

    def __str__(self) -> str:
        return self.text


@frozen
class StructureSegment:
    """A typed answer: `content` is JSON, `source` the name of its schema."""

    source: str
    content: Any
    id: str = ""
    extra: Fields = field(default_factory=dict)

    def __post_init__(self) -> None:
        content = json_copy(self.content, "StructureSegment.content")
        _settle(self, source=_text(self.source, "StructureSegment.source"), content=content)

    def __str__(self) -> str:
        return compact(self.content)


Segment = TextSegment | StructureSegment
Contents = str | Segment | Iterable[str | Segment]
"""What an entry may be made from; it holds segments."""


def _segments(contents: Any, owner: Any) -> tuple[Segment, ...]:
    parts = (contents,) if isinstance(contents, str | TextSegment | StructureSegment) else contents
    if not isinstance(parts, Iterable) or isinstance(parts, bytes | Mapping):
        hint = "give a text, or a list of TextSegment and StructureSegment"
        raise TranscriptError(f"{type(owner).__name__} is not made from a {type(contents).__name__}", hint=hint)
    made = tuple(TextSegment(part) if isinstance(part, str) else part for part in parts)
    for part in made:
        if not isinstance(part, TextSegment | StructureSegment):
            hint = "segments are TextSegment and StructureSegment"
            raise TranscriptError(f"{type(owner).__name__} has a segment of type {type(part).__name__}", hint=hint)
    return made


class _Spoken:
    """An entry with segments."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """Its segments one after another, structures as JSON."""
        return "\n".join(map(str, self.segments))


@frozen
class ToolDefinition:
    """A tool as the model was told of it. A session with this transcript still has to be given the tool itself."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    extra: Fields = field(default_factory=dict)

    def __post_init__(self) -> None:
        _describe(self, ("name", "description"), ("parameters", "extra"))


@frozen
class ResponseFormat:
    """The schema that an answer was asked for in."""

    name: str
    schema: Mapping[str, Any]
    extra: Fields = field(default_factory=dict)

    def __post_init__(self) -> None:
        _describe(self, ("name",), ("schema", "extra"))


def _describe(part: Any, texts: tuple[str, ...], objects: tuple[str, ...]) -> None:
    kind = type(part).__name__
    part.__dict__.update({name: _text(getattr(part, name), f"{kind}.{name}") for name in texts})
    part.__dict__.update({name: _object(getattr(part, name), f"{kind}.{name}") for name in objects})


@frozen
class Instructions(_Spoken):
    """What the application tells the model, and the tools that it may call (None: tools were not written down)."""

    role: ClassVar[str] = "instructions"
    segments: tuple[Segment, ...]
    tools: tuple[ToolDefinition, ...] | None = None
    id: str = ""
    extra: Fields = field(default_factory=dict)

    if TYPE_CHECKING:  # segments may be given as plain text

        def __init__(
            self, segments: Contents, tools: Iterable[ToolDefinition] | None = None, id: str = "", extra: Fields = ...
        ) -> None: ...

    def __post_init__(self) -> None:
        tools = None if self.tools is None else _all(self.tools, ToolDefinition, "Instructions.tools")
        _settle(self, segments=_segments(self.segments, self), tools=tools)


@frozen
class PromptEntry(_Spoken):
    """What the user said, the options it was asked with, and the form that the answer was to have."""

    role: ClassVar[str] = "user"
    segments: tuple[Segment, ...]
    options: Mapping[str, Any] | None = field(default_factory=dict)
    response_format: ResponseFormat | None = None
    id: str = ""
    extra: Fields = field(default_factory=dict)

    if TYPE_CHECKING:

        def __init__(
            self,
            segments: Contents,
            options: Mapping[str, Any] | None = ...,
            response_format: ResponseFormat | None = None,
            id: str = "",
            extra: Fields = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        options = None if self.options is None else _object(self.options, "PromptEntry.options")
        if not isinstance(self.response_format, ResponseFormat | None):
            raise TranscriptError("PromptEntry.response_format is of another type", hint="make a ResponseFormat")
        _settle(self, segments=_segments(self.segments, self), options=options)


@frozen
class Response(_Spoken):
    """What the model answered. `assets` name the models that took part."""

    role: ClassVar[str] = "response"
    segments: tuple[Segment, ...]
    assets: tuple[str, ...] | None = ()
    id: str = ""
    extra: Fields = field(default_factory=dict)

    if TYPE_CHECKING:

        def __init__(
            self, segments: Contents, assets: Iterable[str] | None = (), id: str = "", extra: Fields = ...
        ) -> None: ...

    def __post_init__(self) -> None:
        assets = None if self.assets is None else _all(self.assets, str, "Response.assets")
        _settle(self, segments=_segments(self.segments, self), assets=assets)


@frozen
class ToolCall:
    """One call. `arguments` is the JSON of an object, kept letter for letter; a dict may be given instead."""

    name: str
    arguments: str
    id: str = ""
    extra: Fields = field(default_factory=dict)

    if TYPE_CHECKING:

        def __init__(
            self, name: str, arguments: str | Mapping[str, Any], id: str = "", extra: Fields = ...
        ) -> None: ...

    def __post_init__(self) -> None:
        _text(self.name, "ToolCall.name")
        place = "ToolCall.arguments"
        given: Any = self.arguments
        text = compact(_object(given, place)) if isinstance(given, Mapping) else _text(given, place)
        arguments_of(text, place)
        _settle(self, arguments=text)

    @property
    def values(self) -> dict[str, Any]:
        """The arguments, read."""
        return arguments_of(self.arguments, "ToolCall.arguments")


def arguments_of(text: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise TranscriptError(f"{place} is not JSON", hint='it looks like {"city": "Paris"}') from None
    return _object(value, place)


@frozen
class ToolCalls:
    """The model called tools, all at once."""

    role: ClassVar[str] = "response"
    calls: tuple[ToolCall, ...]
    id: str = ""
    extra: Fields = field(default_factory=dict)

    if TYPE_CHECKING:

        def __init__(self, calls: Iterable[ToolCall], id: str = "", extra: Fields = ...) -> None: ...

    def __post_init__(self) -> None:
        given: Any = self.calls
        calls = (given,) if isinstance(given, ToolCall) else _all(given, ToolCall, "ToolCalls.calls")
        _settle(self, calls=calls)

    def __iter__(self) -> Iterator[ToolCall]:
        return iter(self.calls)

    @property
    def text(self) -> str:
        return "\n".join(f"{call.name}({call.arguments})" for call in self.calls)


@frozen
class ToolOutput(_Spoken):
    """What a tool answered to the call of that id; as in Apple's files, that is also the entry's own id."""

    role: ClassVar[str] = "tool"
    tool_name: str
    segments: tuple[Segment, ...]
    call_id: str = ""
    id: str = ""
    extra: Fields = field(default_factory=dict)

    if TYPE_CHECKING:

        def __init__(
            self, tool_name: str, segments: Contents, call_id: str = "", id: str = "", extra: Fields = ...
        ) -> None: ...

    def __post_init__(self) -> None:
        _text(self.tool_name, "ToolOutput.tool_name")
        call = _text(self.call_id, "ToolOutput.call_id") or new_id()
        self.__dict__["id"] = self.id or call
        _settle(self, segments=_segments(self.segments, self), call_id=call)


@frozen
class Reasoning(_Spoken):
    """What the model thought before it answered. `signature` is what a provider signed it with."""

    role: ClassVar[str] = "reasoning"
    segments: tuple[Segment, ...]
    signature: str | None = None
    id: str = ""
    extra: Fields = field(default_factory=dict)

    if TYPE_CHECKING:

        def __init__(
            self, segments: Contents, signature: str | None = None, id: str = "", extra: Fields = ...
        ) -> None: ...

    def __post_init__(self) -> None:
        if self.signature is not None:
            _text(self.signature, "Reasoning.signature")
        _settle(self, segments=_segments(self.segments, self))


Entry = Instructions | PromptEntry | Response | ToolCalls | ToolOutput | Reasoning
ENTRIES = (Instructions, PromptEntry, Response, ToolCalls, ToolOutput, Reasoning)


def _all(values: Any, kind: type, place: str) -> tuple[Any, ...]:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise TranscriptError(f"{place} is of type {type(values).__name__}", hint=f"give a list of {kind.__name__}")
    items = tuple(values)
    for index, item in enumerate(items):
        if not isinstance(item, kind):
            hint = f"every one must be of type {kind.__name__}"
            raise TranscriptError(f"{place}[{index}] is of type {type(item).__name__}", hint=hint)
        if isinstance(item, str):
            _unicode(item, f"{place}[{index}]")
    return items
