"""Palettes of mixed bits, and recovery beside them, for three trained models. For the `afm-2024` study.

What is compared differs by thousandths of a nat, so one model decides nothing: three are trained from nothing, each on text
of its own and judged by held-out text of its own, and ratios are those of their mean gaps.

Which linear maps go to two bits is measured: each by itself, those first whose two bits move the model least for each bit
that they save, by the divergence from the model itself (on so little text losses would differ by chance). Uniform rounding
is given the same maps at four and two bits, and groups so small that it takes at least as many bits, scales counted, as
palettes take with their tables. What errors are weighed by (inputs or gradients) and the learning rate of recovery are
those that are better for the mean of the three models on a text that nothing else is measured on.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from orchard.core.batch import Batch
from orchard.core.report import Scalar, Value
from orchard.core.seeds import fold
from orchard.models.language import Decoder
from orchard.nn.formats import Int2
from orchard.studies import _afm_ground as ground_
from orchard.studies._afm_ground import Ground
from orchard.studies._afm_two_bits import Training, recover_steps, recovered
from orchard.transforms.palettize import MEASURES, Palettize
from orchard.transforms.ptq import holders
from orchard.transforms.rtn import Rtn

BITS = 3.7
"""The most bits for each weight of a linear map, tables counted."""
GROUP = 128
MODELS = 3
JUDGED = 4
"""Batches by which maps are chosen for two bits."""

RATES = (5e-4, 1e-3, 2e-3)
"""Of recovery."""


@dataclass(frozen=True)
class Trained:
    """A model and the seed of everything that it reads."""

    model: Decoder
    seed: int


@dataclass(frozen=True)
class Compressed:
    """One model in all ways: gaps on held-out text, gaps of weighted palettes on the text by which the measure is chosen."""

    origin: Trained
    whole: float
    two: tuple[str, ...]
    ways: dict[str, Decoder]
    gaps: dict[str, float]
    tried: dict[str, float]


@dataclass(frozen=True)
class Palettes:
    """Values, and the first model with weighted palettes."""

    values: dict[str, Value | Scalar]
    model: Decoder


def models(ground: Ground, seed: int) -> list[Trained]:
    """The first has the study's own seed."""
    seeds = [seed, *(fold(seed, "model", number) for number in range(1, MODELS))]
    return [
        Trained(ground_.base(ground, each, f"model {number + 1} of {MODELS}"), each)
        for number, each in enumerate(seeds)
    ]


def measured(trained: Sequence[Trained], ground: Ground, training: Training) -> Palettes:
    every = [compressed(each, ground, training) for each in trained]
    tried = {by: [each.tried[by] for each in every] for by in MEASURES}
    best = min(MEASURES, key=lambda by: statistics.fmean(tried[by]))
    gaps = {way: [each.gaps[way] for each in every] for way in every[0].gaps}
    gaps["weighted"] = gaps[best]
    worse = max(("weighted", "unweighted"), key=lambda way: statistics.fmean(gaps[way]))
    rate, made, changed = recoveries(every, best, ground, training)
    left = {each: remaining(made[each], every, ground) for each in (rate, training.recover_rate)}
    values: dict[str, Value | Scalar] = {
        "loss": ground_.mean([each.whole for each in every], "nats", "a character, before anything is compressed"),
        **bits(every),
        "gap_weighted": ground_.mean(gaps["weighted"], "nats", f"by {best}, which the other text chose"),
        "gap_unweighted": ground_.mean(gaps["unweighted"], "nats"),
        "gap_rtn": ground_.mean(gaps["rtn"], "nats", f"uniform, groups of {GROUP}, rounded to nearest"),
        "weighted_gap_ratio": ground_.ratio(gaps["weighted"], gaps["unweighted"], "to unweighted, at equal bits"),
        "rtn_gap_ratio": ground_.ratio(gaps["rtn"], gaps[worse], f"to the worse palette, the {worse} one"),
        "rtn_gap_ratio_weighted": ground_.ratio(gaps["rtn"], gaps["weighted"], "to the weighted palette"),
        "gap_recovered": ground_.mean(left[rate], "nats", f"rank {training.rank}, learning rate {rate:g}"),
        "recovered_gap_ratio": ground_.ratio(left[rate], gaps["weighted"], "to the gap before"),
        "recovered_gap_ratio_usual": ground_.ratio(
            left[training.recover_rate], gaps["weighted"], f"with the usual learning rate, {training.recover_rate:g}"
        ),
        "recover_tokens": Value(recover_steps(ground, training)[1], "tokens", note=f"of {ground.tokens:,}"),
        "recover_share": recover_steps(ground, training)[1] / ground.tokens,
        "recover_bases_changed": changed,
        **errors(every),
    }
    for by in MEASURES:
        values[f"gap_by_{by}"] = ground_.mean(gaps[by], "nats", "on held-out text")
        values[f"chosen_gap_by_{by}"] = ground_.mean(tried[by], "nats", "on the text by which the measure is chosen")
    return Palettes(values, every[0].ways[best])


def compressed(trained: Trained, ground: Ground, training: Training) -> Compressed:
    model, seed = trained.model, trained.seed
    texts = list(ground_.batches(ground, training.texts, seed, "look"))
    two = chosen(model, ground, seed)
    ways = {
        **{by: Palettize(two=two, by=by).apply(model, texts) for by in MEASURES},
        "unweighted": Palettize(two=two, weighted=False).apply(model),
        "rtn": Rtn(bits=4, group=GROUP, formats=dict.fromkeys(two, Int2.Config(group=GROUP))).apply(model),
    }
    whole = ground_.loss(model, ground, seed)
    gaps = {way: ground_.loss(each, ground, seed) - whole for way, each in ways.items()}
    other = elsewhere(ground, seed)
    before = ground_.loss_on(model, other)
    tried = {by: ground_.loss_on(ways[by], other) - before for by in MEASURES}
    return Compressed(trained, whole, two, ways, gaps, tried)


def elsewhere(ground: Ground, seed: int) -> list[Batch]:
    """Text to choose by: as much as is held out, and none of it."""
    return list(ground_.batches(ground, -(-ground.held_out // ground.rows), seed, "choose a measure"))


def recoveries(
    every: Sequence[Compressed], way: str, ground: Ground, training: Training
) -> tuple[float, dict[float, list[Decoder]], int]:
    """The rate that is best elsewhere, the recovered models by rate, and how many bases any recovery changed."""
    made: dict[float, list[Decoder]] = {rate: [] for rate in RATES}
    losses = dict.fromkeys(RATES, 0.0)
    changed = 0
    for each in every:
        base, seed, read = each.ways[way], each.origin.seed, elsewhere(ground, each.origin.seed)
        before = ground_.checksum(base)
        for rate in RATES:
            own = replace(training, recover_rate=rate)
            found = recovered(each.origin.model, base, ground, own, fold(seed, "recover"))
            changed += (ground_.checksum(found) != before) + (ground_.checksum(base) != before)
            losses[rate] += ground_.loss_on(found, read)
            made[rate].append(found)
    rate = min(RATES, key=lambda rate: losses[rate])
    return rate, made, changed


def remaining(made: Sequence[Decoder], every: Sequence[Compressed], ground: Ground) -> list[float]:
    """The gap of each recovered model on its held-out text."""
    return [ground_.loss(one, ground, each.origin.seed) - each.whole for one, each in zip(made, every, strict=True)]


def chosen(model: Decoder, ground: Ground, seed: int) -> tuple[str, ...]:
    """The maps that go to two bits, so that all together come within `BITS`."""
    names = list(holders(model.config, "all-linear"))
    judged, same = list(ground_.batches(ground, JUDGED, seed, "choose")), ground_.towards(model)
    costs = {}
    for name in names:
        made = Palettize(targets=(name,), two=(name,), weighted=False).apply(model)  # neither measure is preferred
        weights = model.get_submodule(name).dense().numel()  # type: ignore[operator]
        costs[name] = ground_.strays(made, same, judged) / weights
    order = sorted(names, key=lambda name: costs[name])
    for count in range(len(order) + 1):
        if Palettize(two=tuple(order[:count])).bits_per_weight(model.config) <= BITS:
            return tuple(order[:count])
    return tuple(order)


def bits(every: Sequence[Compressed]) -> dict[str, Value | Scalar]:
    """Bits for each weight, of the model that takes most; and how many more rounding takes, where that is least."""
    palettes = [max(ground_.linear_bits(way) for name, way in each.ways.items() if name != "rtn") for each in every]
    rounding = [ground_.linear_bits(each.ways["rtn"]) for each in every]
    linear = len(holders(every[0].origin.model.config, "all-linear"))
    counts = ", ".join(str(len(each.two)) for each in every)
    return {
        "palette_bits": Value(max(palettes), "bits", note=f"tables counted; of {linear} maps at two bits: {counts}"),
        "rtn_bits": Value(min(rounding), "bits", note="scales counted; the same maps at two bits"),
        "rtn_bits_over": Value(min(b - a for a, b in zip(palettes, rounding, strict=True)), "bits"),
    }


@torch.no_grad()
def errors(every: Sequence[Compressed]) -> dict[str, Value | Scalar]:
    """How far weights are off, relative, of the maps at four and at two bits: what k-means and rounding themselves aim at."""
    values: dict[str, Value | Scalar] = {}
    for way, name in (("unweighted", "palette"), ("rtn", "rtn")):
        for width in (4, 2):
            found = []
            for each in every:
                off = whole = 0.0
                for path in holders(each.origin.model.config, "all-linear"):
                    if (path in each.two) is (width == 2):
                        was, now = (it.get_submodule(path).dense() for it in (each.origin.model, each.ways[way]))  # type: ignore[operator]
                        off, whole = off + float((now - was).square().sum()), whole + float(was.square().sum())
                found.append((off / whole) ** 0.5 if whole else 0.0)
            values[f"error_{name}{width}"] = ground_.mean(found, "", f"of weights, relative, {width} bits")
    return values
