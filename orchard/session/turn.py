"""One call of a model, and what comes back: the seam between a conversation and whatever answers it.

A session turns its transcript into a `Turn` and gives it to an `Executor`: a model of Orchard on this machine, an endpoint
that speaks OpenAI's protocol, or a script in a test. What comes back is a stream of events that ends with `Done`. An
executor knows nothing of transcripts, policies, guardrails or running tools; a session knows nothing of tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from orchard.generate.constraint import Constraint
from orchard.generate.request import Sampling, TokenLogprob
from orchard.text.messages import Message

__all__ = [
    "Call",
    "Capability",
    "Constraint",
    "Done",
    "Event",
    "Executor",
    "Finish",
    "Message",
    "Reasoning",
    "Sampling",
    "Text",
    "TokenLogprob",
    "ToolMode",
    "ToolSpec",
    "Turn",
    "Usage",
]

Finish = Literal["stop", "length", "tool_calls", "cancelled"]
Capability = Literal["guided", "tools", "logprobs", "adapters", "vision", "reasoning", "seed"]


@dataclass(frozen=True)
class ToolSpec:
    """What a model is told of a tool. `parameters` is a JSON Schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    in_prompt: bool = True
    """Whether its schema is shown to the model; its arguments are held to the schema either way."""


@dataclass(frozen=True)
class Usage:
    """Tokens of one or more calls: read, of these found in a cache, written, of these spent on thinking; and how often the
    model was run to write them (fewer than `output` where a grammar leaves no choice)."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0
    calls: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input + other.input,
            self.cached + other.cached,
            self.output + other.output,
            self.reasoning + other.reasoning,
            self.calls + other.calls,
        )

    def to_dict(self) -> dict[str, int]:
        return {
            "input": self.input,
            "cached": self.cached,
            "output": self.output,
            "reasoning": self.reasoning,
            "calls": self.calls,
        }


ToolMode = str
"""`"allowed"`, `"required"`, `"disallowed"`, or the name of the one tool that must be called."""


@dataclass(frozen=True)
class Turn:
    """Everything that an answer depends on."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    tool_mode: ToolMode = "allowed"
    parallel_calls: bool = True
    """Whether one answer may call several tools."""
    constraint: Constraint | None = None
    """What the text of the answer must match. A tool call is held to its own schema instead."""
    begin: str = ""
    """The answer begins with this; it is part of the answer."""
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    """None: as many as the context has room for."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    adapters: tuple[str, ...] = ()
    """Names of loaded adapters, applied together."""
    reasoning: str | None = None
    """none, light, moderate, deep, or a model's own word; None: as the model likes."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    bias: Mapping[int, float] = field(default_factory=dict)
    """Token ids, and what is added to their scores."""
    priority: int = 0
    """Higher ones go first where there is no room for all."""


@dataclass(frozen=True)
class Text:
    """More of the answer's text."""

    delta: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    delta: str


@dataclass(frozen=True)
class Call:
    """A whole tool call. `arguments` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Done:
    """The last event."""

    finish: Finish
    usage: Usage = Usage()
    seed: int | None = None


Event = Text | Reasoning | Call | Done


@runtime_checkable
class Executor(Protocol):
    """What answers. Safe to share between sessions and threads."""

    @property
    def name(self) -> str: ...

    @property
    def context_size(self) -> int: ...

    @property
    def capabilities(self) -> frozenset[Capability]: ...

    def run(self, turn: Turn, cancel: threading.Event) -> Iterator[Event]:
        """Events up to `Done`. Setting `cancel` ends it within one token, with finish "cancelled"; closing the iterator
        ends it without a `Done`. A turn that is too long raises `ExceededContextWindowSizeError` before any event."""
        ...

    def count(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, answer: bool = True) -> int:
        """Tokens that these take in the context; `answer`: with what invites the model to speak."""
        ...

    def prewarm(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> None:
        """Get ready for a conversation that begins like this. A hint: nothing comes of it but speed."""
        ...
