"""The blocks of a model, whatever model it is."""

from __future__ import annotations

from torch import nn


def layers_of(model: nn.Module) -> list[nn.Module]:
    """What the first list of a model called `layers` holds."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "layers":
            return list(module)
    return []
