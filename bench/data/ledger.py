"""A small task of real use, made from a seed: messages about money become lines of one house format.

    "Anna Keller got 43,50 euros back for the taxi, 3rd of March 2024."  →  2024-03-03 | Keller, A. | 43.50 EUR | taxi

A line has the date as year-month-day, the family name and the first letter of the given name, the amount with two digits after
the point and the currency's code, and what it was for. Messages spell each of these in several ways. No message, and no pair of
person and amount, is in both sets; family names of the test set are partly ones that training never shows, so that a line has to
be written and cannot be remembered.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

MONTHS = "January February March April May June July August September October November December"
GIVEN = (
    "Anna Ben Clara David Elena Felix Grace Henry Ines Jonas Karim Laura Mateo Nina Oscar Paula Quentin Rosa Samuel Tara "
    "Ursula Victor Wanda Xavier Yusuf Zoe"
)
FAMILY = (
    "Keller Okafor Lindqvist Moreau Tanaka Brandt Silva Novak Petrov Hughes Romano Jensen Fischer Costa Ivanov Murphy "
    "Dubois Weber Santos Nilsen Kowalski Haddad Mensah Virtanen Larsen Ortega Schmidt Rossi Walsh Becker"
)
UNSEEN = "Hoffman Carter Delgado Eriksen Fontana Greco Horvat Iversen Janssen Kumar"
"""Family names of the test set alone."""
PURPOSES = (
    "taxi,train tickets,hotel,lunch with a client,printer paper,parking,conference fee,office chairs,coffee beans,postage,"
    "a new keyboard,software licence,flowers,cleaning,bus pass,team dinner,books,phone bill,desk lamp,flight to Oslo"
)
CURRENCIES = {"EUR": ("euros", "cents", "€"), "USD": ("dollars", "cents", "$"), "GBP": ("pounds", "pence", "£")}
FORMS = (
    "{name} paid {amount} for {purpose} on {date}.",
    "On {date} {name} spent {amount} on {purpose}.",
    "{purpose}: {amount}, {name}, {date}",
    "Please refund {name} {amount} for {purpose} ({date}).",
    "Hi, this is {name}. I paid {amount} for {purpose} on {date}. Thanks!",
    "{amount} for {purpose}, paid by {name}, {date}.",
    "Receipt of {date}: {purpose}, {amount}. It was {name} who paid.",
    "Could you book {amount} to {purpose}? {name} had it on {date}.",
)
ASK = "Write this as one ledger line (date | name | amount | purpose): "


@dataclass(frozen=True)
class Example:
    prompt: str
    answer: str

    def row(self) -> dict[str, object]:
        """As a line of training data has it."""
        return {"messages": [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.answer}]}


def examples(training: int = 200, test: int = 100, seed: int = 0) -> tuple[list[Example], list[Example]]:
    """The two sets. The same seed gives the same; a longer set begins with the shorter one's examples."""
    taken: set[str] = set()
    sets = []
    for name, count, families in (("training", training, FAMILY), ("test", test, f"{FAMILY} {UNSEEN}")):
        dice = random.Random(f"{seed} {name}")  # a text seeds the same way everywhere
        made: list[Example] = []
        while len(made) < count:
            example, key = _example(dice, families)
            if taken.isdisjoint(key):
                taken.update(key)
                made.append(example)
        sets.append(made)
    return sets[0], sets[1]


def _example(dice: random.Random, families: str) -> tuple[Example, tuple[str, str]]:
    given, family = dice.choice(GIVEN.split()), dice.choice(families.split())
    year, month, day = dice.randint(2019, 2026), dice.randint(1, 12), dice.randint(1, 28)
    cents = dice.choice((0, 0, 5, 25, 50, 75, 99, dice.randint(1, 98)))
    units = dice.choice((dice.randint(2, 99), dice.randint(100, 999), dice.randint(1000, 4999)))
    code = dice.choice(sorted(CURRENCIES))
    purpose = dice.choice(PURPOSES.split(","))
    words = {
        "name": dice.choice((f"{given} {family}", f"{given} {family}", f"{family}, {given}")),
        "amount": _amount(dice, units, cents, code),
        "purpose": purpose,
        "date": _date(dice, year, month, day),
    }
    text = dice.choice(FORMS).format(**words)
    line = f"{year}-{month:02d}-{day:02d} | {family}, {given[0]}. | {units}.{cents:02d} {code} | {purpose}"
    return Example(ASK + text, line), (text, f"{given} {family} {units}.{cents}")


def _amount(dice: random.Random, units: int, cents: int, code: str) -> str:
    word, small, sign = CURRENCIES[code]
    number = f"{units:,}" if dice.random() < 0.5 else str(units)
    if cents == 0:
        return dice.choice((f"{number} {word}", f"{sign}{number}", f"{number} {code}"))
    exact = f"{number}.{cents:02d}"
    return dice.choice((f"{exact} {word}", f"{sign}{exact}", f"{exact} {code}", f"{number} {word} and {cents} {small}"))


def _date(dice: random.Random, year: int, month: int, day: int) -> str:
    name = MONTHS.split()[month - 1]
    ending = "th" if 10 < day < 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return dice.choice(
        (
            f"{day} {name} {year}",
            f"{name} {day}, {year}",
            f"the {day}{ending} of {name} {year}",
            f"{name[:3]} {day}{ending}, {year}",
            f"{year}-{month:02d}-{day:02d}",
        )
    )
