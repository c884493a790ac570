"""One decision for several layers: all go by what the router of an earlier one decided about the image (arXiv 2309.04354).

Shapes: B rows, S tokens each, N = B · S, E experts, K chosen.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.core.errors import UnsupportedPair
from orchard.nn.moe.image_level import DECIDED
from orchard.nn.moe.router import Router, Routing


class Follow(Configurable, Router):
    """The routing of the last `ImageLevel` before it. It has no weights of its own."""

    whole_rows: ClassVar[bool] = True

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        experts: int = REQUIRED
        k: int = 1
        """As many as the router that it follows chooses."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg

    def forward(self, x: Tensor, context: Context | None = None) -> Routing:
        routing: Routing | None = None if context is None else context.memo.get(DECIDED)
        if routing is None:
            raise UnsupportedPair(
                "a layer follows an earlier one that decides about images, and there is none",
                hint="give an earlier layer the router ImageLevel, in the same stage of a pipeline",
            )
        made = (routing.logits.shape[-1], routing.experts.shape[-1], len(routing.logits))
        if made != (self.config.experts, self.config.k, x.shape[:-1].numel()):
            raise UnsupportedPair(
                f"a layer with {self.config.k} of {self.config.experts} experts follows one with {made[1]} of {made[0]}",
                hint="give both the same experts and k, and show both the same tokens",
            )
        return routing
