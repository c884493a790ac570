"""Structured pruning of decoders: hidden units of MLPs and groups of attention heads go, and every layer may end up with a width
of its own.

    small = Prune(width=0.5, importance="activation").apply(model, texts)     # at once, to be healed by distillation
    masked = Prune(width=0.5, importance="soft", steps=500).apply(model)      # masks, to be trained with the model's own loss
    small = Prune(width=0.5, importance="soft").finish(masked)                # the units that the masks chose

Masks as in the first generation of Apple's foundation models (arXiv 2407.21075): soft top-k over the hidden units of the
feed-forward layers only, then the hard one, then distillation goes on. The result is an ordinary decoder: any format packs it.
Which channels of the residual stream a map reads is another matter (`upscale_inputs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from orchard.core.batch import Batch
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.mlp import GatedMLP
from orchard.nn.tensors import carried, dense_tensor
from orchard.transforms.base import Tell, Transform, silent
from orchard.transforms.lora_twin import dotted
from orchard.transforms.prune_activity import mean_inputs
from orchard.transforms.prune_cut import cut, mixers, mlps, narrowed
from orchard.transforms.prune_masks import MaskedMLP
from orchard.transforms.prune_scores import (
    a_share,
    count_of,
    importance,
    keep_best,
    keep_each,
    known_importance,
    usual_multiple,
)

M = TypeVar("M", bound=nn.Module)
SOFT = "soft"


@dataclass(frozen=True)
class Prune(Transform):
    """`width` is the share of hidden units that stay, `heads` that of groups of heads. `importance` is one of `prune_scores`, or
    "soft": learned masks. `together`: one threshold over all layers, instead of the same share of each. `widths` sets single
    layers by path (`stack.layers.3.mlp`). `multiple`: widths come in multiples of this, so that packed formats can hold them;
    None: the largest power of two up to 64 that divides the old width and leaves some choice.

    With `together` the tree of `__call__` has the same share in each layer: which layers lose more is only known from weights.
    """

    width: float = 0.5
    heads: float = 1.0
    importance: str = "l2"
    together: bool = False
    widths: Mapping[str, int] = field(default_factory=dict)
    multiple: int | None = None
    steps: int = 500
    """Updates over which masks cool down; only for "soft"."""

    learns = True

    def __post_init__(self) -> None:
        known_importance(self.importance, (SOFT,))
        a_share("width", self.width)
        a_share("heads", self.heads)
        if self.multiple is not None and self.multiple < 1:
            raise ConfigError(f"widths cannot be multiples of {self.multiple}", hint="use a whole number from 1 on")
        if self.importance == SOFT and self.together:
            raise UnsupportedPair(
                "learned masks keep the same share of every layer", hint="leave out `together`, or set `widths`"
            )

    @property
    def looks(self) -> bool:  # type: ignore[override]
        """Whether `apply` needs texts."""
        return self.importance == "activation"

    def __call__(self, tree: Any) -> Any:
        tree = tree.complete()
        return narrowed(tree, self._widths(tree), self._groups(tree))

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        units, groups = self.choose(model, texts, tell)
        if self.importance != SOFT:
            return cut(model, units, groups)
        if groups:
            model = cut(model, {}, groups)
        return self._masked(model, texts)

    def finish(self, model: M) -> M:
        units = {path: part.kept() for path, part in model.named_modules() if isinstance(part, MaskedMLP)}
        return cut(model, units, {}) if units else model

    def choose(
        self, model: nn.Module, texts: Sequence[Batch] = (), tell: Tell = silent
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What stays, by module path: hidden units of MLPs and groups of heads. Layers that lose nothing are left out."""
        tree = _tree(model)
        widths, groups = self._widths(tree), self._groups(tree)
        readers = [f"{path}.down" for path in widths if self.importance != SOFT] + [f"{path}.o" for path in groups]
        looked = mean_inputs(model, readers, texts, tell) if readers and self.looks else {}
        units: dict[str, Tensor] = {}
        if widths and self.importance != SOFT:
            units = self._units(model, tree, widths, looked)
        return units, self._chosen_groups(model, tree, looked) if groups else {}

    # Hidden units -----------------------------------------------------------------------------------------------------

    def _widths(self, tree: Any) -> dict[str, int]:
        """How many hidden units stay of each MLP that loses some."""
        found = mlps(tree)
        named = {path.replace("[", ".").replace("]", ""): width for path, width in self.widths.items()}
        unknown = sorted(set(named) - set(found))
        if unknown:
            raise ConfigError(f"no MLP with hidden units is called {unknown[0]!r}", hint="as in stack.layers.3.mlp")
        if not found and self.width < 1:
            raise UnsupportedPair("the model has no MLP whose units can go", hint="mixtures of experts are not pruned")
        counts = {path: count_of(node.hidden_dim, self.width, self._multiple(node)) for path, node in found.items()}
        for path, width in named.items():
            if not 0 < width <= found[path].hidden_dim:
                hint = f"it has {found[path].hidden_dim}"
                raise ConfigError(f"{path} cannot keep {width} hidden units", hint=hint)
        return {path: width for path, width in {**counts, **named}.items() if width < found[path].hidden_dim}

    def _multiple(self, node: Any) -> int:
        return usual_multiple(node.hidden_dim) if self.multiple is None else self.multiple

    def _units(
        self, model: nn.Module, tree: Any, widths: Mapping[str, int], looked: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        nodes = mlps(tree)
        scores = {path: _unit_scores(model, path, self.importance, looked.get(f"{path}.down")) for path in widths}
        own = {path.replace("[", ".").replace("]", "") for path in self.widths}
        free = {path: part for path, part in scores.items() if path not in own}
        if not self.together or not free:
            return {path: keep_each(part, widths[path]) for path, part in scores.items()}
        multiple = min(self._multiple(nodes[path]) for path in free)
        chosen = keep_best(free, self.width, together=True, multiple=multiple)
        chosen |= {path: keep_each(scores[path], widths[path]) for path in scores if path in own}
        return {path: kept for path, kept in chosen.items() if len(kept) < nodes[path].hidden_dim}

    def _masked(self, model: M, texts: Sequence[Batch]) -> M:
        """Masks begin with how much units are worth by what is known: by activations where there are texts."""
        tree = _tree(model)
        widths = self._widths(tree)
        plain = sorted(path for path in widths if not isinstance(tree.get(dotted(path)), GatedMLP.Config))
        if plain:
            raise UnsupportedPair(f"{plain[0]} has no gate, and takes no mask", hint="choose by another importance")
        looked = mean_inputs(model, [f"{path}.down" for path in widths], texts) if len(texts) and widths else {}
        scores = {}
        for path, keep in widths.items():
            node = tree.get(dotted(path))
            tree = tree.set(dotted(path), node.derive(MaskedMLP, keep=keep, steps=self.steps))
            kind = "activation" if looked else "l2"
            scores[path] = _unit_scores(model, path, kind, looked.get(f"{path}.down"))
        made: M = carried(model, tree)
        with torch.no_grad():
            for path, worth in scores.items():
                mlp: Any = made.get_submodule(path)
                levels = worth.clamp_min(1e-30).log()
                spread = (levels - levels.mean()) / levels.std().clamp_min(1e-6)
                mlp.mask_scores.data = (spread.clamp(-3, 3) / mlp.config.speed).float()
                mlp.mask_updates.requires_grad_(False)
        return made

    # Groups of heads --------------------------------------------------------------------------------------------------

    def _groups(self, tree: Any) -> dict[str, int]:
        counts = {
            path: count_of(node.kv_heads, self.heads) for members in mixers(tree).values() for path, node in members
        }
        if self.heads < 1 and not counts:
            raise UnsupportedPair("the model has no attention heads to take out", hint="leave `heads` at 1")
        return {path: count for path, count in counts.items() if count < tree.get(dotted(path)).kv_heads}

    def _chosen_groups(self, model: nn.Module, tree: Any, looked: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sharing = {members[0][0]: [path for path, _ in members] for members in mixers(tree).values()}
        kind = "l2" if self.importance == SOFT else self.importance
        scores = {first: _group_scores(model, paths, kind, looked) for first, paths in sharing.items()}
        kept = keep_best(scores, self.heads, together=self.together)
        return {
            path: kept[first]
            for first, paths in sharing.items()
            for path in paths
            if len(kept[first]) < len(scores[first])
        }


def _unit_scores(model: nn.Module, path: str, kind: str, activity: Tensor | None) -> Tensor:
    mlp: Any = model.get_submodule(path)
    reads = dense_tensor(mlp.down, "weight").detach().mT.float()
    if kind == "activation":
        return importance(kind, reads, where=path, activity=activity)
    writes = [
        dense_tensor(getattr(mlp, name), "weight").detach().float() for name in ("gate", "up") if hasattr(mlp, name)
    ]
    return importance(kind, torch.cat([*writes, reads], 1), where=path)


def _group_scores(model: nn.Module, paths: Sequence[str], kind: str, looked: Mapping[str, Tensor]) -> Tensor:
    """Of the groups that several layers share, all their weights count."""
    vectors: list[Tensor] = []
    for path in paths:
        mixer: Any = model.get_submodule(path)
        groups = mixer.config.kv_heads
        reads = dense_tensor(mixer.o, "weight").detach().mT.float()
        if kind == "activation":
            worth = importance(kind, reads, where=path, activity=looked[f"{path}.o"])
            vectors.append(worth.unflatten(0, (groups, -1)).sum(1, keepdim=True))
            continue
        parts = [
            dense_tensor(part, "weight").detach().float() for part in (mixer.q, mixer.k, mixer.v) if part is not None
        ]
        vectors += [part.unflatten(0, (groups, -1)).flatten(1) for part in (*parts, reads)]
    whole = torch.cat(vectors, 1)
    return whole.sum(1) if kind == "activation" else importance(kind, whole, where=paths[0])


def _tree(model: nn.Module) -> Any:
    tree: Any = model.config
    return tree.complete()
