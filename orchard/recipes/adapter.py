"""Side paths beside a frozen base: how they are made, and what the base is kept as while they learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import ConfigError
from orchard.core.seeds import generator
from orchard.models.language.decoder import Decoder
from orchard.nn.formats import Int4, Int8, Plain
from orchard.nn.linear import GroupedLinear, Linear
from orchard.transforms.lora import ALL_LINEAR, Lora, freeze_base
from orchard.weights.checkpoint import Checkpoint
from orchard.weights.stored import as_stored

METHODS = ("lora", "dora", "rslora")
PACKED: dict[str, Any] = {"q8_0": Int8.Config(group=32, half=True), "q4_0": Int4.Config(group=32)}
"""What a base may be packed into, by GGUF's names of the same thing."""


class Adapter(Configurable):
    """LoRA (arXiv 2106.09685), DoRA (2402.09353) or rank-stabilised LoRA (2312.03732) beside a base of any weight format. A base
    whose weights stay packed is QLoRA (2305.14314)."""

    @config
    class Config(BaseConfig):
        method: str = "lora"
        """lora, dora or rslora."""
        r: int = 32
        alpha: float = 64.0
        targets: str | Sequence[str] = ALL_LINEAR
        """"all-linear", or names of linear maps: q, k, v, o, gate, up, down."""
        dropout: float = 0.0
        quantize: str | None = None
        """Pack the linear maps of the base while it is frozen: q8_0 or q4_0. None: as its file has them."""
        unpack: bool = False
        """Make a packed base (GGUF) dense: faster, and four to eight times the memory."""

        def wire(self) -> None:
            if self.method not in METHODS:
                raise ConfigError(f"no adapter is called {self.method!r}", hint="use one of " + ", ".join(METHODS))
            if self.quantize is not None and self.quantize not in PACKED:
                raise ConfigError(f"a base is not packed as {self.quantize!r}", hint="use " + " or ".join(PACKED))
            if self.quantize is not None and self.unpack:
                raise ConfigError("quantize and unpack are opposites", hint="set one of them")

    def __init__(self, cfg: Config) -> None:
        self.config = cfg
        more = {"dora": True} if cfg.method == "dora" else {}
        targets = cfg.targets if isinstance(cfg.targets, str) else tuple(cfg.targets)
        self.lora = Lora(
            r=cfg.r, alpha=cfg.alpha, targets=targets, rslora=cfg.method == "rslora", dropout=cfg.dropout, **more
        )

    def kept(self, checkpoint: Checkpoint, tree: Decoder.Config) -> Decoder.Config:
        """The base's tree with the formats its weights are kept in."""
        tree = tree if self.config.unpack else as_stored(checkpoint, tree)
        if self.config.quantize is None:
            return tree
        packed = PACKED[self.config.quantize]
        for kind in (Linear, GroupedLinear):
            if tree.find(kind, _dense_layer):
                tree = tree.rewrite(kind, lambda node: node.clone(format=packed), _dense_layer)
        return tree

    def attach(self, decoder: Decoder, seed: int) -> Decoder:
        """A twin that shares all tensors with the base, which stays as it is, and has side paths to train."""
        made = self.lora.attach(decoder)
        random = generator(seed, "adapter")
        for name, parameter in made.named_parameters():
            if name.endswith(".lora_a"):  # the same numbers wherever the model is
                bound = parameter.shape[1] ** -0.5
                parameter.data.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=random))
        freeze_base(made)
        return made


def _dense_layer(path: str, node: BaseConfig) -> bool:
    """A linear map inside the layers that nothing packs yet. Embeddings, heads and routers decide much and stay as they are."""
    return (
        path.startswith("stack.layers") and ".router" not in path and isinstance(node.format, Plain.Config)  # type: ignore[attr-defined]
    )
