"""Steps that round weights as they are, with or without a look at what the model reads: nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence

from orchard.core.errors import UsageError
from orchard.recipes.compressing.step import Range, Step
from orchard.recipes.compressing.steps import step
from orchard.transforms.lora import ALL_LINEAR

# What the loss of models of 100M to 1B parameters was multiplied by at group 64; the wide ranges are those of small models.
ROUNDED: dict[int, Range] = {8: (1.0, 1.01), 4: (1.02, 1.15), 2: (2.0, 6.0)}
LOOKED: dict[int, Range] = {8: (1.0, 1.01), 4: (1.01, 1.08), 2: (1.3, 3.5)}


@step
def rtn(
    bits: int = 4, group: int | None = 64, minimum: bool = False, targets: str | Sequence[str] = ALL_LINEAR
) -> Step:
    """Round every weight to the nearest value of its format.

    bits: 8, 4 or 2
    group: weights that share a scale; none: a whole row
    minimum: 4 bits between the least and the largest value of a group
    targets: all-linear, or names and patterns of linear maps
    """
    from orchard.transforms.rtn import Rtn

    _check(bits)
    return Step(Rtn(bits=bits, group=group, minimum=minimum, targets=targets), packs=True, costs=ROUNDED[bits])


@step
def gptq(bits: int = 4, group: int | None = 64, targets: str | Sequence[str] = ALL_LINEAR) -> Step:
    """Round column by column and let the rest make up for it, by what the maps read (arXiv 2210.17323).

    bits: 8, 4 or 2
    group: weights that share a scale; none: a whole row
    targets: all-linear, or names and patterns of linear maps
    """
    from orchard.transforms.gptq import Gptq

    _check(bits)
    return Step(Gptq(bits=bits, group=group, targets=targets), packs=True, costs=LOOKED[bits])


@step
def awq(bits: int = 4, group: int | None = 64, targets: str | Sequence[str] = ALL_LINEAR) -> Step:
    """Scale the channels that matter before rounding (arXiv 2306.00978).

    bits: 8, 4 or 2
    group: weights that share a scale; none: a whole row
    targets: all-linear, or names and patterns of linear maps
    """
    from orchard.transforms.awq import Awq

    _check(bits)
    return Step(Awq(bits=bits, group=group, targets=targets), packs=True, costs=LOOKED[bits])


def _check(bits: int) -> None:
    if bits not in ROUNDED:
        raise UsageError(f"bits is {bits}", hint="use 8, 4 or 2")
