"""What is asked of a model, and what it gives: the wanted form, the answer as it grows, the whole response; and the line in
which those who ask wait for their turn."""

from __future__ import annotations

import html
import json
import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from orchard.core.errors import Cancelled, OrchardError, UsageError
from orchard.generate.constraint import Constraint
from orchard.generate.request import TokenLogprob
from orchard.session.errors import ConcurrentRequestsError, DecodingFailureError, ToolCallError
from orchard.session.turn import Finish, Usage

if TYPE_CHECKING:
    from orchard.session.schema import GeneratedContent, GenerationSchema
    from orchard.session.transcript.entries import Entry, ResponseFormat


class WantedError(UsageError, ValueError):
    """A form that no answer can have; a ValueError, as in the SDK."""

    code = "wanted"


@dataclass(frozen=True)
class Wanted:
    """The form that an answer must have. Everything None: text."""

    schema: GenerationSchema | None = None
    constraint: Constraint | None = None
    typed: bool = False
    """Whether the caller gets an instance of the schema's type, or its content as it is."""

    @classmethod
    def of(
        cls,
        generating: Any = None,
        schema: Any = None,
        json_schema: Mapping[str, Any] | None = None,
        regex: str | None = None,
        choices: Sequence[str] | None = None,
    ) -> Wanted:
        """At most one of these may be given. What no answer can be held to raises here, before any token."""
        named = {
            "generating": generating,
            "schema": schema,
            "json_schema": json_schema,
            "regex": regex,
            "choices": choices,
        }
        given = [name for name, value in named.items() if value is not None]
        if len(given) > 1:
            hint = "an answer has one form: give one of them"
            raise WantedError(f"{' and '.join(given)} were given together", hint=hint)
        if not given or generating is str:
            return cls()
        if regex is not None:
            return cls(constraint=Constraint.regex(regex))
        if choices is not None:
            return cls(constraint=Constraint.choices(choices))
        from orchard.session.schema import schema_for

        made = schema_for(named[given[0]])
        return cls(made, made.constraint(), typed=generating is not None)

    def words(self) -> str:
        """What the model is told of the form; empty where there is nothing to tell."""
        if self.schema is not None:
            return self.schema.for_prompt()
        if self.constraint is not None and self.constraint.kind == "choices":
            return "Answer with one of: " + ", ".join(json.loads(self.constraint.source))
        return ""

    def format(self) -> ResponseFormat | None:
        """The form as a transcript records it."""
        if self.schema is None:
            return None
        from orchard.session.transcript.entries import ResponseFormat

        return ResponseFormat(self.schema.name, self.schema.to_dict())

    def read(self, text: str, finish: Finish) -> tuple[Any, GeneratedContent | None]:
        """What the caller gets for a whole text, and its content."""
        if self.constraint is not None and finish == "length":
            raise DecodingFailureError(
                "the answer was cut off before it was complete",
                raw=text,
                hint="allow more tokens (maximum_response_tokens), or ask for less",
            )
        if self.schema is None:
            return text, None
        content = self.schema.read(text)
        return (self.schema.instance(content) if self.typed else content), content


@dataclass(frozen=True)
class Snapshot:
    """The answer so far. For a guided call `content` is a partial object, with the fields that are there already; otherwise the
    text. `delta` is the text that came since the last snapshot; `usage` is there in the last one."""

    content: Any
    raw_content: GeneratedContent | None = None
    delta: str = ""
    text: str = ""
    usage: Usage | None = None


@dataclass(frozen=True)
class Response:
    """A whole answer."""

    content: Any
    """A text, an instance of the type asked for, or a `GeneratedContent` for a schema."""
    raw_content: GeneratedContent | None
    """The content of a guided answer before it became an instance."""
    text: str
    """What the model wrote."""
    usage: Usage
    """Tokens of all the steps of this answer."""
    transcript_entries: tuple[Entry, ...] = ()
    """What this turn added to the transcript: prompt, reasoning, tool calls, outputs, answer."""
    finish: Finish = "stop"
    seed: int | None = None
    """The same seed gives the same answer again."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each token of the answer, where they were asked for."""
    reasoning: str = ""
    tool_errors: tuple[ToolCallError, ...] = ()
    """Tool calls that failed or were rejected. The model was told; so is the caller."""
    dropped: tuple[str, ...] = ()
    """Ids of entries that the context policy did not show to the model."""

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        usage = self.usage
        foot = f"{usage.input} tokens read ({usage.cached} cached), {usage.output} written, finish: {self.finish}"
        return (
            f'<div><pre style="white-space:pre-wrap">{html.escape(self.text)}</pre>'
            f"<small>{html.escape(foot)}</small></div>"
        )


@dataclass
class Collected:
    """What one step of the model has given so far."""

    text: str = ""
    reasoning: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    finish: Finish = "stop"
    seed: int | None = None


class ResponseStream:
    """Iterate for snapshots; `response` is there at the end. Leaving early (`break`, `close()`, the end of a `with` block) stops
    the model within one token, and the turn is not in the transcript."""

    def __init__(self, turn: Generator[Snapshot, None, Response]) -> None:
        self._turn = turn
        self._response: Response | None = None

    def __iter__(self) -> ResponseStream:
        return self

    def __next__(self) -> Snapshot:
        try:
            return next(self._turn)
        except StopIteration as end:
            if end.value is not None:
                self._response = end.value
            raise StopIteration from None

    @property
    def response(self) -> Response:
        """The whole response, once the stream has ended."""
        if self._response is None:
            raise UsageError("the answer is not complete", hint="iterate to the end first, or call collect()")
        return self._response

    def collect(self) -> Response:
        """Wait for the rest and return the whole response."""
        for _ in self:
            pass
        if self._response is None:
            raise _Closed("the stream was closed before its end", hint="ask again with session.respond(…)")
        return self._response

    def deltas(self) -> Generator[str, None, None]:
        """The new text of each snapshot."""
        for snapshot in self:
            if snapshot.delta:
                yield snapshot.delta

    def close(self) -> None:
        self._turn.close()

    def __enter__(self) -> ResponseStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Closed(OrchardError):
    code = "stream-closed"


class Place:
    """A place in the line. `cancel` is seen by whoever waits in it or is served."""

    def __init__(self, line: Line, thread: int | None) -> None:
        self.cancelled = threading.Event()
        self.thread = thread
        self._line = line
        self._ready = threading.Event()

    def wait(self) -> None:
        """Until it is this one's turn; raises `Cancelled` where it was given up meanwhile."""
        self._ready.wait()
        if self.cancelled.is_set():
            raise Cancelled("the request was cancelled while it waited", hint="ask again")

    def cancel(self) -> None:
        self.cancelled.set()
        self._ready.set()

    def leave(self) -> None:
        """Let the next one in. Leaving twice does nothing."""
        self._line.left_by(self)

    def call(self) -> None:
        self._ready.set()


class Line:
    """One at a time, in the order of asking."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: deque[Place] = deque()

    def take(self, *, thread: int | None = None) -> Place:
        """The last place. `thread`: who will wait; one that is being served already would wait for itself, and is refused."""
        with self._lock:
            if thread is not None and any(place.thread == thread for place in self._places):
                raise ConcurrentRequestsError(
                    "this session is already answering here: a second request would wait for the first for ever",
                    hint="read the stream to its end or close it first; hooks and tools ask a session of their own",
                )
            place = Place(self, thread)
            self._places.append(place)
            if len(self._places) == 1:
                place.call()
        return place

    def left_by(self, place: Place) -> None:
        with self._lock:
            if place not in self._places:
                return
            first = self._places[0] is place
            self._places.remove(place)
            if first and self._places:
                self._places[0].call()

    @property
    def busy(self) -> bool:
        return bool(self._places)

    def cancel_first(self) -> bool:
        """Cancel what is being answered; whether there was anything."""
        with self._lock:
            if self._places:
                self._places[0].cancel()
            return bool(self._places)
