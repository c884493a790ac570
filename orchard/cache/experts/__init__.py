"""Weights that live elsewhere: records on disk, a resident budget, and who stays in it."""

from orchard.cache.experts.counters import Counters
from orchard.cache.experts.errors import BudgetTooSmall, OtherModel, RecordsUnreadable
from orchard.cache.experts.policies import POLICIES, Key, Policy, policy_named
from orchard.cache.experts.records import Records, Source, room, write_records
from orchard.cache.experts.resident import Resident

__all__ = [
    "POLICIES",
    "BudgetTooSmall",
    "Counters",
    "Key",
    "OtherModel",
    "Policy",
    "Records",
    "RecordsUnreadable",
    "Resident",
    "Source",
    "policy_named",
    "room",
    "write_records",
]
