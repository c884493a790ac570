"""What to do when a conversation no longer fits its model.

A policy gives a shorter transcript. By default (`Strict`) nothing is dropped and a conversation that is too long raises. The
others are asked for by name, do nothing while everything fits, never drop the question that is being answered, and never
part a tool call from its output. They work on copies: what was said stays in the session's transcript unless the session
puts the shorter one in its place. Any function from `Transcript` to `Transcript` can be a policy, too; it is always applied.

`fit(policy, transcript, room)` is the one way in. It holds every policy, also one of yours, to the promise: what comes out fits,
or `ExceededContextWindowSizeError` says by how much it does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from orchard.core.errors import UsageError
from orchard.core.frozen import frozen
from orchard.session.errors import DecodingFailureError, ExceededContextWindowSizeError
from orchard.session.transcript import Entry, Instructions, PromptEntry, ToolCalls, ToolOutput, Transcript

RoomFor = Callable[[Transcript], int]
"""How many tokens are left when the model has read this transcript; below 0 where it does not fit."""
Summariser = Callable[[str], str]
"""Asks a model for a summary: a whole prompt in, the summary out."""
SUMMARY = {"summary": True}
"""Marks instructions that stand for dropped turns (`Entry.extra`), so that the next summary takes them in."""


@frozen
class Room:
    """A `RoomFor` that knows its numbers: the context's size, how a transcript is counted, and what the answer needs."""

    limit: int
    count: RoomFor
    reserve: int = 0

    def __call__(self, transcript: Transcript) -> int:
        return self.limit - self.reserve - self.count(transcript)


@runtime_checkable
class ContextPolicy(Protocol):
    """A transcript that fits, or `ExceededContextWindowSizeError`. The given transcript is not changed."""

    def fit(self, transcript: Transcript, room: RoomFor) -> Transcript: ...


PolicyLike = ContextPolicy | Callable[[Transcript], Transcript]


@frozen
class Fitted:
    """What a policy made of a transcript: the ids of entries that are gone, and the summary that stands for them."""

    transcript: Transcript
    dropped: tuple[str, ...] = ()
    summary: str | None = None


def fit(
    policy: PolicyLike | None, transcript: Transcript, room: RoomFor, *, summarise: Summariser | None = None
) -> Fitted:
    """The transcript as the policy (None: `Strict`) leaves it. `summarise` is for policies that ask a model."""
    policy = Strict() if policy is None else policy
    made = _reduced(bound(policy, summarise) if summarise else policy, transcript, room)
    _demand(made, room)
    kept = {entry.id for entry in made}
    known = {entry.id for entry in transcript}
    summaries = [entry.text for entry in made if _is_summary(entry) and entry.id not in known]
    dropped = tuple(entry.id for entry in transcript if entry.id not in kept)
    return Fitted(made, dropped, "\n\n".join(summaries) if summaries else None)


def bound(policy: PolicyLike, summarise: Summariser) -> PolicyLike:
    """The same policy with something to summarise by, also inside chains; one that has its own keeps it."""
    if isinstance(policy, Summarise) and policy.summarise is None:
        return replace(policy, summarise=summarise)
    if isinstance(policy, Chain):
        return Chain(*(bound(each, summarise) for each in policy.policies))
    return policy


class _Reducing(ABC):
    """A policy that says how to shorten; whether that was enough is checked here."""

    @abstractmethod
    def reduce(self, transcript: Transcript, room: RoomFor) -> Transcript:
        """A shorter transcript, or the same where nothing can go."""

    def fit(self, transcript: Transcript, room: RoomFor) -> Transcript:
        made = self.reduce(transcript.copy(), room)
        _demand(made, room)
        return made


@frozen
class Strict(_Reducing):
    """Drops nothing."""

    def reduce(self, transcript: Transcript, room: RoomFor) -> Transcript:
        return transcript


@frozen
class RollingWindow(_Reducing):
    """Drops the oldest turns, whole ones, until the rest fits; with `keep_turns`, never keeps more than so many."""

    keep_instructions: bool = True
    """False: instructions go with the oldest turn that goes."""
    keep_turns: int | None = None
    """The turn that is being answered counts as one."""

    def __post_init__(self) -> None:
        if self.keep_turns is not None:
            _at_least_one("keep_turns", self.keep_turns)

    def reduce(self, transcript: Transcript, room: RoomFor) -> Transcript:
        turns = transcript.turns()
        least = max(0, len(turns) - self.keep_turns) if self.keep_turns else 0
        # Counting tokens is the work here, and what is shorter fits better: look in halves.
        choices = range(least, len(turns))
        fits = bisect_left(choices, True, key=lambda gone: room(self._without(transcript, turns[:gone])) >= 0)
        return self._without(transcript, turns[: min(least + fits, len(turns) - 1)] if turns else ())

    def _without(self, transcript: Transcript, turns: Sequence[Sequence[Entry]]) -> Transcript:
        left = without(transcript, [entry for turn in turns for entry in turn])
        return left if self.keep_instructions or not turns else left.history


@frozen
class DropToolCalls(_Reducing):
    """Drops tool calls that are done, with their outputs, oldest turn first; questions and answers stay."""

    keep_last: int = 1
    """In so many of the last turns nothing is dropped; the one that is being answered counts as one."""

    def __post_init__(self) -> None:
        _at_least_one("keep_last", self.keep_last)

    def reduce(self, transcript: Transcript, room: RoomFor) -> Transcript:
        made = transcript
        for turn in transcript.turns()[: -self.keep_last]:
            if room(made) >= 0:
                break
            made = without(made, _finished_calls(turn))
        return made


@frozen
class Summarise(_Reducing):
    """Puts a summary in the place of all but the last turns; fewer of these are kept where they do not fit.

    The summary stands after the instructions and is taken into the next one. A text that is too long for the model that
    summarises is summed up piece by piece.
    """

    with_model: Any = None
    """The model to ask; None: the session's own. The session reads this."""
    keep_turns: int = 2
    words: int = 120
    summarise: Summariser | None = None

    def __post_init__(self) -> None:
        _at_least_one("keep_turns", self.keep_turns)
        _at_least_one("words", self.words)

    def reduce(self, transcript: Transcript, room: RoomFor) -> Transcript:
        if room(transcript) >= 0:
            return transcript
        turns, made = transcript.turns(), transcript
        for keep in range(min(self.keep_turns, len(turns) - 1), 0, -1):
            old = [entry for turn in turns[:-keep] for entry in turn]
            old += [entry for entry in transcript if _is_summary(entry)]
            rest = without(transcript, old)
            if room(rest) < self.words:  # a token a word at the very least: no summary would fit beside it
                continue
            made = self._with_summary(rest, self._summary(transcript, old, room))
            if room(made) >= 0:
                break
        return made

    def _summary(self, transcript: Transcript, old: Sequence[Entry], room: RoomFor) -> str:
        if self.summarise is None:
            hint = "use it in a session, or give summarise=, a function from a prompt to a text"
            raise UsageError("Summarise has no model to ask", hint=hint)
        gone = {id(entry) for entry in old}
        summary, piece = "", ""
        for entry in transcript:
            if id(entry) not in gone:
                continue
            line = str(Transcript([entry]))
            longer = f"{piece}\n{line}" if piece else line
            asked = Transcript([PromptEntry(self._ask(summary, longer))])
            if piece and room(asked) < 2 * self.words:
                summary, longer = self._answer(summary, piece), line
            piece = longer
        return self._answer(summary, piece)

    def _ask(self, summary: str, conversation: str) -> str:
        before = f"Summary of what came before:\n{summary}\n\n" if summary else ""
        return (
            f"{before}Conversation:\n{conversation}\n\nSum up all of this in at most {self.words} words. "
            "Keep names, numbers, decisions and open questions. Write the summary only."
        )

    def _answer(self, summary: str, conversation: str) -> str:
        assert self.summarise is not None
        text = self.summarise(self._ask(summary, conversation)).strip()
        if not text:
            hint = "try again, or use RollingWindow, which asks no model"
            raise DecodingFailureError("the summary of the conversation came back empty", hint=hint)
        return text

    @staticmethod
    def _with_summary(rest: Transcript, summary: str) -> Transcript:
        place = next((n for n, entry in enumerate(rest) if not isinstance(entry, Instructions)), len(rest))
        rest.insert(place, Instructions(f"Summary of the conversation so far: {summary}", extra=SUMMARY))
        return rest


class Chain(_Reducing):
    """One policy after another, each on what the one before left."""

    def __init__(self, *policies: PolicyLike) -> None:
        self.policies = policies

    def reduce(self, transcript: Transcript, room: RoomFor) -> Transcript:
        for policy in self.policies:
            transcript = _reduced(policy, transcript, room)
        return transcript

    def __eq__(self, other: object) -> bool:
        return self.policies == other.policies if isinstance(other, Chain) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.policies)

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.policies))})"


def without(transcript: Transcript, entries: Sequence[Entry]) -> Transcript:
    """A copy without these entries."""
    gone = {id(entry) for entry in entries}
    left = transcript.copy()
    left[:] = [entry for entry in transcript if id(entry) not in gone]
    return left


def _reduced(policy: PolicyLike, transcript: Transcript, room: RoomFor) -> Transcript:
    """As short as the policy makes it, whether or not that is enough."""
    given = transcript.copy()
    if isinstance(policy, _Reducing):
        made: Any = policy.reduce(given, room)
    elif isinstance(policy, ContextPolicy):
        try:
            made = policy.fit(given, room)
        except ExceededContextWindowSizeError:
            return transcript.copy()
    elif callable(policy):
        made = policy(given)
    else:
        hint = "use a policy of orchard.session.policies, or a function from Transcript to Transcript"
        raise UsageError(f"a {type(policy).__name__} is no context policy", hint=hint)
    if not isinstance(made, Transcript):
        wrong = f"the context policy {policy!r} gave a {type(made).__name__} and not a Transcript"
        raise UsageError(wrong, hint="return the transcript, or a shorter copy of it")
    return made


def _demand(transcript: Transcript, room: RoomFor) -> None:
    left = room(transcript)
    if left >= 0:
        return
    limit, reserve = getattr(room, "limit", None), getattr(room, "reserve", 0)
    if limit is None:
        raise ExceededContextWindowSizeError(f"the conversation is {-left:,} tokens longer than the context holds")
    raise ExceededContextWindowSizeError(tokens=limit - left, limit=limit, hint=_advice(-left, reserve))


def _advice(over: int, reserve: int) -> str:
    answer = f" (of which {reserve:,} are kept for the answer)" if reserve else ""
    return (
        f"it is {over:,} tokens too long{answer}: shorten the prompt or the instructions, start a new session, "
        "or give this one another context policy (see orchard.session.policies)"
    )


def _finished_calls(turn: Sequence[Entry]) -> list[Entry]:
    """Calls that all have an output, and these outputs."""
    answered = {entry.call_id for entry in turn if isinstance(entry, ToolOutput)}
    finished: list[Entry] = []
    done: set[str] = set()
    for entry in turn:
        if isinstance(entry, ToolCalls) and all(call.id in answered for call in entry.calls):
            finished.append(entry)
            done |= {call.id for call in entry.calls}
    return finished + [entry for entry in turn if isinstance(entry, ToolOutput) and entry.call_id in done]


def _is_summary(entry: Entry) -> bool:
    return isinstance(entry, Instructions) and bool(entry.extra.get("summary"))


def _at_least_one(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} is {value!r}", hint="use a whole number from 1")
