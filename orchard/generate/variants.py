"""Other weights over the same base, by name: what requests with an adapter are run by, in the slots of the base's engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from orchard.core.errors import UsageError

R = TypeVar("R")


class Variants(Mapping[str, R], Generic[R]):
    """The variants of one runner, which is not held here: the two would keep each other alive."""

    def __init__(self, facts: Any) -> None:
        """`facts`: what another must have in common with it to share its slots: stores, vocabulary, context."""
        self._facts = facts
        self._others: dict[str, R] = {}

    def add(self, name: str, other: R, facts: Any) -> None:
        if facts != self._facts:
            raise UsageError(
                f"{name!r} cannot be a variant of this model: its stores, its vocabulary or its context are others",
                hint="give it an engine of its own",
            )
        self._others[name] = other

    def drop(self, name: str) -> None:
        """Forget one. Sequences that have begun with it go on."""
        self.find(name)
        del self._others[name]

    def find(self, name: str) -> R:
        if name not in self._others:
            known = ", ".join(map(repr, self._others)) or "none"
            raise UsageError(f"no adapter called {name!r}", hint=f"known here: {known}; `add_variant` adds one")
        return self._others[name]

    def __getitem__(self, name: str) -> R:
        return self._others[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._others)

    def __len__(self) -> int:
        return len(self._others)
