"""Transcripts as JSON, written by hand in the framework's format, and ways to make up and to damage others."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(TEXTS, JSON, max_size=3)


def a_document() -> dict[str, Any]:
    """Every kind of entry and segment, with fields as an app of version 1 writes them."""
    return {
        "type": "FoundationModels.Transcript",
        "version": 1,
        "transcript": {
            "entries": [
                {
                    "role": "instructions",
                    "id": "I-1",
                    "contents": [{"type": "text", "text": "Help with trains.", "id": "I-1-a"}],
                    "tools": [
                        {
                            "type": "function",
                            "function": {
                                "name": "departures",
                                "description": "Trains that leave soon.",
                                "parameters": {
                                    "title": "Arguments",
                                    "type": "object",
                                    "properties": {"station": {"type": "string"}, "limit": {"type": "integer"}},
                                    "required": ["station"],
                                    "additionalProperties": False,
                                    "x-order": ["station", "limit"],
                                },
                            },
                        }
                    ],
                },
                {
                    "id": "P-1",
                    "role": "user",
                    "options": {"temperature": 0.5},
                    "contents": [{"id": "P-1-a", "text": "When is the next train from Bergen?", "type": "text"}],
                    "responseFormat": {
                        "type": "jsonSchema",
                        "jsonSchema": {"name": "Train", "schema": {"title": "Train", "type": "object"}},
                    },
                },
                {
                    "id": "C-1",
                    "role": "response",
                    "toolCalls": [
                        {"id": "T-1", "name": "departures", "arguments": '{"station":  "Bergen", "limit": 1}'},
                        {"id": "T-2", "name": "departures", "arguments": '{"station": "Voss"}'},
                    ],
                },
                {
                    "id": "T-1",
                    "role": "tool",
                    "toolName": "departures",
                    "toolCallID": "T-1",
                    "contents": [{"type": "text", "id": "T-1-a", "text": '[{"to": "Oslo", "at": "07:57"}]'}],
                },
                {"id": "T-2", "role": "tool", "toolName": "departures", "toolCallID": "T-2", "contents": []},
                {
                    "id": "R-1",
                    "role": "response",
                    "assets": ["smollm2"],
                    "contents": [
                        {
                            "type": "structure",
                            "id": "0",
                            "structure": {"source": "Train", "content": {"to": "Oslo", "minutes": 12, "late": None}},
                        }
                    ],
                },
                {"id": "P-2", "role": "user", "options": {}, "contents": [{"type": "text", "id": "x", "text": "Ta ❤"}]},
                {"id": "Q-1", "role": "reasoning", "contents": [{"type": "text", "id": "q", "text": "Be nice."}]},
                {"id": "R-2", "role": "response", "contents": [{"type": "text", "id": "0", "text": "Good trip!"}]},
            ]
        },
    }


def with_extras(document: dict[str, Any]) -> dict[str, Any]:
    """The same with a field of the future in every object that the format knows."""
    document["savedBy"] = {"app": "Trains", "build": 7}
    document["transcript"]["locale"] = "nb_NO"
    for entry in document["transcript"]["entries"]:
        entry["metadata"] = {"nested": [1, {"two": 2.5}]}
        for content in entry.get("contents", []):
            content["lang"] = "en"
            if "structure" in content:
                content["structure"]["revision"] = 3
        for call in entry.get("toolCalls", []):
            call["signature"] = "abc"
        for tool in entry.get("tools", []):
            tool["strict"] = True
            tool["function"]["deprecated"] = False
        if "responseFormat" in entry:
            entry["responseFormat"]["strict"] = "true"
            entry["responseFormat"]["jsonSchema"]["description"] = "A train."
    return document


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for key, item in inside for place in places(item, (*path, key))]


def damaged(document: dict[str, Any], path: tuple[Any, ...], how: str, value: Any) -> dict[str, Any]:
    """A copy with what lies at that path deleted, replaced, doubled, or put under another key."""
    document = copy.deepcopy(document)
    holder: Any = document
    for key in path[:-1]:
        holder = holder[key]
    last = path[-1]
    if how == "delete":
        del holder[last]
    elif how == "replace":
        holder[last] = value
    elif isinstance(holder, list):
        holder.insert(last, copy.deepcopy(holder[last]))
    else:
        holder[f"{last}_"] = holder.pop(last)
    return document


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Any document that the format allows, with fields that it does not know."""
    texts = st.fixed_dictionaries({"type": st.just("text"), "id": NAMES, "text": TEXTS})
    structure = st.fixed_dictionaries({"source": TEXTS, "content": JSON})
    structures = st.fixed_dictionaries({"type": st.just("structure"), "id": NAMES, "structure": structure})
    contents = st.lists(texts | structures, max_size=3)
    function = st.fixed_dictionaries({"name": TEXTS, "description": TEXTS, "parameters": OBJECTS})
    tools = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": function}), max_size=2)
    schema = st.fixed_dictionaries({"name": TEXTS, "schema": OBJECTS}, optional={"description": JSON})
    wanted = st.fixed_dictionaries({"type": st.just("jsonSchema"), "jsonSchema": schema})
    arguments = st.sampled_from(["{}", '{ "a":1.50 }', '{"ø": [null, {"b": "\\u00e9"}]}'])
    calls = st.lists(st.fixed_dictionaries({"id": NAMES, "name": TEXTS, "arguments": arguments}), max_size=2)
    future = st.sampled_from(["metadata", "contextOptions", "new"])

    def entry(role: str, fields: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
        always = {"id": NAMES, "role": st.just(role), **fields}
        known = st.fixed_dictionaries(always, optional=optional)
        return st.builds(lambda extra, made: extra | made, st.dictionaries(future, JSON, max_size=2), known)

    entries = st.one_of(
        entry("instructions", {"contents": contents}, {"tools": tools}),
        entry("user", {"contents": contents}, {"options": OBJECTS, "responseFormat": wanted}),
        entry("response", {"contents": contents}, {"assets": st.lists(TEXTS, max_size=2)}),
        entry("response", {"toolCalls": calls}, {}),
        entry("tool", {"contents": contents, "toolName": TEXTS, "toolCallID": NAMES}, {}),
        entry("reasoning", {"contents": contents}, {"signature": TEXTS}),
    )
    inner = {"entries": draw(st.lists(entries, max_size=5))}
    return {"version": 1, "type": "FoundationModels.Transcript", "transcript": inner}
