"""Activation checkpointing of blocks (arXiv 1604.06174): what a block keeps for the backward pass is made again there instead.

A block's forward pass is run a second time in the backward pass, with the random numbers of the first (dropout), so losses and
gradients are the same bits. The second run must leave no marks: it gets a context of its own, so that nothing is collected twice
and no layer's keys are replaced under another layer that reads them.
"""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint

from orchard.core.blocks import layers_of
from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.core.errors import ConfigError


class Recompute(Configurable):
    """The settings of `recompute`."""

    @config
    class Config(BaseConfig):
        every: int = 0
        """0: no block; 1: all of them; n: the first of every n."""

        def wire(self) -> None:
            if self.every < 0:
                raise ConfigError(f"recompute.every is {self.every}", hint="use 0 for none, 1 for all, n for each n-th")

    def __init__(self, cfg: Config) -> None:
        self.config = cfg


def recompute(model: nn.Module, cfg: Recompute.Config) -> int:
    """Let blocks of a model be computed again in the backward pass, in place; how many. Before `spread`, so that shards are put
    together once for a block's second forward pass and its backward pass."""
    cfg = cfg.complete()
    layers = layers_of(model)
    if cfg.every and not layers:
        raise ConfigError("the model has no list of layers to recompute", hint="set recompute.every to 0")
    chosen = layers[:: cfg.every] if cfg.every else []
    for layer in chosen:
        layer.__dict__["_plain_forward"] = layer.__dict__.get("forward")  # what a compiler may have put there
        layer.forward = MethodType(_again, layer)
    return len(chosen)


def _again(self: Any, x: Tensor, context: Context) -> Tensor:
    """A block's forward pass that is run twice. Bound to its block, so that a copy of the model has one bound to the copy."""
    own = self.__dict__.get("_plain_forward")
    forward = MethodType(type(self).forward, self) if own is None else own
    if not is_grad_enabled() or context.cache is not None:
        out: Tensor = forward(x, context)
        return out
    before, first = dict(context.views), [True]

    def run(x: Tensor) -> Any:
        if first:
            first.clear()
            return forward(x, context)
        return forward(x, replace(context, views=dict(before), collected={}))

    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=True)
