"""Prompts for draft models, made from a seed: what people ask of a small assistant, and requests for JSON of a given form.

`training` and `held_out` share no subject: a draft model that guesses well on the second has not remembered the first.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

SUBJECTS = (
    "bees,volcanoes,the moon,rainbows,bread,coffee,tea,chess,football,swimming,running,yoga,sleep,dreams,memory,"
    "patience,friendship,honesty,courage,gravity,light,sound,electricity,magnets,batteries,solar panels,wind power,"
    "rivers,oceans,glaciers,deserts,forests,mushrooms,ferns,roses,tomatoes,potatoes,apples,olive oil,salt,"
    "chocolate,cheese,soup,pasta,rice,noodles,salads,breakfast,picnics,camping,hiking,cycling,trains,bridges,"
    "lighthouses,castles,museums,libraries,books,poems,novels,newspapers,letters,email,passwords,computers,"
    "Python programs,lists in Python,sorting,binary search,databases,spreadsheets,fractions,percentages,"
    "prime numbers,triangles,circles,probability,averages,money,budgets,savings,taxes,interest rates,inflation,"
    "job interviews,meetings,teamwork,deadlines,public speaking,teaching,homework,exams,school,kindergarten,babies,"
    "cats,dogs,horses,birds,owls,penguins,whales,sharks,spiders,ants,butterflies,dinosaurs,fossils,stars,planets,"
    "Mars,comets,rockets,satellites,clocks,calendars,maps,compasses,Paris,London,Tokyo,Cairo,Brazil,Canada,India,"
    "Australia,Rome,the Nile,the Alps,music,guitars,pianos,drums,painting,drawing,photography,films,theatre,dance,"
    "knitting,sewing,woodwork,gardening,compost,recycling,plastic,water,air,weather,storms,snow,thunder,seasons,"
    "winter,summer,health,vitamins,exercise,headaches,colds,the heart,bones,teeth,eyes,skin,laughter,habits,goals,"
    "stress,breathing,walking,kindness"
)
UNSEEN = (
    "elephants,earthquakes,cinnamon,tennis,curiosity,magnetism in compasses,steam engines,lakes,cacti,lemons,"
    "sandwiches,sailing,tunnels,dictionaries,keyboards,decimals,squares,mortgages,presentations,grandparents,"
    "rabbits,bats,telescopes,Berlin,Mexico,violins,sculpture,origami,fog,autumn,vaccines,muscles,gratitude,"
    "time zones,paper,glass"
)
FORMS = (
    "What is {a}?|Tell me about {a}.|Explain {a} to a child.|Explain {a} in two sentences.|"
    "Why do people care about {a}?|Write a short poem about {a}.|Write a short story about {a}.|"
    "Give me three facts about {a}.|List five tips about {a}.|How does one begin with {a}?|"
    "What are common mistakes with {a}?|Write a paragraph about {a}.|Summarise what matters about {a}.|"
    "What is the difference between {a} and {b}?|How are {a} and {b} connected?|Compare {a} and {b}.|"
    "Write a dialogue about {a}.|Give me a title for an essay about {a}.|Write an email to a friend about {a}.|"
    "What questions could I ask about {a}?|Describe {a} without using the word.|"
    "Make a plan for a week that has to do with {a}.|What is the history of {a}?|Is it worth learning about {a}?|"
    "Name advantages and disadvantages of {a}.|Write a quiz with three questions about {a}.|"
    "What would a world without {a} be like?|Give me advice about {a}.|Write a slogan about {a}.|"
    "How has {a} changed over time?"
)
UNSEEN_FORMS = (
    "What should everybody know about {a}?|Write a few sentences about {a} for a school magazine.|"
    "What do {a} and {b} have in common?|Explain step by step how to learn more about {a}.|"
    "Write a short speech about {a}.|What surprised scientists about {a}?"
)
TEXT: dict[str, Any] = {"type": "string", "maxLength": 60}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fact": (
        "Give one fact about {a} as JSON with the fields subject, fact and certain.",
        {"subject": TEXT, "fact": TEXT, "certain": {"type": "boolean"}},
    ),
    "book": (
        "Invent a book about {a}. Answer as JSON with title, author, pages and topics.",
        {
            "title": TEXT,
            "author": TEXT,
            "pages": {"type": "integer"},
            "topics": {"type": "array", "items": TEXT, "maxItems": 3},
        },
    ),
    "task": (
        "Make a to-do item about {a} as JSON with task, minutes and priority.",
        {"task": TEXT, "minutes": {"type": "integer"}, "priority": {"enum": ["low", "medium", "high"]}},
    ),
    "quiz": (
        "Write a quiz question about {a} as JSON with question, options and answer.",
        {"question": TEXT, "options": {"type": "array", "items": TEXT, "minItems": 3, "maxItems": 3}, "answer": TEXT},
    ),
}


@dataclass(frozen=True)
class Prompt:
    text: str
    schema: dict[str, Any] | None = None

    def row(self) -> dict[str, Any]:
        """As a line of a folder of prompts has it."""
        return {"prompt": self.text} if self.schema is None else {"prompt": self.text, "schema": self.schema}


def training(count: int, seed: int = 0) -> list[Prompt]:
    """Different prompts in free text, in an order of their own; a longer list begins with the shorter one."""
    return _free(count, seed, "training", SUBJECTS.split(","), FORMS.split("|"))


def training_forms(count: int, seed: int = 0) -> list[Prompt]:
    """The same for answers of a given form."""
    return _formed(count, seed, "training", SUBJECTS.split(","))


def held_out(count: int, seed: int = 0) -> list[Prompt]:
    return _free(count, seed, "held out", UNSEEN.split(","), UNSEEN_FORMS.split("|") + FORMS.split("|"))


def held_out_forms(count: int, seed: int = 0) -> list[Prompt]:
    return _formed(count, seed, "held out", UNSEEN.split(","))


def _free(count: int, seed: int, name: str, subjects: list[str], forms: list[str]) -> list[Prompt]:
    dice, found = random.Random(f"{seed} {name}"), dict[str, Prompt]()
    for _ in range(50 * count):
        if len(found) >= count:
            break
        a, b = dice.sample(subjects, 2)
        text = dice.choice(forms).format(a=a, b=b)
        found.setdefault(text, Prompt(text))
    return list(found.values())


def _formed(count: int, seed: int, name: str, subjects: list[str]) -> list[Prompt]:
    dice, found = random.Random(f"{seed} {name} forms"), dict[str, Prompt]()
    for _ in range(50 * count):
        if len(found) >= count:
            break
        ask, fields = KINDS[dice.choice(sorted(KINDS))]
        text = ask.format(a=dice.choice(subjects))
        schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
        found.setdefault(text, Prompt(text, schema))
    return list(found.values())
