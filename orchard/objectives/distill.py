"""Distillation: a student learns the distribution that a teacher gives to the next token, not only the token.

The teacher is only read: it is never changed, gets no gradient, and should come in `eval()` mode. It is a model like the
student (its scores are then made chunk by chunk too), or a function `(ids, context) → scores [B, T, V]`, or one that gives
`TopScores`, so that scores which were stored once serve many runs.

With `top_k`, the teacher's k likeliest tokens count one by one and all others together as one outcome, for teacher and student
alike. What is computed is then the exact divergence between those two coarser distributions. It is never larger than the
divergence over the whole vocabulary (data-processing inequality), is equal to it where the tails are proportional, and says
nothing about how the student spreads the rest. With `top_k` of at least the vocabulary it is the whole divergence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchard.core.batch import Batch, Loss
from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.objectives.base import Objective, Places, hidden_of, one_of, places, positive, share, wide
from orchard.objectives.chunks import Sums, chunked_sums
from orchard.objectives.divergence import DIVERGENCES
from orchard.objectives.lm import cross_entropy
from orchard.objectives.states import distance, listening
from orchard.ops.forward_kl import forward_kl_with_slope


@dataclass(frozen=True)
class TopScores:
    """A teacher's likeliest tokens at each place, at the objective's own temperature: the rest cannot be tempered later."""

    log_probs: Tensor  # [B, T, K]
    tokens: Tensor  # [B, T, K], int64
    rest: Tensor
    """[B, T]: the log-probability of all other tokens together."""


class Distill(Configurable, Objective):
    """(1 - hard)·τ²·divergence + hard·cross-entropy, at every place that has a target. Multiplying by τ² keeps gradients of the
    same size at every temperature (arXiv 1503.02531). Parts: loss (the mixture), kl (without τ²), hard, tokens, correct; with
    `states`, also states."""

    per = {"tokens": "", "correct": "tokens"}

    @config
    class Config(BaseConfig):
        divergence: str = "forward"
        """One of divergence.py."""
        mix: float = 0.5
        temperature: float = 1.0
        hard: float = 0.0
        """The share of plain cross-entropy with the targets."""
        states: float = 0.0
        """Added with this factor: how far what the blocks give is from what the teacher's give, block by block (states.py)."""
        top_k: int | None = None
        chunk: int | None = 1024
        recompute: bool | None = None
        skip: bool = True

        def wire(self) -> None:
            one_of("divergence", self.divergence, DIVERGENCES)
            positive("temperature", self.temperature)
            share("mix", self.mix)
            share("hard", self.hard)
            if self.states < 0:
                raise ConfigError(f"states is {self.states}", hint="use a number from 0")
            for name, value in (("top_k", self.top_k), ("chunk", self.chunk)):
                if value is not None:
                    positive(name, value)

    def __init__(self, cfg: Config, *, teacher: Any) -> None:
        if not callable(teacher) and not hasattr(teacher, "hidden"):
            raise ConfigError(f"a {type(teacher).__name__} is no teacher", hint="give a model or a function of scores")
        self.config = cfg
        self.teacher = teacher

    def __call__(self, model: Any, batch: Batch) -> Loss:
        if not self.config.states:
            return self._loss(model, batch)
        with listening(model) as mine, listening(self.teacher) as theirs:
            loss = self._loss(model, batch)
        apart = distance(mine, theirs, batch.positions >= 0) * loss.weight
        parts = {**loss.parts, "states": apart.detach()}
        return Loss(value=loss.value + self.config.states * apart, weight=loss.weight, parts=parts)

    def _loss(self, model: Any, batch: Batch) -> Loss:
        found = places(model, batch, skip=self.config.skip)
        told, read = self._ask(batch, found)
        sums = chunked_sums(
            model,
            found.hidden,
            [found.targets, found.counted, found.weights, *told],
            lambda scores, targets, counted, weights, *t: self._measure(scores, targets, counted, weights, *read(*t)),
            chunk=self.config.chunk,
            recompute=self.config.recompute,
            slope=self._slope if self._known_slope() else None,
        )
        return Loss(value=sums.pop("value"), weight=sums.pop("weight"), parts=sums)

    def _known_slope(self) -> bool:
        """Whether the gradient can be written down: the whole forward divergence, from a teacher that scores chunk by chunk."""
        cfg = self.config
        plain = cfg.divergence == "forward" and cfg.top_k is None and (cfg.temperature == 1 or not cfg.hard)
        return plain and hasattr(self.teacher, "hidden")

    def _slope(
        self, scores: Tensor, targets: Tensor, counted: Tensor, weights: Tensor, read: Tensor
    ) -> tuple[Sums, Tensor]:
        """The same as `_measure`, with the gradient of "value" for the scores, which are overwritten by it."""
        with torch.no_grad():
            theirs = self.teacher.scores(read)
        _refuse_other_vocabulary(theirs, scores)
        hard, tau = self.config.hard, self.config.temperature
        nll_at_one = None if tau == 1 else cross_entropy(wide(scores), targets)[0]
        found = forward_kl_with_slope(scores, theirs, targets, weights, temperature=tau, hard=hard)
        nll = found.nll if nll_at_one is None else nll_at_one
        weights = weights.to(found.kl.dtype)
        value = (weights * ((1 - hard) * tau**2 * found.kl + hard * nll)).sum()
        sums = {
            "value": value,
            "weight": weights.sum(),
            "loss": value,
            "kl": (weights * found.kl).sum(),
            "hard": (weights * nll).sum(),
            "tokens": counted.sum(),
            "correct": ((found.best == targets) & counted).sum(),
        }
        return sums, found.slope

    @torch.no_grad()
    def _ask(self, batch: Batch, found: Places) -> tuple[list[Tensor], Callable[..., tuple[Tensor, ...]]]:
        """What the teacher says of each place, and how a chunk of it becomes log-probabilities (with tokens, if only some)."""
        if hasattr(self.teacher, "hidden"):
            return [_pick(hidden_of(self.teacher, batch), found)], lambda h: self._coarse(self.teacher.scores(h))
        said = self.teacher(batch.ids, Context(positions=batch.positions, documents=batch.documents))
        if isinstance(said, TopScores):
            joined = torch.cat([said.log_probs, said.rest[..., None]], -1)
            return [_pick(joined, found), _pick(said.tokens, found)], lambda p, tokens: (wide(p), tokens)
        return [_pick(said, found)], self._coarse

    @torch.no_grad()
    def _coarse(self, scores: Tensor) -> tuple[Tensor, ...]:
        """The teacher's log-probabilities [n, V]; or those of its likeliest and of the rest [n, K + 1], and which [n, K]."""
        p = (wide(scores) / self.config.temperature).log_softmax(-1)
        if self.config.top_k is None or self.config.top_k >= p.shape[-1]:
            return (p,)
        tokens = p.topk(self.config.top_k, dim=-1).indices
        return merged(p, tokens), tokens

    def _measure(
        self, scores: Tensor, targets: Tensor, counted: Tensor, weights: Tensor, p: Tensor, tokens: Tensor | None = None
    ) -> Sums:
        scores = wide(scores)
        weights = weights.to(scores.dtype)
        q = (scores / self.config.temperature).log_softmax(-1)
        if tokens is not None:
            q = merged(q, tokens)
        _refuse_other_vocabulary(p, q)
        distance = DIVERGENCES[self.config.divergence](p.to(q.dtype), q, self.config.mix)
        hard, _ = cross_entropy(scores if self.config.hard else scores.detach(), targets)
        mixture = (1 - self.config.hard) * self.config.temperature**2 * distance
        value = (weights * (mixture + self.config.hard * hard)).sum()
        with torch.no_grad():
            correct = (scores.argmax(-1) == targets) & counted
        return {
            "value": value,
            "weight": weights.sum(),
            "loss": value.detach(),
            "kl": (weights * distance.detach()).sum(),
            "hard": (weights * hard.detach()).sum(),
            "tokens": counted.sum(),
            "correct": correct.sum(),
        }


def merged(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of some tokens [n, K] one by one, and of all others together: [n, K + 1]."""
    rest = log_probs.scatter(-1, tokens, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([log_probs.gather(-1, tokens), rest], -1)


def _refuse_other_vocabulary(teacher: Tensor, student: Tensor) -> None:
    if teacher.shape != student.shape:
        raise UnsupportedPair(
            f"the teacher scores {teacher.shape[-1]} tokens and the student {student.shape[-1]}",
            hint="give both one vocabulary",
        )


def _pick(values: Tensor, found: Places) -> Tensor:
    flat = values.flatten(0, 1)
    return flat if found.index is None else flat.index_select(0, found.index)
