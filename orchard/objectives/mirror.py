"""Mirror descent with leave-one-out advantages: MDLOO, of Apple Intelligence Foundation Language Models (arXiv 2407.21075).

Of K answers to a prompt that the policy of a moment ago, πₖ, wrote, each is worth R = r - beta · log(πₖ / π_ref), and its
advantage A is R less the mean R of the others. Over a few updates from these answers what is maximised is

    E[(π / πₖ) · A] - gamma · KL(π ‖ πₖ)

so two things hold the policy: beta keeps it near the reference over the whole run, and gamma near the last iterate within a
round, in place of PPO's clip (mirror descent policy optimisation, arXiv 2005.09814). The divergence is taken token by token
at the answers that were written: with the ratio ρ = π / πₖ of a token, E over πₖ of ρ log ρ - ρ + 1, which is never
negative and whose mean is the divergence of that token's distribution.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from orchard.core.batch import GroupBatch
from orchard.core.config import BaseConfig, config
from orchard.core.errors import ConfigError, UnsupportedPair, UsageError
from orchard.objectives.aggregate import LeaveOneOut
from orchard.objectives.logprobs import frozen_log_probs
from orchard.objectives.policy import BOUND, PolicyGradient


class MirrorDescent(PolicyGradient):
    """Parts: those of `PolicyGradient`, and step_kl (the divergence that gamma bounds), reference_kl (log πₖ / π_ref of whole
    answers, where beta is above 0)."""

    per = {**PolicyGradient.per, "step_kl": "tokens", "reference_kl": "rows"}

    @config
    class Config(PolicyGradient.Config):
        aggregate: BaseConfig = field(default_factory=LeaveOneOut.Config)
        clip_low: float | None = None
        clip_high: float | None = None
        gamma: float = 0.1
        """How much the divergence from the policy that wrote the answers costs."""
        beta: float = 0.0
        """How much of the log-ratio of that policy to the reference is taken off an answer's reward."""

        def wire(self) -> None:
            PolicyGradient.Config.wire(self)
            for name in ("gamma", "beta"):
                if not 0 <= getattr(self, name) < float("inf"):
                    raise ConfigError(f"{name} is {getattr(self, name)}", hint="use a number from 0")

    def __init__(self, cfg: Config, *, reference: Any = None) -> None:
        """`reference`: the model to stay near, where `beta` or `kl` is above 0. It is only read."""
        if cfg.beta and reference is None:
            raise UsageError("beta is above 0 and there is no model to stay near", hint="build(reference=model), or 0")
        super().__init__(cfg, reference=reference)
        self.config: Any = cfg

    def _worth(self, batch: GroupBatch, behaviour: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if not self.config.beta:
            return batch.rewards, {}
        if batch.rewards.ndim > 1 and batch.rewards.shape[1] > 1:
            raise UnsupportedPair(
                "beta with rewards of several objectives", hint="add them up in the reward, or use kl"
            )
        chunk, temperature = self.config.chunk, self.config.temperature
        reference = frozen_log_probs(self.reference, batch.batch, chunk=chunk, temperature=temperature)
        away = behaviour.sum(-1) - reference.to(behaviour.dtype).sum(-1)
        return batch.rewards.reshape(-1).to(away.dtype) - self.config.beta * away, {"reference_kl": away}

    def _held(self, difference: Tensor) -> tuple[Tensor | float, dict[str, Tensor]]:
        near = moved(difference)
        return self.config.gamma * near, {"step_kl": near}


def moved(difference: Tensor) -> Tensor:
    """ρ log ρ - ρ + 1 of log-ratios: never negative, and 0 where nothing moved."""
    difference = difference.clamp(-BOUND, BOUND)
    return difference.exp() * difference - torch.expm1(difference)
