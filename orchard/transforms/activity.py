"""Low-rank predictors of which hidden units a ReLU layer will use: they see what the layer sees, before any of its weights do.

    predictors = Activity(rank=32, recall=0.96).fit(model, texts)            # by path of the layer
    predictors["stack.layers.0.mlp"](x) > 0                                  # the units to load

As in LLM in a flash (arXiv 2312.11514): scores B A x with A [rank, dim] and B [units, rank], trained with balanced cross-entropy
on what the layer really does. What differs: A and B begin as the best low-rank copy of the layer's own map on these texts (so
that training takes seconds), each unit has a bias, and the threshold of a layer is the highest that still finds `recall` of the
active units on texts that were not trained on: a unit that is missed hurts more than one that is loaded for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchard.core.batch import Batch
from orchard.core.context import Context
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.core.seeds import generator
from orchard.nn.feed_forward import FeedForward
from orchard.nn.mlp import GatedMLP
from orchard.nn.tensors import dense_tensor
from orchard.transforms.base import Tell, silent

HELD_OUT = 0.2
"""Of the tokens: thresholds are set on these."""


class Predictor(nn.Module):
    """Scores [..., units] of what a layer reads [..., dim]; those above zero are predicted to be active."""

    def __init__(self, a: Tensor, b: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.a, self.b, self.bias = nn.Parameter(a), nn.Parameter(b), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, self.a), self.b, self.bias)

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parameters())


@dataclass(frozen=True)
class Found:
    """How well predictors do on some texts, in sums over layers."""

    active: int
    """Units that were active, summed over tokens."""
    found: int
    """Of these, predicted."""
    predicted: int
    units: int
    """All units, summed over tokens."""

    @property
    def recall(self) -> float:
        return self.found / max(1, self.active)

    @property
    def excess(self) -> float:
        """Predicted units for each active one."""
        return self.predicted / max(1, self.active)

    @property
    def sparsity(self) -> float:
        return 1 - self.active / max(1, self.units)


@dataclass(frozen=True)
class Activity:
    """How predictors are made. `ranks` sets single layers by path: the last ones often need more."""

    rank: int = 32
    recall: float = 0.96
    steps: int = 300
    batch: int = 512
    rate: float = 2e-3
    balance: float = 0.5
    """1: active and silent units weigh the same in sum; 0: every unit weighs the same."""
    ranks: Mapping[str, int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.rank, *(self.ranks or {"": 1}).values()) < 1 or self.steps < 0 or self.batch < 1:
            raise ConfigError("a predictor has a rank of 1 or more, and takes steps of tokens", hint="try rank=32")
        if not 0 < self.recall < 1:
            raise ConfigError(f"a recall of {self.recall}", hint="use a number between 0 and 1, such as 0.96")

    def fit(self, model: nn.Module, texts: Sequence[Batch], tell: Tell = silent) -> dict[str, Predictor]:
        """A predictor for each ReLU layer, by its path. The model stays as it was."""
        layers = relu_layers(model)
        unknown = sorted(set(self.ranks or {}) - set(layers))
        if unknown:
            raise ConfigError(f"no ReLU layer lies at {unknown[0]}", hint="as in stack.layers.3.mlp")
        inputs = inputs_of(model, list(layers), texts)
        made = {}
        for path, layer in layers.items():
            made[path] = self._fit(inputs.pop(path), *decides(layer), (self.ranks or {}).get(path, self.rank), path)
            tell(1 / len(layers))
        return made

    def _fit(self, x: Tensor, weight: Tensor, bias: Tensor, rank: int, path: str) -> Predictor:
        cut = max(1, int(len(x) * (1 - HELD_OUT)))
        seen, unseen = x[:cut], x[cut:] if cut < len(x) else x
        made = _begin(seen, weight, bias, rank)
        chance = generator(self.seed, "activity", path)
        optimizer = torch.optim.Adam(made.parameters(), self.rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, self.steps))
        share = float((functional.linear(seen[:2048], weight, bias) > 0).float().mean())
        heavier = torch.tensor(((1 - share) / max(share, 1e-6)) ** self.balance)
        with torch.enable_grad():
            for _ in range(self.steps):
                rows = seen[torch.randint(0, len(seen), (min(self.batch, len(seen)),), generator=chance)]
                truth = (functional.linear(rows, weight, bias) > 0).float()
                loss = functional.binary_cross_entropy_with_logits(made(rows), truth, pos_weight=heavier)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        made.requires_grad_(False)
        made.bias.sub_(threshold(made, unseen, weight, bias, self.recall))
        return made.eval()


@torch.no_grad()
def threshold(made: Predictor, x: Tensor, weight: Tensor, bias: Tensor, recall: float) -> float:
    """The highest score that still finds this share of the active units."""
    scores = torch.cat([made(rows)[functional.linear(rows, weight, bias) > 0] for rows in x.split(1024)])
    if not len(scores):
        return 0.0
    place = min(len(scores) - 1, int((1 - recall) * len(scores)))
    return float(scores.kthvalue(place + 1).values)


@torch.no_grad()
def judged(model: nn.Module, predictors: Mapping[str, Predictor], texts: Sequence[Batch]) -> dict[str, Found]:
    """What predictors find on texts, by layer."""
    layers = relu_layers(model)
    inputs = inputs_of(model, list(predictors), texts)
    told = {}
    for path, made in predictors.items():
        counts = torch.zeros(3, dtype=torch.long)
        for rows in inputs[path].split(1024):
            truth, said = functional.linear(rows, *decides(layers[path])) > 0, made(rows) > 0
            counts += torch.stack([truth.sum(), (truth & said).sum(), said.sum()])
        active, hit, named = counts.tolist()
        told[path] = Found(active, hit, named, len(inputs[path]) * len(made.bias))
    return told


def together(found: Mapping[str, Found]) -> Found:
    parts = list(found.values())
    return Found(*(sum(getattr(part, name) for part in parts) for name in ("active", "found", "predicted", "units")))


# What a layer decides with ---------------------------------------------------------------------------------------------


def relu_layers(model: nn.Module) -> dict[str, Any]:
    """The layers whose units can be silent, by path; refused where there is none."""
    kinds = (GatedMLP, FeedForward)
    all_layers = {path: part for path, part in model.named_modules() if isinstance(part, kinds)}
    found = {path: part for path, part in all_layers.items() if part.config.activation == "relu"}
    if not found:
        what = next((part.config.activation for part in all_layers.values()), "no feed-forward layer")
        raise UnsupportedPair(f"no unit of this model is ever silent: it has {what}", hint="relufy it first (`Relufy`)")
    return found


def decides(layer: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias of the map whose sign says which units are active: the gate, or without one the map up."""
    linear = layer.gate if hasattr(layer, "gate") else layer.up
    weight = dense_tensor(linear, "weight").detach().float().cpu()
    bias = torch.zeros(len(weight)) if linear.bias is None else linear.bias.detach().float().cpu()
    return weight, bias


@torch.no_grad()
def inputs_of(model: Any, paths: Sequence[str], texts: Sequence[Batch]) -> dict[str, Tensor]:
    """What the layers at these paths read, [tokens, dim] in float32, of all real tokens."""
    if not len(texts):
        raise ConfigError("there are no texts to look at", hint="give some batches of the text the model is for")
    seen: dict[str, list[Tensor]] = {path: [] for path in paths}
    real: list[Tensor] = []

    def watch(path: str) -> Any:
        return lambda _, given: seen[path].append(given[0].detach()[real[0]].float().cpu())

    hooks = [model.get_submodule(path).register_forward_pre_hook(watch(path)) for path in paths]
    training = model.training
    model.eval()
    try:
        for each in texts:
            batch = each.to(model.device)
            real[:] = [batch.positions >= 0]
            documents = None if batch.plain else batch.documents
            model.hidden(batch.ids, Context(batch.positions, documents=documents, causal=batch.plain))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return {path: torch.cat(parts) for path, parts in seen.items()}


@torch.no_grad()
def _begin(x: Tensor, weight: Tensor, bias: Tensor, rank: int) -> Predictor:
    """The low-rank map nearest to the layer's own on these inputs: by the eigenvectors of its outputs' covariance."""
    rank = min(rank, *weight.shape)
    middle = x.mean(0)
    spread = x - middle
    covariance = spread.T @ spread / len(x)
    root_values, root_vectors = torch.linalg.eigh(covariance.double())
    root = root_vectors * root_values.clamp_min(1e-9 * root_values.max()).sqrt()
    outputs = weight.double() @ root
    scale = outputs.norm(dim=1, keepdim=True).clamp_min(1e-12)  # every unit counts the same, however loud it is
    u, s, v = torch.linalg.svd(outputs / scale, full_matrices=False)
    b = u[:, :rank] * s[:rank]
    a = v[:rank] @ torch.linalg.inv(root)
    offset = (bias.double() + weight.double() @ middle.double()) / scale[:, 0] - b @ (a @ middle.double())
    return Predictor(a.float(), 2 * b.float(), 2 * offset.float())
