"""Policies: which slots a store keeps."""

from orchard.cache.policies.base import Placement, Policy, Slots
from orchard.cache.policies.head_slots import FlatSlots, HeadSlots
from orchard.cache.policies.keep_all import KeepAll
from orchard.cache.policies.keydiff import KeyDiff
from orchard.cache.policies.probe import Probe
from orchard.cache.policies.recent import Recent
from orchard.cache.policies.scored import Scored
from orchard.cache.policies.snap import Snap
from orchard.cache.policies.window import Window

__all__ = [
    "FlatSlots",
    "HeadSlots",
    "KeepAll",
    "KeyDiff",
    "Placement",
    "Policy",
    "Probe",
    "Recent",
    "Scored",
    "Slots",
    "Snap",
    "Window",
]
