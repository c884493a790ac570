"""A runner whose experts live in a file, from a plan, the file, and what a user says about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchard.cache.experts import Records, Resident, policy_named
from orchard.cache.experts.layout import Facts
from orchard.cache.experts.misses import misses_named
from orchard.cache.experts.prefetch import prefetcher_named
from orchard.core.sizes import bytes_of
from orchard.generate.experts import ExpertsProgram
from orchard.generate.experts_file import expert_steps
from orchard.generate.native import NativeRunner
from orchard.ops.plan.steps import Plan


@dataclass(frozen=True)
class ExpertsOptions:
    """How experts that live elsewhere are kept and read."""

    budget: int | str
    """Memory for experts, in bytes or as in "200MB"."""
    policy: str = "auto"
    """Which expert makes room: see `orchard.cache.experts.POLICIES`. auto: least-stale where memory holds less than one token
    needs, so that only what is read ahead can be there in time; lfu-ahead where popular experts can stay from token to token."""
    prefetch: str = "gates"
    """What is read before it is asked for: none, gates, history, threshold."""
    lookahead: int = 1
    """Layers ahead that are prefetched for."""
    misses: str = "wait"
    """wait is exact; substitute and skip give up quality for time."""
    direct: bool = False
    """Read past the system's page cache."""
    readers: int = 4
    """Threads that read beside the engine."""

    @property
    def budget_bytes(self) -> int:
        return self.budget if isinstance(self.budget, int) else bytes_of(self.budget)


def options_of(given: int | str | ExpertsOptions) -> ExpertsOptions:
    return given if isinstance(given, ExpertsOptions) else ExpertsOptions(given)


def check_file(path: Path, expect: Facts) -> None:
    """`BadFile` where a file of experts is damaged, cut, or another model's."""
    Records.open(path, expect=expect).close()


def open_experts(plan: Plan, path: Path, options: ExpertsOptions, expect: Facts) -> NativeRunner:
    """`plan` names its experts only; `expect`: what the file has to say of itself."""
    records = Records.open(path, direct=options.direct, expect=expect)
    layers = expert_steps(plan)
    policy = options.policy
    if policy == "auto":
        a_token = sum(step.k for step in layers)
        policy = "least-stale" if options.budget_bytes < a_token * records.record_bytes else "lfu-ahead"
    resident = Resident(
        records,
        options.budget_bytes,
        policy_named(policy),
        working_set=max(step.k for step in layers),
        threads=options.readers,
    )
    prefetcher = prefetcher_named(options.prefetch, options.lookahead)
    program = ExpertsProgram(plan, resident, prefetcher=prefetcher, misses=misses_named(options.misses))
    return NativeRunner(plan, program=program)
