"""Learned masks over the hidden units of an MLP: a top-k that can be trained, then a hard one.

The relaxed top-k of scores s is the m in [0, 1]ⁿ with Σ m = k that maximises m · s + τ · entropy(m), where each m is a coin
of its own. Its solution is m = σ((s - a) / τ), with the one number a that makes the sum k; for τ → 0 it is the hard top-k.
Conditional adapters choose tokens with a top-k of this kind (arXiv 2304.04947), and the first generation of Apple's foundation
models chose hidden units with one (arXiv 2407.21075). Here a is found by search, and its gradient by the implicit
function: dm_i/ds_j = w_i (δ_ij - w_j / Σ w) / τ, w = m (1 - m). Whatever one unit gains, others lose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from orchard.core.config import REQUIRED, config
from orchard.core.context import Context
from orchard.core.errors import ConfigError
from orchard.nn.mlp import GatedMLP

ROUNDS, POINTS = 4, 65
"""The threshold is looked for among so many points between two bounds, then between two neighbours of these, and so on;
Newton's method does the rest."""
POLISH = 2


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, k: int, temperature: float) -> Tensor:
        low, high = scores.min() - 40 * temperature, scores.max() + 40 * temperature
        points = torch.linspace(0, 1, POINTS, dtype=scores.dtype, device=scores.device)
        for _ in range(ROUNDS):
            tried = low + (high - low) * points
            sums = torch.sigmoid((scores - tried[:, None]) / temperature).sum(1)
            last = ((sums > k).sum() - 1).clamp(0, POINTS - 2)
            low, high = tried[last], tried[last + 1]
        middle = (low + high) / 2
        for _ in range(POLISH):
            mask = torch.sigmoid((scores - middle) / temperature)
            fall = (mask * (1 - mask)).sum().clamp_min(torch.finfo(mask.dtype).tiny) / temperature
            middle = torch.clamp(middle + (mask.sum() - k) / fall, low, high)
        mask = torch.sigmoid((scores - middle) / temperature)
        ctx.save_for_backward(mask)
        ctx.temperature = temperature
        return mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        slope = mask * (1 - mask)
        mean = (slope * grads[0]).sum() / slope.sum().clamp_min(torch.finfo(mask.dtype).tiny)
        return slope * (grads[0] - mean) / ctx.temperature, None, None


def relaxed_top_k(scores: Tensor, k: int, temperature: float) -> Tensor:
    """Numbers in [0, 1] that sum to k, near 1 for the k largest scores, the nearer the colder. With gradient."""
    if not 0 < k <= len(scores) or not temperature > 0:
        raise ConfigError(f"no top {k} of {len(scores)} at temperature {temperature}", hint="keep some, above 0")
    if k == len(scores):
        return torch.ones_like(scores)
    made: Tensor = _TopK.apply(scores, k, temperature)
    return made


class MaskedMLP(GatedMLP):
    """A gated MLP whose hidden units are weighed by a trained mask that keeps `keep` of them. For training only: `Prune.finish`
    makes a smaller MLP of it.

    The temperature falls geometrically from `temperature` to `cold` over `steps` updates of the scores, so that in the end the
    mask is as good as hard. Updates are counted by looking whether the scores changed since the last pass: micro-batches and
    recomputed layers do not count twice.
    """

    @config
    class Config(GatedMLP.Config):
        keep: int = REQUIRED
        steps: int = 500
        temperature: float = 0.5
        cold: float = 0.02
        speed: float = 30.0
        """Scores are this times their parameter: a learning rate that suits weights is slow for masks."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        if not 0 < cfg.keep <= cfg.hidden_dim:
            raise ConfigError(f"{cfg.keep} of {cfg.hidden_dim} units cannot stay", hint="keep some of them")
        if cfg.steps < 1 or not 0 < cfg.cold <= cfg.temperature:
            raise ConfigError("a mask cools over steps ≥ 1 to a temperature above 0", hint="set steps and cold")
        self.config: Any = cfg
        self.mask_scores = nn.Parameter(torch.zeros(cfg.hidden_dim))
        # A parameter that nothing trains: models are carried from tree to tree by their parameters.
        self.mask_updates = nn.Parameter(torch.zeros(1), requires_grad=False)
        self._seen: Tensor | None = None

    @property
    def begin(self) -> dict[str, Callable[[tuple[int, ...]], Tensor]]:
        """What the mask begins with; a checkpoint of the model has none."""
        return {"mask_scores": torch.zeros, "mask_updates": torch.zeros}

    @property
    def warmth(self) -> float:
        """The temperature just now."""
        done = min(1.0, float(self.mask_updates.detach()) / self.config.steps)
        fall = float(self.config.cold / self.config.temperature)
        return float(self.config.temperature) * fall**done

    def mask(self) -> Tensor:
        """[hidden_dim], float32."""
        return relaxed_top_k(self.mask_scores.float() * self.config.speed, self.config.keep, self.warmth)

    def kept(self) -> Tensor:
        """The units of the hard top-k, in order."""
        best = self.mask_scores.detach().float().argsort(descending=True, stable=True)[: self.config.keep]
        return best.sort().values

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.training:
            self._count()
        hidden = self.act(self.gate(x)) * self.up(x)
        y: Tensor = self.down(hidden * self.mask().to(hidden.dtype))
        return y

    @torch.no_grad()
    def _count(self) -> None:
        # By values: torch's fused optimizers change parameters without counting a version.
        scores = self.mask_scores.detach()
        if self._seen is not None and not torch.equal(scores, self._seen):
            self.mask_updates.add_(1)
        self._seen = scores.clone()
