"""Tiny models of other families for tests of compression, made and trained by transformers: somebody else's checkpoints."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orchard.text.tokenizer import Tokenizer
from tests.parity.families import CASES, COMMON
from tests.text.tiny_vocabularies import byte_level
from tests.tiny import TEMPLATE

ROWS, LENGTH = 8, 64
PLACES = ("garden", "kitchen", "library", "harbour", "market", "orchard")
THINGS = ("apple", "lamp", "book", "boat", "basket", "ladder", "pear", "rope")


def sentences(count: int, seed: int = 0) -> list[str]:
    """Text with something to learn: things are where they were put, and numbers follow each other."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        place, thing, number = draw.choice(PLACES), draw.choice(THINGS), int(draw.integers(1, 90))
        found.append(
            f"The {thing} is in the {place}. Where is the {thing}? It is in the {place}. {number} comes before {number + 1}."
        )
    return found


def trained_folder(
    path: Path, case: str = "qwen2", *, steps: int = 60, seconds: float | None = None, **others: Any
) -> Path:
    """A folder as others write it, after so many steps of training, or for so many seconds. `others`: fields of its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = CASES[case]
    sizes = {"vocab_size": 736, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**COMMON, **changes, **sizes, "tie_word_embeddings": True, **others})
    model = AutoModelForCausalLM.from_config(config)
    source = byte_level("smollm")
    facts: dict[str, Any] = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE, "add_bos_token": False}
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(source, encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(facts))
    ids = _ids(Tokenizer.from_file(path / "tokenizer.json", facts, None, None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw, end = np.random.default_rng(1), time.monotonic() + (seconds or 1e9)
    step = 0
    while step < steps or (seconds is not None and time.monotonic() < end):
        starts = draw.integers(0, len(ids) - LENGTH, ROWS)
        batch = torch.stack([ids[start : start + LENGTH] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    return path


def _ids(tokenizer: Tokenizer) -> torch.Tensor:
    """Documents and conversations one after another, each with its end."""
    end = tokenizer.eos_id
    assert end is not None
    found: list[int] = []
    for number, text in enumerate(sentences(400)):
        if number % 2:
            question, _, answer = text.partition("? ")
            start = tokenizer.control_tokens["<|im_start|>"]
            found += [start, *tokenizer.encode(f"user\n{question}?"), end, *tokenizer.encode("\n"), start]
            found += [*tokenizer.encode(f"assistant\n{answer}"), end]
        else:
            found += [*tokenizer.encode(text), end]
    return torch.tensor(found)
