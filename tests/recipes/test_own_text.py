"""Rows that a model writes by itself: openings where they belong, everything else what the model would say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from orchard.core.errors import UsageError
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.recipes.own_text import Script, own_text

END, VOCAB = 7, 24


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.manual_seed(3)
    blocks = [
        Block.Config(mixer=Attention.Config(heads=2, kv_heads=1, head_dim=8), mlp=GatedMLP.Config(hidden_dim=24))
        for _ in range(2)
    ]
    model: Decoder = Decoder.Config(vocab=VOCAB, dim=16, context=160, stack=Stack.Config(layers=blocks)).build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.5)
    return model.eval()


def write(decoder: Decoder, scripts: list[Script], **how: Any) -> np.ndarray:
    return own_text(decoder, scripts, **{"rows": 5, "length": 130, "ends": [END], "batch": 5, **how})


def likeliest(decoder: Decoder, ids: np.ndarray) -> np.ndarray:
    """What would be said after every token, from the whole row at once."""
    with torch.no_grad():
        best: np.ndarray = decoder(torch.from_numpy(ids).long()).argmax(-1).numpy()
    return best


def test_at_no_temperature_every_token_is_the_openings_or_the_likeliest(decoder: Decoder) -> None:
    openings = [[END, 3], [5, END, 9, 1], [2]]
    rows = write(decoder, [Script(openings)], temperature=1e-4, seed=4)
    best = likeliest(decoder, rows)
    begun = 0
    for row, said in zip(rows.tolist(), best.tolist(), strict=True):
        turn = next(i for i, one in enumerate(openings) if row[: len(one)] == one)
        place, drawn = len(openings[turn]), False
        while place < len(row):
            if drawn and row[place - 1] == END:
                turn = (turn + 1) % len(openings)
                wanted = openings[turn][: len(row) - place]
                assert row[place : place + len(wanted)] == wanted
                place, drawn, begun = place + len(wanted), False, begun + 1
            else:
                assert row[place] == said[place - 1]
                place, drawn = place + 1, True
    assert begun > 0, "some row has to end, or nothing was tested"


def test_draws_follow_the_models_distribution(decoder: Decoder) -> None:
    rows = write(decoder, [Script([[1, 2]])], rows=600, length=3, batch=200)
    with torch.no_grad():
        wanted = decoder(torch.tensor([[1, 2]]))[0, -1].softmax(-1).numpy()
    found = np.bincount(rows[:, 2], minlength=VOCAB) / len(rows)
    assert np.abs(found - wanted).sum() < 0.25, "600 draws from 24 tokens are about 0.15 off"


def test_the_seed_decides_and_shares_are_kept(decoder: Decoder) -> None:
    scripts = [Script([[1]], share=3.0), Script([[2], [3]], share=1.0)]
    rows = write(decoder, scripts, rows=8, batch=4, seed=1)
    assert np.array_equal(rows, write(decoder, scripts, rows=8, batch=4, seed=1))
    assert not np.array_equal(rows, write(decoder, scripts, rows=8, batch=4, seed=2))
    assert [int((rows[:, 0] == first).sum()) for first in (1, 2, 3)] == [6, 2, 0]
    assert len(write(decoder, scripts, rows=8, batch=4, until=lambda: True)) == 4


def test_what_cannot_be_written_is_refused(decoder: Decoder) -> None:
    with pytest.raises(UsageError, match="no opening"):
        write(decoder, [Script([[1], []])])
    with pytest.raises(UsageError, match="context of 160"):
        write(decoder, [Script([[1]])], length=161)


def test_each_opening_has_its_own_temperature(decoder: Decoder) -> None:
    """After the first opening anything may come, after the second only what is likeliest."""
    rows = write(decoder, [Script([[1, 2], [3, 4]], heat=[3.0, 1e-4])], seed=2)
    best = likeliest(decoder, rows)
    cold, hot = [], []
    for row, said in zip(rows.tolist(), best.tolist(), strict=True):
        turn, place, drawn = 0, 2, False
        while place < len(row):
            if drawn and row[place - 1] == END:
                turn, place, drawn = 1 - turn, place + 2, False
            else:
                (cold if turn else hot).append(row[place] == said[place - 1])
                place, drawn = place + 1, True
    assert cold and all(cold) and np.mean(hot) < 0.5
    for heat in ([1.0], [1.0, 0.0]):
        with pytest.raises(UsageError, match="temperatures"):
            write(decoder, [Script([[1], [2]], heat=heat)])
