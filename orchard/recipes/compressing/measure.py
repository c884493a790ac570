"""What is measured after every step: how like the original the model still is, by kinds of text, and what it answers to tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchard.cache.codecs import Plain
from orchard.core.progress import progress
from orchard.evals.likeness import Likeness, likeness, together
from orchard.models.language.decoder import Decoder
from orchard.recipes.compressing.texts import Texts

Tasks = Callable[[Any], Mapping[str, float]]
"""`tasks(model) → scores`, 1 is best; the model is an `orchard.session.model.Model`."""


@dataclass(frozen=True)
class Measured:
    """By kind of text, and on all of it together."""

    kinds: dict[str, Likeness]
    tasks: dict[str, float] = field(default_factory=dict)

    @property
    def all(self) -> Likeness:
        return together(self.kinds.values())

    def values(self) -> dict[str, float | None]:
        """What rules speak of."""
        one = self.all
        mean = sum(self.tasks.values()) / len(self.tasks) if self.tasks else None
        return {"loss": one.ratio, "kl": one.kl, "agreement": one.agreement, "tasks": mean}

    def to_dict(self) -> dict[str, Any]:
        kinds = {kind: one.to_dict() for kind, one in self.kinds.items()}
        return {"kinds": kinds, "all": self.all.to_dict(), "tasks": dict(self.tasks)}

    @staticmethod
    def from_dict(facts: Any) -> Measured:
        kinds = {kind: Likeness.from_dict(one) for kind, one in facts["kinds"].items()}
        return Measured(kinds, {name: float(value) for name, value in facts["tasks"].items()})


def measured(
    model: Decoder, original: Decoder, texts: Texts, tasks: Tasks | None = None, asked: Any = None, rows: int = 8
) -> Measured:
    """Hold a model against the original on what is held out; `asked` is the model as tasks want it."""
    model.eval()
    kinds, codes = {}, any(not isinstance(store.codec, Plain.Config) for store in model.stores())
    with progress("measuring", total=len(texts.held)) as advance:
        for kind in texts.held:
            kinds[kind] = likeness(model, original, texts.held_out(kind, rows), stores=codes)
            advance()
    scores = {} if tasks is None else {name: float(value) for name, value in tasks(asked).items()}
    return Measured(kinds, scores)
