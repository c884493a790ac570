"""A sequence that runs on a choice, and makes it anew every so many tokens of its answer.

The prompt chooses before anything is read. After that the choice is made again by the last tokens of the text, at places that depend
on the sequence alone: not on how its tokens are cut into calls, nor on its company. What was chosen at which place is kept with the
keys and values, so that going back (a wrong guess) goes back to the choice of that place. Keys and values of earlier tokens stay
as they were made, by other units: what that costs is measured by the study `afm-3`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from orchard.core.context import Context
from orchard.core.errors import UsageError
from orchard.transforms.ifprune_choice import Choice


class Answering:
    """A model for one prompt, as an engine runs it: over a `Stored`, or over an `Instructed` with all its units in memory.

    `every`: tokens of the answer between two choices (None: the prompt's serves all). `margin`: by how much a group's score has to
    be better before it takes another's place. `window`: how many of the last tokens choose (None: all).
    """

    def __init__(
        self,
        model: Any,
        prompt: Sequence[int],
        *,
        budget: int | None = None,
        every: int | None = None,
        margin: float = 0.0,
        window: int | None = None,
        choice: Choice | None = None,
    ) -> None:
        for name, value in (("every", every), ("window", window)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}", hint="use a whole number from 1, or leave it out")
        self.model = model
        self.prompt = tuple(int(token) for token in prompt)
        self.every = every
        self.margin = margin
        self.window = window
        self.choice: Choice = model.choose(self.prompt[-window:] if window else self.prompt, budget) if choice is None else choice

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def device(self) -> torch.device:
        found: torch.device = self.model.device
        return found

    def cache(self, *, batch: int, length: int) -> Chosen:
        if batch != 1:
            raise UsageError(f"{batch} sequences cannot share one prompt's choice", hint="give each its own")
        return Chosen(self.model.cache(batch=batch, length=length), self.choice)

    def hidden(self, ids: Tensor, context: Context) -> Tensor:
        """What the head reads for ids [1, T], run by run where the choice changes between them."""
        cache = context.cache
        if not isinstance(cache, Chosen):
            return self._run(ids, context, self.choice)
        start, tokens = len(cache.seen), ids[0].tolist()
        parts, done = [], 0
        for at in [place - start for place in self._turns(start, start + len(tokens))] + [len(tokens)]:
            if at > done:
                parts.append(self._run(ids[:, done:at], _part(context, cache, done, at), cache.choice))
                cache.seen.extend(tokens[done:at])
                done = at
            if at < len(tokens):
                cache.turn(self._anew(cache))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def scores(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.model.scores(hidden)
        return out

    def _turns(self, start: int, stop: int) -> list[int]:
        """Places of tokens before which the choice is made anew."""
        if self.every is None:
            return []
        first = len(self.prompt)
        return [at for at in range(max(start, first + 1), stop) if (at - first) % self.every == 0]

    def _anew(self, cache: Chosen) -> Choice:
        seen = cache.seen[-self.window :] if self.window else cache.seen
        made: Choice = self.model.choose(seen, self.choice.budget)
        return made.after(cache.choice, self.margin)

    def _run(self, ids: Tensor, context: Context, choice: Choice) -> Tensor:
        units = {layer: weights.to(self.device) for layer, weights in choice.units().items()}
        out: Tensor = self.model.hidden(ids, replace(context, units=units))
        return out


class Chosen:
    """Stores of one sequence, with its tokens and its choices."""

    def __init__(self, cache: Any, choice: Choice) -> None:
        self.inner = cache
        self.seen: list[int] = []
        self.choices: list[tuple[int, Choice]] = [(0, choice)]
        """From which place on each serves."""

    @property
    def choice(self) -> Choice:
        return self.choices[-1][1]

    def turn(self, choice: Choice) -> None:
        self.choices.append((len(self.seen), choice))

    def rewind(self, lengths: Tensor) -> None:
        self.inner.rewind(lengths)
        left = int(lengths[0])
        del self.seen[left:]
        self.choices = [(at, choice) for at, choice in self.choices if not at or at < left]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _part(context: Context, cache: Chosen, start: int, stop: int) -> Context:
    """The context of some of its tokens. All are wanted: who asked for the last few takes them from the whole."""
    positions = context.positions[:, start:stop]
    return replace(context, positions=positions, cache=cache.inner, wanted=None, views={}, memo={})
