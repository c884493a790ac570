"""The default model, from its real file, against transformers reading the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import orchard
from orchard.session.model import Model
from tests.parity.prompts import PROMPTS

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def ours(smollm2: Path) -> Model:
    return orchard.load(smollm2, dtype="float32")


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> Any:
    from transformers import AutoModelForCausalLM

    file = smollm2 if smollm2.is_file() else next(smollm2.glob("*.gguf"))
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("prompts", [PROMPTS[::6], pytest.param(PROMPTS, marks=pytest.mark.long)], ids=["some", "all"])
def test_the_same_64_greedy_tokens(prompts: list[str], ours: Model, theirs: Any) -> None:
    """If their best next token after every prefix of our answer is our next token, their greedy answer is ours."""
    answers = ours.generate_many(prompts, max_tokens=64)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = ours.prompt_ids(prompt)
        produced = list(answer.ids)
        if answer.finish == "stop":
            produced.append(next(iter(ours.tokenizer.eos_ids & {2})))
        assert len(produced) == 64 or answer.finish == "stop"
        with torch.inference_mode():
            logits = theirs(input_ids=torch.tensor([ids + produced])).logits[0]
        best = logits[len(ids) - 1 : len(ids) + len(produced) - 1].argmax(-1).tolist()
        assert best == produced, prompt


@pytest.mark.timeout(600)
def test_their_own_generate_agrees(ours: Model, theirs: Any) -> None:
    for prompt in PROMPTS[:2]:
        ids = ours.prompt_ids(prompt)
        out = theirs.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False, eos_token_id=2, pad_token_id=2)
        expected = [i for i in out[0, len(ids) :].tolist() if i not in ours.tokenizer.eos_ids]
        assert list(ours.generate(prompt, max_tokens=64).ids) == expected


def test_logits(ours: Model, theirs: Any) -> None:
    ids = ours.tokenizer.encode("The quick brown fox jumps over the lazy dog. 12345 🦊")
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([ids])).logits
    got = ours.logits(ids)
    assert got.dtype == torch.float32
    assert got.shape == (1, len(ids), ours.config.vocab)
    assert (got - expected).abs().max() <= 1e-3 * expected.abs().max()
