"""A decoder together with who chooses its hidden units: what is trained, and what choices are asked of.

    model.choose(ids)                      # a `Choice` for one prompt: scores of all groups, weights for any budget
    model.units(ids, at)                   # weights for a batch, with gradient: for training

Budgets are numbers of groups. One ranking serves all of them: the groups of a small budget are the first of a larger one, so that
growing a budget only adds. A model that is to serve several is trained with one drawn for each batch (slimmable networks,
arXiv 1812.08928). The temperature falls geometrically over `steps` updates, as in `prune_masks`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.core.errors import ConfigError, UsageError
from orchard.transforms.ifprune_choice import Choice
from orchard.transforms.ifprune_mlp import SubnetMLP
from orchard.transforms.ifprune_topk import chosen, soft_top_k


class Instructed(Configurable, nn.Module):
    """`decoder` has some `SubnetMLP`s, all with the same number of groups."""

    @config
    class Config(BaseConfig):
        decoder: BaseConfig = REQUIRED
        predictor: BaseConfig = REQUIRED
        budgets: tuple[int, ...] = REQUIRED
        """Numbers of groups that a choice may keep, the usual one first."""
        temperature: float = 1.0
        cold: float = 0.1
        steps: int = 500
        hard: float = 0.0
        """The share of the steps before units that are not chosen count for nothing; until then they count as λ says."""

        def wire(self) -> None:
            places = self.decoder.find(SubnetMLP)
            if not places:
                raise ConfigError("no layer of the decoder has units to choose", hint="apply IFPrune to it")
            counts = {node.groups for _, node in places}
            if len(counts) > 1:
                raise ConfigError(f"layers have {sorted(counts)} groups", hint="make them equally many")
            groups = counts.pop()
            self.predictor.layers, self.predictor.groups = len(places), groups  # type: ignore[attr-defined]
            if not self.budgets or not all(0 < budget <= groups for budget in self.budgets):
                raise ConfigError(
                    f"budgets of {self.budgets} of {groups} groups", hint=f"use numbers from 1 to {groups}"
                )
            if self.steps < 1 or not 0 < self.cold <= self.temperature:
                raise ConfigError("masks cool over steps ≥ 1 to a temperature above 0", hint="set steps and cold")

        @property
        def vocab(self) -> int:
            return int(self.decoder.vocab)  # type: ignore[attr-defined]

        @property
        def context(self) -> int:
            return int(self.decoder.context)  # type: ignore[attr-defined]

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.decoder: Any = cfg.decoder.build()
        self.predictor: nn.Module = cfg.predictor.build()
        self.updates = nn.Parameter(torch.zeros(1), requires_grad=False)
        self._seen: Tensor | None = None

    # What any model can do --------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.decoder.dtype
        return found

    @property
    def device(self) -> torch.device:
        found: torch.device = self.decoder.device
        return found

    def forward(self, ids: Tensor, context: Context | None = None) -> Tensor:
        scores: Tensor = self.decoder(ids, context)
        return scores

    def hidden(self, ids: Tensor, context: Context) -> Tensor:
        out: Tensor = self.decoder.hidden(ids, context)
        return out

    def scores(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.decoder.scores(hidden)
        return out

    def cache(self, *, batch: int, length: int) -> Any:
        return self.decoder.cache(batch=batch, length=length)

    # Choosing ---------------------------------------------------------------------------------------------------------

    @property
    def done(self) -> float:
        """How much of the cooling is over, 0 to 1."""
        return min(1.0, float(self.updates.detach()) / self.config.steps)

    @property
    def warmth(self) -> float:
        """The temperature just now."""
        fall = self.config.cold / self.config.temperature
        return float(self.config.temperature * fall**self.done)

    def units(
        self, ids: Tensor, at: Tensor, spans: Tensor | None = None, budget: int | None = None
    ) -> dict[int, Tensor]:
        """Weights of groups by layer. `at` [B, n]: the places up to which tokens are looked at, n times; `spans` [B, T]: which of
        these n choices each token uses (None: the only one). In training, a budget is drawn unless one is named."""
        if self.training:
            self._count()
        made = self.weigh(self.predictor(ids, at, self.decoder), self._budget(budget))
        if spans is None:
            return {layer: made[:, :, layer] for layer in range(made.shape[2])}
        rows = torch.arange(len(ids), device=ids.device)[:, None]
        return {layer: made[rows, spans, layer] for layer in range(made.shape[2])}

    def weigh(self, scores: Tensor, budget: int) -> Tensor:
        """How much each group counts [..., groups]; 0 for those that are not chosen."""
        if self.training and self.done < self.config.hard:
            return soft_top_k(scores.float(), budget, self.warmth)
        return chosen(scores.float(), budget, self.warmth)

    @torch.no_grad()
    def choose(self, ids: Any, budget: int | None = None) -> Choice:
        """The choice for one prompt, or for the text so far."""
        tokens = torch.as_tensor(ids, device=self.device).reshape(1, -1)
        if not tokens.numel():
            raise UsageError("a prompt without tokens chooses nothing", hint="give at least one token")
        at = torch.tensor([[tokens.shape[1] - 1]], device=tokens.device)
        scores = self.predictor(tokens, at, self.decoder)[0, 0].float()
        return Choice(scores.cpu(), self._budget(budget, usual=True), self.warmth)

    def _budget(self, asked: int | None, usual: bool = False) -> int:
        budgets = self.config.budgets
        if asked is not None:
            return asked
        if usual or not self.training or len(budgets) == 1:
            return int(budgets[0])
        return int(budgets[int(torch.randint(len(budgets), ()))])

    @torch.no_grad()
    def _count(self) -> None:
        """Updates are counted by looking whether scores' own numbers changed since the last pass: micro-batches do not count
        twice. Their values are compared, because fused optimisers change parameters without raising their version."""
        now = list(self.predictor.parameters())[-1].detach()
        if self._seen is not None and not torch.equal(now, self._seen):
            self.updates.add_(1)
        self._seen = now.clone()
