"""What looking at one image costs, told from a tree alone: operations, weights, and those that the image touches.

Two operations for each weight of a map and token, and four times width and tokens for each query of attention. Routers count,
with the mean that they read; norms, activations and sums do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from orchard.core.errors import UnsupportedPair
from orchard.models.vision.vit import ViT
from orchard.nn.attention.bidirectional import BidirectionalAttention
from orchard.nn.linear import Linear
from orchard.nn.moe import Follow, ImageLevel, MoE
from orchard.nn.tensors import tensor_shapes


@dataclass(frozen=True)
class Costs:
    flops: int
    parameters: int
    touched: int
    """Parameters that one image needs, which have to be in memory for it."""


def costs(tree: ViT.Config) -> Costs:
    tree = tree.complete()
    tokens = tree.patches.tokens
    flops = 2 * (tokens - tree.patches.first) * _weights(tree.patches) + 2 * _weights(tree.head)
    parameters = sum(prod(shape) for shape in tensor_shapes(tree).values()) + tree.dim * (tokens + tree.patches.first)
    idle = 0
    for layer, block in enumerate(tree.stack.layers):
        if not isinstance(block.mixer, BidirectionalAttention.Config):
            raise UnsupportedPair(
                f"the cost of {block.mixer.builds.__name__} in layer {layer} is not known", hint="use attention"
            )
        flops += 2 * tokens * _weights(block.mixer) + 4 * tokens**2 * tree.dim
        if isinstance(block.mlp, MoE.Config):
            used, unused = _mixture(block.mlp, layer, tokens)
            flops, idle = flops + used, idle + unused
        else:
            flops += 2 * tokens * _weights(block.mlp)
    return Costs(flops=flops, parameters=parameters, touched=parameters - idle)


def _mixture(mlp: MoE.Config, layer: int, tokens: int) -> tuple[int, int]:
    """The operations of a mixture, and the weights of the experts that an image leaves alone."""
    router = mlp.router
    if not isinstance(router, ImageLevel.Config | Follow.Config):
        raise UnsupportedPair(
            f"layer {layer}: with the router {router.builds.__name__} each token has its own experts, and what an image "
            "touches depends on the image",
            hint="use ImageLevel",
        )
    expert = 3 * mlp.dim * mlp.hidden_dim
    decide = 0 if isinstance(router, Follow.Config) else 2 * _weights(router) + tokens * mlp.dim
    return decide + 2 * tokens * router.k * expert, (mlp.experts - router.k) * expert


def _weights(node: Any) -> int:
    """The numbers in the matrices of all linear maps at or below a node."""
    return sum(part.in_dim * part.out_dim for _, part in node.walk() if isinstance(part, Linear.Config))
