"""A line of somebody's data becomes rows to learn from, in the words in which inference will put it to the model.

A line is a conversation (`{"messages": […]}`, or the list alone, as in Apple's adapter toolkit), a `prompt` and its `completion`,
or plain `text`. Beside it may stand `tools`, and what form an answer must have: `response_format` at the line or at a user's
message, or `schema`. Inference tells a model of both in ways that depend on the model (`session.tools.formats`,
`session.schema.words`) and holds answers to a grammar, so the same functions write the rows here, and the same grammar has to
accept every answer: a schema that is spelled otherwise in training than at inference teaches the wrong thing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchard.core.errors import OrchardError, UsageError
from orchard.data.errors import BadSample
from orchard.data.rows import checked
from orchard.generate.constraint import Constraint
from orchard.generate.grammar import grammar_for
from orchard.session.schema import GenerationSchema, schema_for
from orchard.session.schema.check import check, target_of
from orchard.session.tools.calls import calls_constraint
from orchard.session.tools.formats import called, format_of
from orchard.session.turn import ToolSpec
from orchard.text.messages import Message, messages_from
from orchard.text.tokenizer import Tokenizer

_FORM, _SCHEMA, _SHOWN = "response_format", "schema", "include_schema_in_prompt"
_TALKS = ("messages", "prompt")
Rendered = dict[str, Any]
"""A row as `orchard.data` reads it."""


@dataclass(frozen=True)
class Talk:
    """One line, checked; `forms` are the schemas of answers, by their place among the messages."""

    place: str
    messages: tuple[Message, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    forms: Mapping[int, GenerationSchema] = field(default_factory=dict)
    shown: bool = True
    """Whether the model is told of the schema in words, as sessions do; a server only holds answers to it."""
    text: str | None = None
    """A line that is no conversation."""

    @property
    def answers(self) -> list[int]:
        return [index for index, message in enumerate(self.messages) if message.role == "assistant"]

    @property
    def plain(self) -> bool:
        """No tools and no forms: what a model reads before a later answer begins with what it read before an earlier one."""
        return not (self.tools or self.forms or any(message.tool_calls for message in self.messages))


def talk_of(value: Any, place: str) -> Talk:
    """A line's JSON as a talk, or `BadSample`."""
    row = dict(value) if isinstance(value, Mapping) else {"messages": value} if isinstance(value, list) else value
    if not isinstance(row, dict):
        checked(row, place)
    if "chosen" in row or "rejected" in row:
        raise BadSample(
            "a preference, and adapters learn from answers",
            reason="no-form",
            place=place,
            hint="see `orchard train dpo`",
        )
    general, asked = row.get(_FORM) or row.get(_SCHEMA), _taken_out(row)
    data = checked(row, place)
    if "text" in data:
        return Talk(place, text=data["text"])
    pair = [{"role": "user", "content": data.get("prompt")}, {"role": "assistant", "content": data.get("completion")}]
    messages = tuple(messages_from(data.get("messages") or pair))
    tools = tuple(_tool(tool, place) for tool in data.get("tools", ()))
    _check_calls(messages, {tool.name: tool for tool in tools}, place)
    forms = _forms(messages, general, asked, place)
    return Talk(place, messages, tools, forms, row.get(_SHOWN) is not False)


class Renderer:
    """Talks as rows for one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.format = format_of(tokenizer)

    def rows(self, talk: Talk, *, split: bool) -> list[Rendered]:
        """The rows of a talk: one for all of its answers, or (`split`, or where the model reads each answer's prompt in words
        of its own) one for each answer, of which the last message is learnt."""
        if talk.text is not None:
            return [{"text": talk.text}]
        if talk.plain and not split:
            return [_row(talk.messages)]
        return [row for index in talk.answers for row in self._answer(talk, index)]

    def _answer(self, talk: Talk, index: int) -> list[Rendered]:
        answer, before = talk.messages[index], list(talk.messages[:index])
        if answer.tool_calls:
            return self._native(talk, index) if self.format.native else self._calls(talk, index)
        schema = talk.forms.get(index)
        if schema is not None:
            answer = replace(answer, content=self._in_form(schema, answer.content, talk.place))
            before = _told(before, schema.for_prompt()) if talk.shown else before
        if self.format.native:
            shown, told = self.format.for_template([*before, answer], talk.tools)
            return [_row(shown, told)]
        return [_row([*self.format.for_template(before, ())[0], answer])]

    def _native(self, talk: Talk, index: int) -> list[Rendered]:
        shown, told = self.format.for_template(talk.messages[: index + 1], talk.tools)
        return [_row(shown, told)]

    def _calls(self, talk: Talk, index: int) -> list[Rendered]:
        """A model whose template knows no tools makes one call a step and is shown the tool that it is to call."""
        rows, before = [], list(talk.messages[:index])
        results = _results(talk.messages, index)
        for number, call in enumerate(talk.messages[index].tool_calls or ()):
            name, arguments = called(call)
            tool = next(tool for tool in talk.tools if tool.name == name)
            line = self.format.call_text(name, ordered(arguments, tool.parameters, tool.parameters))
            self._check(calls_constraint(self.format.written, (tool,), parallel=False), line, talk.place)
            rows.append(_row([*self.format.for_template(before, (tool,))[0], Message("assistant", line)]))
            result = results.get(str(call.get("id", "")), results.get(number))
            if result is None:
                break
            before += [Message("assistant", "", tool_calls=[call]), result]
        return rows

    def _in_form(self, schema: GenerationSchema, text: str, place: str) -> str:
        """The answer as the grammar of its schema lets a model write it."""
        try:
            value = schema.read(text).value()
        except OrchardError as error:
            raise BadSample(f"the answer does not match its schema: {error}", reason="schema", place=place) from error
        constraint = schema.constraint()
        exact = json.loads(constraint.source)
        line = json.dumps(ordered(value, exact, exact), ensure_ascii=False, separators=(",", ":"))
        self._check(constraint, line, place)
        return line

    def _check(self, constraint: Constraint, text: str, place: str) -> None:
        try:
            matcher = grammar_for(self.tokenizer, constraint).matcher()
        except OrchardError as error:
            raise BadSample(f"its schema cannot be used: {error}", reason="schema", place=place) from error
        ids = self.tokenizer.encode_piece(text, first=False)
        read = int(matcher.validate_tokens(ids))
        if read < len(ids) or not matcher.consume_tokens(ids) or not matcher.is_accepting():
            rest = text[len(self.tokenizer.decode(ids[:read], skip_special=False)) :][:40]
            raise BadSample(
                f"inference could not write this answer: its grammar does not allow {rest!r}"
                if rest
                else "inference could not write this answer: its grammar asks for more",
                reason="schema",
                place=place,
                hint="change the answer or the schema",
            )


def ordered(value: Any, schema: Any, root: Mapping[str, Any]) -> Any:
    """A JSON value with properties in the order of its schema, which is the order in which they are generated."""
    if not isinstance(schema, Mapping) or not isinstance(value, dict | list):
        return value
    if isinstance(schema.get("$ref"), str):
        return ordered(value, target_of(root, schema["$ref"]), root)
    for option in schema.get("anyOf") or schema.get("oneOf") or ():
        if _matches(value, option, root):
            return ordered(value, option, root)
    if isinstance(value, list):
        first = schema.get("prefixItems") or ()
        return [
            ordered(item, first[place] if place < len(first) else schema.get("items"), root)
            for place, item in enumerate(value)
        ]
    known = schema.get("properties") or {}
    names = [name for name in known if name in value] + [name for name in value if name not in known]
    return {name: ordered(value[name], known.get(name, schema.get("additionalProperties")), root) for name in names}


# Reading a line ---------------------------------------------------------------------------------------------------------


def _taken_out(row: dict[str, Any]) -> dict[int, Any]:
    """Forms that stand at messages, by their place; no template knows them, so they are taken out."""
    asked: dict[int, Any] = {}
    for name in _TALKS:
        if isinstance(row.get(name), list):
            found = {i: m[_FORM] for i, m in enumerate(row[name]) if isinstance(m, Mapping) and m.get(_FORM)}
            row[name] = [_without_form(message) for message in row[name]]
            asked = found or asked
    return asked


def _without_form(message: Any) -> Any:
    return {k: v for k, v in message.items() if k != _FORM} if isinstance(message, Mapping) else message


def _forms(
    messages: Sequence[Message], general: Any, asked: Mapping[int, Any], place: str
) -> dict[int, GenerationSchema]:
    """The schema of each answer that has one. A message's form is for the next answer in words, a line's for all of them."""
    wrong = next((index for index in asked if messages[index].role != "user"), None)
    if wrong is not None:
        raise BadSample(f"message {wrong}: only a user's message asks for a form", reason="schema", place=place)
    found: dict[int, GenerationSchema] = {}
    form = general
    for index, message in enumerate(messages):
        if message.role == "user":
            form = asked.get(index, general)
        elif message.role == "assistant" and not message.tool_calls and form:
            schema = _schema(form, place)
            if schema is not None:
                found[index] = schema
    return found


def _schema(form: Any, place: str) -> GenerationSchema | None:
    """The schema of a form as OpenAI writes it (Apple's toolkit does the same), or of a plain JSON Schema."""
    inner = form
    if isinstance(form, Mapping) and form.get("type") in ("text", "json_object", "json_schema"):
        if form["type"] != "json_schema":
            return None
        named = form.get("json_schema", form)
        inner = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(inner, Mapping):
        raise BadSample("its form has no schema", reason="schema", place=place, hint="see docs/adapt.md")
    try:
        return schema_for(inner)
    except OrchardError as error:
        raise BadSample(f"its schema cannot be used: {error}", reason="schema", place=place) from error


def _tool(value: Mapping[str, Any], place: str) -> ToolSpec:
    function = value.get("function", value)
    name = function.get("name") if isinstance(function, Mapping) else None
    parameters = (function.get("parameters") or {"type": "object", "properties": {}}) if name else None
    if not isinstance(name, str) or not isinstance(parameters, Mapping):
        raise BadSample("a tool without a name, or with parameters that are no schema", reason="tools", place=place)
    return ToolSpec(name, str(function.get("description") or ""), parameters)


def _check_calls(messages: Sequence[Message], tools: Mapping[str, ToolSpec], place: str) -> None:
    """Whether every call could have been made: of a tool that is there, with arguments of its schema."""
    for index, message in enumerate(messages):
        for call in message.tool_calls or ():
            name, arguments = called(call)
            if name not in tools:
                known = ", ".join(tools) or "none"
                raise BadSample(
                    f"message {index} calls {name!r}, and the tools are: {known}", reason="tools", place=place
                )
            try:
                if not isinstance(arguments, dict):
                    raise UsageError("they are no JSON object")
                check(tools[name].parameters, arguments)
            except OrchardError as error:
                what = f"message {index}: arguments of {name} that it does not take: {error}"
                raise BadSample(what, reason="tools", place=place) from error


# Writing rows -----------------------------------------------------------------------------------------------------------


def _row(messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> Rendered:
    row: Rendered = {"messages": [message.to_dict() for message in messages]}
    return row | ({"tools": tools} if tools else {})


def _told(messages: list[Message], words: str) -> list[Message]:
    """The words about a form behind what the user said last, as a session puts them."""
    place = max((index for index, message in enumerate(messages) if message.role == "user"), default=None)
    if place is not None:
        messages[place] = replace(messages[place], content=f"{messages[place].content}\n\n{words}")
    return messages


def _results(messages: Sequence[Message], index: int) -> dict[str | int, Message]:
    """What came of the calls of a message, by their id and by their number."""
    found: dict[str | int, Message] = {}
    for number, message in enumerate(messages[index + 1 :]):
        if message.role != "tool":
            break
        found[number] = message
        if message.tool_call_id:
            found[message.tool_call_id] = message
    return found


def _matches(value: Any, option: Any, root: Mapping[str, Any]) -> bool:
    try:
        check({**option, **{name: root[name] for name in ("$defs", "definitions") if name in root}}, value)
    except (OrchardError, TypeError):
        return False
    return True
