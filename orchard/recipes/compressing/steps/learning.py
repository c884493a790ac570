"""Steps that learn: weights that are trained as they will be kept, and side paths beside weights that are packed."""

from __future__ import annotations

from collections.abc import Sequence

from orchard.core.errors import UsageError
from orchard.recipes.compressing.step import Lessons, Range, Step
from orchard.recipes.compressing.steps import step
from orchard.transforms.lora import ALL_LINEAR

# At a few ten million tokens; more tokens cost less.
TRAINED: dict[int, Range] = {8: (1.0, 1.02), 4: (1.01, 1.15), 2: (1.15, 2.0)}


@step
def qat(
    bits: int = 2,
    group: int | None = 64,
    embedding: int | None = 4,
    levels: str = "balanced",
    targets: str | Sequence[str] = ALL_LINEAR,
    tokens: int | None = None,
    share: float = 1.0,
    lr: float = 5e-4,
    average: float | None = None,
) -> Step:
    """Train weights and their scales as they will be kept, then keep them so, bit for bit.

    bits: 2, 4 or 8
    group: weights that share a scale; none: a whole row
    embedding: bits of the embedding; none: as it is
    levels: balanced (of 2 bits: none at zero)
    targets: all-linear, or names and patterns of linear maps
    tokens: so many; unless given, a share of the plan's
    share: of the plan's tokens, beside the shares of other steps
    lr: the highest learning rate
    average: keep an average of the weights with this decay
    """
    from orchard.transforms.qat import Qat

    if bits not in TRAINED:
        raise UsageError(f"bits is {bits}", hint="use 2, 4 or 8")
    made = Qat(bits=bits, group=group, targets=targets, levels=levels, embedding=embedding)
    lessons = Lessons(share=share, tokens=tokens, lr=lr, average=average)
    return Step(made, lessons=lessons, packs=True, sees=True, costs=TRAINED[bits])


@step
def recover(
    r: int = 16,
    alpha: float = 32.0,
    targets: str | Sequence[str] = ALL_LINEAR,
    tokens: int | None = None,
    share: float = 0.5,
    lr: float = 5e-4,
) -> Step:
    """Train low-rank side paths beside weights that stay as they are, and keep them in half precision.

    r: the rank of the side paths
    alpha: their scale is alpha / r
    targets: all-linear, or names and patterns of linear maps
    tokens: so many; unless given, a share of the plan's
    share: of the plan's tokens, beside the shares of other steps
    lr: the highest learning rate
    """
    from orchard.transforms.recover import Recover

    lessons = Lessons(share=share, tokens=tokens, lr=lr, whole=False)
    return Step(Recover(r=r, alpha=alpha, targets=targets), lessons=lessons, mends=(0.4, 0.9))


@step
def prune(
    width: float = 0.75, importance: str = "activation", tokens: int | None = None, share: float = 1.0, lr: float = 3e-4
) -> Step:
    """Take away the hidden units of feed-forward layers that matter least, and train the rest to make up for them.

    width: the share of units that stays
    importance: by what they are chosen: l1, l2, activation, lamp or fpgm
    tokens: so many; unless given, a share of the plan's
    share: of the plan's tokens, beside the shares of other steps
    lr: the highest learning rate
    """
    from orchard.transforms.prune import Prune

    made = Prune(width=width, importance=importance)
    return Step(made, lessons=Lessons(share=share, tokens=tokens, lr=lr), costs=(1.05, 2.0))
