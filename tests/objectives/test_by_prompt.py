"""Learning by a part of the model that the text before has chosen: nothing of an answer is looked at before it is made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from orchard.core.batch import IGNORED, Batch
from orchard.core.errors import ConfigError
from orchard.objectives.by_prompt import ByPrompt, in_spans, last_of_prompt
from orchard.objectives.lm import NextToken
from orchard.transforms.ifprune_gather import gathered
from tests.transforms.ifprune_models import VOCAB, instructed


def batch(prompts: tuple[int, ...], length: int = 12, seed: int = 0) -> Batch:
    """Rows whose answers begin after so many tokens."""
    dice = np.random.default_rng(seed)
    tokens = dice.integers(0, VOCAB, (len(prompts), length + 1))
    targets = tokens[:, 1:].copy()
    for row, prompt in enumerate(prompts):
        targets[row, : prompt - 1] = IGNORED
    places = np.broadcast_to(np.arange(length), (len(prompts), length)).copy()
    return Batch(tokens[:, :-1].copy(), targets, places, np.zeros_like(places), plain=True).to("cpu")


def test_the_loss_is_that_of_the_gathered_models() -> None:
    model, read = instructed(), batch((4, 7))
    with torch.no_grad():
        found = ByPrompt.Config().build()(model, read)
        total = 0.0
        for row, prompt in enumerate((4, 7)):
            small = gathered(model.decoder, model.choose(read.ids[row, :prompt]))
            total += float(NextToken.Config().build()(small, read.part(row, row + 1)).value)
    assert float(found.value) == pytest.approx(total, rel=1e-4)
    assert float(found.weight) == (12 - 3) + (12 - 6)


def test_an_answer_is_not_looked_at() -> None:
    """The scores of the answer's first token are the same whatever the answer is."""
    model, read = instructed(), batch((5,))
    first = read.targets.clone()
    first[:, 5:] = IGNORED
    other = read.ids.clone()
    other[:, 5:] = (other[:, 5:] + 1) % VOCAB
    objective = ByPrompt.Config().build()
    with torch.no_grad():
        one = objective(model, replace(read, targets=first))
        two = objective(model, replace(read, targets=first, ids=other))
    assert float(one.value) == pytest.approx(float(two.value), rel=1e-5)


def test_a_span_is_told_by_what_came_before_it() -> None:
    model, read = instructed(), batch((1,))
    objective = ByPrompt.Config(span=4).build()
    at, spans, left = in_spans(read, 4)
    assert at.tolist() == [[3, 7]] and spans.tolist() == [[0] * 8 + [1] * 4]
    assert (left.targets[0, :3] == IGNORED).all() and (left.targets[0, 3:] != IGNORED).all()
    with torch.no_grad():
        whole = objective(model, read)
        # The last span's tokens: their loss does not change with what comes after each.
        only = read.targets.clone()
        only[:, :8] = only[:, 9:] = IGNORED
        other = read.ids.clone()
        other[:, 9:] = 0
        one = objective(model, replace(read, targets=only))
        two = objective(model, replace(read, targets=only, ids=other))
    assert float(whole.weight) == 9
    assert float(one.value) == pytest.approx(float(two.value), rel=1e-5)


def test_the_first_choice_may_be_made_by_a_few_tokens() -> None:
    at, spans, left = in_spans(batch((1,)), 4, 2)
    assert at.tolist() == [[1, 3, 7]] and spans.tolist() == [[0] * 4 + [1] * 4 + [2] * 4]
    assert (left.targets[0, :1] == IGNORED).all() and (left.targets[0, 1:] != IGNORED).all()
    with pytest.raises(ConfigError):
        ByPrompt.Config(span=4, first=5).build()


def test_gradients_reach_both() -> None:
    model = instructed().train()
    for parameter in model.decoder.parameters():
        parameter.requires_grad_(True)
    loss = ByPrompt.Config(span=4).build()(model, batch((1, 1)))
    loss.value.backward()
    assert model.predictor.head.out.weight.grad.abs().max() > 0  # type: ignore[union-attr]
    assert model.decoder.stack.layers[1].mlp.down.weight.grad.abs().max() > 0


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError):
        ByPrompt.Config(span=0).build()
    with pytest.raises(ConfigError, match="second span"):
        in_spans(batch((1,)), 12)
    with pytest.raises(ConfigError, match="no answer"):
        last_of_prompt(torch.full((1, 3), IGNORED))
