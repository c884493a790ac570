"""The study mobile-vmoe: kinds begin with the same model and see the same images, its measures are right, and it runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from orchard.studies import _mobile_vmoe_runs as runs
from orchard.studies import mobile_vmoe, study
from orchard.studies._mobile_vmoe_experts import used

TINY = replace(
    mobile_vmoe.SCALES["small"],
    side=12,
    dim=12,
    hidden_dim=8,
    train=96,
    held_out=64,
    test=64,
    first=32,
    then=64,
    batch=16,
    seeds=2,
    processes=1,
)


def begun(kind: runs.Kind, size: runs.Size = TINY) -> tuple[torch.nn.Module, torch.nn.Module]:
    weights = runs.first(size, 1, 0)
    return runs._begun(size, runs.Kind("dense"), 1, weights), runs._begun(size, kind, 1, weights)


@pytest.mark.parametrize(
    "kind", [runs.Kind("some", 2, mobile_vmoe.PLANTED), runs.Kind("learned", 4), runs.Kind("wide", 2, wide=True)]
)
def test_all_kinds_begin_with_the_same_function(kind: runs.Kind) -> None:
    dense, other = begun(kind)
    images = runs.pictures(TINY, "test", 0).images[:9].float()
    with torch.no_grad():
        assert torch.allclose(dense(images), other(images), atol=1e-5)
    dense_count, other_count = (sum(p.numel() for p in model.parameters()) for model in (dense, other))
    assert other_count > 1.5 * dense_count


def test_from_scratch_nothing_is_copied() -> None:
    size = replace(TINY, first=0)
    _, fresh = begun(runs.Kind("some", 1, mobile_vmoe.PLANTED), size)
    gates = fresh.stack.layers[-1].mlp.gate.weight
    assert not torch.equal(gates[0], gates[1])


def test_the_order_of_images_goes_on_where_it_was_and_shows_all() -> None:
    whole = runs._order(10, 3, 0, 5)
    seen = [next(whole).tolist() for _ in range(6)]
    for epoch in range(3):
        assert sorted(seen[2 * epoch] + seen[2 * epoch + 1]) == list(range(10))
    assert next(runs._order(10, 3, 5, 5)).tolist() == seen[1]
    assert next(runs._order(10, 3, 8, 4)).tolist() == (seen[1] + seen[2])[3:7]
    assert seen[0] + seen[1] != seen[2] + seen[3]


def test_a_run_repeats_and_learns_what_it_is_taught() -> None:
    size = replace(TINY, then=640, rate=1e-2)
    begin = runs.first(size, 1, 0)
    kind = runs.Kind("some", 1, mobile_vmoe.PLANTED)
    one, again = (runs.then(size, kind, 1, 0, begin) for _ in range(2))
    assert all(np.array_equal(one.weights[name], again.weights[name]) for name in one.weights)
    labels = runs.pictures(size, "train", 0).labels
    model = runs._begun(size, kind, 1, begin)
    before = runs.look(model, runs.pictures(size, "train", 0))[1]
    model.load_state_dict({name: torch.from_numpy(value) for name, value in one.weights.items()})
    after = runs.look(model, runs.pictures(size, "train", 0))[1]
    assert before is not None and after is not None and after.shape == (1, 96)
    taught = np.array(mobile_vmoe.PLANTED)[labels]
    assert (after == taught).mean() > (before == taught).mean() + 0.1


def test_experts_are_counted_where_they_run() -> None:
    model = runs._begun(TINY, runs.Kind("some", 2, mobile_vmoe.PLANTED), 1, runs.first(TINY, 1, 0))
    images = runs.pictures(TINY, "test", 0).images[:5].float()
    assert used(model, images) == [[1, 1]] * 5
    for layer in model.stack.layers[-2:]:
        layer.mlp.router.config.k = 3
    assert used(model, images) == [[3, 3]] * 5


def test_random_groups_are_balanced_and_differ() -> None:
    of = mobile_vmoe.kinds(TINY, 0)
    groups = [next(kind.groups for kind in of(seed) if kind.name == "random") for seed in (1, 2)]
    assert groups[0] != groups[1] and all(np.bincount(one).tolist() == [8] * 8 for one in groups)


def test_the_study_runs_and_every_claim_has_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mobile_vmoe.SCALES, "small", TINY)
    report = study("mobile-vmoe", seed=1)
    assert all(claim.value is not None for claim in report.claims)
    assert report["flops_ratio"] < 1.03 and report["experts_off"] == 0 and -1 <= report["rand_index"] <= 1
    assert [row[0] for row in report.series["accuracy by kind and seed"]] == [
        "dense",
        "experts_in_1",
        "experts_in_2",
        "experts_in_4",
        "learned",
        "random",
        "wide",
    ]
