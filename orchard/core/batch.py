"""What is learnt from, and what learning is measured by: plain values between sources, objectives and the loop.

Sources fill batches with numpy arrays, which cost nothing to keep and to send; `to` makes tensors of them, once, where they are
used. Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

IGNORED = -100
"""A target that nothing is learnt from."""
Array = Any
"""A numpy array in a source, a tensor after `to`."""
B = TypeVar("B", bound="Movable")


class Movable:
    """A dataclass of arrays, tensors and further such dataclasses."""

    def to(self: B, device: torch.device | str | None = None) -> B:
        return self._each(lambda value: _moved(value, device))

    def part(self: B, start: int, stop: int) -> B:
        """Some of the rows."""
        return self._each(lambda value: value[start:stop])

    def _each(self: B, change: Callable[[Any], Any]) -> B:
        made = {item.name: _changed(getattr(self, item.name), change) for item in fields(self)}  # type: ignore[arg-type]
        return replace(self, **made)  # type: ignore[type-var]


class Origins(tuple[str, ...]):
    """Where rows come from, for people: which files and lines. Cut like an array, moved nowhere."""

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return Origins(found) if isinstance(at, slice) else found


@dataclass(frozen=True)
class Batch(Movable):
    """Rows of tokens, one or more documents in each. `targets` are what comes after each token of `ids`: the scores at a place
    are held against the target at the same place."""

    ids: Array
    targets: Array
    positions: Array
    """Places within documents; -1: padding."""
    documents: Array
    """Numbers of documents within their row; -1: padding. Nothing looks into another document."""
    weights: Array | None = None
    """How much each target counts; None: all the same."""
    plain: bool = False
    """Known without looking at tensors: every row is one document from its beginning, without padding."""
    full: bool = False
    """Known likewise: every place has a target that counts."""
    origins: Origins = field(default_factory=Origins)
    """Of each row, where that is known."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """Targets that count."""
        return int((self.targets != IGNORED).sum())


@dataclass(frozen=True)
class PairBatch(Movable):
    """Answers of which one was preferred, row by row; `reference`: log-probabilities [B] of both under another model."""

    chosen: Batch
    rejected: Batch
    reference: tuple[Array, Array] | None = None

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def tokens(self) -> int:
        return self.chosen.tokens + self.rejected.tokens


@dataclass(frozen=True)
class GroupBatch(Movable):
    """Answers that were sampled, with what they were worth. Rows of one group answer the same prompt."""

    batch: Batch
    behaviour: Array
    """Log-probabilities [B, T] of the targets when they were sampled."""
    rewards: Array
    """[B], or [B, objectives]."""
    groups: Array
    """[B]"""
    versions: Array | None = None
    """[B]: how many updates the weights had seen that wrote a row."""
    ages: Array | None = None
    """[B]: how many more the weights have seen that learn from it."""

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def tokens(self) -> int:
        return self.batch.tokens


@dataclass(frozen=True)
class ImageBatch(Movable):
    """Images, what each shows, and the group that this belongs to."""

    images: Array
    """[B, channels, height, width]"""
    labels: Array
    """[B], classes; or [B, classes], shares of them, where images are mixed."""
    groups: Array | None = None
    """[B], or shares [B, groups]: what routers are taught; None: nothing."""

    def __len__(self) -> int:
        return len(self.images)

    @property
    def tokens(self) -> int:
        """Targets that count: one an image."""
        return len(self.images)


@dataclass(frozen=True)
class Loss:
    """Sums, so that micro-batches and processes add up exactly: what is minimised is `value` over `weight`."""

    value: Tensor
    weight: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    """Further sums, for curves."""


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Movable):
        return value._each(change)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Origins):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_changed(item, change) for item in value)
    return change(value)


def _moved(value: Any, device: torch.device | str | None) -> Any:
    if isinstance(value, Origins):
        return value
    tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return tensor.to(device, non_blocking=True)
