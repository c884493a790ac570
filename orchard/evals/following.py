"""Whether a model does what it is told: 300 short prompts whose answers a program can check.

A hundred ask for a form (a list, JSON, one word, capital letters), a hundred for something that stands in a short passage, a
hundred for a plain fact. They are made here from a seed and belong to nobody else's benchmark. The score of a small model says
little by itself; the share of it that a compressed form keeps says what compression costs a person who uses it.

    checks = following()
    found = follow(checks, answers)      # answers: prompts in, texts out, in the same order
    found.score, found.by_kind
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from orchard.core.errors import UsageError
from orchard.evals.following_words import (
    ANIMALS,
    CITIES,
    FACTS,
    GROUPS,
    ITEMS,
    JOBS,
    MONTHS,
    NAMES,
    OPPOSITES,
    PLACES,
    SHORT,
    SUBJECTS,
)

KINDS = ("form", "extraction", "fact")
Passes = Callable[[str], bool]
MAX_TOKENS = 96
"""Enough for every answer; longer ones are cut off."""


@dataclass(frozen=True)
class Check:
    """A prompt, and whether an answer does what it asks."""

    kind: str
    prompt: str
    passes: Passes


@dataclass(frozen=True)
class Followed:
    """Which checks passed, in their order."""

    checks: Sequence[Check]
    passed: Sequence[bool]

    @property
    def score(self) -> float:
        return sum(self.passed) / len(self.passed)

    @property
    def by_kind(self) -> dict[str, float]:
        found = {kind: [ok for check, ok in zip(self.checks, self.passed) if check.kind == kind] for kind in KINDS}
        return {kind: sum(oks) / len(oks) for kind, oks in found.items() if oks}


def follow(checks: Sequence[Check], answers: Callable[[Sequence[str]], Sequence[str]]) -> Followed:
    """Ask everything and check every answer."""
    said = answers([check.prompt for check in checks])
    if len(said) != len(checks):
        raise UsageError(f"{len(said)} answers to {len(checks)} prompts", hint="give one answer for each prompt")
    return Followed(checks, [check.passes(answer) for check, answer in zip(checks, said)])


def following(each: int = 100, seed: int = 0) -> list[Check]:
    """So many checks of each kind. The same seed gives the same prompts, and no prompt comes twice."""
    found: list[Check] = []
    for kind, makers in (("form", FORMS), ("extraction", EXTRACTIONS), ("fact", (_fact, _opposite, _sum))):
        draw, seen = random.Random(f"{seed} {kind}"), set[str]()
        while len(seen) < each:
            # By turns, so that every kind of question is there whatever their number.
            prompt, passes = makers[len(seen) % len(makers)](draw)
            if prompt not in seen:
                seen.add(prompt)
                found.append(Check(kind, prompt, passes))
    return found


# Forms ------------------------------------------------------------------------------------------------------------------

Maker = Callable[[random.Random], tuple[str, Passes]]


def _bullets(draw: random.Random) -> tuple[str, Passes]:
    count, subject = draw.randint(2, 5), draw.choice(SUBJECTS)
    prompt = f'Write exactly {count} bullet points about {subject}. Start every bullet point with "- ".'
    return prompt, lambda answer: sum(line.lstrip().startswith("- ") for line in answer.splitlines()) == count


def _json(draw: random.Random) -> tuple[str, Passes]:
    name, age, city = draw.choice(NAMES), draw.randint(18, 79), draw.choice(CITIES)
    wanted = {"name": name, "age": age, "city": city}
    prompt = (
        f'{name} is {age} years old and lives in {city}. Write this as JSON with the keys "name", "age" and "city".'
    )
    return prompt, partial(_same_json, wanted)


def _one_word(draw: random.Random) -> tuple[str, Passes]:
    group, members = draw.choice(sorted(GROUPS.items()))
    bare = draw.choice(("Answer with one word only", "Use exactly one word", "Reply with a single word"))
    prompt = f"Name one {group}. {bare}."
    return prompt, lambda answer: len(_words(answer)) == 1 and (not members or _words(answer)[0] in members)


def _capitals(draw: random.Random) -> tuple[str, Passes]:
    prompt = f"Write one sentence about {draw.choice(SUBJECTS)}. USE ONLY CAPITAL LETTERS."
    return prompt, lambda answer: len(_words(answer)) >= 3 and answer == answer.upper()


def _commas(draw: random.Random) -> tuple[str, Passes]:
    count, group = draw.randint(3, 5), draw.choice(sorted(GROUPS))
    prompt = f"List {count} different {group}s, separated by commas. Write nothing else."
    return prompt, partial(_listed, count)


def _contains(draw: random.Random) -> tuple[str, Passes]:
    one, other = draw.sample(SHORT, 2)
    prompt = f'Write one sentence that contains the words "{one}" and "{other}".'
    return prompt, lambda answer: {one, other} <= set(_words(answer)) and len(_words(answer)) <= 60


def _question(draw: random.Random) -> tuple[str, Passes]:
    prompt = f"Write one question about {draw.choice(SUBJECTS)}. Do not answer it."
    return prompt, lambda answer: answer.strip().endswith("?") and answer.count("?") == 1


def _begins(draw: random.Random) -> tuple[str, Passes]:
    word, subject = draw.choice(("Today", "Perhaps", "Once", "Nobody", "Every")), draw.choice(SUBJECTS)
    prompt = f'Write one sentence about {subject}. Begin with the word "{word}".'
    return prompt, lambda answer: answer.strip().startswith(word)


FORMS: tuple[Maker, ...] = (_bullets, _json, _one_word, _capitals, _commas, _contains, _question, _begins)


# Extractions --------------------------------------------------------------------------------------------------------------


def _price(draw: random.Random) -> tuple[str, Passes]:
    (one, other), (cheap, dear) = draw.sample(ITEMS, 2), draw.sample(range(3, 90), 2)
    asked, price, wrong = draw.choice(((one, cheap, dear), (other, dear, cheap)))
    prompt = (
        f"In the shop the {one} costs {cheap} dollars and the {other} costs {dear} dollars. "
        f"How many dollars does the {asked} cost? Answer with the number."
    )
    return prompt, partial(_says, str(price), (str(wrong),))


def _meeting(draw: random.Random) -> tuple[str, Passes]:
    day, month, place = draw.randint(1, 28), draw.choice(MONTHS), draw.choice(PLACES)
    name = draw.choice(NAMES)
    passage = f"{name} wrote: our next meeting is on {day} {month} in the {place}. Please bring your notes."
    asked, wanted = draw.choice((("In which month is the meeting", month), ("Where is the meeting", place)))
    return f"{passage}\n\n{asked}? Answer briefly.", partial(_says, wanted, ())


def _job(draw: random.Random) -> tuple[str, Passes]:
    (one, other), (mine, yours) = draw.sample(NAMES, 2), draw.sample(JOBS, 2)
    name, job, wrong = draw.choice(((one, mine, yours), (other, yours, mine)))
    prompt = f"{one} is a {mine}. {other} is a {yours}.\n\nWhat is {name}'s job? Answer with the job only."
    return prompt, partial(_says, job, (wrong,))


def _who(draw: random.Random) -> tuple[str, Passes]:
    (one, other), (here, there) = draw.sample(NAMES, 2), draw.sample(CITIES, 2)
    city, name, wrong = draw.choice(((here, one, other), (there, other, one)))
    prompt = (
        f"{one} moved to {here} last year, and {other} moved to {there}.\n\nWho moved to {city}? Answer with the name."
    )
    return prompt, partial(_says, name, (wrong,))


def _count(draw: random.Random) -> tuple[str, Passes]:
    (one, other), (few, many) = draw.sample(ANIMALS, 2), draw.sample(range(2, 60), 2)
    asked, count, wrong = draw.choice(((one, few, many), (other, many, few)))
    prompt = f"The farm has {few} {one}s and {many} {other}s. How many {asked}s does it have? Answer with the number."
    return prompt, partial(_says, str(count), (str(wrong),))


EXTRACTIONS: tuple[Maker, ...] = (_price, _meeting, _job, _who, _count)


# Facts ----------------------------------------------------------------------------------------------------------------------


def _fact(draw: random.Random) -> tuple[str, Passes]:
    question, wanted = draw.choice(FACTS)
    return f"{question} Answer briefly.", partial(_says_one_of, wanted)


def _opposite(draw: random.Random) -> tuple[str, Passes]:
    word, wanted = draw.choice(OPPOSITES)
    return f'What is the opposite of "{word}"? Answer with one word.', partial(_says_one_of, wanted)


def _sum(draw: random.Random) -> tuple[str, Passes]:
    one, other = draw.randint(1, 12), draw.randint(1, 12)
    if draw.random() < 0.5:
        return f"What is {one} + {other}? Answer with the number.", partial(_says, str(one + other), ())
    return f"What is {one + other} - {other}? Answer with the number.", partial(_last_number, one)


# What an answer says ----------------------------------------------------------------------------------------------------


def _words(answer: str) -> list[str]:
    return re.findall(r"[\w'-]+", answer.lower())


def _listed(count: int, answer: str) -> bool:
    parts = [part.strip().lower() for part in answer.strip().split(",")]
    return len(set(parts) - {""}) == count and all(len(part.split()) <= 4 for part in parts)


def _says(wanted: str, wrong: Sequence[str], answer: str) -> bool:
    """The word or number is there, and none that would be wrong. An answer as long as a page says everything."""
    words = _words(answer)
    return len(words) <= 40 and wanted.lower() in words and not any(one.lower() in words for one in wrong)


def _says_one_of(wanted: Sequence[str], answer: str) -> bool:
    return any(_says(one, (), answer) for one in wanted)


def _last_number(wanted: int, answer: str) -> bool:
    """The result comes last, whether or not the sum is repeated before it."""
    numbers = re.findall(r"\d+", answer)
    return len(_words(answer)) <= 40 and bool(numbers) and int(numbers[-1]) == wanted


def _same_json(wanted: Mapping[str, object], answer: str) -> bool:
    found = re.search(r"\{.*\}", answer, re.DOTALL)
    try:
        said = json.loads(found.group()) if found else None
    except ValueError:
        return False
    return isinstance(said, dict) and {key: str(value) for key, value in said.items()} == {
        key: str(value) for key, value in wanted.items()
    }
