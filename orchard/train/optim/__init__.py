"""Optimisers: `AdamW.Config(lr=…).build(named_parameters=model.named_parameters())` is a `torch.optim.Optimizer`."""

from orchard.train.optim.adafactor import Adafactor
from orchard.train.optim.adam8bit import AdamW8bit
from orchard.train.optim.adamw import AdamW
from orchard.train.optim.base import Optimizer
from orchard.train.optim.groups import Rules
from orchard.train.optim.muon import Muon

__all__ = ["Adafactor", "AdamW", "AdamW8bit", "Muon", "Optimizer", "Rules"]
