"""UPSCALE: channel pruning without constraints, exported without copies.

Wan et al. (arXiv 2307.08771, ICML 2023). Layers that read the same tensor may each keep other channels of it. Pruners usually
forbid that: a layer that keeps some channels here and there has to gather them, which costs more time than it saves. Without
the rule accuracy after pruning is higher (published: 2.1 points of ImageNet top-1 on average, 17 on DenseNet, without
fine-tuning), and with channels put in another order at export most gathers become views (published: up to twice as fast as the
plain export).

Here a small ResNet and a small DenseNet learn ten shapes in noise (pictures are drawn, nothing is fetched) and lose the same
share of their input channels with and without the rule, without fine-tuning. The constrained baseline is the better of two:
channels worth what all their readers have in sum, or on average. Exports are compared with the masked net, with a mock of it
that indexes, and with the plain export, which gathers wherever a layer's channels are no run.

What differs from the paper: the order of channels is not found along heavy paths but exactly, by PQ-trees, for as many readers
as such nets have; a choice of channels moves in front of steps that only one layer reads, so that a concatenation is made of
views of its parts; pictures are small, and one net of each kind is trained. Unconstrained nets keep more weights at the same
share, because a channel goes only when no layer reads it; so accuracy at equal weights is shown too. The last part is ours: a
decoder whose maps each keep their own channels of the residual stream.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from orchard.core.progress import track
from orchard.core.report import Bound, Claim, Scalar, Value
from orchard.core.seeds import fold, generator
from orchard.studies import _upscale_decoder as decoders
from orchard.studies import _upscale_nets as nets
from orchard.studies._upscale_fuzz import mismatches
from orchard.studies._upscale_shapes import pictures
from orchard.studies.harness import Outcome
from orchard.transforms.prune_scores import IMPORTANCES
from orchard.transforms.upscale_export import Export, export, mock
from orchard.transforms.upscale_inputs import PruneInputs
from orchard.transforms.upscale_masks import Masks
from orchard.transforms.upscale_net import ChannelNet, plain_torch
from orchard.transforms.upscale_order import Reader, Wish, arrange
from orchard.transforms.upscale_trace import trace

KEEP = 0.6
CONSTRAINED = ({"constrained": True}, {"constrained": True, "averaged": True})
INPUTS, RUNS = 100, 30
CLAIMS = [
    Claim("learnt", "Both nets know the shapes before pruning", "least_accuracy", Bound(">=", 85)),
    Claim("better", "Without the rule one net at least keeps more", "best_gain", Bound(">=", 3.0)),
    Claim("no_worse", "And none keeps less", "least_gain", Bound(">=", -1.0)),
    Claim("copies", "Reordering spares half of all copied channels", "copied_ratio", Bound("<=", 0.5)),
    Claim("two", "Two readers of one tensor never copy", "copies_of_two", Bound("==", 0)),
    Claim("exact", "An export computes what the masked net does", "difference", Bound("<=", 1e-5)),
    Claim("mock", "And what a net that indexes does", "mock_difference", Bound("<=", 1e-5)),
    Claim("weights", "Reordering adds no weight", "parameters_ratio", Bound("<=", 1.0)),
    Claim("layers", "Layers have exactly the same weights", "layer_weights_ratio", Bound("==", 1.0)),
    Claim("views", "Views cost no hidden copies of single pictures", "hidden_copies", Bound("==", 0)),
    Claim("latency", "It is no slower than the plain export", "latency_ratio", Bound("<=", 1.0)),
    Claim("fuzz", "No random net comes out wrong", "fuzz_mismatches", Bound("==", 0)),
    Claim("decoder", "A decoder's maps keep channels of their own", "decoder_difference", Bound("<=", 1e-5)),
    Claim("maps", "None of them copies", "decoder_map_copies", Bound("==", 0)),
    Claim("stream", "That is worth something", "decoder_gain", Bound(">", 0)),
]
NOTES = [
    "Accuracies are in percent, after pruning without fine-tuning; a gain is over the better of two constrained baselines, with "
    "a 95 % bootstrap interval over pictures. Nets are compared at the same share of input channels, as published.",
    "Copied channels are those of gathers, in one pass. A concatenation copies too, in every export; what all together write is "
    "in `moved_ratio`.",
    f"Differences are the largest of any score on {INPUTS} pictures, as a share of the largest score, in float32.",
    "The decoder copies nothing in its maps, but its norms write in another order: `decoder_copied_ratio` counts that in full, "
    "against a gather in each map.",
]


@dataclass(frozen=True)
class Scale:
    steps: int = 1200
    batch: int = 64
    rate: float = 4e-3
    tested: int = 4000
    looked: int = 256
    shares: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6, 0.5)
    fuzz: int = 200
    pairs: int = 1000
    decoder: decoders.Scale = field(default_factory=decoders.Scale)


SCALES = {"small": Scale(), "full": Scale(steps=6000, batch=128, fuzz=1000, decoder=decoders.Scale(steps=1500))}


def run(scale: str, seed: int) -> Outcome:
    size = SCALES[scale]
    images, labels = pictures(size.tested, seed, "test")
    looked, _ = pictures(size.looked, seed, "looked at")
    values: dict[str, Value | Scalar] = {}
    series: dict[str, list[Any]] = {}
    for name in nets.NETS:
        model, curve = nets.train(name, steps=size.steps, batch=size.batch, rate=size.rate, seed=seed)
        net = trace(model, looked)
        series[f"{name}: loss"] = [round(loss, 3) for loss in curve[:: max(1, size.steps // 40)]]
        found, by_share = accuracies(net, size, images, labels, looked, seed)
        made, by_step = exported(net, looked, images[:INPUTS])
        values |= {f"{name}_{key}": value for key, value in {**found, **made}.items()}
        series[f"{name}: importance, kept, unconstrained, constrained, averaged"] = by_share
        series[f"{name}: copied channels"] = by_step
    values |= worst(values) | two_readers(size.pairs, seed) | fuzzed(size.fuzz, seed) | in_decoder(size.decoder, seed)
    return Outcome(values=values, series=series, notes=NOTES, config={**asdict(size), "keep": KEEP})


# Accuracy -------------------------------------------------------------------------------------------------------------


def accuracies(
    net: ChannelNet, size: Scale, images: Tensor, labels: Tensor, looked: Tensor, seed: int
) -> tuple[dict[str, Value | Scalar], list[list[Any]]]:
    """How much a net still knows after pruning, by importance and by share."""

    def known(**how: Any) -> Tensor:
        return nets.right(Masks(**how).apply(net, looked), images, labels)

    rows = []
    wanted = [("l2", share) for share in size.shares] + [(kind, KEEP) for kind in IMPORTANCES if kind != "l2"]
    for kind, share in track(wanted, "pruning"):
        both = [known(keep=share, importance=kind, **how) for how in ({}, *CONSTRAINED)]
        rows.append([kind, share, *(round(_percent(part), 2) for part in both)])
    free, *held = (known(keep=KEEP, **how) for how in ({}, *CONSTRAINED))
    baseline = max(held, key=_percent)
    equal, share = at_equal_weights(net, looked)
    return {
        "accuracy": Value(_percent(nets.right(net, images, labels)), "%", note="before pruning"),
        "unconstrained": Value(_percent(free), "%"),
        "constrained": Value(_percent(baseline), "%", note="the better of the sum and the mean over readers"),
        "gain": gained(free, baseline, seed),
        "gain_at_equal_weights": Value(
            _percent(nets.right(equal, images, labels)) - _percent(baseline), "points", note=f"keeps {share:.0%}"
        ),
    }, rows


def at_equal_weights(net: ChannelNet, looked: Tensor) -> tuple[ChannelNet, float]:
    """The unconstrained net with the largest share that has no more weights than the larger constrained one."""
    room = max(export(Masks(keep=KEEP, **how).apply(net, looked), looked[:1]).parameters for how in CONSTRAINED)  # type: ignore[arg-type]
    share = KEEP
    while True:
        found = Masks(keep=share).apply(net, looked)
        if export(found, looked[:1]).parameters <= room or share < 0.1:
            return found, share
        share -= 0.02


def gained(free: Tensor, held: Tensor, seed: int) -> Value:
    """In points, with an interval of a bootstrap over pictures."""
    gain = 100 * (free.double() - held.double())
    drawn = torch.randint(0, len(gain), (400, len(gain)), generator=generator(seed, "bootstrap"))
    low, high = gain[drawn].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Value(float(gain.mean()), "points", low, high)


def _percent(right: Tensor) -> float:
    return 100 * float(right.float().mean())


# Exports --------------------------------------------------------------------------------------------------------------


def exported(net: ChannelNet, looked: Tensor, images: Tensor) -> tuple[dict[str, Value | Scalar], list[list[Any]]]:
    """One pruned net, exported in four ways."""
    masked = Masks(keep=KEEP).apply(net, looked)
    ways = {
        (reorder, push): export(masked, looked[:1], reorder=reorder, push=push)
        for reorder in (False, True)
        for push in (False, True)
    }
    plain, best = ways[False, False], ways[True, True]
    with torch.no_grad():
        want, got, like = masked(images), best.net(images), mock(masked, best)(images)
    size = float(want.abs().max())
    ratio, times = latency(plain.net, best.net, images[:1])
    table = [
        ["reordered" if reorder else "in place", "pushed" if push else "late", made.copied]
        for (reorder, push), made in ways.items()
    ]
    return {
        "copied_plain": plain.copied,
        "copied": best.copied,
        "copied_ratio": Value(best.copied / max(1, plain.copied), "x", note="of the plain export"),
        "moved_ratio": Value(
            moved(best, images[:1]) / max(1, moved(plain, images[:1])), "x", note="with concatenations"
        ),
        "gathers_plain": len(plain.gathers),
        "gathers": len(best.gathers),
        "views": len(best.views),
        "difference": float((got - want).abs().max()) / size,
        "mock_difference": float((got - like).abs().max()) / size,
        "parameters": best.parameters,
        "parameters_ratio": Value(best.parameters / plain.parameters, "x"),
        "layer_weights_ratio": layer_weights(best) / layer_weights(plain),
        "hidden_copies": hidden_copies(best.net, images[:1]),
        "hidden_copies_of_batches": Value(hidden_copies(best.net, images[:8]), "channels", note="of 8 pictures"),
        "latency_ratio": Value(ratio, "x", *times, note="batch 1; quartiles of pairs of runs"),
    }, table


def moved(made: Export, image: Tensor) -> int:
    """Channels that gathers and concatenations write."""
    joins = {step.name for step in made.net.steps if step.op in ("cat", "gather")}
    counts: dict[str, int] = {}
    with torch.no_grad():
        made.net(image, watch=lambda name, value: counts.__setitem__(name, value.shape[1]) if name in joins else None)
    return sum(counts.values())


def layer_weights(made: Export) -> int:
    layers = {step.tensors for step in made.net.steps if step.op in ("conv", "linear")}
    return sum(part.numel() for name, part in made.net.held.named_parameters() if name.partition(".")[0] in layers)


def hidden_copies(net: ChannelNet, images: Tensor) -> int:
    """Channels that a convolution or linear map would copy first, because what it reads is not in one piece of memory."""
    readers = {name for step in net.steps if step.op in ("conv", "linear") for name in step.inputs}
    scattered: list[int] = []

    def look(name: str, value: Tensor) -> None:
        if name in readers and not value.is_contiguous():
            scattered.append(value.shape[1])

    with torch.no_grad():
        net(images, watch=look)
    return sum(scattered)


def latency(plain: ChannelNet, best: ChannelNet, image: Tensor) -> tuple[float, tuple[float, float]]:
    """The time of one over that of the other, by turns: medians, and quartiles of the ratio of neighbours."""
    modules: list[nn.Module] = [plain_torch(plain), plain_torch(best)]
    taken: list[list[float]] = [[], []]
    with torch.no_grad():
        for turn in range(RUNS + 5):
            for module, times in zip(modules, taken, strict=True):
                start = time.perf_counter()
                for _ in range(5):
                    module(image)
                if turn >= 5:
                    times.append(time.perf_counter() - start)
    ratios = sorted(new / old for old, new in zip(*taken, strict=True))
    return statistics.median(taken[1]) / statistics.median(taken[0]), (ratios[RUNS // 4], ratios[-RUNS // 4])


def worst(values: dict[str, Value | Scalar]) -> dict[str, Value | Scalar]:
    """Over both nets: what claims are about."""

    def each(key: str) -> list[float]:
        found = [values[f"{name}_{key}"] for name in nets.NETS]
        return [float(part.value if isinstance(part, Value) else part) for part in found]  # type: ignore[arg-type]

    keys = ("copied_ratio", "difference", "mock_difference", "parameters_ratio", "hidden_copies", "latency_ratio")
    return {
        "least_accuracy": min(each("accuracy")),
        "best_gain": max(each("gain")),
        "least_gain": min(each("gain")),
        "layer_weights_ratio": max(each("layer_weights_ratio"), key=lambda ratio: abs(ratio - 1)),
        **{key: max(each(key)) for key in keys},
    }


# Without training -----------------------------------------------------------------------------------------------------


def two_readers(count: int, seed: int) -> dict[str, Value | Scalar]:
    """Random sets of two readers each: channels that any of them would have to copy."""
    chance, copied = random.Random(fold(seed, "pairs")), 0
    for _ in range(count):
        size = chance.randint(1, 96)
        sets = [frozenset(chance.sample(range(size), chance.randint(1, size))) for _ in range(2)]
        (order,) = arrange([range(size)], [Reader((Wish(0, part),), len(part)) for part in sets])
        for part in sets:
            at = [place for place, item in enumerate(order) if item in part]
            copied += 0 if at[-1] - at[0] + 1 == len(part) else len(part)
    return {"copies_of_two": Value(copied, "channels", note=f"{count} pairs of random sets")}


def fuzzed(count: int, seed: int) -> dict[str, Value | Scalar]:
    wrong, plain, best = 0, 0, 0
    for place in track(range(count), "random nets"):
        found, before, after = mismatches(fold(seed, "fuzz", place) % 2**32)
        wrong, plain, best = wrong + bool(found), plain + before.copied, best + after.copied
    note = f"{count} nets, four exports each, with mock and plain torch"
    return {"fuzz_mismatches": Value(wrong, "nets", note=note), "fuzz_copied_ratio": best / max(1, plain)}


def in_decoder(size: decoders.Scale, seed: int) -> dict[str, Value | Scalar]:
    model = decoders.trained(size, seed)
    ids = decoders.rows(200, seed, "test")
    free, held = (decoders.pruned(model, PruneInputs(keep=0.75, constrained=rule), ids) for rule in (False, True))
    with torch.no_grad():
        before = float(decoders.loss_of(model, ids))
    spent = free.copies.maps + free.copies.norms
    return {
        "decoder_loss": Value(before, "nats", note="before pruning"),
        "decoder_unconstrained": Value(free.loss, "nats", note="each map keeps 75 %, keys and values the same"),
        "decoder_constrained": Value(held.loss, "nats", note="all maps that read a norm keep the same 75 %"),
        "decoder_gain": Value(held.loss - free.loss, "nats"),
        "decoder_difference": max(free.difference, held.difference),
        "decoder_map_copies": Value(free.copies.maps, "channels"),
        "decoder_copied_ratio": Value(spent / free.copies.plain, "x", note="with what norms reorder"),
    }
