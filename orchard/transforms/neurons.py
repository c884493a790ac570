"""Neurons from flash: a ReLU model runs with its feed-forward layers in a file (arXiv 2312.11514, "LLM in a flash").

    predictors = Activity(rank=32).fit(model, texts)          # which neurons a token will use
    write_neurons(model, "model.neurons", predictors)         # a neuron is one record
    small = FromFlash("model.neurons", window=5).apply(model) # generates with the neurons of the last tokens in memory
    orchard.load("model", rewrite=FromFlash("model.neurons")) # the same, and the layers' weights are never read

`spent` tells what that cost: bytes, reads, hits, neurons in memory. A model that is not yet sparse is made so by `Relufy`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from orchard.cache.experts import BudgetTooSmall, OtherModel, Records
from orchard.core.batch import Batch
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.feed_forward import FeedForward
from orchard.nn.mlp import GatedMLP
from orchard.transforms.base import Tell, Transform, silent
from orchard.transforms.lora_twin import dotted
from orchard.transforms.neurons_file import FIXED, KIND, identity, write_neurons
from orchard.transforms.neurons_mlp import EXACT, LEAST, PREDICTED, NeuronMLP

M = TypeVar("M", bound=nn.Module)

__all__ = ["FromFlash", "NeuronMLP", "Spent", "neuron_layers", "row_bytes", "spent", "write_neurons"]


@dataclass(frozen=True)
class FromFlash(Transform):
    """`budget`: bytes that the neurons in memory may take in all layers together; None: as many as the window holds."""

    file: str | Path
    window: int = 5
    budget: int | None = None
    activity: str = PREDICTED
    extras: bool = False
    join: bool = True
    direct: bool = False

    def __post_init__(self) -> None:
        if self.activity not in (PREDICTED, EXACT):
            raise ConfigError(f"activity is {self.activity!r}", hint=f"use {PREDICTED} or {EXACT}")
        if self.window < 0:
            raise ConfigError(f"a window of {self.window} tokens", hint="use 0 or more")

    def __call__(self, tree: Any) -> Any:
        tree = tree.complete()
        with Records.open(self.file, expect={"kind": KIND}) as records:
            names = [layer.name for layer in records.layers if not layer.name.endswith(FIXED)]
        nodes = {name: _layer_at(tree, name, Path(self.file).name) for name in names}
        capacities = self._capacities(nodes)
        for name, node in nodes.items():
            made = NeuronMLP.Config(
                dim=node.dim,
                hidden_dim=node.hidden_dim,
                file=str(self.file),
                name=name,
                activity=self.activity,
                window=self.window,
                capacity=capacities.get(name),
                extras=self.extras,
                join=self.join,
                direct=self.direct,
            )
            tree = tree.set(dotted(name), made)
        return tree.complete()

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        with Records.open(self.file, expect={"kind": KIND, "model": identity(model)}):
            pass
        made = super().apply(model, texts, tell)
        tell(1.0)
        return made.eval().requires_grad_(False)

    def _capacities(self, nodes: Mapping[str, Any]) -> dict[str, int]:
        """How many neurons of each layer the budget holds: the same share of all layers."""
        if self.budget is None:
            return {}
        rows = {name: row_bytes(node) for name, node in nodes.items()}
        whole = sum(rows[name] * node.hidden_dim for name, node in nodes.items())
        share = self.budget / whole
        if share < LEAST:
            what = f"{LEAST:.0%} of the neurons of all layers"
            raise BudgetTooSmall(budget=self.budget, needed=int(LEAST * whole) + 1, what=what)
        return {name: max(1, min(node.hidden_dim, int(share * node.hidden_dim))) for name, node in nodes.items()}


def row_bytes(node: Any) -> int:
    """What a neuron of a layer takes in memory, in float32."""
    linears = [part for part in (getattr(node, "gate", None), node.up, node.down) if part is not None]
    return 4 * (len(linears) * node.dim + sum(part.bias for part in linears[:-1]))


def _layer_at(tree: Any, name: str, file: str) -> Any:
    try:
        node = tree.get(dotted(name))
    except ConfigError as error:
        raise OtherModel(f"{file} has neurons of {name}, which the model lacks", hint="write them anew") from error
    if not isinstance(node, GatedMLP.Config | FeedForward.Config):
        raise UnsupportedPair(f"{name} is a {node.builds.__name__}, which has no neurons", hint="use it on the model")
    if node.activation != "relu":
        raise UnsupportedPair(
            f"{name} has {node.activation}, whose neurons are never silent", hint="relufy the model first (`Relufy`)"
        )
    return node


@dataclass(frozen=True)
class Spent:
    """What the layers of a model cost since the start or the last `reset`, in sums over layers."""

    bytes: int
    reads: int
    tokens: int
    """Of one layer: all see the same."""
    wanted: int
    hits: int
    loaded: int
    resident: float
    """Neurons in memory after a call, on average, as a share of all."""
    peak: float
    """The most at once, as a share of all; layers need not have had theirs at the same time."""


def neuron_layers(model: nn.Module) -> list[NeuronMLP]:
    return [part for part in model.modules() if isinstance(part, NeuronMLP)]


def spent(model: nn.Module, *, reset: bool = False) -> Spent:
    """The counters of all layers that read neurons; `reset` sets them to zero afterwards."""
    layers = neuron_layers(model)
    if not layers:
        raise UnsupportedPair("no layer of this model reads neurons", hint="use FromFlash")
    units = sum(layer.config.hidden_dim for layer in layers)
    tallies = [layer.tally for layer in layers]
    told = Spent(
        bytes=sum(layer.store.records.bytes for layer in layers),
        reads=sum(layer.store.records.reads for layer in layers),
        tokens=tallies[0].tokens,
        wanted=sum(tally.wanted for tally in tallies),
        hits=sum(tally.hits for tally in tallies),
        loaded=sum(tally.loaded for tally in tallies),
        resident=sum(tally.resident / max(1, tally.calls) for tally in tallies) / units,
        peak=sum(tally.peak for tally in tallies) / units,
    )
    if reset:
        for layer in layers:
            layer.tally.reset()
            layer.store.records.reads = layer.store.records.bytes = 0
    return told
