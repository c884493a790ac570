"""Steps that keep weights as codes of a table, or as blocks: nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence

from orchard.core.errors import UsageError
from orchard.recipes.compressing.step import Step
from orchard.recipes.compressing.steps import step
from orchard.transforms.lora import ALL_LINEAR


@step
def palettize(
    bits: int = 4,
    two: Sequence[str] = (),
    rows: int = 16,
    weighted: bool = True,
    targets: str | Sequence[str] = ALL_LINEAR,
) -> Step:
    """Keep weights as codes of small tables found by k-means.

    bits: 4 or 2
    two: linear maps to keep at 2 bits, by name or pattern
    rows: rows that share a table
    weighted: let weights count by what is multiplied with them
    targets: all-linear, or names and patterns of linear maps
    """
    from orchard.transforms.palettize import Palettize

    if bits not in (4, 2):
        raise UsageError(f"bits is {bits}", hint="use 4 or 2")
    costs = (1.01, 1.10) if bits == 4 and not two else (1.2, 4.0)
    made = Palettize(bits=bits, two=tuple(two), rows=rows, weighted=weighted, targets=targets)
    return Step(made, packs=True, costs=costs)


@step
def blocks(r: int = 16) -> Step:
    """Keep weights as blocks of 6 by 6 in 128 bits (3.56 bits a weight), the leading directions beside them.

    Errors count by what is multiplied with a weight.

    r: directions that are kept in half precision beside the blocks; 0: none
    """
    from orchard.nn.formats import Blocks
    from orchard.transforms.residual import Residual

    if r < 0:
        raise UsageError(f"r is {r}", hint="use a whole number from 0")
    return Step(Residual(r=r, then=Blocks.Config(), weighted=True), packs=True, costs=(1.03, 1.25))
