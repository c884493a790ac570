"""One piece of text, judged: lists of the application, then rules of intent, then the classifier.

A judge keeps nothing between calls and can be shared by threads. What it needs from disk is read when the first text comes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache

from orchard.core.frozen import frozen
from orchard.session.guardrails.classifier import Classifier, read
from orchard.session.guardrails.lexicon import Lexicon, stem
from orchard.session.guardrails.normalise import hidden_texts, plain_words, words_of
from orchard.session.guardrails.phrases import Phrases
from orchard.session.guardrails.policy import Policy
from orchard.session.guardrails.rules import SCORE, Rule, rules
from orchard.session.guardrails.verdict import DENY, Stage, categories

NEAR_THE_TOP = 1.0
"""Categories whose log odds are further below those of the likeliest one are not named."""
# A model that says no is not doing what it says no to.
_REFUSAL = re.compile(
    r"^(\w+ ){0,6}(cannot|can not|cant|could not|unable to|wont|will not|not able to|dont|do not) (\w+ )?"
    r"(help|assist|provide|give|answer|support|create|write|generate|comply|fulfil|discuss|share|engage|condone|encourage)\b"
)


@frozen
class Finding:
    """A category, how sure, and by what."""

    category: str
    score: float
    rule: str


@lru_cache(maxsize=1)
def shipped() -> Classifier:
    """The classifier that comes with the package."""
    return read()


class Vocabulary:
    """The words that a disguise may hide: those of the lexicon and those that the application denies."""

    def __init__(self, lexicon: Lexicon, extra: Sequence[str]) -> None:
        self._lexicon, self._extra = lexicon, frozenset(extra)

    def __contains__(self, word: object) -> bool:
        return word in self._extra or word in self._lexicon

    def __len__(self) -> int:
        return len(self._lexicon) + len(self._extra)

    def __iter__(self) -> Iterator[str]:
        yield from self._lexicon
        yield from self._extra


class Judge:
    """`findings(text)`: what a piece of text is against."""

    def __init__(self, policy: Policy, deny: Sequence[str], allow: Sequence[str], normalise: bool = True) -> None:
        self.policy = policy
        self.normalise = normalise
        self._deny, self._allow = tuple(deny), tuple(allow)

    @cached_property
    def classifier(self) -> Classifier:
        return shipped()

    @cached_property
    def _known(self) -> Vocabulary:
        extra = [word for entry in self._deny for word in plain_words(entry)]
        return Vocabulary(self.classifier.lexicon, extra)

    @cached_property
    def _lists(self) -> tuple[Phrases, Phrases]:
        deny = Phrases((tuple(self.words(entry)), entry) for entry in self._deny)
        return deny, Phrases((tuple(self.words(entry)), entry) for entry in self._allow)

    @cached_property
    def _rules(self) -> tuple[Rule, ...]:
        return rules()

    def words(self, text: str) -> list[str]:
        return words_of(text, self._known) if self.normalise else plain_words(text)

    def findings(self, text: str, stage: Stage) -> list[Finding]:
        """Everything above the policy's thresholds, the surest first; one finding a category."""
        best: dict[str, Finding] = {}
        for version in (text, *(hidden_texts(text) if self.normalise else ())):
            for finding in self._version(self.words(version), stage):
                if finding.category not in best or best[finding.category].score < finding.score:
                    best[finding.category] = finding
        return sorted(best.values(), key=lambda finding: (-finding.score, finding.category))

    def _version(self, words: list[str], stage: Stage) -> Iterator[Finding]:
        deny, allow = self._lists
        for _, _, entry in deny.find(words) if deny else ():
            yield Finding(DENY, 1.0, f"deny:{entry}")
        if allow:
            words = _without(words, allow)
        if not words or (stage == "output" and _REFUSAL.search(" ".join(words[:12]))):
            return
        settings = self.policy.settings
        for finding in (*self._by_rules(words), *self._by_classifier(words)):
            wanted = stage in categories()[finding.category].stages
            if wanted and finding.score >= settings[finding.category].threshold:
                yield finding

    def _by_rules(self, words: list[str]) -> Iterator[Finding]:
        found = self.classifier.lexicon.classes([stem(word) for word in words])
        present = frozenset(name for _, name in found)
        for rule in self._rules:
            if rule.fits(words, found, present):
                yield Finding(rule.category, SCORE, rule.id)

    def _by_classifier(self, words: list[str]) -> Iterator[Finding]:
        odds = self.classifier.logits(words)
        scores, top = self.classifier.scores(words), float(odds.max())
        for category, odd in zip(self.classifier.categories, odds.tolist()):
            if odd >= top - NEAR_THE_TOP:
                yield Finding(category, scores[category], "classifier")


def _without(words: list[str], allow: Phrases) -> list[str]:
    """The words less those of allowed phrases."""
    gone = {place for start, end, _ in allow.find(words) for place in range(start, end)}
    return [word for place, word in enumerate(words) if place not in gone]
