"""What an image shows: cross-entropy over classes, with label smoothing (arXiv 1512.00567) and mixed images (arXiv 1710.09412).

What routers are taught goes along in the batch (`ImageBatch.groups`) and is left by the layers; `WithCollected` adds it:

    with_collected(Classify.Config(), {"moe.router": 0.3})
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from orchard.core.batch import ImageBatch, Loss
from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import UsageError
from orchard.objectives.base import Objective, share, wide


class Classify(Configurable, Objective):
    """Cross-entropy of the class of each image. Parts: loss (without smoothing), correct."""

    @config
    class Config(BaseConfig):
        smoothing: float = 0.0

        def wire(self) -> None:
            share("smoothing", self.smoothing)

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def __call__(self, model: Any, batch: ImageBatch) -> Loss:
        context = model.context(batch.images, batch.groups)
        scores = wide(model.scores(model.hidden(batch.images, context)))
        labels = batch.labels if batch.labels.dim() == 2 else batch.labels.long()
        _check(labels, scores.shape)
        value = functional.cross_entropy(scores, labels, reduction="sum", label_smoothing=self.config.smoothing)
        with torch.no_grad():
            plain = (
                functional.cross_entropy(scores, labels, reduction="sum") if self.config.smoothing else value.detach()
            )
            shown = labels.argmax(-1) if labels.dim() == 2 else labels
            correct = (scores.argmax(-1) == shown).sum()
        weight = torch.tensor(float(len(batch)), device=value.device)
        return Loss(value=value, weight=weight, parts={"loss": plain, "correct": correct})


def _check(labels: torch.Tensor, shape: torch.Size) -> None:
    """One class an image, or the share of each."""
    if (labels.dim() == 2 and labels.shape != shape) or (labels.dim() != 2 and labels.shape != shape[:1]):
        raise UsageError(
            f"labels of shape {tuple(labels.shape)} for scores of shape {tuple(shape)}",
            hint="give one class an image, or the share of each class",
        )
    if (
        labels.dim() == 1
        and labels.is_cpu
        and len(labels)
        and not 0 <= int(labels.min()) <= int(labels.max()) < shape[1]
    ):
        raise UsageError(
            f"labels from {int(labels.min())} to {int(labels.max())} for {shape[1]} classes",
            hint="number classes from 0 on, and give the model as many as there are",
        )
