"""The study of RATTENTION: its facts are right and far enough apart, its models are what they claim to be, and it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from orchard.nn.attention import Attention, RAttention
from orchard.studies import _rattention_models as models
from orchard.studies import rattention, study
from orchard.studies._rattention_facts import WIDTH, Facts, told

TINY = models.Size(dim=16, hidden=16, head_dim=8, length=36, rows=4, steps=2, held_out=4)


@pytest.mark.parametrize("hops", [1, 3])
def test_facts_are_right_and_told_far_back(hops: int) -> None:
    facts = Facts(letters=6, window=4, hops=hops)
    read = told(facts, 12, 90, 0, "a")
    seen = set()
    for row in range(12):
        ids, leads, when = read.batch.ids[row].numpy(), {}, {}
        for now in range(0, 90, WIDTH):
            steps, letter, answer = int(ids[now]) + 1, int(ids[now + 1]), int(ids[now + 2])
            at, oldest = letter, now
            known = all(letter in leads for letter in _path(leads, letter, steps))
            assert bool(read.steps[row, now + 1]) is known and read.steps[row, now + 1] in (0, steps)
            if known:
                for _ in range(steps):
                    oldest, at = min(oldest, when[at]), leads[at]
                assert at == answer
                assert read.back[row, now + 1] == now - oldest >= 2 * facts.window
                seen.add(steps)
            if steps == 1:
                leads[letter], when[letter] = answer, now
            if hops == 1 and known:
                assert read.back[row, now + 1] <= 8 * facts.window
    assert seen == set(range(1, hops + 1))
    assert np.array_equal(read.batch.ids[:, 1:], read.batch.targets[:, :-1])
    assert torch.equal(read.batch.ids, told(facts, 12, 90, 0, "a").batch.ids)
    assert not torch.equal(read.batch.ids, told(facts, 12, 90, 0, "b").batch.ids)


def _path(leads: dict[int, int], letter: int, steps: int) -> list[int]:
    found = [letter]
    for _ in range(steps - 1):
        found.append(leads.get(found[-1], -1))
    return found


def test_models_differ_in_their_local_layers_only() -> None:
    made = models.framed(TINY, 8)
    kinds = {name: [type(block.mixer) for block in config.stack.layers] for name, config in made.items()}
    assert kinds["rattention"] == [RAttention.Config] * 3 + [Attention.Config]
    assert all(kinds[name] == [Attention.Config] * 4 for name in ("full", "window", "wide window"))
    windows = {name: [block.mixer.window for block in config.stack.layers] for name, config in made.items()}
    assert windows == {
        "full": [None] * 4,
        "window": [5, 5, 5, None],
        "rattention": [5, 5, 5, None],
        "wide window": [33, 33, 33, None],
    }
    rotary = {name: [block.mixer.rotary is not None for block in config.stack.layers] for name, config in made.items()}
    assert rotary.pop("full") == [True] * 4 and set(map(tuple, rotary.values())) == {(True, True, True, False)}
    alone = models.local_only(TINY, 8)
    assert {block.mixer.window for config in alone.values() for block in config.stack.layers} == {5}
    one, other = (models.built(made[name], 3) for name in ("full", "rattention"))
    shared = dict(one.named_parameters())
    assert all(torch.equal(shared[name], value) for name, value in other.named_parameters() if name in shared)


@torch.no_grad()
def test_a_window_alone_cannot_see_what_counts_as_far() -> None:
    """Whatever its weights: what stands further back than layers × w does not change what a window without global layers says."""
    model = models.built(models.local_only(TINY, 8)["window"], 0)
    ids = torch.randint(8, (1, 30))
    other = ids.clone()
    other[0, : 29 - TINY.layers * TINY.window] = 0
    torch.testing.assert_close(model(ids)[0, -1], model(other)[0, -1])


def test_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rattention.SCALES, "small", TINY)
    report = study("rattention")
    verdicts = {claim.id: claim.passed for claim in report.claims}
    assert verdicts.keys() == {claim.id for claim in rattention.CLAIMS}
    assert verdicts["forms"] and verdicts["constant"] and verdicts["bytes"]


def test_bytes_are_those_of_the_shape_of_the_note() -> None:
    found: Any = rattention.counted(replace(TINY, dim=999))
    heads, layers = 8, 6
    assert found["bytes"].value == layers * heads * 4 * (2 * 18 * 16 + 32 * 16)
    assert found["bytes_wide"].value == layers * heads * 4 * 2 * 130 * 16
