"""Which parameters are treated how: groups by rules over names and shapes.

Weight decay pulls matrices towards zero; for the scale of a norm, a bias or a token's own vector that has no meaning, so they
are left out by rule. Rules are patterns over parameters' names (`fnmatch`), so a recipe can say otherwise.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import UsageError

Named = Iterable[tuple[str, Tensor]]

EMBEDDINGS = ["embedding.*", "*.embedding.*", "*embed*"]
HEADS = ["head.*", "*.head.*", "*lm_head*"]


@dataclass(frozen=True)
class Group:
    """Parameters that are updated alike."""

    names: list[str]
    parameters: list[Tensor]
    decay: bool
    matrix: bool
    """Whether these are hidden matrices: two axes (or three, a stack of them), and neither the embedding nor the head."""
    rate: float = 1.0
    """A factor of the learning rate."""


class Rules(Configurable):
    """Splits named parameters by decay or not, matrix or not, and rate. Those without gradients are left out."""

    @config
    class Config(BaseConfig):
        no_decay: list[str] = field(default_factory=lambda: ["*norm*", "*bias", *EMBEDDINGS])
        """Patterns of names without decay; whatever has fewer than two axes has none either."""
        not_hidden: list[str] = field(default_factory=lambda: [*EMBEDDINGS, *HEADS])
        """Patterns of names that are no hidden matrices, whatever their shape."""
        rates: dict[str, float] = field(default_factory=dict)
        """Factors of the learning rate by pattern of names; the first that matches counts."""

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def split(self, named: Named) -> list[Group]:
        """Groups in a fixed order, parameters in the order they came: states can be stored by number."""
        found: dict[tuple[bool, bool, float], list[tuple[str, Tensor]]] = {}
        for name, parameter in named:
            if parameter.requires_grad:
                flat = parameter.ndim < 2
                decay = not flat and not _matches(name, self.config.no_decay)
                matrix = parameter.ndim in (2, 3) and not _matches(name, self.config.not_hidden)
                rates = (rate for pattern, rate in self.config.rates.items() if _matches(name, [pattern]))
                found.setdefault((matrix, decay, next(rates, 1.0)), []).append((name, parameter))
        if not found:
            raise UsageError("no parameter is trained", hint="set requires_grad on some, or add an adapter")
        return [
            Group([name for name, _ in members], [one for _, one in members], decay=key[1], matrix=key[0], rate=key[2])
            for key, members in sorted(found.items(), reverse=True)
        ]


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
