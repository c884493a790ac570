"""Mixtures of experts: a router chooses, experts compute, nothing is dropped."""

from orchard.nn.moe.experts import Experts, Own
from orchard.nn.moe.moe import MoE
from orchard.nn.moe.router import Routing, TopK

__all__ = ["Experts", "MoE", "Own", "Routing", "TopK"]
