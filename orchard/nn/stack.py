"""Blocks and stacks of them: a mixer, an MLP, and norms wherever a family puts them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from typing import Any

from torch import Tensor, nn

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.attention.attention import Attention
from orchard.nn.attention.rattention import RAttention
from orchard.nn.layer_norm import LayerNorm
from orchard.nn.lowering import obstacle, part_of
from orchard.nn.mlp import GatedMLP
from orchard.nn.norm import RMSNorm
from orchard.ops.plan.builder import Builder, Value


@config
class Layer(BaseConfig):
    """What a stack takes: a block, or several blocks that stand for one layer (`orchard.nn.tracks`)."""

    dim: int = REQUIRED
    layer: int = REQUIRED
    """The number of its store, or of the first of them."""

    @property
    def mixer(self) -> Any:
        """None: it has no mixer of its own, only blocks inside."""
        return None

    @property
    def mlp(self) -> Any:
        return None

    def mixers(self) -> list[Any]:
        """All mixers, in the order of their stores."""
        return [self.mixer]


class Block(Configurable, nn.Module):
    """x + mixer(x), then x + mlp(x). A norm may stand before and after each; None is no norm.

    Llama normalises before, OLMo 2 after, Gemma 2 and 3 both. `mixer` and `mlp` are sockets: any config with `dim`
    (and `layer` for mixers) whose module is called as `(x, context) → y`.
    """

    @config
    class Config(Layer):
        mixer_norm: RMSNorm.Config | LayerNorm.Config | None = field(default_factory=RMSNorm.Config)
        mixer: BaseConfig = field(default_factory=Attention.Config)
        mixer_out_norm: RMSNorm.Config | LayerNorm.Config | None = None
        mlp_norm: RMSNorm.Config | LayerNorm.Config | None = field(default_factory=RMSNorm.Config)
        mlp: BaseConfig = field(default_factory=GatedMLP.Config)
        mlp_out_norm: RMSNorm.Config | LayerNorm.Config | None = None

        def wire(self) -> None:
            for norm in (self.mixer_norm, self.mixer_out_norm, self.mlp_norm, self.mlp_out_norm):
                if norm is not None:
                    norm.dim = self.dim
            self.mixer.dim = self.mlp.dim = self.dim  # type: ignore[attr-defined]
            self.mixer.layer = self.layer  # type: ignore[attr-defined]
            _check_router(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.mixer_norm = _norm(cfg.mixer_norm)
        self.mixer: nn.Module = cfg.mixer.build()
        self.mixer_out_norm = _norm(cfg.mixer_out_norm)
        self.mlp_norm = _norm(cfg.mlp_norm)
        self.mlp: nn.Module = cfg.mlp.build()
        self.mlp_out_norm = _norm(cfg.mlp_out_norm)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.mixer_out_norm(self.mixer(self.mixer_norm(x), context))
        return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x), context))

    def lower(self, builder: Builder, x: Value, path: str) -> Value:
        for name in ("mixer", "mlp"):
            y = x
            for part in (f"{name}_norm", name, f"{name}_out_norm"):
                y = part_of(builder, getattr(self, part), y, f"{path}.{part}")
            x = builder.add(x, y)
        return x


class Stack(Configurable, nn.Module):
    """Blocks one after another. Each layer is a config of its own, so any of them may differ."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        layers: Sequence[Layer] = REQUIRED

        def wire(self) -> None:
            number = 0
            for block in self.layers:
                block.dim, block.layer = self.dim, number
                number += len(block.mixers())
            _check_owners(self.layers)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.layers = nn.ModuleList(block.build() for block in cfg.layers)
        self._keeps = max((layer for layer, block in enumerate(cfg.layers) if _own_store(block)), default=0)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[B, T, dim] → the same, or of the tokens that are wanted only where later layers keep nothing of their own."""
        wanted = context.wanted if context.cache is not None else None
        for place, layer in enumerate(self.layers):
            if place == self._keeps + 1 and wanted is not None and wanted < x.shape[1]:
                x, context = x[:, x.shape[1] - wanted :], context.last(wanted)
                if not wanted:
                    break
            x = layer(x, context)
        return x

    def elsewhere(self) -> set[int]:
        """The numbers of stores that other processes keep."""
        layers: list[Any] = [layer for layer in self.layers if hasattr(layer, "elsewhere")]
        return {number for layer in layers for number in layer.elsewhere()}

    def lower(self, builder: Builder, x: Value, path: str) -> Value:
        builder.in_torch.update(_stores_in_torch(self.layers))
        for layer, block in enumerate(self.layers):
            x = part_of(builder, block, x, f"{path}.layers.{layer}")
        return x


def block_of(name: str, tree: BaseConfig) -> Layer | None:
    """The config of the block that a tensor belongs to, by Orchard's name of the tensor; None outside of blocks."""
    node: Any = tree
    for part in name.split("."):
        node = node[int(part)] if isinstance(node, list | tuple) else getattr(node, part, None)
        if isinstance(node, Layer) and node.mixer is not None:
            return node
        if node is None:
            break
    return None


def _stores_in_torch(layers: nn.ModuleList) -> dict[int, str]:
    """Stores that cannot be native, and why. One layer that has to run in torch takes all along that share its store."""
    members: dict[int, list[int]] = {}
    reasons: dict[int, str] = {}
    for block, reason in _blocks(layers, None):
        mixer: Any = getattr(block, "mixer", None)
        store = getattr(getattr(mixer, "config", None), "store", None)
        if store is None:
            continue
        layer: int = mixer.config.layer
        members.setdefault(layer if store.owner is None else store.owner, []).append(layer)
        reason = reason or _obstacle(mixer)
        if reason is not None:
            reasons[layer] = reason
    for group in members.values():
        first = next((layer for layer in group if layer in reasons), None)
        if first is not None:
            for layer in group:
                reasons.setdefault(layer, f"it shares a store with layer {first}: {reasons[first]}")
    return reasons


def _blocks(modules: Iterable[Any], reason: str | None) -> Iterator[tuple[Any, str | None]]:
    """Every block, also those inside of others, and why it (or what it is inside of) has to run in torch."""
    for module in modules:
        why = reason or _obstacle(module)
        if hasattr(module, "inside"):
            yield from _blocks(module.inside(), why)
        else:
            yield module, why


def _obstacle(module: Any) -> str | None:
    return obstacle(module) or (module.obstacle() if hasattr(module, "obstacle") else None)


def _own_store(block: Layer) -> bool:
    """Whether a layer keeps something, as far as its config tells: all do but those that read another's store."""
    return getattr(getattr(block.mixer, "store", None), "owner", None) is None


def _norm(cfg: RMSNorm.Config | LayerNorm.Config | None) -> nn.Module:
    module: nn.Module = nn.Identity() if cfg is None else cfg.build()
    return module


def _check_router(block: Block.Config) -> None:
    """A router that reads whole rows fits no layer that keeps keys and values, one token after another."""
    router: Any = getattr(getattr(block.mlp, "router", None), "builds", None)
    if getattr(router, "whole_rows", False) and getattr(block.mixer, "store", None) is not None:
        raise UnsupportedPair(
            f"layer {block.layer}: the router {router.__name__} looks at tokens that are not written yet",
            hint="use TopK in models that generate text, or attention in both directions",
        )


def _check_owners(layers: Sequence[Layer]) -> None:
    """A borrowed store must belong to an earlier layer that has one, with the same heads."""
    mixers = [mixer for layer in layers for mixer in layer.mixers()]
    if len(mixers) > len(layers) and any(
        getattr(getattr(one, "store", None), "owner", None) is not None or getattr(one, "borrow", None) is not None
        for one in mixers
    ):
        raise UnsupportedPair(
            "a layer reads another layer's keys and values, in a model with tracks",
            hint="let every layer keep its own (store.owner=None), or build the model without tracks",
        )
    for layer, mixer in enumerate(mixers):
        if not isinstance(mixer, Attention.Config):
            continue
        reads = [] if mixer.store.owner is None else [mixer.store.owner]
        for owner in (*reads, *(mixer.borrow.layers if mixer.borrow is not None else ())):
            _check_owner(mixers, layer, owner)


def _check_owner(mixers: Sequence[Any], layer: int, owner: int) -> None:
    mixer = mixers[layer]
    if not 0 <= owner < layer:
        raise ConfigError(f"layer {layer} cannot read the store of layer {owner}", hint="name an earlier layer")
    other = mixers[owner]
    if not isinstance(other, Attention.Config) or other.store.owner is not None:
        raise UnsupportedPair(f"layer {layer} reads layer {owner}, which keeps no store", hint="name its owner")
    if (other.kv_heads, other.head_dim) != (mixer.kv_heads, mixer.head_dim):
        raise UnsupportedPair(f"layers {layer} and {owner} have different key/value heads", hint="make them equal")
    if other.rotary != mixer.rotary:
        raise UnsupportedPair(f"layers {layer} and {owner} have different rotary positions", hint="make them equal")
    if isinstance(mixer, RAttention.Config) and not (type(other) is type(mixer) and other.window == mixer.window):
        raise UnsupportedPair(
            f"layer {layer} reads the sum of what left its window, and layer {owner} keeps no such sum",
            hint="let RATTENTION read a layer of RATTENTION with the same window",
        )
