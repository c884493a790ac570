"""SpecMD: experts that are not in memory, which to read ahead and which to let go.

Published 2026 (arXiv 2602.03921, ICML 2026): a harness that runs mixtures of experts with a small cache under many prefetch and
eviction policies, and a new rule, Least-Stale. Within one token the layers run in order, so what was just used is needed
last. LRU keeps exactly those and drops what was prefetched for the next layers before it is used: a collision. Least-Stale keeps
two generations, what this pass has touched and what it has not, and evicts the stale ones first, each in order of arrival.
Published: up to 85 times fewer collisions than LRU, over 88 % hits and 34.7 % less time to the first token at a cache of 5 %.

Here the books of Orchard's own cache (`orchard.cache.experts`) are replayed over two traces: a made-up one with the numbers of
OLMoE, and one recorded while a tiny mixture, trained in this study, reads unseen text on the native engine with its experts in a
file. The paper has no upper bound; here the oracle (Belady's rule, made exact for prefetching: what is fetched again before it
is used costs nothing to give up) says how much is left.

What differs from the paper: models, sizes and hardware are small or simulated; misses are waited for, so nothing is lossy. A
cache is as large as its in-flight set: what the running layer uses and what may be read ahead for the next two. A unit is in use
until its layer has ended, for every policy. LRU comes in two kinds, which differ a lot: a prefetch of what is there already may
count as use (`lru-touch`) or not (`lru`, which the claims are about).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from orchard.cache.experts.link import Hardware
from orchard.cache.experts.policies import POLICIES
from orchard.cache.experts.prefetch import NextGates, Nothing
from orchard.cache.experts.simulate import ORACLE, Replay
from orchard.cache.experts.simulate import Outcome as Replayed
from orchard.cache.experts.trace import Trace
from orchard.core.progress import track
from orchard.core.report import Bound, Claim, Scalar, Value
from orchard.studies import _specmd_lm as lm
from orchard.studies._specmd_synthetic import TOKENS, synthetic
from orchard.studies.harness import Outcome

TRANSFER = 0.5e-3
LARGEST = 0.25
"""The largest cache, as a share of all units."""
CLAIMS = [
    Claim(
        "collisions", "Made-up trace: a tenth of LRU's collisions at one size at least", "collisions", Bound("<=", 0.1)
    ),
    Claim("hits", "And 1.3 times its hits there", "hits", Bound(">=", 1.3)),
    Claim("lru", "No fewer hits than LRU at any size that holds the in-flight set", "over_lru", Bound(">=", -0.005)),
    Claim("lfu", "And 1.2 times those of LFU", "over_lfu", Bound(">=", 1.2)),
    Claim("oracle", "The oracle is never beaten", "oracle_margin", Bound(">=", 0)),
    Claim("lm_collisions", "Recorded trace: a tenth of LRU's collisions", "lm_collisions", Bound("<=", 0.1)),
    Claim("lm_hits", "And 1.3 times its hits", "lm_hits", Bound(">=", 1.3)),
    Claim("lm_lru", "No fewer hits than LRU at any such size", "lm_over_lru", Bound(">=", -0.005)),
    Claim("lm_lfu", "And 1.2 times those of LFU", "lm_over_lfu", Bound(">=", 1.2)),
    Claim("lm_oracle", "The oracle is never beaten there either", "lm_oracle_margin", Bound(">=", 0)),
    Claim("lm_smallest", "85 % hits at the smallest such size", "lm_smallest_hit_rate", Bound(">=", 0.85)),
    Claim("ttft", "Three quarters of LRU's time to the first token", "ttft", Bound("<=", 0.75)),
    Claim("plain", "Without prefetching the two are nearly equal", "plain_difference", Bound("<=", 0.02)),
]
NOTES = [
    "The in-flight set is what the running layer uses and what may be read ahead for the layers to come, by the prefetcher's "
    "numbers. Gates change their minds as they come nearer, so that there is more at times: `usual_…` are the values where a "
    "cache holds what was in flight at nine moments of ten, `most_…` where it holds the most there ever was.",
    f"Sizes go from the in-flight set to {LARGEST:.0%} of all units. The point of the first two claims and of the "
    "time to the first token is the size where Least-Stale gains most, among those with a tenth of LRU's collisions.",
    "Time to the first token: the first 32 tokens, one after another, on simulated hardware where a layer computes as long as "
    "its experts take to come; a faster or slower line moves the ratio towards 1.",
    "`…_lru_touch` are the same numbers against an LRU for which a prefetch counts as use: it has next to no collisions either, "
    "and Least-Stale gains nothing over it.",
    "`short_…`: a cache smaller than its in-flight set (three layers ahead and four more units each), where no rule is good.",
]
LATER = (
    "a cache that holds the in-flight set by its numbers is short of what gates ask for when they change their minds, which they "
    "often do in a mixture this small: see `lm_usual_…` and `lm_most_…`"
)
REASONS = {"lm_smallest": LATER, "lm_collisions": LATER, "lm_hits": LATER}


@dataclass(frozen=True)
class Scale:
    tokens: int = TOKENS
    lookahead: int = 2
    extra: int = 0
    lm_extra: int = 2
    lm: lm.LM = field(default_factory=lm.LM)


SCALES = {"small": Scale(), "full": Scale(tokens=600, lm=lm.LM(steps=2000, batch=16))}


def run(scale: str, seed: int) -> Outcome:
    size = SCALES[scale]
    made_up = synthetic(seed, size.tokens)
    model, losses = lm.train(size.lm, seed)
    recorded = lm.record(model, size.lm, seed)
    values, series = measured(made_up, size.lookahead, size.extra, "")
    more, others = measured(recorded, size.lookahead, size.lm_extra, "lm_")
    values |= more | plain(made_up) | short(made_up)
    values["lm_loss"] = Value(sum(losses[-20:]) / len(losses[-20:]), "nats")
    for distance in range(1, lm.LOOKAHEAD + 1):
        values[f"lm_guessed_{distance}_ahead"] = lm.accuracy(recorded, distance)
    series |= others | {"lm: loss": [round(loss, 3) for loss in losses[:: max(1, len(losses) // 40)]]}
    return Outcome(values=values, series=series, notes=NOTES, reasons=REASONS, config=asdict(size))


def measured(
    trace: Trace, lookahead: int, extra: int, name: str
) -> tuple[dict[str, Value | Scalar], dict[str, list[Any]]]:
    """All policies over all sizes that hold the in-flight set."""
    replay = Replay(trace, NextGates(lookahead, extra), Hardware(TRANSFER, TRANSFER * trace.k))
    sizes = capacities(replay.nominal, trace.layers * trace.experts)
    found = {
        policy: [replay.run(policy, size) for size in sizes]
        for policy in track((*POLICIES, ORACLE), f"replaying {trace.model}")
    }
    values: dict[str, Value | Scalar] = {
        f"{name}in_flight": replay.nominal,
        f"{name}units": trace.layers * trace.experts,
    }
    values |= {f"{name}{key}": value for key, value in at_other_sizes(replay).items()}
    values |= {f"{name}{key}": value for key, value in compared(found, sizes).items()}
    series: dict[str, list[Any]] = {f"{name}sizes": sizes}
    for policy, curve in found.items():
        series[f"{name}{policy}: hit rate"] = [round(one.counters.hit_rate, 4) for one in curve]
        series[f"{name}{policy}: collisions"] = [one.counters.collisions for one in curve]
    return values, series


def at_other_sizes(replay: Replay) -> dict[str, Value | Scalar]:
    """What is seen where the in-flight set is counted as it came to be: at nine moments of ten, or at its largest."""
    found: dict[str, Value | Scalar] = {}
    for name, size in (("usual", replay.in_flight), ("most", replay.most_in_flight)):
        stale, lru = replay.run("least-stale", size), replay.run("lru", size)
        found |= {
            f"{name}_in_flight": size,
            f"{name}_hit_rate": stale.counters.hit_rate,
            f"{name}_lru_hit_rate": lru.counters.hit_rate,
            f"{name}_collisions": stale.counters.collisions / max(lru.counters.collisions, 1),
            f"{name}_ttft": stale.first / lru.first,
        }
    return found


def capacities(least: int, units: int) -> list[int]:
    """From the in-flight set on, in steps that grow, to a quarter of all units."""
    most, found = max(round(LARGEST * units), least), [least]
    while found[-1] < most:
        found.append(min(most, found[-1] + max(1, found[-1] // 4)))
    return found


def compared(found: dict[str, list[Replayed]], sizes: list[int]) -> dict[str, Value | Scalar]:
    stale, lru, touch, lfu = (found[policy] for policy in ("least-stale", "lru", "lru-touch", "lfu"))
    rates = {policy: [one.counters.hit_rate for one in curve] for policy, curve in found.items()}
    ratios = [
        (one.counters.collisions / max(other.counters.collisions, 1), mine / max(its, 1e-9))
        for one, other, mine, its in zip(stale, lru, rates["least-stale"], rates["lru"], strict=True)
    ]
    best = min(range(len(sizes)), key=lambda place: (ratios[place][0] > 0.1, -ratios[place][1]))
    others = [curve for policy, curve in rates.items() if policy != ORACLE]
    pairs = list(zip(rates["least-stale"], rates["lru"], rates["lru-touch"], rates["lfu"], rates[ORACLE], strict=True))
    return {
        "size": sizes[best],
        "collisions": ratios[best][0],
        "hits": ratios[best][1],
        "hit_rate": rates["least-stale"][best],
        "lru_hit_rate": rates["lru"][best],
        "lru_touch_hit_rate": rates["lru-touch"][best],
        "oracle_hit_rate": rates[ORACLE][best],
        "lru_collisions": lru[best].counters.collisions,
        "least_stale_collisions": stale[best].counters.collisions,
        "lru_touch_collisions": touch[best].counters.collisions,
        "over_lru": min(mine - its for mine, its, _, _, _ in pairs),
        "over_lru_touch": min(mine - its for mine, _, its, _, _ in pairs),
        "over_lfu": min(mine / max(its, 1e-9) for mine, _, _, its, _ in pairs),
        "below_oracle": max(best_there_is - mine for mine, _, _, _, best_there_is in pairs),
        "oracle_margin": min(
            oracle - other for curve in others for oracle, other in zip(rates[ORACLE], curve, strict=True)
        ),
        "smallest_hit_rate": rates["least-stale"][0],
        "lfu_ahead_at_the_largest": rates["lfu-ahead"][-1],
        "least_stale_at_the_largest": rates["least-stale"][-1],
        "oracle_at_the_largest": rates[ORACLE][-1],
        "ttft": stale[best].first / lru[best].first,
        "ttft_lru_touch": stale[best].first / touch[best].first,
        "lfu_collisions": lfu[best].counters.collisions,
    }


def plain(trace: Trace) -> dict[str, Value | Scalar]:
    """No prefetching, at sizes where something stays from token to token."""
    replay = Replay(trace, Nothing())
    sizes = [round(share * trace.layers * trace.experts) for share in (0.05, 0.15, 0.25)]
    rates = [[replay.run(policy, size).counters.hit_rate for policy in ("least-stale", "lru")] for size in sizes]
    return {"plain_difference": max(abs(mine - its) for mine, its in rates), "plain_hit_rate": rates[-1][0]}


def short(trace: Trace) -> dict[str, Value | Scalar]:
    """Three layers ahead in a cache of 3 %: less than the in-flight set."""
    replay = Replay(trace, NextGates(3, 4))
    size = round(0.03 * trace.layers * trace.experts)
    values: dict[str, Value | Scalar] = {"short_size": size, "short_in_flight": replay.nominal}
    for policy in ("least-stale", "lru", "lru-touch"):
        values[f"short_{policy.replace('-', '_')}"] = replay.run(policy, size).counters.hit_rate
    return values
