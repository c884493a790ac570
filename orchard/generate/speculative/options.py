"""What a request may ask of speculation: a plain frozen value, checked when it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from orchard.core.errors import UsageError
from orchard.core.frozen import frozen

if TYPE_CHECKING:
    from orchard.generate.speculative.coarse import Groups

Kind = Literal["lookup", "draft", "early"]
Accept = Literal["same", "rejection", "coarse"]
LONGEST = 64
"""Tokens that may be guessed for one call."""


@frozen
class Speculation:
    """Where guesses come from, how many, and which are kept.

    `kind`: "lookup" copies what followed the last tokens when they stood in the prompt or the answer before; "draft" asks the
    engine's draft model; "early" asks the first layers of the model itself.

    `accept`: "same" gives exactly the tokens that there would be without speculation, whatever the sampling. "rejection" gives
    tokens of exactly the same law and keeps more guesses of a model where the temperature is above 0, but the same seed gives
    other tokens than without speculation, and may give others when guesses are cut differently. "coarse" keeps a guess whose
    group of like tokens passes the test: it changes the law inside groups, and is meant for tokens of codecs, never for text.
    """

    kind: Kind = "lookup"
    length: int = 0
    """Tokens guessed for each call; 0: as many as pay, by what was kept and by what calls cost."""
    accept: Accept = "same"
    groups: Groups | None = None
    """For "coarse" only."""
    layers: int = 0
    """For "early" only: how many layers guess; 0: a quarter of them."""

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, get_args(Kind))
        _one_of("accept", self.accept, get_args(Accept))
        _whole("length", self.length, LONGEST)
        _whole("layers", self.layers, None)
        if self.layers and self.kind != "early":
            raise UsageError(f"layers={self.layers} with kind {self.kind!r}", hint='use it with kind "early"')
        if self.accept == "coarse" and self.groups is None:
            raise UsageError(
                'accept="coarse" needs groups of like tokens',
                hint="make them from the model's table of embeddings: orchard.generate.speculative.coarse.Groups",
            )
        if self.accept != "coarse" and self.groups is not None:
            raise UsageError(f"groups with accept {self.accept!r}", hint='use them with accept="coarse"')


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name} is {value!r}", hint=f"use one of {', '.join(map(repr, known))}")


def _whole(name: str, value: Any, most: int | None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < 0 or (most is not None and value > most):
        raise UsageError(
            f"{name} is {value!r}", hint="use a whole number from 0" + (f" to {most}" if most is not None else "")
        )
