"""Constraints become rules on tokens: which may come next, which must, and when nothing more may.

The work is done by llguidance, on bytes: a token may come when the grammar can read all its bytes and still reach an end. A
`Grammar` is made once for a tokenizer and a constraint and shared; each answer has a `GrammarRule` of its own, which follows
the answer's tokens forwards and back.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from orchard.generate.constraint import Constraint
from orchard.generate.errors import BadGrammar, GrammarStuck
from orchard.generate.grammar_words import Words, words_of
from orchard.generate.protocol import State, Tokens
from orchard.ops.kernels.sampling import mask
from orchard.text.tokenizer import Tokenizer

KEPT = 64
"""Grammars that are kept for each tokenizer."""
KEPT_CHARACTERS = 1_000_000
"""Of the constraints of all these together: a grammar takes some 30 bytes for each."""
LESSONS = 8
"""Answers that a grammar learns from."""
LONGEST = 4_000_000
"""Characters of a constraint."""


def grammar_for(tokenizer: Tokenizer, constraint: Constraint) -> Grammar:
    """The grammar for a constraint, made at the first call. Raises `UnsupportedSchema` or `BadGrammar` before any token."""
    with _lock:
        kept = _kept.setdefault(tokenizer, OrderedDict())
        if constraint in kept:
            kept.move_to_end(constraint)
            return kept[constraint]
    made = Grammar(words_of(tokenizer), constraint)
    with _lock:
        made = kept.setdefault(constraint, made)  # another thread may have been faster
        characters = sum(len(one.source) for one in kept)
        while len(kept) > KEPT or (characters > KEPT_CHARACTERS and len(kept) > 1):
            characters -= len(kept.popitem(last=False)[0].source)
    return made


class Grammar:
    """A constraint in the vocabulary of one tokenizer. Safe to share."""

    def __init__(self, words: Words, constraint: Constraint) -> None:
        self.words = words
        self.constraint = constraint
        self._begin = words.matcher(grammar_text(constraint))
        self._lock = threading.Lock()
        self._lessons = 0
        kind = _NAMES[constraint.kind]
        if self._begin.is_error():
            raise BadGrammar(f"this {kind} cannot be used: {_line(self._begin.get_error())}", hint=_HINT)
        self._begin.compute_bitmask()
        if self._begin.is_error():
            raise BadGrammar(f"no answer can match this {kind}", hint="its parts contradict each other")

    def rule(self) -> GrammarRule:
        return GrammarRule(self)

    def matcher(self) -> Any:
        """One that has read nothing yet, for one answer."""
        with self._lock:
            return self._begin.deep_copy()

    def learn(self, matcher: Any) -> None:
        """Begin the next answers with what the lexer of a finished one has worked out: their masks come several times as fast.
        A few answers are enough, and more would only take memory."""
        with self._lock:
            if self._lessons < LESSONS:
                self._lessons += 1
                knowing = matcher.deep_copy()
                if knowing.reset() and not knowing.is_error():
                    self._begin = knowing


class GrammarRule:
    """A rule for one answer (see `orchard.generate.protocol.Rule`). Not to be shared between answers."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher()
        self._at = Tokens()
        self._fed = 0  # tokens of `_at` that the matcher has read: all of them, but for an end
        self._bits: np.ndarray | None = None  # of the tokens that may come next
        self._masked = np.empty(0, np.float32)
        self._learned = False

    def __call__(self, scores: np.ndarray, state: State) -> np.ndarray:
        """The same scores where a token may come, -inf elsewhere, in memory that the next call uses again. Raises `GrammarStuck`
        where the answer so far, or a limit on the work, leaves nothing."""
        self._follow(state.output)
        if self._bits is None:
            self._bits = self._allowed()
        if len(self._masked) != len(scores):
            self._masked = np.empty(len(scores), np.float32)
        return mask(scores, self._bits, self._masked)

    def forced(self, state: State) -> tuple[int, ...]:
        """Tokens that must come next, as the tokenizer would spell them; none where there is a choice."""
        self._follow(state.output)
        return () if self._stopped() else tuple(self._matcher.compute_ff_tokens())

    def reads(self, state: State, ids: Sequence[int]) -> int:
        """How many of these tokens could follow one another."""
        self._follow(state.output)
        return 0 if self._stopped() else int(self._matcher.validate_tokens(list(ids)))

    def complete(self, state: State) -> bool:
        """Whether nothing may follow but the end."""
        self._follow(state.output)
        if not self._stopped():
            return False
        if not self._learned:
            self._learned = True
            self._grammar.learn(self._matcher)
        return True

    def _stopped(self) -> bool:
        return self._fed < len(self._at) or (self._matcher.is_stopped() and not self._matcher.is_error())

    def _follow(self, output: Tokens) -> None:
        """Bring the matcher to where the answer stands."""
        if output is self._at:
            return
        shared = min(len(output), len(self._at))
        if not (output.goes_on_from(self._at) or self._at.goes_on_from(output)):
            pairs = enumerate(zip(output[:shared], self._at[:shared], strict=True))
            shared = next((place for place, (new, old) in pairs if new != old), shared)
        shared = min(shared, self._fed)
        if self._matcher.is_error() or not self._matcher.rollback(self._fed - shared):
            self._matcher, shared = self._grammar.matcher(), 0
        self._at, self._fed, self._bits = output, shared, None
        for token in output[shared:]:
            if token in self._grammar.words.ends and self._matcher.is_accepting():
                return  # the answer is over, whatever comes behind
            if not self._matcher.consume_token(token):
                raise self._stuck(f"it does not allow token {self._fed + 1} of the answer")
            self._fed += 1

    def _allowed(self) -> np.ndarray:
        """One bit a token, as `orchard.ops.kernels.sampling.mask` reads them."""
        if self._stopped():
            return self._grammar.words.only_ends
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise self._stuck(_line(self._matcher.get_error()))
        return bits

    def _stuck(self, why: str) -> GrammarStuck:
        kind = _NAMES[self._grammar.constraint.kind]
        hint = f"make the {kind} simpler, or its texts and numbers shorter"
        return GrammarStuck(f"the {kind} cannot be followed any further: {why}", hint=hint)


_kept: WeakKeyDictionary[Tokenizer, OrderedDict[Constraint, Grammar]] = WeakKeyDictionary()
_lock = threading.Lock()
_NAMES = {"json_schema": "schema", "regex": "regular expression", "choices": "list of choices", "lark": "grammar"}
_HINT = "see https://github.com/guidance-ai/llguidance for what expressions and grammars may hold"


def grammar_text(constraint: Constraint) -> str:
    """A constraint as a grammar in the Lark dialect of llguidance. Raises `UnsupportedSchema` or `BadGrammar`."""
    if len(constraint.source) > LONGEST:
        raise BadGrammar(
            f"a {_NAMES[constraint.kind]} of {len(constraint.source):,} characters", hint="make it shorter"
        )
    if constraint.kind == "json_schema":
        from orchard.generate.json_schema import schema_grammar

        return schema_grammar(constraint.source)
    if constraint.kind == "lark":
        return f"%llguidance {{}}\n{constraint.source}"
    from orchard.generate.json_schema.strings import lark_string

    if constraint.kind == "choices":
        return f"start: {' | '.join(map(lark_string, json.loads(constraint.source)))}\n"
    return _regex_grammar(constraint.source)


def _regex_grammar(pattern: str) -> str:
    """Patterns mean what they mean in a JSON Schema, but for the whole answer. What that dialect does not have, such as
    `(?i)`, is left to llguidance, which knows the dialect of Rust."""
    from llguidance import LLMatcher

    from orchard.generate.json_schema.pattern import PatternError, text_expression, unanchored
    from orchard.generate.json_schema.pattern_reader import read_pattern

    try:
        return f"start: TEXT\nTEXT: /{text_expression(unanchored(read_pattern(pattern)))}/\n"
    except PatternError as error:
        grammar = str(LLMatcher.grammar_from_regex(pattern))
        if LLMatcher.validate_grammar(grammar):
            raise BadGrammar(f"the regular expression {pattern!r} cannot be used: {error}", hint=_HINT) from None
        return grammar


def _line(problem: str) -> str:
    """The first line of a message, without the place in a source that nobody sees."""
    return re.sub(r"\s+", " ", problem.strip().split("\n")[0])[:300]
