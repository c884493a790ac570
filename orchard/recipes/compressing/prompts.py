"""Prompts of many kinds, made from a seed: what people ask a small model for, in their many ways of asking.

A model that writes by itself asks itself what it likes to be asked. People ask otherwise: shortly, with a form in mind, about a
passage they paste in. So a part of what a compressed model learns from are the original's answers to these. They share no
sentence and no list of words with `orchard.evals.following`, by which compressed models are measured.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from orchard.recipes.compressing import prompts_words as words

Maker = Callable[[random.Random], str]
VOWEL = re.compile(r"(\b[Aa]) (?=[aeio])")
"""Where it is `an`."""


def prompts(count: int, seed: int = 0) -> list[str]:
    """So many prompts, all different, the kinds by turns."""
    draw, found = random.Random(f"prompts {seed}"), dict[str, None]()
    turn = 0
    while len(found) < count:
        found[VOWEL.sub(r"\1n ", MAKERS[turn % len(MAKERS)](draw))] = None
        turn += 1
    return list(found)


def _split(text: str) -> list[str]:
    return text.replace("\n", "").split("|")


def _few(draw: random.Random) -> str:
    return draw.choice(["two", "three", "four", "five", "six", "2", "3", "4", "5", "6", "7", "10"])


# To explain, to list, to write ------------------------------------------------------------------------------------------

ABOUT = _split("""
Explain {thing}.|What is special about {thing}?|Tell me about {thing}.|How would you describe {thing}?|
Why does {thing} matter?|I want to understand {thing}. Where do I start?|
What are common mistakes people make about {thing}?|Give me an overview of {thing}.|
What should everybody know about {thing}?|Teach me something surprising about {thing}.|Compare {thing} and {other}.|
What connects {thing} with {other}?|Which is more useful to know about, {thing} or {other}?|
Is there anything dangerous about {thing}?|What is {land} known for?|What is the weather like in {land}?|
What do people eat in {land}?|Which languages are spoken in {land}?|On which continent is {land}?|
Plan three days in {land} for me.|Who was {famous}?|What did {famous} do?|When did {famous} live?|
What can we learn from {famous}?|What happened during {event}?|When was {event}?|Why was {event} important?|
Who invented the {invention}?|How does a {invention} work?|What does a {trade} do all day?|How do I become a {trade}?|
Which tools does a {trade} need?|What does the word "{word}" mean?|Define "{noun}".|What is a {noun}?
""")

FORMS = _split("""
in one sentence|in two sentences|in a single paragraph|in at most {n}0 words|in exactly {few} sentences|
in simple words for a child|as a numbered list|as a list with {few} points|
with {few} bullets, each on its own line starting with an asterisk|as a short poem|as a dialogue|
as a table with two columns|as a question and its answer|in lowercase letters only|in upper case, as if you were shouting|
with a title in the first line|without any introduction|in the style of a pirate|in formal language|in a friendly tone|
and finish with the word "done"|and start with "Well,"|and use the word "{noun}" somewhere|
and mention a {noun} and a {other_noun}|as one line, items divided by semicolons|as a headline|in {tongue}|
and put every sentence on its own line|as JSON with the fields "title" and "text"|in markdown with a heading|
in fewer than five words
""")

TASKS = _split("""
Explain {thing}|Describe {thing}|Summarize what you know about {thing}|Write about {thing}|
Tell me why {thing} is interesting|Say something about {land}|
Introduce {famous}|Describe {event}|Explain what a {trade} does|Explain how to {matter}|Give advice on how to {matter}|
Describe a {word} {noun}|Write down a thought about {thing}|Answer this: what is {thing}?
""")

LISTS = _split("""
Name {few} {sort}s.|List {few} {sort}s.|Give me {few} examples of a {sort}.|What are {few} well-known {sort}s?|
I need {few} {sort}s, one on each line.|Write {few} {sort}s in alphabetical order.|
{few} {sort}s, please, divided by slashes and without comments.|Tell me the name of any {sort}. No explanation.|
Pick a {sort}. I only want the word itself.|Which {sort} do you like best? Just say which.|
Suggest a {sort} that starts with the letter {letter}.|Is a {noun} a {sort}? Yes or no.|
Think of a {sort} and describe it without naming it.|Sort these from short to long: {noun}, {other_noun}, {word}.|
Which of these does not belong: {noun}, {other_noun}, {word}?
""")

WORDS = _split("""
Give me a synonym for "{word}".|Which word means the contrary of "{word}"?|Use "{word}" in a sentence.|
Make a sentence with {word} and {noun}.|Write a sentence in which both "{noun}" and "{other_noun}" occur.|
What is the plural of "{noun}"?|Spell the word "{noun}".|How many letters does "{noun}" have?|What rhymes with "{noun}"?|
Translate "{noun}" into {tongue}.|How do you say "a {word} {noun}" in {tongue}?|Is "{word}" an adjective or a noun?|
Write the word {noun} three times.|Repeat after me: {word} {noun}.|Ask me something about a {noun}.|
Make up a question on {thing}, without the answer.|Write a question that a {trade} might ask.|
Complete the sentence: The {word} {noun} was|Turn "{word}" into an adverb.
""")

HELP = _split("""
How do I {matter}?|Help me {matter}.|I want to {matter}. Any ideas?|Give me {few} tips: how to {matter}.|
What is the first step if I want to {matter}?|My friend {person} wants to {matter}. What should I say?|Write {writing}.|
Please write {writing}, not longer than {few} sentences.|Draft {writing} and sign it with {person}.|
Write a Python function that {program}.|Show me code that {program}.|Hi! I am {person} from {town}. How are you?|
Thanks, that was helpful.|What can you help me with?|Good morning! What should I do on a {weekday}?|I am bored.|
I feel {word} today.|Should I buy a {object} or a {other_object}?
""")

REWRITE = _split("""
Correct the mistakes: {sentence}.|Rewrite this politely: {sentence}.|Make this shorter: {sentence}.|
Is this positive or negative? {sentence}.|Translate into {tongue}: {sentence}.|Say the same in other words: {sentence}.|
What is the mood of this sentence? "{sentence}."|Continue the story: {sentence}.|
Write this in capitals: {noun} and {other_noun}.|How many words does this sentence have? {sentence}.|
Who or what is this sentence about? {sentence}.|Change this to the future tense: {sentence}.|
Turn this into a question: {sentence}.
""")


def _filled(templates: list[str]) -> Maker:
    return lambda draw: _fill(draw, draw.choice(templates))


def _fill(draw: random.Random, template: str) -> str:
    nouns, things, objects = (draw.sample(some, 2) for some in (words.NOUNS, words.THINGS, words.OBJECTS))
    return template.format(
        thing=things[0],
        other=things[1],
        noun=nouns[0],
        other_noun=nouns[1],
        object=objects[0],
        other_object=objects[1],
        land=draw.choice(words.LANDS),
        town=draw.choice(words.TOWNS),
        famous=draw.choice(words.FAMOUS),
        event=draw.choice(words.EVENTS),
        invention=draw.choice(words.INVENTIONS),
        trade=draw.choice(words.TRADES),
        person=draw.choice(words.PEOPLE),
        word=draw.choice(words.DESCRIBING),
        sort=draw.choice(words.SORTS),
        tongue=draw.choice(words.TONGUES),
        matter=draw.choice(words.MATTERS),
        writing=draw.choice(words.WRITINGS),
        program=draw.choice(words.PROGRAMS),
        sentence=draw.choice(words.SENTENCES),
        weekday=draw.choice(words.WEEKDAYS),
        letter=draw.choice("ABCDEFGHLMNOPRSTW"),
        few=_few(draw),
        n=draw.randint(2, 9),
    )


def _formed(draw: random.Random) -> str:
    task, form = _fill(draw, draw.choice(TASKS)), _fill(draw, draw.choice(FORMS))
    if form.startswith("and "):
        return f"{task.replace('?', ',')} {form}."
    if task.endswith("?"):
        return f"{task} Answer {form}."
    return draw.choice((f"{task} {form}.", f"{task}. Do it {form}."))


# Numbers ----------------------------------------------------------------------------------------------------------------


def _numbers(draw: random.Random) -> str:
    a, b = draw.randint(2, 60), draw.randint(2, 40)
    who, goods = draw.choice(words.PEOPLE), draw.choice(words.GOODS)
    return draw.choice(
        (
            f"Add {a} and {b}.",
            f"{a} plus {b} equals",
            f"{a}+{b}=?",
            f"Take {b} away from {a + b}. What is left?",
            f"{a + b}-{b}",
            f"How much is {a % 12 + 2} times {b % 12 + 2}?",
            f"Multiply {a % 12 + 2} by {b % 10 + 2}.",
            f"Divide {(a % 12 + 1) * (b % 9 + 2)} by {b % 9 + 2}.",
            f"Is {a} greater than {b}?",
            f"Which number comes after {a}?",
            f"Count from {b} to {b + 6}.",
            f"Is {a} an even number?",
            f"What is half of {2 * a}?",
            f"{who} has {a} {goods} and gets {b} more. How many are there now?",
            f"{who} had {a + b} {goods} and gave {b} of them away. How many does {who} still have?",
            f"A box holds {b % 10 + 2} {goods}. How many {goods} are in {a % 9 + 2} boxes?",
            f"Round {a}.{b % 9 + 1} to a whole number.",
            f"Write the number {a} in words.",
        )
    )


# Something to read ------------------------------------------------------------------------------------------------------

CLOSINGS = _split(
    "|| Be brief.| Just the answer, please.| Answer in a few words.| Reply in one short sentence.| Only say it."
)


def _read(draw: random.Random) -> str:
    passage, questions = draw.choice(PASSAGES)(draw)
    question = draw.choice(questions)
    shape = draw.choice(
        (
            "{passage} {question}",
            "{passage}\n\n{question}",
            "{question}\n\n{passage}",
            "Text: {passage}\nQuestion: {question}",
            "Read this: {passage}\n\n{question}",
        )
    )
    return shape.format(passage=passage, question=question + draw.choice(CLOSINGS))


Passage = Callable[[random.Random], tuple[str, list[str]]]


def _trip(draw: random.Random) -> tuple[str, list[str]]:
    (one, other), (here, there) = draw.sample(words.PEOPLE, 2), draw.sample(words.TOWNS, 2)
    day, hour = draw.choice(words.WEEKDAYS), draw.randint(1, 12)
    text = f"{one} travels from {here} to {there} on {day} at {hour} o'clock, and {other} stays at home."
    return text, [
        f"Where does {one} go?", "On which day is the trip?", "Who stays at home?", f"From which town does {one} come?",
        "At what time does the journey begin?", "Summarize this in three words.", "Who is travelling?",
    ]  # fmt: skip


def _shop(draw: random.Random) -> tuple[str, list[str]]:
    one, two, three = draw.sample(words.GOODS, 3)
    a, b, c = draw.sample(range(2, 99), 3)
    text = f"On the shelf there are {a} {one}, {b} {two} and {c} {three}."
    return text, [
        f"How many {two} are there?", f"How many {one} are on the shelf?", f"What is the number of {three}?",
        "Which of them are the most?", f"There are {b} of what?", "Which things are on the shelf?",
        "Write it as JSON, with the things as keys.",
    ]  # fmt: skip


def _offer(draw: random.Random) -> tuple[str, list[str]]:
    (one, two), (a, b) = draw.sample(words.OBJECTS, 2), draw.sample(range(4, 400), 2)
    hue, other = draw.sample(words.COLOURS, 2)
    text = f"For sale: a {hue} {one} for {a} euros, and a {other} {two} for {b} euros."
    return text, [
        f"What is the price of the {one}?", f"How many euros for the {two}?", f"What colour does the {two} have?",
        "Which one is cheaper?", f"What is {hue}?", "Make a list of what is offered.", f"Which thing can I have for {b} euros?",
        "Turn this into JSON.", "Give this as a table.",
    ]  # fmt: skip


def _life(draw: random.Random) -> tuple[str, list[str]]:
    who, town, land = draw.choice(words.PEOPLE), draw.choice(words.TOWNS), draw.choice(words.LANDS)
    trade, pet, year = draw.choice(words.TRADES), draw.choice(words.CREATURES), draw.randint(1930, 2010)
    text = f"{who} was born in {year} in {town}, works as a {trade}, has a {pet} and would like to see {land} one day."
    return text, [
        f"When was {who} born?", f"What does {who} do for a living?", f"Which pet does {who} have?",
        f"Where was {who} born?", f"Which country would {who} like to visit?", "What is the name of this person?",
        'Give it as JSON with the fields "person", "born" and "work".', "List all facts, one on each line.",
    ]  # fmt: skip


def _two(draw: random.Random) -> tuple[str, list[str]]:
    (one, other), (mine, yours) = draw.sample(words.PEOPLE, 2), draw.sample(words.TRADES, 2)
    (pet, beast), (thing, item) = draw.sample(words.CREATURES, 2), draw.sample(words.OBJECTS, 2)
    text = f"{one}, the {mine}, owns a {thing} and a {pet}. {other}, the {yours}, owns a {item} and feeds a {beast}."
    return text, [
        f"Who owns a {item}?", f"Which animal does {one} own?", f"Who is the {yours}?", f"What is the work of {one}?",
        f"To whom does the {thing} belong?", f"Which animal does {other} feed?", f"Does {one} own a {item}?",
    ]  # fmt: skip


def _plan(draw: random.Random) -> tuple[str, list[str]]:
    (one, other), (first, then) = draw.sample(words.WEEKDAYS, 2), draw.sample(words.SIGHTS, 2)
    who, hour, later = draw.choice(words.PEOPLE), draw.randint(7, 11), draw.randint(1, 6)
    text = f"Dear {who}, we meet at {first} on {one} at {hour} am, and again at {then} on {other} at {later} pm."
    return text, [
        f"Where is the meeting on {one}?", f"On which day is {then} the place to be?", f"When do we meet on {other}?",
        "To whom is this written?", "At what time is the first meeting?", "How many meetings are planned?",
        "Shorten this message.",
    ]  # fmt: skip


def _match(draw: random.Random) -> tuple[str, list[str]]:
    (home, away), (a, b) = draw.sample(words.TOWNS, 2), draw.sample(range(7), 2)
    who = draw.choice(words.PEOPLE)
    text = f"{home} played against {away} and the game ended {a} to {b}. {who} was the best player."
    return text, [
        "Who won?", "How many goals were there?", f"How many goals did {away} score?", "Who played best?",
        f"Against whom did {home} play?", "Write a headline for this.",
    ]  # fmt: skip


def _weather(draw: random.Random) -> tuple[str, list[str]]:
    (here, there), (warm, cool) = draw.sample(words.TOWNS, 2), draw.sample(range(-9, 38), 2)
    text = f"Today it is {warm} degrees in {here} and {cool} degrees in {there}, with strong wind in {there}."
    return text, [
        f"How warm is it in {here}?", f"What is the temperature in {there}?", "Where is it windy?", "Where is it warmer?",
        f"In which town is it {cool} degrees?", "Put this into a table.",
    ]  # fmt: skip


PASSAGES: list[Passage] = [_trip, _shop, _offer, _life, _two, _plan, _match, _weather]

MAKERS: list[Maker] = [
    _filled(ABOUT),
    _read,
    _formed,
    _filled(LISTS),
    _read,
    _filled(HELP),
    _formed,
    _read,
    _filled(WORDS),
    _numbers,
    _filled(REWRITE),
    _formed,
]
"""By turns: a quarter reads, a quarter keeps to a form."""
