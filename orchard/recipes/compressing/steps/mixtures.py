"""Steps that make mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence

from orchard.recipes.compressing.step import Lessons, Step
from orchard.recipes.compressing.steps import step


@step
def upcycle(
    experts: int = 8,
    k: int = 2,
    layers: str | Sequence[int] = "all",
    parts: int = 1,
    shared: float = 0.0,
    noise: float = 0.0,
    tokens: int | None = None,
    share: float = 1.0,
    lr: float = 3e-4,
) -> Step:
    """Make each feed-forward layer a mixture of copies of itself, and train them apart. The model grows by it.

    experts: how many in a layer
    k: how many of them each token meets
    layers: all, second (every second one), or numbers of layers
    parts: slices of hidden units that the layer is cut into; an expert is one of them
    shared: the share of the output that a copy for all tokens keeps; 0: none
    noise: what is added to experts, as a share of their spread
    tokens: so many; unless given, a share of the plan's
    share: of the plan's tokens, beside the shares of other steps
    lr: the highest learning rate
    """
    from orchard.transforms.upcycle import Upcycle

    numbers = layers if isinstance(layers, str) else tuple(layers)
    made = Upcycle(experts=experts, k=k, layers=numbers, parts=parts, shared=shared, noise=noise)
    return Step(made, lessons=Lessons(share=share, tokens=tokens, lr=lr), costs=(0.9, 1.05))
