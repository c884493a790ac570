"""Fit the classifier of `orchard.session.guardrails` on sentences made from the templates of `corpus.json`.

Everything it learns from was written for this purpose. The lists in tests/data/guardrails are held out: they are read here only
to leave out a sentence that happens to say the same. The same seed gives the same file.

    python tools/guardrails/train.py [--out orchard/session/guardrails/weights.bin]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from orchard.session.guardrails.classifier import BENIGN, pack
from orchard.session.guardrails.features import BUCKETS, WEAK, features
from orchard.session.guardrails.lexicon import lexicon
from orchard.session.guardrails.normalise import plain_words

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent.parent / "orchard" / "session" / "guardrails" / "weights.bin"
LEXICON = TARGET.parent / "lexicon.json"
LISTS = HERE.parent.parent / "tests" / "data" / "guardrails"
SLOT = re.compile(r"\{(\w+)\}")
LEADS = (
    "please",
    "hey,",
    "hi,",
    "hello,",
    "can you",
    "could you",
    "just",
    "quick question:",
    "for a friend:",
    "so,",
    "ok",
)
TAILS = ("please", "thanks", "?", "asap", "in detail", "for me", "today", "right now", "i need it", "in simple words")


FRAMES = (
    "the {0} and the {other}", "a {0} of the {other}", "if the {other} is {0} it must be set again", "the {other} was {0} before",
    "see the section on {0} and {other}", "this {other} does not {0} the value", "it may {0} when the {other} is empty",
    "you can {0} the {other} in the next step", "we {0} it and use the {other} instead", "they {0} in the {other} every year",
    "use {0} with the {other}", "{0} is a word in the {other}", "the old {0} near the {other} was open", "{other}: {0}",
    "people in the {other} spoke of {0}", "the {other} has some {0} in it", "no {0} was seen in the {other}",
)  # fmt: skip
OTHERS = (
    *(
        "list",
        "program",
        "garden",
        "train",
        "report",
        "function",
        "river",
        "price",
        "window",
        "licence",
        "table",
        "song",
    ),
    *("module", "team", "market", "file", "weather", "book", "city", "model", "kitchen", "error", "letter", "library"),
)


def fill(template: str, slots: dict[str, list[str]], dice: random.Random) -> str:
    """A sentence of a template: slots within slots are filled too."""
    while SLOT.search(template):
        template = SLOT.sub(lambda match: dice.choice(slots[match[1]]), template, count=1)
    words = [
        dice.choice(slots[word]) if word.startswith("@") else word for word in template.replace(",", " , ").split()
    ]
    return " ".join(words)


def sentences(corpus: dict[str, Any], each: int, seed: int) -> Iterator[tuple[str, str]]:
    """Category and sentence, every sentence once: up to `each` of a template, some with a few words around them."""
    dice = random.Random(seed)
    # "@kill": any word of that class of the lexicon, whatever it means; such sentences only name things.
    classes = json.loads(LEXICON.read_text(encoding="utf-8"))
    slots = corpus["slots"] | {f"@{name}": [word.strip() for word in text.split(",")] for name, text in classes.items()}
    groups = [(BENIGN, corpus["benign"]), *corpus["harmful"].items()]
    for category, templates in groups:
        for template in templates:
            seen: set[str] = set()
            for _ in range(each if SLOT.search(template) else each // 2):
                text = fill(template, slots, dice)
                if dice.random() < 0.25:
                    text = f"{dice.choice(LEADS)} {text}"
                if dice.random() < 0.25:
                    text = f"{text} {dice.choice(TAILS)}"
                if text not in seen:
                    seen.add(text)
                    yield category, text


def mentions(classes: dict[str, str], each: int, seed: int) -> Iterator[tuple[str, str]]:
    """Harmless sentences in which every word that could be harmful is named once or more, and nothing is done with it."""
    dice = random.Random(seed)
    for name, text in classes.items():
        for entry in text.split(",") if name not in WEAK else ():
            if " " not in entry.strip():
                for _ in range(each):
                    yield BENIGN, dice.choice(FRAMES).format(entry.strip(), other=dice.choice(OTHERS))


def table(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of feature numbers as one list with the row of each."""
    lengths = np.array([len(row) for row in rows])
    flat = np.fromiter((feature for row in rows for feature in row), dtype=np.int64, count=int(lengths.sum()))
    return flat, np.repeat(np.arange(len(rows)), lengths)


def fit(
    rows: list[list[int]], labels: np.ndarray, classes: int, weights: np.ndarray, seed: int, epochs: int, decay: float
) -> np.ndarray:
    """Multinomial logistic regression by Adagrad with weight decay. The last row of the result is the bias."""
    rng = np.random.default_rng(seed)
    w = np.zeros((BUCKETS + 1, classes))
    seen = np.full((BUCKETS + 1, classes), 1e-2)
    for epoch in range(epochs):
        order, rate = rng.permutation(len(rows)), 0.15 * (1 - epoch / epochs)
        for start in range(0, len(rows), 512):
            batch = order[start : start + 512]
            picked = [rows[i] for i in batch]
            flat, owner = table([[*row, BUCKETS] for row in picked])
            scores = np.zeros((len(batch), classes))
            np.add.at(scores, owner, w[flat])
            scores -= scores.max(axis=1, keepdims=True)
            error = np.exp(scores)
            error /= error.sum(axis=1, keepdims=True)
            error[np.arange(len(batch)), labels[batch]] -= 1
            error *= weights[labels[batch], None]
            touched, inverse = np.unique(flat, return_inverse=True)
            gradient = np.zeros((len(touched), classes))
            np.add.at(gradient, inverse, error[owner])
            gradient = gradient / len(batch) + decay * w[touched] * (touched < BUCKETS)[:, None]
            seen[touched] += gradient**2
            w[touched] -= rate * gradient / np.sqrt(seen[touched])
    return w


def held_out() -> set[str]:
    """The prompts of the test lists, as words."""
    lines = [line for path in sorted(LISTS.glob("*.txt")) for line in path.read_text(encoding="utf-8").splitlines()]
    return {" ".join(plain_words(line.split("\t")[-1])) for line in lines}


def training_sentences(corpus: dict[str, Any], each: int, seed: int) -> list[tuple[str, str]]:
    """Everything that is learnt from."""
    classes = json.loads(LEXICON.read_text(encoding="utf-8"))
    made = [*sentences(corpus, each, seed), *mentions(classes, 6, seed)]
    kept_apart = held_out()
    return [(category, text) for category, text in made if " ".join(plain_words(text)) not in kept_apart]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TARGET)
    parser.add_argument("--each", type=int, default=40, help="sentences of a template (default: 40)")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--decay", type=float, default=3e-5)
    parser.add_argument("--seed", type=int, default=4)
    options = parser.parse_args(arguments)
    corpus = json.loads((HERE / "corpus.json").read_text(encoding="utf-8"))
    categories = [BENIGN, *corpus["harmful"]]
    known = lexicon()
    made = training_sentences(corpus, options.each, options.seed)
    rows = [features(plain_words(text), known) for _, text in made]
    labels = np.array([categories.index(category) for category, _ in made])
    counts = np.bincount(labels, minlength=len(categories))
    weights = np.sqrt(counts[1:].mean() / counts)  # small categories count for more, large ones for less
    weights[0] *= 1.5  # a harmless text that is stopped is the worse mistake
    w = fit(rows, labels, len(categories), weights, options.seed, options.epochs, options.decay)
    options.out.write_bytes(pack(categories, w))
    sys.stderr.write(f"{len(made):,} sentences, {dict(zip(categories, counts.tolist()))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
