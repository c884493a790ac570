"""Conversations with questions about them: what a memory is tested with.

`recall` makes chats from a seed: several people, many topics, and in passing each tells a few things of themselves. Later one of
them is asked, and what they said stands among alternatives of the same kind; the likeliest alternative is the answer. So a
small model can show what its memory holds, and one that remembers nothing is right one time in eight. Some things are told by two
people, with different values: it has to be remembered who said what.

Other conversations come from files, see `memory_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from orchard.bench.memory_words import OPENERS, PEOPLE, TOPICS, Relation, Topic
from orchard.core.errors import UsageError

Count = Callable[[str], int]
"""How many tokens a text has."""
TOGETHER = 4
"""Utterances in a row about one topic."""
FACTS = 2
"""Of these, so many tell something."""


@dataclass(frozen=True)
class Question:
    """`text` is what is asked, `prompt` what the model goes on from; `choices[answer]` is right."""

    text: str
    prompt: str
    choices: tuple[str, ...]
    answer: int
    evidence: tuple[int, ...] = ()
    """The utterances that say it."""


@dataclass(frozen=True)
class Talk:
    """A conversation. An utterance is a whole line: who, what, and the line's end."""

    name: str
    begin: str
    utterances: tuple[str, ...]
    questions: tuple[Question, ...]

    def cut(self, tokens: int | None, questions: int, count: Count, seed: int = 0) -> Talk:
        """The beginning of it, of about so many tokens (None: all), and some questions about that, spread over it."""
        kept, total = 0, count(self.begin)
        while kept < len(self.utterances):
            total += count(self.utterances[kept])
            if tokens is not None and total > tokens:
                break
            kept += 1
        asked = [one for one in self.questions if one.evidence and max(one.evidence) < kept]
        Random(seed).shuffle(asked)
        return replace(self, utterances=self.utterances[:kept], questions=tuple(asked[:questions]))


@dataclass(frozen=True)
class Fact:
    who: str
    relation: Relation
    value: str

    def said(self, opener: str) -> str:
        return f"{self.who}: {opener} {_lower(self.relation.stem)} {self.value}.\n"

    def asked(self, by: str, evidence: int, dice: Random) -> Question:
        choices = list(self.relation.values)
        dice.shuffle(choices)
        question = f"{self.who}, {self.relation.question}"
        prompt = f"{by}: {question}\n{self.who}: {self.relation.stem}"
        return Question(
            question, prompt, tuple(f" {one}" for one in choices), choices.index(self.value), evidence=(evidence,)
        )


def recall(seed: int, *, tokens: int, questions: int, count: Count, tellers: int = 2) -> Talk:
    """A chat of about so many tokens. `tellers`: by so many people each thing is told, of themselves."""
    if tokens < 64 or questions < 1 or not 1 <= tellers <= len(PEOPLE):
        raise UsageError(
            f"a chat of {tokens} tokens with {questions} questions and {tellers} tellers",
            hint=f"use 64 tokens or more, one question or more, and 1 to {len(PEOPLE)} tellers",
        )
    dice = Random(f"recall {seed}")
    untold = {topic.name: _facts(topic, tellers, dice) for topic in TOPICS}
    begin = "Friends are talking.\n"
    lines: list[str] = []
    told: list[tuple[Fact, int]] = []
    total = count(begin)
    order: list[Topic] = []
    while total < tokens:
        order = order or dice.sample(TOPICS, len(TOPICS))
        topic = order.pop()
        facts = [untold[topic.name].pop() for _ in range(min(FACTS, len(untold[topic.name])))]
        for what in dice.sample([*facts, *[None] * (TOGETHER - len(facts))], TOGETHER):
            if what is not None:
                told.append((what, len(lines)))
            line = _chatter(topic, dice) if what is None else what.said(dice.choice(OPENERS))
            lines.append(line)
            total += count(line)
    chosen = dice.sample(told, min(questions, len(told)))
    asked = [fact.asked(dice.choice([one for one in PEOPLE if one != fact.who]), at, dice) for fact, at in chosen]
    return Talk(f"recall {seed}", begin, tuple(lines), tuple(asked))


def recalls(seed: int, talks: int, *, tokens: int, questions: int, count: Count) -> list[Talk]:
    return [recall(seed * 1000 + number, tokens=tokens, questions=questions, count=count) for number in range(talks)]


def _facts(topic: Topic, tellers: int, dice: Random) -> list[Fact]:
    """In the order in which they will be told, from the end; people who tell the same thing have different values."""
    found = []
    for relation in topic.relations:
        people, values = dice.sample(PEOPLE, tellers), dice.sample(relation.values, tellers)
        found += [Fact(who, relation, value) for who, value in zip(people, values, strict=True)]
    dice.shuffle(found)
    return found


def _chatter(topic: Topic, dice: Random) -> str:
    return f"{dice.choice(PEOPLE)}: {dice.choice(OPENERS)} {dice.choice(topic.chatter)}\n"


def _lower(text: str) -> str:
    """As inside a sentence; "I" stays as it is."""
    return text if text.startswith("I ") else text[0].lower() + text[1:]


def distractors(right: str, others: Sequence[str], count: int, dice: Random) -> tuple[tuple[str, ...], int]:
    """The right answer among others that differ from it and from each other, and where it is."""
    seen, found = {right.casefold()}, []
    for other in dice.sample(list(others), len(others)):
        if other.casefold() not in seen:
            seen.add(other.casefold())
            found.append(other)
    choices = [right, *found[: count - 1]]
    dice.shuffle(choices)
    return tuple(choices), choices.index(right)
