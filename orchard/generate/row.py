"""One sequence on its way: its tokens so far, its text so far, and when it ends.

Where a constraint leaves no choice about the next tokens, they are taken without asking the model (`begin`, `follow`), and the
model reads them together with the next token that it is asked for. Those that the answer must begin with are read with the
prompt. What is read as a prompt and what as an answer depends on the request alone, so a row can lose its slot at any time and
go on later as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from orchard.core.errors import OrchardError
from orchard.generate.protocol import State
from orchard.generate.request import Finish, Piece, Request, TokenLogprob, Usage
from orchard.generate.sampling import Sampler, broken, logprob_of
from orchard.generate.stops import StopFinder
from orchard.text.stream import StreamDecoder
from orchard.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from orchard.generate.speculative.drafting import Draft

_keys = count()


class Row:
    """`take(scores)` chooses the next token and gives the piece it adds; `finished` is set by the last piece. `cached` and
    `calls` are for the record."""

    def __init__(
        self, index: int, request: Request, tokenizer: Tokenizer, *, room: int, reads_only: bool = False
    ) -> None:
        """`index`: the request's place in its list; `room`: new tokens that the context has room for; `reads_only`: nothing is
        to be written, the prompt is only read."""
        self.index = index
        self.key = next(_keys)
        self.request = request
        self.reads_only = reads_only
        self.limit = min(request.max_tokens, room)
        self.finished = False
        self.trouble: Exception | None = None
        """What went wrong before it could begin: it ends with that, and no other row does."""
        self.state = State(request.ids)
        self.prompt: tuple[int, ...] = request.ids
        self.cached = 0
        self.calls = 0
        self._scoring = request.prompt_logprobs is not None
        self._prompt_logprobs: list[TokenLogprob] = []
        self._grammar: Any = None  # GrammarRule, or one that waits for the thoughts to end
        self._budget: Any = None
        self._judge: Any = None
        self._tokenizer = tokenizer
        if request.constraint is not None and request.thinking is None:
            self._grammar = self._constraint()
        self.sampler = Sampler(self._with_rules())
        self._ends = tokenizer.eos_ids
        self._decoder = StreamDecoder(tokenizer)
        self._stops = StopFinder(request.stop)

    @property
    def length(self) -> int:
        """The tokens this sequence can grow to."""
        return len(self.request.ids) + self.limit

    @property
    def last(self) -> int:
        """The token chosen last."""
        return self.state.output[-1]

    @property
    def thinks(self) -> bool:
        """Whether `think` is still to be called, when the prompt has been read."""
        return self.request.thinking is not None and self._budget is None

    @property
    def plain(self) -> bool:
        """Whether its next token is always the likeliest one, and nothing else is asked about the scores."""
        request = self.request
        bent = self._scoring or request.speculation or request.thinking or request.constraint or self.sampler.rules
        return self.sampler.greedy and not bent and request.logprobs is None

    def pending(self, given: int) -> tuple[int, ...]:
        """New tokens that the model has not been given yet, when it has been given so many, the prompt's included."""
        return self.state.output[given - len(self.request.ids) :]

    @property
    def unscored(self) -> bool:
        """Whether the scores of all tokens of the prompt are still wanted."""
        return self._scoring and len(self._prompt_logprobs) < len(self.request.ids) - 1

    def score(self, start: int, scores: np.ndarray) -> None:
        """What the model thought of the prompt's tokens after place `start`. A prompt may be read again from its beginning."""
        wanted, ids = self.request.prompt_logprobs, self.request.ids
        assert wanted is not None
        del self._prompt_logprobs[start:]
        for place, row in enumerate(scores[: len(ids) - 1 - start], start + 1):
            self._prompt_logprobs.append(logprob_of(row, ids[place], wanted))

    def begin(self) -> list[Piece]:
        """Tokens that the answer must begin with. They are read as part of the prompt."""
        if self.trouble is not None:
            raise self.trouble
        if self._grammar is None:
            return []
        pieces = list(self.follow())
        self.prompt = (*self.request.ids, *self.state.output)
        return pieces

    def think(self, hidden: np.ndarray | None, signature: str | None) -> None:
        """The budget of thoughts, now that the prompt has been read; `hidden`: what the head read for its last token."""
        from orchard.generate.budget import Afterwards, thinking_rule  # few requests think

        thinking = self.request.thinking
        assert thinking is not None
        self._budget = thinking_rule(thinking, hidden, signature=signature)
        if self.request.constraint is not None:
            self._grammar = Afterwards(self._constraint(), self._budget.begin, self._budget.end)
        self.sampler, self._judge = Sampler(self._with_rules()), None

    def follow(self) -> Iterator[Piece]:
        """Tokens that must come next."""
        if (self._grammar is None and self._budget is None) or self.request.logprobs is not None:
            return
        while not self.finished and (tokens := self._forced()):
            for token in tokens:
                if self.finished:
                    return
                self.state = self.state.plus(token)
                yield replace(self._taken(None), forced=True)

    def take(self, scores: np.ndarray) -> Piece:
        """Keeps nothing of the scores: their memory is the runner's."""
        self.calls += 1
        self.state = self.sampler.step(self.state, scores)
        piece = self._chosen(scores)
        if self._scoring:
            piece = replace(piece, prompt=tuple(self._prompt_logprobs))
            self._scoring = False
        return piece

    def take_best(self, tokens: Sequence[int]) -> Iterator[Piece]:
        """Tokens that a device chose by itself, for a row that is `plain`, as far as they are wanted; -1: broken scores."""
        for token in tokens:
            if self.finished:
                return
            if token < 0:
                raise broken(self.state)
            self.calls += 1
            self.state = self.state.plus(token)
            yield self._taken(None)

    def take_many(self, scores: np.ndarray, draft: Draft) -> Iterator[Piece]:
        """The tokens that scores [1 + draft, V] give: as many as were guessed right, and one more. `scores[0]` stand before the
        first guess."""
        if self._judge is None:
            from orchard.generate.speculative.accept import judge_of

            self._judge = judge_of(self.request, self.sampler)
        self.calls += 1
        before = len(self.state.output)
        while not self.finished:
            place = len(self.state.output) - before
            self.state = self._judge.step(self.state, scores[place], draft, place)
            yield self._chosen(scores[place])
            yield from self.follow()
            new = self.state.output[before:]
            if len(new) > len(draft.ids) or new != draft.ids[: len(new)]:
                return

    def cancel(self) -> Piece:
        """The last piece of a sequence that ends before its time."""
        return self._closing(Piece(self._end(), None, "cancelled"))

    def fail(self, error: BaseException) -> Piece:
        """The last piece of a sequence that cannot go on."""
        hint = f" ({error.hint})" if isinstance(error, OrchardError) and error.hint else ""
        text = str(error) if isinstance(error, OrchardError) else f"{type(error).__name__}: {error}"
        return self._closing(Piece(self._end(), None, "error", error=text + hint))

    # Inside -----------------------------------------------------------------------------------------------------------

    def _constraint(self) -> Any:
        from orchard.generate.grammar import grammar_for  # not every start needs it

        assert self.request.constraint is not None
        return grammar_for(self._tokenizer, self.request.constraint).rule()

    def _forced(self) -> tuple[int, ...]:
        for rule in (self._budget, self._grammar):
            tokens: tuple[int, ...] = () if rule is None else rule.forced(self.state)
            if tokens:
                return tokens
        return ()

    def _with_rules(self) -> Request:
        """The request with the rules that its other wishes stand for."""
        more = [rule for rule in (self._budget, self._grammar) if rule is not None]
        return replace(self.request, rules=(*self.request.rules, *more)) if more else self.request

    def _chosen(self, scores: np.ndarray) -> Piece:
        wanted = self.request.logprobs
        return self._taken(None if wanted is None else logprob_of(scores, self.last, wanted))

    def _taken(self, logprob: TokenLogprob | None) -> Piece:
        """The piece that the last token adds."""
        token = self.last
        if token in self._ends:
            return self._closing(Piece(self._end(), None, "stop", logprob))
        text = self._decoder.push(token)
        if self._stops.stops:
            text = self._stops.push(text)
        finish: Finish | None = None
        if not self._stops.found and self._grammar is not None and self._grammar.complete(self.state):
            text, finish = text + self._end(), "stop"  # nothing but the end may follow: the model need not say so
        elif not self._stops.found and len(self.state.output) >= self.limit:
            text, finish = text + self._end(), "length"
        if self._stops.found:  # also where the last few characters, held back until now, complete a stop string
            self.finished, finish = True, "stop"
        piece = Piece(text, token, finish, logprob)
        return piece if finish is None else self._closing(piece)

    def _closing(self, piece: Piece) -> Piece:
        output = len(self.state.output) - (bool(self.state.output) and self.last in self._ends)
        return replace(piece, usage=Usage(len(self.request.ids), output, self.cached, self.calls))

    def _end(self) -> str:
        """What was held back."""
        self.finished = True
        return self._stops.push(self._decoder.finish()) + self._stops.finish()
