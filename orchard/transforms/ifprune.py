"""Instruction-following pruning: a sub-network for each prompt (arXiv 2501.02086).

A predictor reads the prompt once and says which hidden units of every feed-forward layer are worth computing; the answer is made by
these alone. Predictor and model are trained together through a relaxed top-k.

    model = IFPrune(keep=0.25, groups=None, predictor="reader").apply(decoder)     # a decoder with a predictor, to be trained
    choice = model.choose(prompt_ids)                                                # which units this prompt uses
    small = gathered(model.decoder, choice)                                          # an ordinary, smaller decoder

`keep` is the share of groups that are used: one number, or several budgets that nest. `shared` is the share of units that every
prompt uses. Groups of one unit follow the paper; larger ones are records that can be read from a disk in one piece (AFM 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.mlp import GatedMLP
from orchard.nn.tensors import carried
from orchard.transforms.ifprune_mlp import SubnetMLP
from orchard.transforms.ifprune_model import Instructed
from orchard.transforms.ifprune_predictor import FirstLayers, Fixed, Reader
from orchard.transforms.prune_scores import a_share

PREDICTORS = ("reader", "first-layers", "fixed")


@dataclass(frozen=True)
class IFPrune:
    """`groups` of each layer (None: one unit each). `first` layers choose nothing: they read the prompt for "first-layers"."""

    keep: float | tuple[float, ...] = 0.25
    groups: int | None = None
    shared: float = 0.0
    predictor: str = "reader"
    first: int = 0
    dim: int = 64
    """Width of a "reader"."""
    temperature: float = 1.0
    cold: float = 0.1
    steps: int = 500
    hard: float = 0.0

    def __post_init__(self) -> None:
        if self.predictor not in PREDICTORS:
            raise ConfigError(f"no predictor is called {self.predictor!r}", hint="one of " + ", ".join(PREDICTORS))
        for share in self._shares():
            a_share("keep", share)
        if not 0 <= self.shared < 1:
            raise ConfigError(f"shared is {self.shared}", hint="use a share from 0 up to 1")
        if self.first < 0 or (self.predictor == "first-layers" and self.first < 1):
            raise ConfigError(f"the first {self.first} layers cannot read a prompt", hint="use first ≥ 1")

    def __call__(self, tree: Any) -> Any:
        """The decoder's tree with layers that choose."""
        tree, place = tree.complete(), 0
        for layer, block in enumerate(tree.stack.layers):
            if layer < self.first or type(block.mlp) is not GatedMLP.Config:
                continue
            shared, groups = self._cut(block.mlp.hidden_dim)
            made = block.mlp.derive(SubnetMLP, place=place, groups=groups, shared=shared)
            tree = tree.set(f"stack.layers[{layer}].mlp", made)
            place += 1
        if not place:
            raise UnsupportedPair("no layer has a gated MLP whose units can be chosen", hint="mixtures choose experts")
        return tree

    def tree(self, tree: Any) -> Instructed.Config:
        """The tree of decoder and predictor together."""
        decoder = self(tree)
        _, node = decoder.find(SubnetMLP)[0]
        common: dict[str, Any] = {"layers": len(decoder.find(SubnetMLP)), "groups": node.groups}
        predictor: Any
        if self.predictor == "reader":
            predictor = Reader.Config(vocab=decoder.vocab, dim=self.dim, **common)
        elif self.predictor == "first-layers":
            predictor = FirstLayers.Config(dim=decoder.dim, first=self.first, **common)
        else:
            predictor = Fixed.Config(**common)
        budgets = tuple(max(1, round(share * node.groups)) for share in self._shares())
        cooling = {name: getattr(self, name) for name in ("temperature", "cold", "steps", "hard")}
        made: Instructed.Config = Instructed.Config(decoder=decoder, predictor=predictor, budgets=budgets, **cooling)
        return made.complete()

    def apply(self, model: nn.Module) -> Instructed:
        """The decoder's weights in a model with a fresh predictor. The one given stays as it was."""
        made: Instructed = self.tree(_tree(model)).build()
        parameter = next(model.parameters())
        made.predictor.to(device=parameter.device)
        made.updates.data = made.updates.data.to(parameter.device)
        made.decoder = carried(model, made.config.decoder)
        return made.train(model.training)

    def _shares(self) -> tuple[float, ...]:
        return (self.keep,) if isinstance(self.keep, (int, float)) else tuple(self.keep)

    def _cut(self, hidden: int) -> tuple[int, int]:
        """Shared units and groups of a layer: with a number of groups, as many units are shared as that leaves over."""
        shared = round(self.shared * hidden)
        if self.groups is None:
            return shared, hidden - shared
        size = (hidden - shared) // self.groups
        if size < 1:
            raise ConfigError(f"{hidden - shared} units are not {self.groups} groups", hint="use fewer groups")
        return hidden - size * self.groups, self.groups


def _tree(model: nn.Module) -> Any:
    tree: Any = model.config
    return tree.complete()
