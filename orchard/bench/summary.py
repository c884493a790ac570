"""From results to the values of a Report: medians with quartiles, ratios, memory beside its bound, shares of the limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchard.bench.cases import LINEAR, smaller_is_better, topic_of, unit_of
from orchard.bench.facts import Facts
from orchard.bench.limits import Limits, share
from orchard.bench.peers import LLAMA, OWN, TRANSFORMERS
from orchard.bench.results import Results
from orchard.bench.stats import Spread, line, ratio, spread
from orchard.core.report import Value

GENERATE = f"{OWN} generate"
SHAPES = {"orchard 4-bit": "q4", "orchard 2-bit": "q2", "llama.cpp Q4_0": "Q4_0"}
ENGINES = (OWN, GENERATE, LLAMA, TRANSFORMERS, *SHAPES)
PEERS = (LLAMA, TRANSFORMERS)
TEXTS = 50
LIMITS = {
    "dram": ("GB/s", 1e9, "read by all threads from 1 GiB"),
    "cached": ("GB/s", 1e9, "read by all threads from 96 MB, in part from cache"),
    "bf16": ("TFLOP/s", 1e12, "torch's matrix product"),
    "int8": ("TOP/s", 1e12, "torch's matrix product"),
}
Values = dict[str, Value]


def engine_values(results: Results) -> Values:
    """Each figure of each engine, in its best setting."""
    found: Values = {}
    for figure in results.figures():
        for engine in ENGINES:
            best = results.best(engine, figure)
            if best is not None:
                setting, rounds = best
                settings = results.rounds[engine]
                note = f"{setting}, the best of {len(settings)} settings" if setting and len(settings) > 1 else setting
                found[f"{engine} {figure}"] = _value(spread(list(rounds.values())), unit_of(figure), note)
    return found


def ratio_values(results: Results) -> Values:
    found: Values = {}
    for figure in results.figures():
        for peer in PEERS:
            pair = results.paired(OWN, peer, figure)
            if all(pair):
                found[f"{figure} over {peer}"] = _value(
                    ratio(*pair), note="smaller is better" if smaller_is_better(figure) else ""
                )
    for own, name in (("orchard 4-bit", "4-bit"), ("orchard 2-bit", "2-bit")):
        pair = results.paired(own, "llama.cpp Q4_0", "shape 32")
        if all(pair):
            found[f"shape 32 {name} over llama.cpp"] = _value(ratio(*pair))
    for engine, name in ((OWN, "busy 32 over quiet"), (LLAMA, "busy 32 over quiet, llama.cpp")):
        pair = _same_setting(results, engine)
        if all(pair):
            found[name] = _value(ratio(*pair), note="one core kept busy by another process")
    return found


def _same_setting(results: Results, engine: str) -> tuple[list[float], list[float]]:
    """The busy figure beside the quiet one of the same setting and the same rounds."""
    best = results.best(engine, "busy 32")
    if best is None:
        return [], []
    quiet = results.rounds[engine][best[0]].get("decode 32", {})
    both = sorted(best[1].keys() & quiet.keys())
    return [best[1][number] for number in both], [quiet[number] for number in both]


def memory_values(results: Results, facts: Facts, lengths: Mapping[str, int]) -> Values:
    """Peak memory beside the weight file and the keys and values. `lengths`: the room for tokens behind each figure."""
    found: Values = {}
    for figure, length in lengths.items():
        values = results.values(OWN, figure)
        if values:
            bound = facts.file_bytes + facts.kv_bytes * length
            one = spread(values)
            scaled = Spread(one.median / bound, one.low / bound, one.high / bound)
            found[f"{figure} over weights and KV"] = _value(scaled, note=f"of {bound / 1e6:.0f} MB")
    return found


def linear_values(results: Results) -> Values:
    """A straight line through the medians of a step's cost at each context."""
    points = [(length, results.values(OWN, f"linear {length}")) for length in LINEAR]
    points = [(length, values) for length, values in points if values]
    if len(points) < 3:
        return {}
    fit = line([length for length, _ in points], [spread(values).median for _, values in points])
    return {
        "linear R2": Value(fit.r2, note=f"{points[0][0]:,} to {points[-1][0]:,} tokens"),
        "linear start": Value(fit.start * 1e3, "ms", note="a step at no context, by the line"),
        "linear slope": Value(fit.slope * 1e6, "ms per 1,000 tokens"),
    }


def work_of(figure: str, facts: Facts) -> tuple[float, float, float] | None:
    """Bytes read and operations done by one unit of work, and how many tokens it gives; None for what has no such limit.

    Attention's operations are left out: they are few beside those of the matrices up to some thousand tokens.
    """
    topic, _, number = figure.partition(" ")
    count = int(number) if number.isdigit() else 0
    if topic in ("decode", "shape"):
        return facts.step_bytes + facts.kv_bytes * count, 2.0 * (facts.body + facts.head), 1
    if topic == "batch":
        return facts.step_bytes + facts.kv_bytes * 48 * count, 2.0 * (facts.body + facts.head) * count, count
    if topic in ("prefill", "ttft"):
        return facts.step_bytes, 2.0 * (facts.body * count + facts.head), count
    return None


def share_values(values: Mapping[str, Value], facts: Mapping[str, Facts], limits: Limits) -> Values:
    """For each figure the limit that bounds it and how near the engine is. `facts`: by engine, as formats differ in size."""
    found: Values = {}
    for name, value in values.items():
        engine = next((one for one in sorted(facts, key=len, reverse=True) if name.startswith(f"{one} ")), None)
        if engine is None or not isinstance(value.value, float) or value.value <= 0:
            continue
        figure = name.removeprefix(f"{engine} ")
        work = work_of(figure, facts[engine])
        if work is None:
            continue
        seconds = value.value if topic_of(figure) == "ttft" else work[2] / value.value
        near = share(limits, seconds=seconds, bytes_read=work[0], operations=work[1])
        if near is not None:
            found[f"{name} share of {near.by}"] = Value(near.share, note=f"bound by {near.by}")
    return found


def paired_shares(results: Results, facts: Mapping[str, Facts]) -> Values:
    """Decode of the large shapes beside the bandwidth that the same process measured between its runs: on a machine with
    neighbours the best minute of the day says little about this one. The share of the best round is there too."""
    found: Values = {}
    for engine in SHAPES:
        pair = results.paired(engine, engine, "shape 32", "bandwidth")
        if all(pair):
            shares = [rate * facts[engine].step_bytes / limit for rate, limit in zip(*pair)]
            found[f"{engine} shape 32 share of bandwidth at the time"] = _value(
                spread(shares), note="memory read between its own runs"
            )
    return found


def limit_values(measured: list[dict[str, float | None]]) -> tuple[Values, Limits]:
    """The limits: the best of all rounds, as an engine must not look nearer to them than it is. Values, and `Limits`."""
    found: Values = {}
    best: dict[str, float] = {}
    for name, (unit, scale, note) in LIMITS.items():
        rounds = [value for one in measured if (value := one.get(name)) is not None]
        if rounds:
            ends = (min(rounds) / scale, max(rounds) / scale)
            found[f"limit {name}"] = Value(ends[1], unit, *ends, note=f"{note}; the best of {len(rounds)} rounds")
            best[name] = max(rounds)
    return found, Limits(**best)


def quality_values(quality: Mapping[str, Any]) -> Values:
    found: Values = {}
    note = f"{quality['texts']} texts, {quality['tokens']:,} tokens"
    few = (
        "" if quality["texts"] >= TEXTS else f" of {quality['texts']} texts"
    )  # another name: the claims speak of all texts
    for way in ("decode", "prefill"):
        if way in quality:
            found[f"agreement {way}{few}"] = Value(quality[way]["agreement"], note=note)
            found[f"divergence {way}{few}"] = Value(quality[way]["nats"], "nats per token", note=note)
    if "lost" in quality:
        lost = quality["lost"]
        found["matrices lost"] = Value(len(lost), note=", ".join(lost[:5]) or "bit-equal after unpacking")
    return found


def _value(of: Spread, unit: str = "", note: str = "") -> Value:
    return Value(of.median, unit, of.low, of.high, note)
