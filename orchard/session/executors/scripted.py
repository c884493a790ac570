"""A model that answers from a script, so that an application is tested without weights, in no time, and always the same.

It is held to what a real model is held to: an answer that does not match the constraint of the call, a call of a tool that
was not offered, or text where a call was required is an error in the script and says so.
"""

from __future__ import annotations

import inspect
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from orchard.core.errors import UsageError
from orchard.generate.constraint import Constraint
from orchard.generate.request import TokenLogprob
from orchard.session.errors import ExceededContextWindowSizeError
from orchard.session.turn import Call, Capability, Done, Event, Finish, Reasoning, Text, ToolSpec, Turn, Usage
from orchard.text.messages import Message

ALL: frozenset[Capability] = frozenset({"guided", "tools", "logprobs", "adapters", "reasoning", "seed"})
"""Everything but pictures."""
_PIECES = re.compile(r"\S+\s*|\s+")
_TOKENS = re.compile(r"\w+|[^\w\s]")


class ScriptError(UsageError):
    """A script that does not fit what it was asked: it ran out, or a real model could not have answered so."""

    code = "script"


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, as an answer. `arguments` is a dict, or JSON as text (which may be wrong on purpose)."""

    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)

    @property
    def json(self) -> str:
        return self.arguments if isinstance(self.arguments, str) else _json(self.arguments)


@dataclass(frozen=True)
class Answer:
    """An answer with everything that can be said about it. Most scripts need no more than texts and objects."""

    content: Any = ""
    """A text, or an object that becomes JSON."""
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    delay: float | None = None
    """Seconds before each piece; None: as the model says."""
    pieces: tuple[str, ...] | None = None
    """The text as it arrives; None: word by word."""
    finish: Finish | None = None
    error: BaseException | None = None
    """Raised after the pieces were sent."""
    checked: bool = True
    """Whether the answer must match what was asked for."""

    def parts(self) -> tuple[str, ...]:
        if self.pieces is not None:
            return self.pieces
        return tuple(_PIECES.findall(self.content if isinstance(self.content, str) else _json(self.content)))


class ScriptedModel:
    """An executor whose answers are given.

    model = ScriptedModel(["Hello!", {"name": "Ada"}, ToolCall("weather", {"city": "Paris"}), RateLimitedError()])
    session = orchard.Session(model=model)

    An answer is a text, an object (JSON for a guided call), a `ToolCall` or a list of them, an error to raise, an `Answer`, or
    a function of the `Turn` that returns one of these. `turns` holds what was asked.
    """

    def __init__(
        self,
        answers: Sequence[Any] = (),
        *,
        name: str = "scripted",
        context_size: int = 4096,
        capabilities: frozenset[Capability] = ALL,
        delay: float = 0.0,
        repeat: bool = False,
    ) -> None:
        """`repeat`: begin again with the first answer after the last."""
        if isinstance(answers, str):
            raise UsageError("the answers are one text", hint='give a list of answers, such as ["Hello!"]')
        self.name = name
        self.context_size = context_size
        self.capabilities = capabilities
        self.delay = delay
        self.repeat = repeat
        self.turns: list[Turn] = []
        self.prewarmed: list[tuple[Message, ...]] = []
        self._answers = list(answers)
        self._next = 0
        self._lock = threading.Lock()

    def add(self, *answers: Any) -> None:
        """More answers, after those that are there."""
        with self._lock:
            self._answers += answers

    @property
    def remaining(self) -> int:
        """How many answers were not used yet."""
        return len(self._answers) - self._next

    @property
    def prompts(self) -> list[str]:
        """The last user message of every turn."""
        return [
            next((message.content for message in reversed(turn.messages) if message.role == "user"), "")
            for turn in self.turns
        ]

    def run(self, turn: Turn, cancel: threading.Event) -> Iterator[Event]:
        read = self.count(turn.messages, turn.tools)
        if read >= self.context_size:
            raise ExceededContextWindowSizeError(tokens=read, limit=self.context_size)
        answer, number = self._take(turn)
        if answer.checked:
            _check(answer, turn, number)
        return self._events(answer, turn, read, cancel)

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, answer: bool = True) -> int:
        """Words and signs, one more for each message, and one for the invitation to speak."""
        texts = [message.content + _json(message.tool_calls or "") for message in messages]
        told = [_json([tool.name, tool.description, tool.parameters]) for tool in tools]
        return sum(len(_TOKENS.findall(text)) for text in texts + told) + len(messages) + int(answer)

    def prewarm(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> None:
        self.prewarmed.append(tuple(messages))

    def _take(self, turn: Turn) -> tuple[Answer, int]:
        with self._lock:
            self.turns.append(turn)
            if self._next >= len(self._answers) and self.repeat:
                self._next = 0
            if self._next >= len(self._answers):
                asked = turn.messages[-1].content if turn.messages else ""
                raise ScriptError(
                    f"the script of {self.name!r} has {len(self._answers)} answers and was asked for one more: {asked!r:.200}",
                    hint="give ScriptedModel as many answers as the program asks for (a tool call counts as one)",
                )
            given = self._answers[self._next]
            if isinstance(given, BaseException | Answer) and not self.repeat:
                self._answers[self._next] = None  # an error that was raised holds on to whoever caught it
            self._next += 1
            number = self._next
        return _answer(given, turn), number

    def _events(self, answer: Answer, turn: Turn, read: int, cancel: threading.Event) -> Iterator[Event]:
        delay = self.delay if answer.delay is None else answer.delay
        thoughts, parts = _PIECES.findall(answer.reasoning), answer.parts()
        calls, finish, error = answer.calls, answer.finish, answer.error
        del answer  # with its error in this frame, and this frame in the error's trace, both would outlive the call
        written = 0

        def done(finish: Finish) -> Done:
            return Done(finish, Usage(read, 0, written, len(thoughts), written), turn.seed)

        for piece in thoughts:
            if _stopped(cancel, delay):
                yield done("cancelled")
                return
            yield Reasoning(piece)
        for piece, last in _until_stop(parts, turn.stop):
            if _stopped(cancel, delay):
                yield done("cancelled")
                return
            if turn.max_tokens is not None and written >= turn.max_tokens:
                yield done("length")
                return
            written += 1
            yield Text(piece, (written,), () if turn.logprobs is None else (TokenLogprob(written, -0.1),))
            if last:
                yield done("stop")
                return
        if error is not None:
            try:
                raise error
            finally:
                del error
        for call in calls:
            if _stopped(cancel, delay):
                yield done("cancelled")
                return
            written += 1
            yield Call(f"call-{uuid4().hex[:12]}", call.name, call.json)
        yield done(finish or ("tool_calls" if calls else "stop"))


def _stopped(cancel: threading.Event, delay: float) -> bool:
    return cancel.wait(delay) if delay else cancel.is_set()


def _answer(given: Any, turn: Turn) -> Answer:
    if inspect.isfunction(given) or inspect.ismethod(given):
        given = given(turn)
    if isinstance(given, Answer):
        return given
    if isinstance(given, ToolCall):
        return Answer(calls=(given,))
    if isinstance(given, BaseException):
        return Answer(error=given, checked=False)
    if isinstance(given, type) and issubclass(given, BaseException):
        return Answer(error=given(), checked=False)
    if isinstance(given, list | tuple) and given and all(isinstance(item, ToolCall) for item in given):
        return Answer(calls=tuple(given))
    if isinstance(given, str):
        # A guided call asks for JSON: a text that is meant as a JSON string may be written plainly.
        return Answer(given)
    schema = _schema_of(turn.constraint)
    return Answer(_json(_ordered(_plain(given), schema, schema)))


def _check(answer: Answer, turn: Turn, number: int) -> None:
    """Whether a real model could have answered so."""
    which = f"answer {number} of the script"
    names = [tool.name for tool in turn.tools]
    for call in answer.calls:
        if turn.tool_mode == "disallowed" or call.name not in names:
            offered = ", ".join(names) if names and turn.tool_mode != "disallowed" else "none"
            raise ScriptError(
                f"{which} calls the tool {call.name!r}, but the tools offered are: {offered}", hint=_AS_IT_IS
            )
    if turn.tool_mode not in ("allowed", "disallowed") and not answer.calls:
        raise ScriptError(f"{which} is no tool call, but one was required", hint=_AS_IT_IS)
    text = "".join(answer.parts())
    if turn.constraint is not None and not answer.calls and not matches(turn.constraint, text):
        raise ScriptError(
            f"{which} does not match its {turn.constraint.kind}: {text!r:.200}",
            hint=f"wanted: {turn.constraint.source:.300}. {_AS_IT_IS}",
        )


_AS_IT_IS = "Answer(…, checked=False) gives an answer as it is"


def matches(constraint: Constraint, text: str) -> bool:
    """Whether a whole text is one that the constraint allows. JSON may be written with spaces."""
    if constraint.kind == "choices":
        return text in json.loads(constraint.source)
    from llguidance import LLMatcher, LLTokenizer

    if constraint.kind == "json_schema":
        from orchard.generate.json_schema import schema_grammar

        try:
            text = _json(json.loads(text))
        except ValueError:
            return False
        grammar = LLMatcher.grammar_from_lark(schema_grammar(constraint.source))
    elif constraint.kind == "regex":
        grammar = LLMatcher.grammar_from_regex(constraint.source)
    else:
        grammar = LLMatcher.grammar_from_lark(constraint.source)
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    if matcher.is_error():
        raise ScriptError(f"the {constraint.kind} cannot be compiled: {matcher.get_error()}", hint="correct it")
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


def _until_stop(pieces: Sequence[str], stops: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Pieces up to the first stop string; the last one before it is marked."""
    text = "".join(pieces)
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    end = min(places) if places else None
    at = 0
    for piece in pieces:
        if end is not None and at + len(piece) >= end:
            yield piece[: end - at], True
            return
        at += len(piece)
        yield piece, False


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    """An object as JSON holds it: instances of dataclasses, Pydantic models and generables by their fields."""
    if isinstance(value, Mapping | list | tuple | str | int | float | bool | None):
        return value
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", by_alias=True)
    if hasattr(value, "generated_content"):
        return json.loads(value.generated_content.to_json())
    if hasattr(value, "to_json"):
        return json.loads(value.to_json())
    if hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "value"):
        return value.value
    raise ScriptError(
        f"{type(value).__name__} cannot be an answer", hint="give a text, JSON values, or an instance of the type"
    )


def _schema_of(constraint: Constraint | None) -> Any:
    return json.loads(constraint.source) if constraint is not None and constraint.kind == "json_schema" else None


def _ordered(value: Any, schema: Any, root: Any) -> Any:
    """The same JSON with the keys of objects in the schema's order, which is the order in which a model writes them."""
    value = _plain(value)
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        target = root
        for part in schema["$ref"].lstrip("#").strip("/").split("/"):
            target = target.get(part, {}) if part and isinstance(target, Mapping) else target
        if target is schema:
            break
        schema = target
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, Mapping):
        options = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())]
        known = max(
            (_properties(option, root) for option in options), key=lambda names: len(names.keys() & value.keys())
        )
        names = [name for name in known if name in value] + [name for name in value if name not in known]
        return {name: _ordered(value[name], known.get(name), root) for name in names}
    if isinstance(value, list | tuple):
        return [_ordered(item, schema.get("items"), root) for item in value]
    return value


def _properties(schema: Any, root: Any) -> Mapping[str, Any]:
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        name = schema["$ref"].rsplit("/", 1)[-1]
        schema = root.get("$defs", {}).get(name, root)
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(found, Mapping):
        return {}
    first = [name for name in schema.get("x-order", ()) if name in found]
    return {name: found[name] for name in [*first, *found]}
