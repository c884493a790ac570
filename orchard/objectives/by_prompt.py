"""The next token by a part of the model that the text before it has chosen (instruction-following pruning, arXiv 2501.02086).

Two ways to say what "before" is, the two stages of that paper. Answers after prompts (`span=None`): a row's units are chosen by
its tokens before the first that is learnt from, and no token of an answer is looked at. Running text (`span=64`): rows are cut
into spans of so many tokens, the units of a span are chosen by everything before it, and those of the first by its first few
tokens (`first`), which are not learnt from. There is one pass, so that a span reads keys and values that were made with earlier
choices, as when a choice is made anew while generating.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from orchard.core.batch import IGNORED, Batch, Loss
from orchard.core.config import config
from orchard.core.context import Context
from orchard.core.errors import ConfigError
from orchard.objectives.lm import NextToken


class ByPrompt(NextToken):
    """`NextToken` of a model that has `units` (`orchard.transforms.ifprune_model.Instructed`)."""

    @config
    class Config(NextToken.Config):
        span: int | None = None
        first: int | None = None
        """Tokens that the first choice is made by; None: a whole span."""
        budget: int | None = None
        """None: as the model says; in training it draws one for each batch."""

        def wire(self) -> None:
            NextToken.Config.wire(self)
            if self.span is not None and self.span < 1:
                raise ConfigError(f"spans of {self.span} tokens", hint="use a number from 1, or None for answers")
            if self.first is not None and not 0 < self.first <= (self.span or 0):
                raise ConfigError(f"the first {self.first} tokens of a span", hint="use a number from 1 to the span")

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.config: Any = cfg

    def __call__(self, model: Any, batch: Batch) -> Loss:
        if self.config.span is None:
            units = model.units(batch.ids, last_of_prompt(batch.targets)[:, None], budget=self.config.budget)
        else:
            at, spans, batch = in_spans(batch, self.config.span, self.config.first)
            units = model.units(batch.ids, at, spans, budget=self.config.budget)
        return super().__call__(Bound(model, units), batch)


def last_of_prompt(targets: Tensor) -> Tensor:
    """[B]: the last token of each row that is known before the answer begins. The target there is the answer's first token."""
    counted = targets != IGNORED
    if not bool(counted.any(1).all()):
        raise ConfigError("a row has no answer, so that it is not known what its prompt is", hint="leave such rows out")
    return counted.long().argmax(1)


def in_spans(batch: Batch, span: int, first: int | None = None) -> tuple[Tensor, Tensor, Batch]:
    """Where each choice looks up to [B, n], which choice each token uses [B, T], and the batch without what has no choice yet."""
    rows, length = batch.ids.shape
    if length <= span:
        raise ConfigError(f"rows of {length} tokens have no second span of {span}", hint="use shorter spans")
    device, first = batch.ids.device, span if first is None else first
    starts = [first] * (first < span) + list(range(span, length, span))
    places = torch.arange(length, device=device)
    spans = (torch.tensor(starts[1:], device=device)[:, None] <= places).sum(0)
    targets = batch.targets.clone()
    targets[:, : first - 1] = IGNORED  # the choice they use has looked at what they are to say
    at = torch.tensor(starts, device=device) - 1
    return at.expand(rows, -1), spans.expand(rows, -1), replace(batch, targets=targets, full=False)


class Bound:
    """A model whose passes use these units."""

    def __init__(self, model: Any, units: dict[int, Tensor]) -> None:
        self._model = model
        self._units = units

    def hidden(self, ids: Tensor, context: Context) -> Tensor:
        hidden: Tensor = self._model.hidden(ids, replace(context, units=self._units))
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
