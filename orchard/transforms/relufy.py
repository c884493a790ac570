"""Relufication: feed-forward layers whose hidden units are mostly silent, because ReLU says exactly nothing below zero.

    relu = Relufy()
    model = relu.apply(model)                                 # ReLU for SiLU or GELU; the rest stays bit for bit
    train(model)                                              # it has to get used to that: a few percent of pretraining
    model = relu.finish(model)

ReLU Strikes Back (arXiv 2310.04564) showed that a trained model takes this well after some more training, and that nine of ten
hidden units are then silent at each token. In a gated layer the gate decides: down(relu(gate(x)) · up(x)).

With `watched`, layers leave how active they are in `Context.collected` under "mlp.activity" while they are trained, for an
objective to press on: `with_collected(NextToken.Config(), {"mlp.activity": 0.3})`. It is no L1 norm, which a layer can lower by
small gates and large weights behind them, but a smooth count of active units, which does not change with their scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from orchard.core.batch import Batch
from orchard.core.config import config
from orchard.core.context import Context
from orchard.core.errors import UnsupportedPair
from orchard.nn.feed_forward import FeedForward
from orchard.nn.mlp import GatedMLP
from orchard.transforms.base import Tell, Transform, silent
from orchard.transforms.reformat import learning_like

M = TypeVar("M", bound=nn.Module)
ACTIVITY = "mlp.activity"
SOFTNESS = 0.25
"""How far from zero a unit still counts in part, in standard deviations of what comes before the ReLU."""


class WatchedMLP(GatedMLP):
    """A gated MLP that tells how many of its units are active."""

    @config
    class Config(GatedMLP.Config):
        pass

    def forward(self, x: Tensor, context: Context) -> Tensor:
        gate = self.gate(x)
        if self.training:
            context.collect(ACTIVITY, soft_activity(gate, context))
        y: Tensor = self.down(self.act(gate) * self.up(x))
        return y


class WatchedFeedForward(FeedForward):
    """The same without a gate."""

    @config
    class Config(FeedForward.Config):
        pass

    def forward(self, x: Tensor, context: Context) -> Tensor:
        before = self.up(x)
        if self.training:
            context.collect(ACTIVITY, soft_activity(before, context))
        y: Tensor = self.down(self.act(before))
        return y


PLAIN: dict[type, Any] = {WatchedMLP: GatedMLP, WatchedFeedForward: FeedForward}
WATCHED: dict[type, Any] = {plain: watched for watched, plain in PLAIN.items()}


@dataclass(frozen=True)
class Relufy(Transform):
    """ReLU in every feed-forward layer. `watched`: layers tell how active they are, until `finish`."""

    watched: bool = False

    heals: ClassVar[bool] = True
    """Whether the model should be trained afterwards, though nothing new has to be learnt."""

    def __call__(self, tree: Any) -> Any:
        return _with_layers(tree, PLAIN)

    def trained(self, tree: Any) -> Any:
        """The tree of the model that `apply` gives."""
        return _with_layers(tree, WATCHED if self.watched else PLAIN)

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        made = learning_like(self._in(model, self.trained(model.config)), model)
        tell(1.0)
        return made

    def finish(self, model: M) -> M:
        return learning_like(self._in(model, self(model.config)), model)


def soft_activity(before: Tensor, context: Context) -> Tensor:
    """A smooth count of what is above zero, as a share: 0 where all is far below, 1 where all is far above."""
    spread = before.detach().float().std().clamp_min(1e-12) * SOFTNESS
    share = torch.sigmoid(before / spread.to(before.dtype)).float().mean(-1)
    real = (context.positions >= 0).float()
    return (share * real).sum() / real.sum().clamp_min(1)


def _with_layers(tree: Any, kinds: dict[type, Any]) -> Any:
    tree = tree.complete()
    found = [(path, node) for path, node in tree.walk() if isinstance(node, GatedMLP.Config | FeedForward.Config)]
    if not found:
        raise UnsupportedPair(
            "the model has no feed-forward layer for ReLU", hint="mixtures of experts route tokens already"
        )
    for path, node in found:
        kind = kinds.get(node.builds, node.builds)
        tree = tree.set(path, node.derive(kind, activation="relu"))
    return tree.complete()
