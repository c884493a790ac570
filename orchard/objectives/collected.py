"""Losses that layers leave behind on their way (`Context.collect`), such as the balance of a mixture's experts.

They are added to any objective without its knowing: the wrapper shows it the model with `hidden` watched, and afterwards takes
what was left in the contexts that went through. A teacher or a reference is not watched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from orchard.core.batch import Loss
from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.core.errors import ConfigError
from orchard.objectives.base import Objective


class WithCollected(Configurable, Objective):
    """objective + Σ weight · mean over layers of what they left under that name, for each unit of the objective's own weight.

    What layers leave is a mean over the tokens of one forward pass and not a sum, so for this share alone two micro-batches
    come near one batch without being equal to it.
    """

    @config
    class Config(BaseConfig):
        objective: BaseConfig = REQUIRED
        collected: dict[str, float] = REQUIRED
        """Name in `Context.collected` → how much of it is added, such as {"moe.balance": 0.01}."""

    def __init__(self, cfg: Config, **runtime: Any) -> None:
        """`runtime` (a teacher, a reference) goes to the objective."""
        self.config = cfg
        self.objective: Objective = cfg.objective.build(**runtime)
        self.per = self.objective.per  # type: ignore[misc]

    def __call__(self, model: Any, batch: Any) -> Loss:
        watched = _Watched(model)
        loss = self.objective(watched, batch)
        value, parts = loss.value, dict(loss.parts)
        amount = loss.weight.detach()
        for name, factor in self.config.collected.items():
            mean = torch.stack(self._left(name, watched.contexts)).mean().to(value.dtype)
            value = value + factor * amount * mean
            parts[name] = amount * mean.detach()
        return Loss(value=value, weight=loss.weight, parts=parts)

    def _left(self, name: str, contexts: list[Context]) -> list[Tensor]:
        found = [value for context in contexts for value in context.collected.get(name, ())]
        if not found:
            known = sorted({key for context in contexts for key in context.collected})
            raise ConfigError(
                f"no layer left anything called {name!r}",
                hint="there is " + ", ".join(known) if known else "this model's layers leave nothing behind",
            )
        return found


def with_collected(objective: BaseConfig, collected: Mapping[str, float]) -> WithCollected.Config:
    """The same objective with what layers left added: `with_collected(NextToken.Config(), {"moe.balance": 0.01})`."""
    return WithCollected.Config(objective=objective, collected=dict(collected))


class _Watched:
    """A model whose contexts are remembered."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.contexts: list[Context] = []

    def hidden(self, ids: Tensor, context: Context) -> Tensor:
        self.contexts.append(context)
        out: Tensor = self._model.hidden(ids, context)
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
