"""Words for made-up chats: topics, what people tell of themselves in passing, and small talk around it.

A `Relation` is something a person may tell: said as "My dog is afraid of thunder", asked as "what is your dog afraid of?". Each
has eight values, one of which is true of a person. Small talk names no value.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Relation:
    """`stem` is what stands before the value, when it is told and when it is asked for."""

    stem: str
    question: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Topic:
    name: str
    relations: tuple[Relation, ...]
    chatter: tuple[str, ...]


PEOPLE = ("Anna", "Tom", "Maria", "Ben", "Clara", "David", "Emma", "Peter")
OPENERS = (
    "You know,",
    "Honestly,",
    "Well,",
    "By the way,",
    "As I said,",
    "Oh, and",
    "I must say,",
    "To be fair,",
    "Guess what,",
    "Anyway,",
)


def _relation(stem: str, question: str, values: str) -> Relation:
    return Relation(stem, question, tuple(values.split()))


TOPICS = (
    Topic(
        "pets",
        (
            _relation(
                "My dog is afraid of",
                "what is your dog afraid of?",
                "thunder bicycles balloons cows mirrors umbrellas snow trains",
            ),
            _relation(
                "I feed my cat with",
                "what do you feed your cat with?",
                "tuna chicken rice eggs salmon turkey cheese milk",
            ),
            _relation(
                "My puppy sleeps under the",
                "where does your puppy sleep?",
                "table sofa stairs desk piano bed window bench",
            ),
        ),
        (
            "the puppy would not stop barking at the door.",
            "a walk with the dog in the rain is still a walk.",
            "cats do whatever they want all day long.",
            "the animal doctor was very kind to us.",
            "pets make a home so much warmer.",
            "the kitten climbed up the curtains again.",
        ),
    ),
    Topic(
        "the garden",
        (
            _relation(
                "Behind the shed I planted",
                "what did you plant behind the shed?",
                "tomatoes roses beans onions carrots potatoes tulips pumpkins",
            ),
            _relation(
                "I painted the garden gate",
                "what colour is your garden gate?",
                "green red blue yellow white black orange purple",
            ),
            _relation(
                "My lawn was eaten by",
                "who has eaten your lawn?",
                "rabbits sheep goats ants deer geese mice beetles",
            ),
        ),
        (
            "the soil is dry and the flowers need water.",
            "weeds grow faster than anything else in a garden.",
            "there is nothing like digging in the earth on a mild day.",
            "the hedge has to be cut before the birds nest in it.",
            "the compost heap is steaming in the morning.",
            "the seeds came up at last, tiny leaves everywhere.",
        ),
    ),
    Topic(
        "cooking",
        (
            _relation(
                "The secret of my soup is",
                "what is the secret of your soup?",
                "garlic ginger pepper honey lemon butter wine salt",
            ),
            _relation(
                "For dinner guests I always bake",
                "what do you bake for dinner guests?",
                "bread cookies pies muffins pizza cakes pancakes biscuits",
            ),
            _relation(
                "My oven burned the",
                "what did your oven burn?",
                "pudding roast fish lasagna turkey potatoes chicken beans",
            ),
        ),
        (
            "the kitchen smells wonderful when something simmers.",
            "a sharp knife is half of the work at the stove.",
            "the recipe says one hour, but it never takes one hour.",
            "the dishes pile up faster than we can wash them.",
            "a good pan lasts a whole life.",
            "one should taste the sauce before serving it.",
        ),
    ),
    Topic(
        "travel",
        (
            _relation(
                "For the next holiday I fly to",
                "where do you fly for the next holiday?",
                "Spain Norway Japan Italy Greece Peru Egypt Canada",
            ),
            _relation(
                "On my last trip I lost my",
                "what did you lose on your last trip?",
                "passport camera wallet hat phone keys watch ticket",
            ),
            _relation(
                "At the airport I met a famous",
                "whom did you meet at the airport?",
                "actor singer poet chef painter pilot dancer writer",
            ),
        ),
        (
            "the train was late and the luggage was heavy.",
            "hotels all look alike after a week on the road.",
            "a map on paper never runs out of power.",
            "the view from the plane was worth the early start.",
            "packing the suitcase takes me a whole evening.",
            "the border queue was longer than the flight.",
        ),
    ),
    Topic(
        "music",
        (
            _relation(
                "I am learning to play the",
                "which instrument are you learning to play?",
                "piano violin guitar drums flute harp trumpet organ",
            ),
            _relation(
                "The songs I write are about",
                "what are the songs you write about?",
                "rain love trains winter money home ghosts dreams",
            ),
            _relation(
                "Our choir sings in the",
                "where does your choir sing?",
                "church school park theatre library station castle market",
            ),
        ),
        (
            "the concert hall was full to the last seat.",
            "practising scales is dull but it helps.",
            "the band could not agree on a melody.",
            "a tune went round in my head all night.",
            "the singer forgot the second verse.",
            "the old record still sounds warm.",
        ),
    ),
    Topic(
        "sport",
        (
            _relation(
                "On weekends I train for",
                "which sport do you train for on weekends?",
                "tennis swimming boxing football rowing skiing golf hockey",
            ),
            _relation(
                "In the last match I hurt my",
                "what did you hurt in the last match?",
                "arm thumb nose knee ankle shoulder back elbow",
            ),
            _relation(
                "Our team is called the",
                "what is your team called?",
                "Lions Eagles Bears Wolves Sharks Tigers Dragons Bulls",
            ),
        ),
        (
            "the coach made us run up the hill twice.",
            "the referee did not see it, but everybody else did.",
            "my muscles ache after every training.",
            "the stadium was loud until the last minute.",
            "winning is nice, but playing is nicer.",
            "the new shoes give me blisters.",
        ),
    ),
    Topic(
        "work",
        (
            _relation(
                "My new office is next to the",
                "what is your new office next to?",
                "bank church library station museum hospital school bakery",
            ),
            _relation(
                "I see my boss every",
                "when do you see your boss?",
                "Monday Tuesday Wednesday Thursday Friday Saturday morning evening",
            ),
            _relation(
                "My company sells",
                "what does your company sell?",
                "shoes windows tractors pencils boats lamps carpets clocks",
            ),
        ),
        (
            "the meeting could have been a short letter.",
            "the printer jams whenever there is a deadline.",
            "my desk is buried under files again.",
            "a colleague brought coffee for the whole floor.",
            "the phone did not stop ringing all day.",
            "the contract has to be signed before noon.",
        ),
    ),
    Topic(
        "books",
        (
            _relation(
                "I am reading a novel about",
                "what is the novel you are reading about?",
                "pirates dragons spies doctors queens robots farmers soldiers",
            ),
            _relation(
                "I left my library book in the",
                "where did you leave your library book?",
                "bus garden kitchen car cinema hotel bath tent",
            ),
            _relation(
                "The best chapter was set in",
                "where was the best chapter set?",
                "London Paris Rome China Africa Russia India Mexico",
            ),
        ),
        (
            "the story gets going after a hundred pages.",
            "the cover is torn but no page is missing.",
            "one more chapter, I said, and then it was midnight.",
            "the ending surprised me completely.",
            "I never lend books without writing it down.",
            "the shop around the corner has the best shelves.",
        ),
    ),
)
