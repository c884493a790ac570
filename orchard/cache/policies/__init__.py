"""Policies: which slots a store keeps."""

from orchard.cache.policies.base import Placement, Policy, Slots
from orchard.cache.policies.keep_all import KeepAll
from orchard.cache.policies.window import Window

__all__ = ["KeepAll", "Placement", "Policy", "Slots", "Window"]
