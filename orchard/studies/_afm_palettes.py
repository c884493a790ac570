"""Palettes of mixed bits, and recovery beside them. For the `afm-2024` study.

Which linear maps go to two bits is measured: each by itself, on text that nothing else is measured on, those first whose
two bits cost least for each bit that they save. Uniform rounding is given the same maps at four and two bits, and groups so
small that it takes at least as many bits, scales counted, as palettes take with their tables.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchard.core.batch import Batch
from orchard.core.report import Scalar, Value
from orchard.core.seeds import fold
from orchard.models.language import Decoder
from orchard.nn.formats import Int2
from orchard.studies import _afm_ground as ground_
from orchard.studies._afm_ground import Ground
from orchard.studies._afm_two_bits import Training, recover_steps, recovered
from orchard.transforms.palettize import Palettize
from orchard.transforms.ptq import holders
from orchard.transforms.rtn import Rtn

BITS = 3.7
"""The most bits for each weight of a linear map, tables counted."""
GROUP = 128
SEEDS = 3


@dataclass(frozen=True)
class Palettes:
    """Values, and the model with weighted palettes."""

    values: dict[str, Value | Scalar]
    model: Decoder


def measured(model: Decoder, ground: Ground, training: Training, seed: int) -> Palettes:
    whole = ground_.loss(model, ground, seed)
    texts = list(ground_.batches(ground, training.texts, seed, "look"))
    two = chosen(model, ground, texts, seed)
    models = {
        "weighted": Palettize(two=two).apply(model, texts),
        "gradients": Palettize(two=two, by="gradients").apply(model, texts),
        "unweighted": Palettize(two=two, weighted=False).apply(model),
        "rtn": Rtn(bits=4, group=GROUP, formats=dict.fromkeys(two, Int2.Config(group=GROUP))).apply(model),
    }
    gaps = {name: ground_.loss(each, ground, seed) - whole for name, each in models.items()}
    bits = {name: ground_.linear_bits(each) for name, each in models.items()}
    base, before, changed = models["weighted"], ground_.checksum(models["weighted"]), 0
    left = []
    for number in range(SEEDS):
        made = recovered(model, base, ground, training, fold(seed, "recover", number))
        left.append(ground_.loss(made, ground, seed) - whole)
        changed += ground_.checksum(made) != before
    linear = len(holders(model.config, "all-linear"))
    values: dict[str, Value | Scalar] = {
        "loss": Value(whole, "nats", note="nats a character on held-out text, before anything is compressed"),
        "palette_bits": Value(
            bits["weighted"], "bits", note=f"tables counted; {len(two)} of {linear} maps at two bits"
        ),
        "rtn_bits": Value(bits["rtn"], "bits", note="scales counted; the same maps at two bits"),
        "rtn_bits_over": Value(bits["rtn"] - max(bits["weighted"], bits["unweighted"]), "bits"),
        "gap_weighted": Value(gaps["weighted"], "nats", note="by mean squares of inputs"),
        "gap_weighted_by_gradients": Value(gaps["gradients"], "nats", note="by squared gradients"),
        "gap_unweighted": Value(gaps["unweighted"], "nats"),
        "gap_rtn": Value(gaps["rtn"], "nats", note=f"uniform, groups of {GROUP}, rounded to nearest"),
        "weighted_gap_ratio": Value(gaps["weighted"] / gaps["unweighted"], "x", note="to unweighted, at equal bits"),
        "rtn_gap_ratio": Value(
            gaps["rtn"] / max(gaps["weighted"], gaps["unweighted"]), "x", note="to the worse palette"
        ),
        "gap_recovered": ground_.mean(left, "nats", f"rank {training.rank}"),
        "recovered_gap_ratio": ground_.mean([each / gaps["weighted"] for each in left], "x", "to the gap before"),
        "recover_tokens": Value(recover_steps(ground, training)[1], "tokens", note=f"of {ground.tokens:,}"),
        "recover_share": recover_steps(ground, training)[1] / ground.tokens,
        "recover_bases_changed": changed,
    }
    return Palettes(values, base)


def chosen(model: Decoder, ground: Ground, texts: list[Batch], seed: int) -> tuple[str, ...]:
    """The maps that go to two bits, so that all together come within `BITS`."""
    names = list(holders(model.config, "all-linear"))
    judged = list(ground_.batches(ground, 2, seed, "choose"))
    before = ground_.loss_on(model, judged)
    costs = {}
    for name in names:
        made = Palettize(targets=(name,), two=(name,)).apply(model, texts[:1])
        weights = model.get_submodule(name).dense().numel()  # type: ignore[operator]
        costs[name] = (ground_.loss_on(made, judged) - before) / weights
    order = sorted(names, key=lambda name: costs[name])
    for count in range(len(order) + 1):
        if Palettize(two=tuple(order[:count])).bits_per_weight(model.config) <= BITS:
            return tuple(order[:count])
    return tuple(order)
