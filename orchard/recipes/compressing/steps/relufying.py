"""A step that makes feed-forward layers sparse, so that their neurons can be left in a file until they are used."""

from __future__ import annotations

from orchard.recipes.compressing.step import Lessons, Step
from orchard.recipes.compressing.steps import step


@step
def relufy(tokens: int | None = None, share: float = 1.0, lr: float = 3e-4) -> Step:
    """Put ReLU into every feed-forward layer, and train the model to say what the original says.

    tokens: so many; unless given, a share of the plan's
    share: of the plan's tokens, beside the shares of other steps
    lr: the highest learning rate
    """
    from orchard.transforms.relufy import Relufy

    return Step(Relufy(), lessons=Lessons(share=share, tokens=tokens, lr=lr), costs=(1.02, 2.0))
