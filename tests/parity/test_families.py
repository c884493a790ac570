"""Orchard's logits against transformers', for every family: whole prompt, step by step, and in a padded batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from orchard.core.context import Context
from orchard.models.language import Decoder
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.load import load_decoder
from tests.parity.families import CASES, reference, save

BAR = 1e-4


@pytest.fixture(scope="module", params=sorted(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    theirs = reference(request.param)
    folder = save(theirs, tmp_path_factory.mktemp(request.param))
    with open_checkpoint(folder) as checkpoint:
        return theirs, load_decoder(checkpoint)


@torch.inference_mode()
def test_whole_prompt(pair: tuple[Any, Decoder]) -> None:
    theirs, ours = pair
    ids = torch.randint(3, 96, (2, 40), generator=torch.Generator().manual_seed(1))
    expected = theirs(input_ids=ids, use_cache=False).logits
    assert expected.std() > 0.05  # a flat reference would prove nothing
    assert (ours(ids) - expected).abs().max() <= BAR


@torch.inference_mode()
def test_step_by_step(pair: tuple[Any, Decoder]) -> None:
    theirs, ours = pair
    ids = torch.randint(3, 96, (1, 24), generator=torch.Generator().manual_seed(2))
    expected = theirs(input_ids=ids, use_cache=False).logits
    cache, got = ours.cache(batch=1, length=32), []
    cuts = [0, 5, 6, 7, 15, *range(16, 25)]
    for start, end in pairwise(cuts):
        positions = torch.arange(start, end)[None]
        got.append(ours(ids[:, start:end], Context(positions=positions, cache=cache, upto=end)))
    assert (torch.cat(got, dim=1) - expected).abs().max() <= BAR


@torch.inference_mode()
def test_against_their_cache(pair: tuple[Any, Decoder]) -> None:
    """Their own step-by-step path must agree too: the same next-token scores after a cached decode."""
    theirs, ours = pair
    ids = torch.randint(3, 96, (1, 20), generator=torch.Generator().manual_seed(3))
    out = theirs(input_ids=ids[:, :12], use_cache=True)
    for t in range(12, 20):
        out = theirs(input_ids=ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
    cache = ours.cache(batch=1, length=20)
    ours(ids[:, :12], Context(positions=torch.arange(12)[None], cache=cache))
    for t in range(12, 20):
        last = ours(ids[:, t : t + 1], Context(positions=torch.tensor([[t]]), cache=cache))
    assert (last - out.logits).abs().max() <= BAR


@pytest.mark.parametrize("side", ["left", "right"])
@torch.inference_mode()
def test_padded_batch(pair: tuple[Any, Decoder], side: str) -> None:
    theirs, ours = pair
    lengths = [4, 17, 11]
    rows = [torch.randint(3, 96, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    ids = torch.zeros(3, max(lengths), dtype=torch.long)
    valid = torch.zeros_like(ids, dtype=torch.bool)
    for i, row in enumerate(rows):
        at = slice(max(lengths) - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, at], valid[i, at] = row, True
    padded = theirs(
        input_ids=ids, attention_mask=valid.long(), position_ids=(valid.long().cumsum(-1) - 1).clamp_min(0)
    ).logits
    context = Context.whole(ids, valid)
    batched = ours(ids, context)
    stored = ours(ids, Context(positions=context.positions, cache=ours.cache(batch=3, length=20), upto=17))
    for i, row in enumerate(rows):
        alone = theirs(input_ids=row[None]).logits[0]
        assert (batched[i][valid[i]] - alone).abs().max() <= BAR
        assert (stored[i][valid[i]] - alone).abs().max() <= BAR
        assert (batched[i][valid[i]] - padded[i][valid[i]]).abs().max() <= BAR


def test_nothing_is_nan_in_padding(pair: tuple[Any, Decoder]) -> None:
    _, ours = pair
    ids = torch.zeros(1, 6, dtype=torch.long)
    context = Context.whole(ids, torch.tensor([[False, False, True, True, True, True]]))
    assert torch.isfinite(ours(ids, context)).all()
