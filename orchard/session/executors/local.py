"""A model of this machine behind a session: messages become tokens, tokens become text, thoughts and tool calls.

Names and arguments of calls are always held to the tools' schemas. Whether there is a call at all is left to a model that was
taught it (its template takes tools): it writes text until it opens a call. For any other model it is weighed beforehand which
tool fits, if any (`orchard.session.tools.choice`), and the model is shown that tool alone.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from orchard.core.errors import UsageError
from orchard.core.seeds import fresh_seed
from orchard.generate.loops import NoLoops
from orchard.generate.request import Answer, Request
from orchard.session.completion import Completion, bias_rules, complete, text_ids
from orchard.session.errors import ExceededContextWindowSizeError
from orchard.session.executors.local_text import Begin, Events, Thoughts, cannot_begin
from orchard.session.executors.thinking import template_variables, thinking_rules
from orchard.session.tools.calls import MOST_TOKENS, calls_constraint
from orchard.session.tools.choice import Weighed, weighed
from orchard.session.tools.formats import ToolFormat, called, format_of
from orchard.session.turn import Call, Capability, Done, Event, Finish, Text, ToolSpec, Turn, Usage
from orchard.text.messages import Message

if TYPE_CHECKING:
    from orchard.session.model import Model

_HELLO = (Message("user", "Hello"),)
_TAIL = 12
"""Tokens at the end of a prompt that may spell the beginning of thoughts."""


class LocalExecutor:
    """An executor over a loaded model. Safe to share between sessions and threads, as the model is."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def context_size(self) -> int:
        return self.model.context

    @property
    def capabilities(self) -> frozenset[Capability]:
        known: set[Capability] = {"guided", "tools", "logprobs", "adapters", "seed"}
        if "</think>" in (self.model.tokenizer.chat_template or ""):
            known.add("reasoning")
        return frozenset(known)

    @cached_property
    def format(self) -> ToolFormat:
        """How this model is shown tools, and how it writes calls."""
        return format_of(self.model.tokenizer)

    def run(self, turn: Turn, cancel: threading.Event) -> Iterator[Event]:
        """What cannot be answered raises here, before any event."""
        model = self.model.adapters.model(turn.adapters) if turn.adapters else self.model
        return _Reply(model, self.format, turn, cancel).events()

    def complete(self, asked: Completion, cancel: threading.Event) -> Iterator[Event]:
        """Go on with a text as it stands. What cannot be answered raises here, before any event."""
        model = self.model.adapters.model(asked.adapters) if asked.adapters else self.model
        return complete(model, asked, cancel)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that stands by itself."""
        return text_ids(self.model, text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.tokenizer.decode(ids, skip_special=False)

    def spelled(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes that each token stands for."""
        return [self.model.tokenizer.token_bytes(token) for token in ids]

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, answer: bool = True) -> int:
        tokenizer = self.model.tokenizer
        if messages:
            return len(self.format.ids(tokenizer, messages, tools, answer=answer))
        told, alone = (len(self.format.ids(tokenizer, _HELLO, some, answer=False)) for some in (tools, ()))
        return told - alone

    def prewarm(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> None:
        for ids in self._beginnings(messages, tools):
            if len(ids) < self.context_size:
                self.model.engine.warm(ids)

    def save_prefix(self, messages: Sequence[Message], tools: Sequence[ToolSpec], path: str | Path) -> int:
        """Keep what reading a conversation gave in a file, for another process; answers how many tokens that is (0: no file)."""
        ids = next(iter(self._beginnings(messages, tools)), None)
        if ids is None:
            return 0
        self.model.engine.warm(ids)
        return self.model.engine.prefixes.save(path, ids)

    def load_prefix(self, path: str | Path) -> int:
        """Take up what `save_prefix` kept; answers how many tokens that is."""
        return self.model.engine.prefixes.load(path)

    def _beginnings(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[list[int]]:
        """How prompts of such a conversation will begin. A model that was not taught to call tools answers without them, and
        is shown only the one that it is to call."""
        shown = [tools] if self.format.native or not tools else [(), tools][: 1 + (len(tools) == 1)]
        tokenizer = self.model.tokenizer
        return [self.format.ids(tokenizer, messages, some, answer=False) for some in shown if messages]


class _Reply:
    """One turn on its way."""

    def __init__(self, model: Model, format: ToolFormat, turn: Turn, cancel: threading.Event) -> None:
        self.engine = model.engine
        self.aside = getattr(model, "aside", None) or model.engine
        self.tokenizer = model.tokenizer
        self.context = model.context
        self.format = format
        self.turn = turn
        self.cancel = cancel
        self.seed = fresh_seed() if turn.seed is None else turn.seed
        self.tools = _offered(turn)
        self.usage = Usage()
        self.ids = self._ids(self.tools)
        _check(turn, len(self.ids) + len(self._begin()), self.context)

    def events(self) -> Iterator[Event]:
        mode = self.turn.tool_mode
        if not self.tools or self.turn.begin:
            return self._text(self._ids(()) if not self.tools or not self.format.native else self.ids)
        if mode != "allowed":
            return self._required()
        return self._as_it_likes() if self.format.native else self._weighed()

    # Text -----------------------------------------------------------------------------------------------------------

    def _text(self, ids: Sequence[int]) -> Iterator[Event]:
        answer = yield from self._said(ids, ())
        yield self._done(answer.finish)

    def _said(self, ids: Sequence[int], stop: tuple[str, ...]) -> Generator[Event, None, Answer]:
        """Stream text; what is answered at the end is the whole."""
        turn, begin = self.turn, self.turn.begin
        if begin and turn.constraint is None:
            yield Text(begin)
            ids = [*ids, *self._begin()]
        request = replace(
            self._request(ids),
            stop=(*turn.stop, *stop),
            logprobs=turn.logprobs,
            constraint=turn.constraint,
        )
        if begin and turn.constraint is not None:
            request = replace(request, rules=(*request.rules, Begin(self.tokenizer, begin)))
        loops = NoLoops(self.tokenizer.eos_ids if turn.constraint is None else ())
        opened = self._opens_thoughts(ids)
        budget = thinking_rules(self.tokenizer, turn.reasoning, opened=opened) if turn.constraint is None else ()
        request = replace(request, rules=(*budget, *request.rules, loops))
        events = Events(Thoughts(open=opened))
        stream = self.engine.stream(request, cancel=self.cancel)
        with stream:
            for piece in stream:
                yield from events.of(piece)
        self._count(stream.answer, events.reasoning)
        answer = stream.answer
        if turn.constraint is not None and not (answer.text.startswith(begin) or begin.startswith(answer.text)):
            raise cannot_begin(begin)
        return answer

    def _begin(self) -> list[int]:
        return self.tokenizer.encode_piece(self.turn.begin, first=False) if self.turn.begin else []

    def _opens_thoughts(self, ids: Sequence[int]) -> bool:
        return self.tokenizer.decode(ids[-_TAIL:], skip_special=False).rstrip().endswith("<think>")

    # Calls ----------------------------------------------------------------------------------------------------------

    def _as_it_likes(self) -> Iterator[Event]:
        """A model that was taught to call tools: text, unless and until it opens a call."""
        marker = self.format.written.marker
        if self.turn.constraint is not None and not self._would_call(marker):
            yield from self._text(self.ids)
            return
        said = ""
        if self.turn.constraint is None:
            answer = yield from self._said(self.ids, (marker,))
            if not self._opened(answer, marker):
                yield self._done(answer.finish)
                return
            said = answer.text
        ids = [*self.ids, *self.tokenizer.encode_piece(said, first=False)] if said else self.ids
        if len(ids) >= self.context:
            yield self._done("length")
            return
        yield from self._calls(ids, self.tools)

    def _opened(self, answer: Answer, marker: str) -> bool:
        """Whether the answer ended because it opened a call, and not for another reason."""
        spelled = self.tokenizer.decode(answer.ids, skip_special=False)
        rest = spelled[spelled.find(answer.text) + len(answer.text) :]
        return answer.finish == "stop" and rest.startswith(marker)

    def _would_call(self, marker: str) -> bool:
        """Whether the answer would begin with a call if nothing held it to another form."""
        first = self.tokenizer.encode_piece(marker, first=False)
        answer = self.engine.answer([replace(self._request(self.ids), max_tokens=len(first))], cancel=self.cancel)[0]
        self._count(answer)
        return list(answer.ids) == first

    def _weighed(self) -> Iterator[Event]:
        """A model that was not: each tool may be called once for what the user said last, if the words ask for it."""
        said, fresh = _asked(self.turn.messages, self.tools)
        found = self._weigh(said, fresh) if fresh else None
        if self.cancel.is_set():
            yield self._done("cancelled")
        elif found is not None and found.enough:
            chosen = (fresh[found.best],)
            yield from self._calls(self._ids(chosen), chosen)
        else:
            yield from self._text(self._ids(()))

    def _required(self) -> Iterator[Event]:
        tools = self.tools
        if len(tools) > 1 and not self.format.native:
            tools = (tools[self._weigh(_asked(self.turn.messages, tools)[0], tools).best],)
        yield from self._calls(self.ids if tools == self.tools else self._ids(tools), tools)

    def _weigh(self, said: str, tools: tuple[ToolSpec, ...]) -> Weighed:
        found = weighed(self.aside, said, tools, self.cancel)
        self.usage = self.usage + Usage(calls=found.runs)
        return found

    def _calls(self, ids: Sequence[int], tools: tuple[ToolSpec, ...]) -> Iterator[Event]:
        # A model that was not taught to call tools does not know when to stop: it makes one call a step.
        parallel = self.turn.parallel_calls and self.format.native
        constraint = calls_constraint(self.format.written, tools, parallel=parallel)
        request = self._request(ids)
        limit = request.max_tokens if self.turn.max_tokens is not None else min(request.max_tokens, MOST_TOKENS)
        request = replace(request, max_tokens=limit, constraint=constraint, rules=(*request.rules, NoLoops()))
        stream = self.engine.stream(request, cancel=self.cancel)
        with stream:
            for _ in stream:
                pass
        answer = stream.answer
        self._count(answer)
        calls = self.format.read(answer.text) if answer.finish != "cancelled" else ()
        for name, arguments in dict.fromkeys(calls):  # a small model may say the same call twice
            yield Call(f"call_{uuid.uuid4().hex[:16]}", name, arguments)
        yield self._done("tool_calls" if answer.finish == "stop" else answer.finish)

    # Both -----------------------------------------------------------------------------------------------------------

    def _ids(self, tools: Sequence[ToolSpec]) -> list[int]:
        variables = template_variables(self.turn.reasoning)
        return self.format.ids(self.tokenizer, self.turn.messages, tools, variables=variables)

    def _request(self, ids: Sequence[int]) -> Request:
        room = max(1, self.context - len(ids))
        limit = room if self.turn.max_tokens is None else self.turn.max_tokens
        rules = bias_rules(self.turn.bias, self.engine.model.config.vocab)
        return Request(tuple(ids), limit, self.turn.sampling, seed=self.seed, rules=rules, priority=self.turn.priority)

    def _count(self, answer: Answer, reasoning: int = 0) -> None:
        used = answer.usage
        self.usage = self.usage + Usage(used.input, used.cached, used.output, reasoning, used.calls)

    def _done(self, finish: Finish | Literal["error"]) -> Done:
        # One request alone never ends with "error": the engine raises instead.
        return Done("stop" if finish == "error" else finish, self.usage, self.seed)


def _offered(turn: Turn) -> tuple[ToolSpec, ...]:
    """The tools that the answer may call."""
    mode = turn.tool_mode
    if mode == "disallowed":
        return ()
    if mode in ("allowed", "required"):
        found = tuple(turn.tools)
    else:
        found = tuple(tool for tool in turn.tools if tool.name == mode)
    if not found and mode != "allowed":
        known = ", ".join(tool.name for tool in turn.tools) or "none"
        what = (
            "a tool call is required, and there are no tools" if mode == "required" else f"no tool is called {mode!r}"
        )
        raise UsageError(what, hint=f"tools are: {known}; modes are allowed, required, disallowed, or a tool's name")
    if found and turn.begin and mode != "allowed":
        raise UsageError("an answer that must call a tool cannot begin with a text", hint="leave out `begin`")
    return found


def _check(turn: Turn, tokens: int, limit: int) -> None:
    if tokens >= limit:
        raise ExceededContextWindowSizeError(tokens=tokens, limit=limit)
    if turn.max_tokens is not None and turn.max_tokens < 1:
        raise UsageError(f"max_tokens is {turn.max_tokens}", hint="use a whole number from 1, or None")


def _asked(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[str, tuple[ToolSpec, ...]]:
    """What the user said last, and the tools that have not been called since."""
    spent: set[str] = set()
    for message in reversed(messages):
        if message.role == "user":
            return message.content, tuple(tool for tool in tools if tool.name not in spent)
        spent |= {called(call)[0] for call in message.tool_calls or ()}
    return "", ()
