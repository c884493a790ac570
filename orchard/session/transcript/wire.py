"""Transcripts as JSON, version 1 of the format of Apple's Foundation Models framework.

    {"version": 1, "type": "FoundationModels.Transcript", "transcript": {"entries": [ENTRY, …]}}

An entry has an `id` and a `role`: `instructions` (contents, tools), `user` (contents, options, responseFormat), `response`
(contents and assets, or toolCalls), `tool` (toolName, toolCallID, contents). Contents are `text` or `structure`. Orchard adds
the role `reasoning` (contents, signature), which version 1 does not have. Reading and writing again gives the same JSON,
fields that are not known here included; what cannot be read raises `TranscriptError` with its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from orchard.session.errors import TranscriptError
from orchard.session.transcript.entries import (
    MOST_CHARACTERS,
    Entry,
    Instructions,
    PromptEntry,
    Reasoning,
    Response,
    ResponseFormat,
    Segment,
    StructureSegment,
    TextSegment,
    ToolCall,
    ToolCalls,
    ToolDefinition,
    ToolOutput,
    arguments_of,
    json_copy,
)

VERSION = 1
KIND = "FoundationModels.Transcript"
MOST_ENTRIES = 100_000
MOST_BYTES = MOST_CHARACTERS
AROUND = 16  # levels that the format itself puts around a segment's content
Json = dict[str, Any]
Part = TypeVar("Part", bound=Any)


def read_document(document: Any) -> tuple[list[Entry], Json]:
    """The entries of a transcript, and the fields around them that are not known here."""
    _check(isinstance(document, Mapping), "the transcript", "is not a JSON object")
    document = json_copy(document, "the transcript", depth=-AROUND)
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise TranscriptError(
            f"the transcript has version {version!r}; version {VERSION} is the one that is read here",
            hint="save it again with a program of that version, or check that this is a transcript",
        )
    if document.get("type") != KIND:
        raise TranscriptError(
            f"the transcript has type {document.get('type')!r}", hint=f"a transcript's type is {KIND}"
        )
    inner = _object(document, "transcript", "the transcript")
    entries = _list(inner, "entries", "transcript")
    _check(len(entries) <= MOST_ENTRIES, "transcript.entries", f"has more than {MOST_ENTRIES:,} entries")
    known = write_document((), {})
    return [_entry(raw, f"transcript.entries[{n}]") for n, raw in enumerate(entries)], _rest(document, known)


def write_document(entries: Iterable[Entry], extra: Json) -> Json:
    """A JSON document of its own: changing it changes no entry."""
    document = {"version": VERSION, "type": KIND, "transcript": {"entries": [write_entry(entry) for entry in entries]}}
    # Entries hold checked JSON, so a plain walk is enough here.
    copied: Json = json.loads(json.dumps(_with(document, extra)))
    return copied


def parse(text: str | bytes) -> Any:
    """JSON of a file; what Python would forgive (a key twice, NaN) is damage here."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except TranscriptError:
        raise
    except (ValueError, RecursionError) as error:
        hint = "the file is cut short or not a transcript"
        raise TranscriptError(f"the transcript is not JSON: {error}", hint=hint) from error


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = next(key for n, (key, _) in enumerate(pairs) if key in dict(pairs[:n]))
        raise TranscriptError(f"the transcript has the key {twice!r} twice in one object", hint="the file is damaged")
    return made


def _no_constant(name: str) -> NoReturn:
    raise TranscriptError(f"the transcript holds {name}, which is no JSON", hint="the file is damaged")


# Writing


def write_entry(entry: Entry) -> Json:
    return _with(_write_entry(entry), entry.extra)


def _write_entry(entry: Entry) -> Json:
    written: Json = {"id": entry.id, "role": entry.role}
    if isinstance(entry, ToolCalls):
        return written | {"toolCalls": [_with(_write_call(call), call.extra) for call in entry.calls]}
    written["contents"] = [_with(_write_segment(segment), segment.extra) for segment in entry.segments]
    if isinstance(entry, Instructions) and entry.tools is not None:
        written["tools"] = [_with(_write_tool(tool), tool.extra) for tool in entry.tools]
    elif isinstance(entry, PromptEntry):
        if entry.options is not None:
            written["options"] = entry.options
        if entry.response_format is not None:
            written["responseFormat"] = _with(_write_format(entry.response_format), entry.response_format.extra)
    elif isinstance(entry, Response) and entry.assets is not None:
        written["assets"] = list(entry.assets)
    elif isinstance(entry, ToolOutput):
        written |= {"toolName": entry.tool_name, "toolCallID": entry.call_id}
    elif isinstance(entry, Reasoning) and entry.signature is not None:
        written["signature"] = entry.signature
    return written


def _write_segment(segment: Segment) -> Json:
    if isinstance(segment, TextSegment):
        return {"type": "text", "id": segment.id, "text": segment.text}
    structure = {"source": segment.source, "content": segment.content}
    return {"type": "structure", "id": segment.id, "structure": structure}


def _write_call(call: ToolCall) -> Json:
    return {"id": call.id, "name": call.name, "arguments": call.arguments}


def _write_tool(tool: ToolDefinition) -> Json:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _write_format(wanted: ResponseFormat) -> Json:
    return {"type": "jsonSchema", "jsonSchema": {"name": wanted.name, "schema": wanted.schema}}


def _with(known: Mapping[str, Any], extra: Mapping[str, Any]) -> Json:
    """Known fields and the others, objects joined; a known field wins."""
    joined = dict(known)
    for key, value in extra.items():
        if key not in joined:
            joined[key] = value
        elif isinstance(value, Mapping) and isinstance(joined[key], Mapping):
            joined[key] = _with(joined[key], value)
    return joined


def _rest(raw: Mapping[str, Any], known: Mapping[str, Any]) -> Json:
    """What `_with` must add to `known` to give `raw` again."""
    rest: Json = {}
    for key, value in raw.items():
        if key not in known:
            rest[key] = value
        elif isinstance(value, Mapping) and isinstance(known[key], Mapping):
            inner = _rest(value, known[key])
            rest |= {key: inner} if inner else {}
    return rest


# Reading


def _entry(raw: Any, place: str) -> Entry:
    _check(isinstance(raw, dict), place, "is not an object")
    role = raw.get("role")
    if not isinstance(role, str) or role not in _READERS:
        raise TranscriptError(f"{place}.role is {role!r}", hint=f"roles are {', '.join(_READERS)}")
    return _kept(_READERS[role](raw, _id(raw, place), place), raw, _write_entry)


def _instructions(raw: Json, id: str, place: str) -> Entry:
    tools = _optional_list(raw, "tools", place)
    known = None if tools is None else [_tool(tool, f"{place}.tools[{n}]") for n, tool in enumerate(tools)]
    return Instructions(_contents(raw, place), known, id)


def _prompt(raw: Json, id: str, place: str) -> Entry:
    options = raw.get("options")
    _check(isinstance(options, dict | None), f"{place}.options", "is not an object")
    wanted = raw.get("responseFormat")
    answer_in = None if wanted is None else _format(wanted, f"{place}.responseFormat")
    return PromptEntry(_contents(raw, place), options, answer_in, id)


def _response(raw: Json, id: str, place: str) -> Entry:
    calls = _optional_list(raw, "toolCalls", place)
    if calls or (calls is not None and "contents" not in raw):
        _check(not raw.get("contents"), place, "has both contents and toolCalls")
        return ToolCalls([_call(call, f"{place}.toolCalls[{n}]") for n, call in enumerate(calls)], id)
    assets = _optional_list(raw, "assets", place)
    for n, asset in enumerate(assets or ()):
        _check(isinstance(asset, str), f"{place}.assets[{n}]", "is not text")
    return Response(_contents(raw, place), assets, id)


def _output(raw: Json, id: str, place: str) -> Entry:
    call = _id(raw, place, "toolCallID")
    return ToolOutput(_text(raw, "toolName", place), _contents(raw, place), call, id)


def _reasoning(raw: Json, id: str, place: str) -> Entry:
    signature = None if raw.get("signature") is None else _text(raw, "signature", place)
    return Reasoning(_contents(raw, place), signature, id)


_READERS: dict[str, Callable[[Json, str, str], Entry]] = {
    "instructions": _instructions,
    "user": _prompt,
    "response": _response,
    "tool": _output,
    "reasoning": _reasoning,
}


def _contents(raw: Json, place: str) -> list[Segment]:
    contents = _list(raw, "contents", place)
    return [_segment(content, f"{place}.contents[{n}]") for n, content in enumerate(contents)]


def _segment(raw: Any, place: str) -> Segment:
    _check(isinstance(raw, dict), place, "is not an object")
    kind, id = raw.get("type"), _id(raw, place)
    if kind == "text":
        return _kept(TextSegment(_text(raw, "text", place), id), raw, _write_segment)
    if kind != "structure":
        raise TranscriptError(f"{place}.type is {kind!r}", hint="contents of version 1 are text and structure")
    structure, inside = _object(raw, "structure", place), f"{place}.structure"
    _check("content" in structure, f"{inside}.content", "is missing")
    made = StructureSegment(_text(structure, "source", inside), structure["content"], id)
    return _kept(made, raw, _write_segment)


def _tool(raw: Any, place: str) -> ToolDefinition:
    _check(isinstance(raw, dict), place, "is not an object")
    _check(raw.get("type") == "function", f"{place}.type", f'is {raw.get("type")!r} and not "function"')
    function, inside = _object(raw, "function", place), f"{place}.function"
    name, description = _text(function, "name", inside), _text(function, "description", inside)
    return _kept(ToolDefinition(name, description, _object(function, "parameters", inside)), raw, _write_tool)


def _format(raw: Any, place: str) -> ResponseFormat:
    _check(isinstance(raw, dict), place, "is not an object")
    _check(raw.get("type") == "jsonSchema", f"{place}.type", f'is {raw.get("type")!r} and not "jsonSchema"')
    wanted, inside = _object(raw, "jsonSchema", place), f"{place}.jsonSchema"
    return _kept(ResponseFormat(_text(wanted, "name", inside), _object(wanted, "schema", inside)), raw, _write_format)


def _call(raw: Any, place: str) -> ToolCall:
    _check(isinstance(raw, dict), place, "is not an object")
    arguments = _text(raw, "arguments", place)
    arguments_of(arguments, f"{place}.arguments")
    return _kept(ToolCall(_text(raw, "name", place), arguments, _id(raw, place)), raw, _write_call)


def _kept(part: Part, raw: Json, write: Callable[[Part], Json]) -> Part:
    """The part with whatever of `raw` it does not know."""
    rest = _rest(raw, write(part))
    return replace(part, extra=rest) if rest else part


def _id(raw: Json, place: str, key: str = "id") -> str:
    value = _text(raw, key, place)
    _check(bool(value), f"{place}.{key}", "is empty")
    return value


def _text(raw: Json, key: str, place: str) -> str:
    return str(_typed(raw, key, place, str, "text"))


def _object(raw: Json, key: str, place: str) -> Json:
    value: Json = _typed(raw, key, place, dict, "an object")
    return value


def _list(raw: Json, key: str, place: str) -> list[Any]:
    value: list[Any] = _typed(raw, key, place, list, "a list")
    return value


def _optional_list(raw: Json, key: str, place: str) -> list[Any] | None:
    """None where it is missing or null."""
    return None if raw.get(key) is None else _list(raw, key, place)


def _typed(raw: Json, key: str, place: str, kind: type, named: str) -> Any:
    _check(key in raw, f"{place}.{key}", "is missing")
    _check(isinstance(raw[key], kind), f"{place}.{key}", f"is not {named}")
    return raw[key]


def _check(holds: bool, place: str, wrong: str) -> None:
    if not holds:
        raise TranscriptError(f"{place} {wrong}", hint="the transcript is damaged there, or not of version 1")
