"""The upscale study: its pictures and nets are what they say, its measures measure, and it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orchard.studies import _upscale_decoder as decoders
from orchard.studies import _upscale_nets as nets
from orchard.studies import study, upscale
from orchard.studies._upscale_shapes import CLASSES, pictures
from orchard.transforms.upscale_export import export
from orchard.transforms.upscale_masks import Masks
from orchard.transforms.upscale_trace import trace

TINY = upscale.Scale(
    steps=2,
    batch=4,
    tested=20,
    looked=8,
    shares=(0.6,),
    fuzz=1,
    pairs=5,
    decoder=decoders.Scale(dim=32, layers=2, steps=2, batch=2),
)


def test_pictures_are_drawn_from_their_seed() -> None:
    images, labels = pictures(300, 0, "a")
    assert images.shape == (300, 1, 16, 16) and images.isfinite().all() and set(labels.tolist()) == set(range(CLASSES))
    assert torch.equal(images, pictures(300, 0, "a")[0])
    assert not torch.equal(images, pictures(300, 0, "b")[0]) and not torch.equal(images, pictures(300, 1, "a")[0])
    means = torch.stack([images[labels == kind].mean() for kind in range(CLASSES)])
    assert means.std() > 0.02  # shapes cover more or less of a picture


def test_sums_are_right() -> None:
    for row in decoders.rows(20, 0, "a").view(-1, 9).tolist():
        a, b, c = row[0] + 10 * row[1], row[3] + 10 * row[4], row[6] + 10 * row[7] + 100 * row[8]
        assert a + b == c and row[2] == decoders.PLUS and row[5] == decoders.EQUALS


def test_copies_are_counted() -> None:
    images, _ = pictures(8, 0, "a")
    net = trace(nets.DenseNet(6, 4, 3, 2).eval(), images)
    masked = Masks(keep=0.6).apply(net, images)
    plain, best = export(masked, images, reorder=False, push=False), export(masked, images)
    assert plain.copied == sum(step.op == "gather" and plain.gathers[step.name] for step in plain.net.steps) > 0
    assert upscale.moved(best, images[:1]) < upscale.moved(plain, images[:1])
    assert upscale.layer_weights(best) == upscale.layer_weights(plain)
    assert upscale.hidden_copies(best.net, images[:1]) == 0 <= upscale.hidden_copies(best.net, images)
    equal, share = upscale.at_equal_weights(net, images)
    assert share < upscale.KEEP and export(equal, images).parameters < best.parameters


def test_gains_and_their_intervals() -> None:
    free, held = torch.tensor([True] * 90 + [False] * 10), torch.tensor([True] * 60 + [False] * 40)
    gain = upscale.gained(free, held, 0)
    assert gain.value == pytest.approx(30) and gain.low is not None and gain.high is not None
    assert 18 < gain.low < 30 < gain.high < 42


def test_the_study_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(upscale.SCALES, "small", TINY)
    small: Any = {"resnet": lambda: nets.ResNet((6, 8, 10)), "densenet": lambda: nets.DenseNet(6, 4, 2, 2)}
    monkeypatch.setattr(nets, "NETS", small)
    monkeypatch.setattr(upscale, "RUNS", 4)
    report = study("upscale")
    assert {claim.metric for claim in upscale.CLAIMS} <= report.values.keys()
    held = {verdict.id: verdict.passed for verdict in report.claims}
    for claim in ("two", "exact", "mock", "weights", "layers", "views", "fuzz", "decoder", "maps"):
        assert held[claim], claim
