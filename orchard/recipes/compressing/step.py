"""A step of a plan: a transform, or one that is chosen when its turn comes, and how the model learns in between.

Steps know neither files nor folders. What they cost in quality before anything was measured is a guess, and says so: a range of
loss ratios that such steps were seen to cost small models elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from orchard.core.batch import Batch
from orchard.transforms.base import Tell, Transform

if TYPE_CHECKING:
    from orchard.models.language.decoder import Decoder

Range = tuple[float, float]


@dataclass(frozen=True)
class Lessons:
    """How a step learns: from the original, on text, for a part of the plan's tokens."""

    share: float = 1.0
    """Of the plan's tokens, beside the shares of its other steps."""
    tokens: int | None = None
    """So many, whatever the plan has."""
    lr: float = 3e-4
    scales: float = 1.0
    """A factor of the rate for the scales of learned weights."""
    whole: bool = True
    """Every weight learns; otherwise those that the transform left to be trained."""
    average: float | None = None
    """Keep an average of the weights with this decay, and go on with that."""
    states: float = 0.0
    """How much it counts that blocks give what the original's give."""
    between: bool = False
    """Learn after every round of a transform that has several (`Rounds`), twice as much as after the one before."""


class Rounds(Protocol):
    """A transform that takes several rounds, between which a model may learn: `heal(model, number)` after each of them."""

    def counts(self, tree: Any) -> Sequence[Any]: ...

    def in_rounds(self, model: Any, texts: Sequence[Batch], heal: Callable[[Any, int], Any]) -> Any: ...


@dataclass(frozen=True)
class Ground:
    """What a step may look at when its turn comes."""

    model: Decoder
    texts: Sequence[Batch]
    room: int | None
    """Bytes that the weights this step packs may take, all others counted; None: no budget was given."""
    folder: Path
    """The step's own, for what takes long to find out."""
    tell: Tell


@dataclass(frozen=True)
class Step:
    """`transform` is what it does, or, where it `chooses` by looking at the model, the smallest that it may come to."""

    transform: Transform | None = None
    choose: Callable[[Ground], Transform] | None = None
    most: Transform | None = None
    """The largest that a choice may come to."""
    lessons: Lessons | None = None
    packs: bool = False
    """Whether it brings dense linear maps into a format of few bits."""
    sees: bool = False
    """Whether texts help its transform, though it could do without."""
    costs: Range = (1.0, 1.0)
    """A guess: the loss is multiplied by something in between."""
    mends: Range = (1.0, 1.0)
    """A guess: of what the loss has grown by so far, this part is left."""
    name: str = ""
    words: str = ""
    """As a plan writes it."""

    @property
    def looks(self) -> bool:
        return self.sees or self.choose is not None or bool(self.transform is not None and self.transform.looks)

    @property
    def mending(self) -> bool:
        """Whether it is there to undo what the step before it did; that step is then judged together with it."""
        return self.mends != (1.0, 1.0)

    def tree(self, tree: Any, *, largest: bool = False) -> Any:
        """What it makes of a tree."""
        transform = self.most if largest and self.most is not None else self.transform
        return tree if transform is None else transform(tree)

    def guess(self, before: Range) -> Range:
        """What the loss ratio may be afterwards."""
        low, high = (1 + (ratio - 1) * part for ratio, part in zip(before, self.mends, strict=True))
        return low * self.costs[0], high * self.costs[1]
