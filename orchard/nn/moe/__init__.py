"""Mixtures of experts: a router chooses, experts compute, nothing is dropped."""

from orchard.nn.moe.moe import MoE
from orchard.nn.moe.router import TopK

__all__ = ["MoE", "TopK"]
