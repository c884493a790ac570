"""Thinking budgets: how many tokens an answer may spend on thinking before it must come to the point.

A model that thinks writes an opening mark, its thoughts, a closing mark, then the answer. `Budget` is a rule that
counts the thoughts and writes the closing mark when they are spent. `Thinking` is what a request says about it, and
may name a predictor that reads the prompt's last hidden vector and gives easy prompts no thoughts at all (Adaptive
Thinking, OpenReview 2i6Rp0gCq6).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from orchard.core.errors import UsageError
from orchard.core.frozen import frozen
from orchard.generate.protocol import Runner, State, Tokens, Work

if TYPE_CHECKING:
    from orchard.generate.budget_predictor import SelfConsistency

CHUNK = 512
"""Tokens of a prompt that are read at once."""


class Span:
    """Where thinking begins and ends in an answer. Follows it forwards and back; a step costs the length of the marks.

    Only the first thoughts count: marks that come after the end are the answer's own words.
    """

    def __init__(self, begin: tuple[int, ...] | None, end: tuple[int, ...]) -> None:
        self.begin, self.end = begin, end
        self._known: tuple[Tokens, int | None, int | None] = (Tokens(), None if begin else 0, None)

    def places(self, output: Tokens) -> tuple[int | None, int | None]:
        """Tokens of the answer before the first thought, and before the first token after the closing mark; None: not yet."""
        at, begun, ended = self._known  # replaced whole, so that threads may share a span
        shared = _shared(at, output)
        if self.begin and begun is not None and begun > shared:
            begun = None
        if ended is not None and ended > shared:
            ended = None
        for place in range(shared + 1, len(output) + 1):
            if begun is None:
                begun = place if self.begin and _closes(output, place, self.begin, 0) else None
            elif ended is None and _closes(output, place, self.end, begun):
                ended = place
        self._known = (output, begun, ended)
        return begun, ended

    def left(self, output: Tokens, begun: int) -> tuple[int, ...]:
        """What is missing of a closing mark that thoughts may have begun to write."""
        for matched in range(min(len(self.end) - 1, len(output) - begun), 0, -1):
            if output[len(output) - matched :] == self.end[:matched]:
                return self.end[matched:]
        return self.end


class Budget:
    """A rule: after `tokens` thoughts nothing but the closing mark may come, and after that the rule says nothing more.

    `begin`: the opening mark; None where thinking begins with the answer, because the prompt holds the mark. `opens`: the answer
    must begin with the opening mark; otherwise the model thinks when it likes. `tokens` = 0 closes at once. One for each answer:
    a shared one is right, but slower.
    """

    def __init__(self, tokens: int, begin: Iterable[int] | None, end: Iterable[int], *, opens: bool = False) -> None:
        self.tokens = _count("a budget", tokens)
        self.begin = None if begin is None else _mark("the opening mark", begin)
        self.end = _mark("the closing mark", end)
        if opens and self.begin is None:
            raise UsageError("no opening mark to begin with", hint="give `begin`, or leave `opens` out")
        self.opens = opens
        self._largest = max((*(self.begin or ()), *self.end))
        self._span = Span(self.begin, self.end)

    def __call__(self, scores: np.ndarray, state: State) -> np.ndarray:
        if self._largest >= len(scores):  # before any of a mark is written
            raise UsageError(
                f"token {self._largest} of a thinking mark is outside the vocabulary of {len(scores):,}",
                hint="encode the marks with this model's own tokenizer",
            )
        forced = self.forced(state)
        if not forced:
            return scores
        only = np.full_like(scores, -np.inf)
        only[forced[0]] = scores[forced[0]]
        return only

    def forced(self, state: State) -> tuple[int, ...]:
        """Tokens that must come next; none where the model has a choice."""
        output = state.output
        begun, ended = self._span.places(output)
        if ended is not None:
            return ()
        if begun is None:
            written = len(output)
            starts = self.opens and self.begin is not None and output[:written] == self.begin[:written]
            return self.begin[written:] if starts and self.begin is not None else ()
        return self._span.left(output, begun) if len(output) - begun >= self.tokens else ()

    def spent(self, state: State) -> int:
        """Thoughts so far, without the closing mark."""
        begun, ended = self._span.places(state.output)
        if begun is None:
            return 0
        return (len(state.output) if ended is None else ended - len(self.end)) - begun


class Afterwards:
    """A rule for what comes after the thoughts: another rule that sees the answer without them, and says nothing before.

    A grammar is usually about the answer proper. This wraps its rule, with `forced` and `complete` where it has them.
    """

    def __init__(self, rule: Any, begin: Iterable[int] | None, end: Iterable[int]) -> None:
        self.rule = rule
        self._span = Span(None if begin is None else _mark("the opening mark", begin), _mark("the closing mark", end))
        self._known: tuple[Tokens, Tokens, int] = (Tokens(), Tokens(), 0)

    def __call__(self, scores: np.ndarray, state: State) -> np.ndarray:
        rest = self._rest(state)
        if rest is None:
            return scores
        bent: np.ndarray = self.rule(scores, rest)
        return bent

    def forced(self, state: State) -> tuple[int, ...]:
        rest = self._rest(state)
        return () if rest is None else tuple(self.rule.forced(rest))

    def complete(self, state: State) -> bool:
        rest = self._rest(state)
        return rest is not None and bool(self.rule.complete(rest))

    def _rest(self, state: State) -> State | None:
        """The answer after its thoughts, token after token the same growing list, so that rules can follow it."""
        ended = self._span.places(state.output)[1]
        if ended is None:
            return None
        at, rest, start = self._known
        if start != ended or not state.output.goes_on_from(at):
            at, rest, start = state.output, Tokens(state.output[ended:]), ended
        for token in state.output[ended + len(rest) :]:
            rest = rest.plus(token)
        self._known = (state.output, rest, start)
        return State(state.prompt, rest)


@frozen
class Thinking:
    """How a request thinks. `begin` and `end` are the marks' token ids.

    `begin`: written at once when the answer is to think; None where the prompt holds it already. `skip`: what is written instead
    when it is not to think; None: the marks with nothing between them.
    """

    end: tuple[int, ...]
    begin: tuple[int, ...] | None = None
    most: int = 4096
    """Thoughts, at most, in tokens."""
    skip: tuple[int, ...] | None = None
    predictor: SelfConsistency | None = None
    """Sets the budget by the prompt; None: always `most`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "end", _mark("the closing mark", self.end))
        _count("most", self.most)
        for name, what in (("begin", "the opening mark"), ("skip", "what skips thinking")):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _mark(what, getattr(self, name)))


def thinking_rule(thinking: Thinking, hidden: np.ndarray | None = None, *, signature: str | None = None) -> Budget:
    """The rule for one answer, made when its prompt has been read. `hidden`: what the head read for the prompt's last token;
    None where a runner does not know, and then the budget is `most`. `signature`: of the model that runs."""
    tokens = thinking.most
    if thinking.predictor is not None and hidden is not None:
        thinking.predictor.check(hidden, signature)
        tokens = thinking.predictor.budget(thinking.predictor.predict(hidden), thinking.most)
    if tokens == 0 and thinking.skip is not None:
        return Budget(0, None, thinking.skip)
    return Budget(tokens, thinking.begin, thinking.end, opens=thinking.begin is not None)


def hidden_of(runner: Runner, prompts: Iterable[Sequence[int]]) -> np.ndarray:
    """What the head reads after each prompt, [n, dim]: what a predictor is fitted on, the same numbers that it will be shown."""
    slots, found = runner.slots(1), []
    for ids in prompts:
        slots.open(0, len(ids))
        try:
            for start in range(0, len(ids), CHUNK):
                slots.run([Work(0, ids[start : start + CHUNK], int(start + CHUNK >= len(ids)), prompt=True)])
            hidden = slots.hidden(0)
        finally:
            slots.close(0)
        if hidden is None:
            raise UsageError("this runner does not tell what its head reads", hint="run the model natively or in torch")
        found.append(np.array(hidden, np.float32))
    return np.stack(found)


def _shared(one: Tokens, other: Tokens) -> int:
    """How many tokens two answers begin with alike."""
    if one is other or other.goes_on_from(one):
        return len(one)
    if one.goes_on_from(other):
        return len(other)
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _closes(output: Tokens, place: int, mark: tuple[int, ...], since: int) -> bool:
    """Whether a mark stands right before this place, and no earlier than `since`."""
    start = place - len(mark)
    return start >= since and output[place - 1] == mark[-1] and output[start:place] == mark


def _count(name: str, tokens: Any) -> int:
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        raise UsageError(f"{name} of {tokens!r} tokens", hint="use a whole number; 0 is no thinking at all")
    return tokens


def _mark(name: str, ids: Iterable[Any]) -> tuple[int, ...]:
    try:
        mark = tuple(map(operator.index, ids))
    except TypeError as error:
        raise UsageError(f"{name} is no list of token ids: {error}", hint="pass what `encode` gives") from error
    if not mark or min(mark) < 0:
        raise UsageError(f"{name} is {mark}", hint="give at least one token id, from 0 on")
    return mark
