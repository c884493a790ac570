"""Policy gradients: answers that were better than others of their group become likelier.

All that is needed is in the batch (`GroupBatch`): the tokens, what their log-probabilities were when they were sampled, and
rewards. Whether the sampler ran a moment ago or several steps behind makes no difference here, so an asynchronous rollout
needs no other objective.

With the ratio ρ of new to old probability and the advantage A, a token's loss is -min(ρA, clip(ρ, 1 - low, 1 + high)·A) (PPO,
arXiv 1707.06347; different bounds: DAPO, arXiv 2503.14476), plus kl times an estimate of the divergence from a reference:
e^d - d - 1 with d the reference's log-probability less the model's ("k3", as in GRPO, arXiv 2402.03300). `ratio="sequence"`
takes one ratio for a whole answer, the geometric mean of its tokens' (GSPO, arXiv 2507.18071).
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from orchard.core.batch import IGNORED, GroupBatch, Loss
from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import ConfigError, UsageError
from orchard.objectives.aggregate import Aggregate, GroupNormal
from orchard.objectives.base import Objective, one_of, positive, wide
from orchard.objectives.logprobs import frozen_log_probs, token_log_probs

BOUND = 20.0
"""Log-ratios beyond this are cut: e^20 of anything is no step to take, and e^90 is no float32."""


class PolicyGradient(Configurable, Objective):
    """Parts: loss, tokens, rows, ratio, clipped (tokens whose gradient the clip took away), kl (k3 against the reference),
    behaviour_kl (k3 against the sampler: how stale the data is), entropy (-log p of the sampled tokens, an estimate), reward,
    advantage (its magnitude), staleness (updates since the answers were written, where the batch knows)."""

    per = {
        **dict.fromkeys(("ratio", "clipped", "kl", "behaviour_kl", "entropy"), "tokens"),
        **dict.fromkeys(("reward", "advantage", "staleness"), "rows"),
        **dict.fromkeys(("tokens", "rows"), ""),
    }

    @config
    class Config(BaseConfig):
        aggregate: BaseConfig = field(default_factory=GroupNormal.Config)
        clip_low: float | None = 0.2
        """How far below 1 a ratio is followed; None: as far as it goes."""
        clip_high: float | None = 0.2
        ratio: str = "token"
        """"token" or "sequence"."""
        normalize: str = "token"
        """"token": every token counts the same, so long answers count more; "sequence": every answer counts the same (GRPO);
        "constant": tokens add up and answers are counted, each as `length` tokens (Dr. GRPO)."""
        length: int | None = None
        kl: float = 0.0
        temperature: float = 1.0
        """The temperature that answers were sampled at."""
        chunk: int | None = 1024

        def wire(self) -> None:
            one_of("ratio", self.ratio, ("token", "sequence"))
            one_of("normalisation", self.normalize, ("token", "sequence", "constant"))
            positive("temperature", self.temperature)
            if (self.normalize == "constant") != (self.length is not None):
                raise ConfigError(
                    'normalize="constant" and length belong together', hint="set length to the longest answer allowed"
                )
            if self.length is not None:
                positive("length", self.length)

    def __init__(self, cfg: Config, *, reference: Any = None) -> None:
        """`reference`: the model to stay near, where `kl` is above 0. It is only read."""
        if cfg.kl and reference is None:
            raise UsageError("kl is above 0 and there is no model to stay near", hint="build(reference=model), or kl=0")
        self.config = cfg
        self.aggregate: Aggregate = cfg.aggregate.build()
        self.reference = reference

    def __call__(self, model: Any, batch: GroupBatch) -> Loss:
        cfg, rows = self.config, batch.batch
        counted = rows.targets != IGNORED
        log_probs = token_log_probs(model, rows, chunk=cfg.chunk, temperature=cfg.temperature)
        behaviour = torch.where(counted, wide(batch.behaviour).to(log_probs.dtype), 0)  # may hold anything in between
        worth, told = self._worth(batch, behaviour)
        advantage = self.aggregate(worth, batch.groups).to(log_probs.dtype)
        ratio = self._ratio(log_probs - behaviour, counted)
        followed, clipped = self._follow(ratio, advantage[:, None])
        held, holding = self._held(log_probs - behaviour)
        losses, estimate = held - followed, torch.zeros_like(log_probs)
        if cfg.kl:
            other = frozen_log_probs(self.reference, rows, chunk=cfg.chunk, temperature=cfg.temperature)
            estimate = k3(other.to(log_probs.dtype) - log_probs)
            losses = losses + cfg.kl * estimate
        share = (
            counted.to(losses.dtype) if rows.weights is None else torch.where(counted, rows.weights, 0).to(losses.dtype)
        )
        value, weight = self._total(losses, share)
        real = counted.any(-1)

        def total(x: Tensor, where: Tensor) -> Tensor:
            return torch.where(where, x.detach(), 0).sum()

        rewards = batch.rewards if batch.rewards.ndim == 1 else batch.rewards.sum(-1)
        parts = {
            "loss": value.detach(),
            "tokens": counted.sum(),
            "rows": real.sum(),
            "ratio": total(ratio, counted),
            "clipped": total(clipped.float(), counted),
            "kl": total(estimate, counted),
            "behaviour_kl": total(k3(behaviour - log_probs), counted),
            "entropy": total(-log_probs, counted),
            "reward": total(wide(rewards), real),
            "advantage": total(advantage.abs(), real),
        }
        parts |= {name: total(each, real) for name, each in told.items()}
        parts |= {name: total(each, counted) for name, each in holding.items()}
        if batch.ages is not None:
            parts["staleness"] = total(batch.ages.double(), real)
        return Loss(value=value, weight=weight, parts=parts)

    def _worth(self, batch: GroupBatch, behaviour: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What answers are compared by, and what else to report of each row [B]."""
        return batch.rewards, {}

    def _held(self, difference: Tensor) -> tuple[Tensor | float, dict[str, Tensor]]:
        """What each token's loss is raised by for having moved, from log-ratios, and what to report of each token [B, T]."""
        return 0.0, {}

    def _ratio(self, difference: Tensor, counted: Tensor) -> Tensor:
        """[B, T], from log-ratios that are 0 where nothing counts."""
        if self.config.ratio == "sequence":
            mean = difference.sum(-1, keepdim=True) / counted.sum(-1, keepdim=True).clamp_min(1)
            difference = mean.expand_as(difference)
        return difference.clamp(-BOUND, BOUND).exp()

    def _follow(self, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """min(ρA, clip(ρ)A), and where the clip decided."""
        low = 0.0 if self.config.clip_low is None else 1 - self.config.clip_low
        high = None if self.config.clip_high is None else 1 + self.config.clip_high
        free, bound = ratio * advantage, ratio.clamp(low, high) * advantage
        return torch.minimum(free, bound), bound < free

    def _total(self, losses: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """The sum that is minimised, and what it is a sum over."""
        if self.config.normalize == "token":
            return (losses * share).sum(), share.sum()
        of_row = share.sum(-1)
        real = (of_row > 0).to(share.dtype)
        if self.config.normalize == "sequence":
            per_row = (losses * share).sum(-1) / torch.where(of_row > 0, of_row, 1)
            return per_row.sum(), real.sum()
        assert self.config.length is not None
        return (losses * share).sum(), real.sum() * self.config.length


def k3(difference: Tensor) -> Tensor:
    """An estimate of the divergence that is never negative: e^d - d - 1."""
    difference = difference.clamp(-BOUND, BOUND)
    return torch.expm1(difference) - difference
