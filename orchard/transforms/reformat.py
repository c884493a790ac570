"""Weights into other formats, module by module, part by part: a rewrite of the tree where values must not be found anew."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from orchard.core.config import BaseConfig
from orchard.nn.formats import Packed
from orchard.transforms.lora_twin import replaced, twin

M = TypeVar("M", bound=nn.Module)
Pack = Callable[[Any], tuple[BaseConfig, Packed]]
"""`module → (the config of its new format, the weight in it)`"""


def repacked(model: M, packs: Mapping[str, Pack]) -> M:
    """A copy of a model in which the weights at some paths live in other formats. It shares no tensor with the model."""
    return copy.deepcopy(replaced(model, {path: _maker(pack) for path, pack in packs.items()}))


def _maker(pack: Pack) -> Callable[[Any], nn.Module]:
    def make(module: Any) -> nn.Module:
        cfg, parts = pack(module)
        made = twin(module)
        for name in module.format.layout(module.shape):
            made._parameters.pop(name, None)
            made._buffers.pop(name, None)
        made.format = cfg.build()
        made.config = module.config.clone(format=cfg)
        for name, part in made.format.layout(module.shape).items():
            value = parts[name].detach()
            if part.trained:
                made._parameters[name] = nn.Parameter(value)
            else:
                made._buffers[name] = value
        for name in ("_made", "_known_squares", "_known_lengths"):  # what was worked out from the parts that were
            made.__dict__.pop(name, None)
        return made

    return make


def learning_like(made: M, model: nn.Module) -> M:
    """A model that was carried over, in which what was trained before is trained again."""
    learns = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(learns.get(name, parameter.requires_grad))
    return made
