"""Classes of images: the loss is cross-entropy, sums add up, routers are taught beside it, and the trainer can run it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from orchard.core.batch import ImageBatch
from orchard.core.errors import ConfigError, UsageError
from orchard.data import Repeat, Scenes
from orchard.data.scenes import CLASSES
from orchard.models.vision import ViT, small_vit
from orchard.objectives import Classify, with_collected
from orchard.train.optim import AdamW
from orchard.train.trainer import Trainer
from orchard.transforms.image_experts import ImageExperts


def tree(classes: int = 6) -> ViT.Config:
    return small_vit(side=8, patch=4, classes=classes, dim=12, layers=2, heads=2, hidden_dim=16)


def batch(count: int = 8) -> ImageBatch:
    dice = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, 8, 8, generator=dice)
    return ImageBatch(images, torch.arange(count) % 6, torch.arange(count) % 3)


@torch.no_grad()
def test_it_is_cross_entropy_and_parts_add_up() -> None:
    model, whole = tree().build(), batch()
    for smoothing in (0.0, 0.1):
        objective = Classify.Config(smoothing=smoothing).build()
        loss = objective(model, whole)
        scores = model(whole.images)
        wanted = functional.cross_entropy(scores, whole.labels, label_smoothing=smoothing)
        assert float(loss.value / loss.weight) == pytest.approx(float(wanted), rel=1e-5)
        assert float(loss.parts["loss"]) / 8 == pytest.approx(
            float(functional.cross_entropy(scores, whole.labels)), rel=1e-5
        )
        assert int(loss.parts["correct"]) == int((scores.argmax(-1) == whole.labels).sum())
        halves = [objective(model, whole.part(start, start + 4)) for start in (0, 4)]
        assert sum(float(half.value) for half in halves) == pytest.approx(float(loss.value), rel=1e-5)
        assert float(loss.weight) == sum(float(half.weight) for half in halves) == 8


@torch.no_grad()
def test_mixed_images_have_shares_of_classes() -> None:
    model, whole = tree().build(), batch()
    objective = Classify.Config().build()
    shares = functional.one_hot(whole.labels, 6).float()
    same = objective(model, ImageBatch(whole.images, shares))
    assert float(same.value) == pytest.approx(float(objective(model, whole).value), rel=1e-5)
    mixed = objective(model, ImageBatch(whole.images, (shares + shares.flip(0)) / 2))
    other = objective(model, ImageBatch(whole.images, whole.labels.flip(0)))
    assert float(mixed.value) == pytest.approx((float(same.value) + float(other.value)) / 2, rel=1e-5)


@torch.no_grad()
def test_routers_are_taught_beside_it() -> None:
    model, whole = ImageExperts(experts=3, last=2)(tree()).build(), batch()
    plain = Classify.Config().build()(model, whole)
    taught = with_collected(Classify.Config(), {"moe.router": 0.3}).build()(model, whole)
    context = model.context(whole.images, whole.groups)
    model.hidden(whole.images, context)
    left = float(torch.stack(context.collected["moe.router"]).mean())
    assert float(taught.value) == pytest.approx(float(plain.value) + 0.3 * 8 * left, rel=1e-5)
    with pytest.raises(ConfigError, match=r"moe\.router"):
        with_collected(Classify.Config(), {"moe.router": 0.3}).build()(model, ImageBatch(whole.images, whole.labels))


def test_labels_that_do_not_fit_are_refused() -> None:
    model, whole = tree().build(), batch()
    objective = Classify.Config().build()
    with pytest.raises(UsageError, match="labels from 0 to 5 for 4 classes"):
        objective(tree(4).build(), whole)
    with pytest.raises(UsageError, match="labels of shape"):
        objective(model, ImageBatch(whole.images, whole.labels[:3]))
    with pytest.raises(UsageError, match="labels of shape"):
        objective(model, ImageBatch(whole.images, torch.zeros(8, 4)))
    with pytest.raises(ConfigError, match="smoothing"):
        Classify.Config(smoothing=2).build()


def test_the_trainer_learns_scenes_with_experts(tmp_path: Path) -> None:
    cfg = Trainer.Config(
        model=ImageExperts(experts=8, last=1)(tree(CLASSES)),
        objective=with_collected(Classify.Config(), {"moe.router": 0.3}),
        source=Repeat.Config(source=Scenes.Config(rows=32, batches=1, side=8)),
        steps=12,
        micro=16,
        optim=AdamW.Config(lr=1e-2),
    )
    report = cfg.build(folder=tmp_path).run()
    routers = report.series["moe.router"]
    assert routers[-1] < routers[0] and report["tokens"] == 12 * 32
