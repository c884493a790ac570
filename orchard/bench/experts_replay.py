"""`orchard bench experts`: a recorded trace replayed over all policies and capacities, or one recorded first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchard.bench.texts import TEXTS
from orchard.cache.experts.link import Hardware
from orchard.cache.experts.policies import POLICIES
from orchard.cache.experts.prefetch import NextGates, Prefetcher, prefetcher_named
from orchard.cache.experts.simulate import ORACLE, Outcome, Replay
from orchard.cache.experts.trace import Trace
from orchard.core.errors import UsageError
from orchard.core.progress import track
from orchard.core.report import Bound, Claim, Report

SHARES = (0.02, 0.03, 0.05, 0.08, 0.12, 0.18, 0.25, 0.35, 0.5)
"""Of all units: how large caches are, unless capacities are given."""
CLAIMS = [
    Claim("oracle", "No policy beats the oracle", "oracle margin", Bound(">=", 0)),
]


@dataclass(frozen=True)
class Options:
    """What to replay. `capacities`: in units; none: some shares of all units."""

    prefetch: str = "gates"
    lookahead: int = 1
    extra: int = 0
    capacities: tuple[int, ...] = ()
    policies: tuple[str, ...] = ()

    def prefetcher(self) -> Prefetcher:
        if self.prefetch == NextGates.name:
            return NextGates(self.lookahead, self.extra)
        return prefetcher_named(self.prefetch, self.lookahead)


def replay(trace: Trace, options: Options) -> Report:
    """Curves of every policy over the capacities, as a Report."""
    started = time.perf_counter()
    run = Replay(trace, options.prefetcher(), Hardware())
    policies = options.policies or (*POLICIES, ORACLE)
    unknown = [name for name in policies if name not in (*POLICIES, ORACLE)]
    if unknown:
        raise UsageError(f"no policy called {unknown[0]!r}", hint="one of " + ", ".join((*POLICIES, ORACLE)))
    capacities = _capacities(trace, run, options.capacities)
    outcomes = {name: [run.run(name, size) for size in capacities] for name in track(policies, "replaying")}
    values: dict[str, Any] = {
        "tokens": trace.tokens,
        "units": trace.layers * trace.experts,
        "working set": run.working_set,
        "in flight": run.in_flight,
    }
    values |= {
        f"{name} {what} at {size}": number
        for name, curve in outcomes.items()
        for size, outcome in zip(capacities, curve, strict=True)
        for what, number in _figures(outcome).items()
    }
    if ORACLE in outcomes:
        values["oracle margin"] = min(
            oracle.counters.hits - outcome.counters.hits
            for curve in outcomes.values()
            for oracle, outcome in zip(outcomes[ORACLE], curve, strict=True)
        )
    series: dict[str, list[Any]] = {"capacity": list(capacities)}
    for name, curve in outcomes.items():
        for what in ("hit rate", "collisions", "reads"):
            series[f"{name}: {what}"] = [_figures(outcome)[what] for outcome in curve]
    return Report.record(
        "bench",
        "experts",
        values=values,
        claims=CLAIMS if ORACLE in outcomes else [],
        series=series,
        config={"model": trace.model, **asdict(options), "hardware": asdict(run.hardware)},
        notes=["Capacities are counted in units. A collision is a miss of what had been fetched for the same pass."],
        wall_time=round(time.perf_counter() - started, 3),
    )


def record(name: str, path: Path, tokens: int) -> Trace:
    """Let a model write about some texts with its experts in a file, and keep what it chose."""
    from orchard.generate.experts_trace import Recorder
    from orchard.session.model import load

    model = load(name, experts_budget="100TB")  # never more than there is
    program = model.experts
    assert program is not None
    program.recorder = recorder = Recorder(program.layers)
    openings = [text.partition(".")[0][:80] for text in TEXTS[:8]]
    for text in track(openings, "recording"):
        model.generate(text, max_tokens=max(tokens // len(openings), 1))
    trace = recorder.trace(name)
    trace.save(path)
    return trace


def _capacities(trace: Trace, run: Replay, given: Sequence[int]) -> list[int]:
    units = trace.layers * trace.experts
    least = run.working_set
    if given:
        return sorted(set(given))
    found = {min(max(least, run.in_flight), units), *(round(share * units) for share in SHARES)}
    return sorted(size for size in found if least <= size <= units) or [least]


def _figures(outcome: Outcome) -> dict[str, float]:
    counters = outcome.counters
    return {
        "hit rate": round(counters.hit_rate, 6),
        "collisions": counters.collisions,
        "reads": counters.reads,
        "seconds": round(outcome.seconds, 6),
    }
