"""Where a mixture's experts are computed: by default from the weights of the mixture itself.

`MoE.experts` may be set to anything else that fills this contract, such as experts that live on disk and are brought in when they
are asked for. Routing, sorting and adding up stay with the mixture.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orchard.core.context import Context
from orchard.nn.formats import Plain
from orchard.nn.linear import GroupedLinear
from orchard.nn.lowering import hooked
from orchard.nn.moe.router import Routed


class Experts(ABC):
    """The experts of one mixture. Shapes: P pairs of a token and an expert, E experts."""

    def choose(self, routing: Routed, context: Context) -> Routed:
        """The routing to go by, after the router has spoken: experts that are not at hand may be left out or exchanged here."""
        return routing

    @abstractmethod
    def run(self, tokens: Tensor, counts: Tensor, context: Context) -> Tensor:
        """What the experts make of their tokens: [P, dim] → [P, dim]. Tokens are sorted by expert: the first `counts[0]` belong
        to expert 0, the next `counts[1]` to expert 1, and so on. counts: int64 [E], where the tokens are."""


def at_once(part: Any) -> bool:
    """Whether a part's experts may be computed together: plain weights, and no hooks that wait for single experts."""
    return type(part) is GroupedLinear and type(part.format) is Plain and hooked(part) is None


class Own(Experts):
    """Experts whose weights are the mixture's own grouped ones (or whatever stands in their place)."""

    def __init__(self, gate: Any, up: Any, down: Any, act: Callable[[Tensor], Tensor]) -> None:
        self.gate, self.up, self.down, self.act = gate, up, down, act

    def run(self, tokens: Tensor, counts: Tensor, context: Context) -> Tensor:
        """All experts at once, or one after another where their weights are packed or somebody looks at what goes in."""
        if not all(at_once(part) for part in (self.gate, self.up, self.down)):
            return self.loop(tokens, counts)
        hidden = self.act(self.gate.grouped(tokens, counts)) * self.up.grouped(tokens, counts)
        out: Tensor = self.down.grouped(hidden, counts)
        return out

    def loop(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """The plain twin: expert by expert."""
        results, start = [], 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                rows = tokens[start : start + count]
                hidden = self.act(self.gate(rows, expert)) * self.up(rows, expert)
                results.append(self.down(hidden, expert))
                start += count
        return torch.cat(results)
