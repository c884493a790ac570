"""Mixtures of experts: a router chooses, experts compute, nothing is dropped."""

from orchard.nn.moe.expert_choice import Choices, ExpertChoice
from orchard.nn.moe.experts import Experts, Own
from orchard.nn.moe.follow import Follow
from orchard.nn.moe.image_level import ImageLevel
from orchard.nn.moe.moe import MoE
from orchard.nn.moe.router import Router, Routing, TopK
from orchard.nn.moe.shared import SharedMLP

__all__ = [
    "Choices",
    "ExpertChoice",
    "Experts",
    "Follow",
    "ImageLevel",
    "MoE",
    "Own",
    "Router",
    "Routing",
    "SharedMLP",
    "TopK",
]
