"""Learning from which of two answers was preferred: DPO and its kin.

Each is a function of the log-probabilities of both answers, for most against those under a reference model (the model before
training). One answer per row; prompts are masked by targets of -100. With c and r the log-probabilities of the chosen and
rejected answer, c₀ and r₀ under the reference, |c| and |r| their lengths, and h = β((c - c₀) - (r - r₀)):

| name    | loss of a pair                                                        | source           |
|---------|-----------------------------------------------------------------------|------------------|
| `dpo`   | -log σ(h); smoothed: -(1-ε) log σ(h) - ε log σ(-h)                     | arXiv 2305.18290 |
| `ipo`   | ((c - c₀) - (r - r₀) - 1/(2β))²                                       | arXiv 2310.12036 |
| `hinge` | max(0, 1 - h): SLiC's loss (2305.10425) on DPO's margin                | arXiv 2309.06657 |
| `simpo` | -log σ(β(c/|c| - r/|r|) - γ), no reference                            | arXiv 2405.14734 |
| `orpo`  | -c/|c| - β log σ(log-odds(c/|c|) - log-odds(r/|r|)), no reference      | arXiv 2403.07691 |

Smoothing (labels that are wrong with chance ε, as in cDPO) applies to `dpo` and `simpo`. IPO here sums log-probabilities over
tokens, as its paper does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from orchard.core.batch import Loss, PairBatch
from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import ConfigError, UsageError
from orchard.objectives.base import Objective, one_of, positive, wide
from orchard.objectives.logprobs import frozen_log_probs, lengths, row_log_probs


@dataclass(frozen=True)
class Pair:
    """Rewards [B] of both answers by the loss's own measure: log-probabilities, relative or averaged, times beta."""

    chosen: Tensor
    rejected: Tensor

    @property
    def margin(self) -> Tensor:
        return self.chosen - self.rejected


class Preference(Configurable, Objective):
    """The losses above, summed over pairs. Parts: loss, pairs, margin, accuracy (pairs in the right order), chosen, rejected
    (rewards), chosen_log_prob, rejected_log_prob. A pair without targets on either side counts for nothing."""

    per = {"pairs": ""}

    @config
    class Config(BaseConfig):
        loss: str = "dpo"
        beta: float = 0.1
        smoothing: float = 0.0
        gamma: float = 0.5
        """The margin that SimPO asks for."""
        chunk: int | None = 1024

        def wire(self) -> None:
            one_of("preference loss", self.loss, LOSSES)
            positive("beta", self.beta)
            if not 0 <= self.smoothing < 0.5:
                raise ConfigError(
                    f"smoothing is {self.smoothing}: labels would be wrong more often than right", hint="use 0 to 0.5"
                )
            if self.chunk is not None:
                positive("chunk", self.chunk)

    def __init__(self, cfg: Config, *, reference: Any = None) -> None:
        """`reference`: the model to stay near, used where a batch does not bring its log-probabilities. It is only read."""
        self.config = cfg
        self.reference = reference

    def __call__(self, model: Any, batch: PairBatch) -> Loss:
        chunk = self.config.chunk
        chosen, rejected = (row_log_probs(model, side, chunk=chunk) for side in (batch.chosen, batch.rejected))
        pair = self._rewards(chosen, rejected, batch)
        losses = LOSSES[self.config.loss].loss(self.config, pair)
        counted = (lengths(batch.chosen) + lengths(batch.rejected) > 0).to(losses.dtype)
        value = (losses * counted).sum()

        def total(x: Tensor) -> Tensor:
            return (x.detach() * counted).sum()

        parts = {
            "loss": value.detach(),
            "pairs": counted.sum(),
            "margin": total(pair.margin),
            "accuracy": total((pair.margin > 0).to(counted.dtype)),
            "chosen": total(pair.chosen),
            "rejected": total(pair.rejected),
            "chosen_log_prob": total(chosen),
            "rejected_log_prob": total(rejected),
        }
        return Loss(value=value, weight=counted.sum(), parts=parts)

    def _rewards(self, chosen: Tensor, rejected: Tensor, batch: PairBatch) -> Pair:
        if LOSSES[self.config.loss].relative:
            first, second = (wide(x).to(chosen.dtype) for x in self._reference(batch))
            return Pair(self.config.beta * (chosen - first), self.config.beta * (rejected - second))
        counts = (lengths(side).clamp_min(1) for side in (batch.chosen, batch.rejected))
        first, second = (x / count for x, count in zip((chosen, rejected), counts))
        return Pair(self.config.beta * first, self.config.beta * second)

    def _reference(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        if batch.reference is not None:
            return batch.reference
        if self.reference is None:
            raise UsageError(
                f"{self.config.loss} compares with a reference, and neither the batch nor the objective has one",
                hint="build(reference=model), or store log-probabilities with the data, or use simpo or orpo",
            )
        first, second = (
            frozen_log_probs(self.reference, side, chunk=self.config.chunk).sum(-1)
            for side in (batch.chosen, batch.rejected)
        )
        return first, second


@dataclass(frozen=True)
class Kind:
    """A loss of pairs, and whether it compares with a reference."""

    loss: Callable[[Preference.Config, Pair], Tensor]
    relative: bool


def _logistic(cfg: Preference.Config, margin: Tensor) -> Tensor:
    return -(1 - cfg.smoothing) * logsigmoid(margin) - cfg.smoothing * logsigmoid(-margin)


def _orpo(cfg: Preference.Config, pair: Pair) -> Tensor:
    chosen, rejected = pair.chosen / cfg.beta, pair.rejected / cfg.beta  # log-probabilities per token
    odds = (chosen - rejected) - (_log_complement(chosen) - _log_complement(rejected))
    return -chosen - cfg.beta * logsigmoid(odds)


def _log_complement(log_prob: Tensor) -> Tensor:
    """log(1 - p), bounded where p is 1 (an empty answer, or one that is certain)."""
    return torch.log(-torch.expm1(log_prob.clamp_max(-1e-7)))


LOSSES: dict[str, Kind] = {
    "dpo": Kind(lambda cfg, pair: _logistic(cfg, pair.margin), relative=True),
    "ipo": Kind(lambda cfg, pair: (pair.margin / cfg.beta - 1 / (2 * cfg.beta)).square(), relative=True),
    "hinge": Kind(lambda cfg, pair: relu(1 - pair.margin), relative=True),
    "simpo": Kind(lambda cfg, pair: _logistic(cfg, pair.margin - cfg.gamma), relative=False),
    "orpo": Kind(_orpo, relative=False),
}
