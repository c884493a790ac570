"""The study mc-suite: its measures measure, its baselines are what they say, and it runs."""

from __future__ import annotations

import pytest
import torch

from orchard.core.seeds import fold
from orchard.studies import _mc_suite_prune as pruning
from orchard.studies import mc_suite, study
from orchard.studies._mc_suite_model import Size, perplexity, texts, tree
from orchard.transforms.prune_experts import PruneExperts
from orchard.transforms.prune_experts_scores import CRITERIA

TINY = Size(
    models=1,
    dim=32,
    hidden=8,
    layers=2,
    experts=4,
    rows=4,
    length=32,
    steps=2,
    heal=1,
    rounds=2,
    looked=1,
    held_out=1,
    removal=1,
    chances=1,
)


def test_ranks_agree_or_not() -> None:
    worth = torch.tensor([0.3, 0.1, 0.4, 0.2])
    assert pruning.rank_correlation([1, 3, 0, 2], worth) == pytest.approx(1)
    assert pruning.rank_correlation([2, 0, 3, 1], worth) == pytest.approx(-1)
    assert -1 < pruning.rank_correlation([1, 0, 3, 2], worth) < 1


def test_removals_are_losses_without_one_expert() -> None:
    torch.manual_seed(0)
    cfg = tree(TINY)
    for block in cfg.stack.layers:
        block.mlp.router.gate.bias = True
    model = cfg.build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
        model.stack.layers[0].mlp.router.gate.bias[2] = -1e4  # never asked
    read = texts(TINY, 1, 0, "a")
    grown = pruning.removals(model, ["stack.layers.0.mlp"], read)["stack.layers.0.mlp"]
    assert len(grown) == 4 and abs(float(grown[2])) < 1e-6 and (grown[[0, 1, 3]].abs() > 1e-4).all()
    busy = pruning.busiest(model, read)
    assert all(1 <= load <= 2 for load in busy.values()), "of four experts of which two are asked"


def test_places_are_fair_to_the_others() -> None:
    """Others count with their better end, ours with the low one."""
    found = pruning.Found(1.0)
    found.agreement = dict.fromkeys(CRITERIA, (0.0, -0.1))
    found.agreement |= {"ean": (0.2, 0.9), "ege": (-0.5, 0.5), "rwn": (-0.7, 0.7), "euf": (0.3, -0.3)}
    agreements, place = mc_suite.places([found])
    assert place["rwn"] == 1 and place["euf"] == 2 and place["ean"] == 3 and place["ege"] == 16
    assert agreements["ean"] == (0.2, 0.9)


def test_a_tiny_study_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mc_suite.SCALES, "small", TINY)
    report = study("mc-suite")
    assert {claim.id for claim in report.claims} == {claim.id for claim in mc_suite.CLAIMS}
    assert report["memory_ratio"] == 0.5 and 1 <= report["best_place"] <= 16
    assert len(report.series["random choices"]) == 1
    table = next(rows for name, rows in report.series.items() if name.startswith("criterion"))
    assert {row[0] for row in table} == set(CRITERIA) and [row[1] for row in table] == sorted(row[1] for row in table)
    assert len(next(rows for name, rows in report.series.items() if name.startswith("mixture"))) == 2 * 2
    again = pruning.measured(TINY, fold(0, "mixture", 0))
    assert report["perplexity_whole"] == again.whole and report["perplexity_lottery"] == again.perplexity["lottery"]
    prune = PruneExperts(keep=0.5, rounds=2)
    assert [set(step.values()) for step in prune.counts(tree(TINY))] == [{3}, {2}]
    assert perplexity(tree(TINY).build(), texts(TINY, 1, 0, "b")) == pytest.approx(128, rel=0.3), "knows nothing"
