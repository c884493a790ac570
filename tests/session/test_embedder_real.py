"""The real MiniLM beside transformers, where it has been pulled (`orchard pull minilm`); it is not the default model."""

from __future__ import annotations

import numpy as np
import pytest

from orchard.core.errors import ContextOverflow
from orchard.session.embedder import Embedder, load_embedder
from orchard.weights.library import Library

TEXTS = [
    "A man is eating food.",
    "Someone eats a meal.",
    "The stock market fell sharply on Monday.",
    "Wie wird das Wetter morgen in München?",
    "日本の首都は東京です。",
    "def add(a, b):\n    return a + b",
    "naïve café — “quotes”, emoji 🙂 and a supercalifragilisticexpialidocious word",
    "x",
    "a longer text. " * 60,
]


@pytest.fixture(scope="module")
def minilm() -> Embedder:
    if Library().find("minilm") is None:
        pytest.skip("minilm is not in the library: `orchard pull minilm` gets it")
    return load_embedder("minilm")


def test_it_agrees_with_transformers(minilm: Embedder) -> None:
    import torch
    from transformers import AutoTokenizer, BertModel

    path = Library().resolve("minilm")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = BertModel.from_pretrained(path).eval()
    tokens = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    kept = tokens["attention_mask"][..., None]
    wanted = torch.nn.functional.normalize((hidden * kept).sum(1) / kept.sum(1), dim=-1).numpy()
    found = minilm.embed(TEXTS, truncate=True)
    assert found.tokens == tokens["attention_mask"].sum(1).tolist()
    assert (found.vectors * wanted).sum(1).min() >= 0.9999
    assert np.abs(found.vectors - wanted).max() < 1e-5


def test_what_means_the_same_is_near(minilm: Embedder) -> None:
    assert (minilm.dim, minilm.max_tokens) == (384, 256)
    pairs = [
        ("A man is eating food.", "Someone eats a meal."),
        ("How do I reset my password?", "I forgot my login and need a new one."),
        ("The cat sleeps on the sofa.", "A kitten is napping on the couch."),
        ("The stock market fell sharply.", "Shares dropped a lot today."),
    ]
    left, right = (minilm.embed([pair[side] for pair in pairs]).vectors for side in (0, 1))
    near = left @ right.T
    assert (near.argmax(1) == np.arange(len(pairs))).all() and (near.argmax(0) == np.arange(len(pairs))).all()
    others = near[~np.eye(len(pairs), dtype=bool)]
    assert near.diagonal().min() > others.max() + 0.1


def test_the_limit_is_that_of_its_files(minilm: Embedder) -> None:
    with pytest.raises(ContextOverflow) as caught:
        minilm.embed(["word " * 255])
    assert (caught.value.tokens, caught.value.limit) == (257, 256)
    assert minilm.embed(["word " * 254]).tokens == [256]
