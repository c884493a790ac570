"""Speculation: guess the next few tokens cheaply, let the model read all guesses in one call, keep those that it agrees with.

A drafter guesses (`lookup`, `model`, `early`), the scheduler runs pending and guessed tokens together, a judge (`accept`,
`coarse`) says token by token what the answer is, and `adapt` says how many guesses are worth their cost. `speculator.Speculator`
is what the scheduler talks to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchard.generate.speculative.options import Speculation

if TYPE_CHECKING:
    from orchard.generate.speculative.drafting import Ask, Draft, Drafter
    from orchard.generate.speculative.speculator import Speculator

__all__ = ["Ask", "Draft", "Drafter", "Speculation", "Speculator"]


def __getattr__(name: str) -> Any:
    if name in ("Ask", "Draft", "Drafter"):
        from orchard.generate.speculative import drafting

        return getattr(drafting, name)
    if name == "Speculator":
        from orchard.generate.speculative.speculator import Speculator

        return Speculator
    raise AttributeError(f"module 'orchard.generate.speculative' has no attribute {name!r}")
