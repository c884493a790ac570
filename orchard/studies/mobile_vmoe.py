"""Mobile V-MoE: experts chosen once an image, by a router that is taught super-classes.

Daxberger et al. (arXiv 2309.04354). The MLPs of the last layers of a small vision transformer become several experts, of which a
router takes one for the whole image; it is taught which super-class the image belongs to, and super-classes are groups of classes
that a dense model confuses. Only the chosen experts have to be loaded. Published: 3.39 points of ImageNet top-1 over the dense
ViT-Tiny at the same cost, and 4.66 at 54M operations.

Here 64 classes in eight families are drawn (nothing is fetched): polygons, petals, strokes, stripes, checks, rings, framed things
and spirals. A small ViT with experts in its last two layers, taught the planted families, is compared at equal cost with the
dense one, with random super-classes, and with a router that learns by itself under a balance loss; and with a dense one of as
many parameters as the mixture has in all. The families are then looked for in the confusions of the dense model on images that
were held out.

What differs from the paper: on two CPU cores there is no time for hundreds of epochs, so at the scale `small` all kinds of one
seed begin with the same dense model, whose MLPs the experts copy (sparse upcycling, arXiv 2212.05055), and go on for as many
images each; at the scale `full` every kind learns from scratch. The router reads the mean token that enters the first layer with
experts. Weights of the chosen experts are renormalised, so k = 1 scales nothing. A router that learns by itself gets
straight-through gradients, or copies of one MLP would first be shrunk by its weights. Experts are gated MLPs, and so are the
dense model's. A class of these images has four looks, and which ones differs from family to family (`orchard.data.scenes`):
where a tiny model tells classes by their shape alone, it has no need of experts, as a first set of images showed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import torch

from orchard.core.progress import track
from orchard.core.report import Bound, Claim, Scalar, Value
from orchard.core.seeds import fold
from orchard.data.scene_families import KINDS
from orchard.data.scenes import CLASSES
from orchard.models.vision import ViT
from orchard.models.vision.costs import costs
from orchard.models.vision.superclasses import adjusted_rand, confusions, superclasses
from orchard.studies import _mobile_vmoe_runs as runs
from orchard.studies._mobile_vmoe_experts import used
from orchard.studies._mobile_vmoe_runs import EXPERTS, Kind, Result, Size
from orchard.studies.harness import Outcome
from orchard.transforms.image_experts import ImageExperts

LAST = 2
"""Layers with experts, as published."""
PLANTED = tuple(label // KINDS for label in range(CLASSES))
CLAIMS = [
    Claim("gain", "Experts for images beat the dense model", "gain", Bound(">=", 1.5)),
    Claim("flops", "At the same cost, routers included", "flops_ratio", Bound("<=", 1.03)),
    Claim("router", "Routers know the super-class", "router_accuracy", Bound(">=", 80)),
    Claim("correlates", "Where they know it better, experts gain more", "router_correlation", Bound(">", 0)),
    Claim("random", "Super-classes beat random groups of classes", "over_random", Bound(">=", 1.0)),
    Claim("learned", "And a router that learns by itself", "over_learned", Bound(">=", 0)),
    Claim("touched", "An image touches few of the parameters", "touched_ratio", Bound("<=", 0.65)),
    Claim("experts", "And exactly k experts a layer", "experts_off", Bound("==", 0)),
    Claim("recovered", "Confusions show the hidden super-classes", "rand_index", Bound(">=", 0.6)),
    Claim("some", "Accuracy peaks with experts in some layers", "peak_layers", Bound(">=", 1)),
    Claim("few", "But in three at most, not in all", "peak_layers", Bound("<=", 3)),
]
SCALES = {
    "small": Size(),
    "full": Size(
        side=32,
        patch=4,
        dim=48,
        layers=6,
        hidden_dim=96,
        train=40_960,
        held_out=8_192,
        test=8_192,
        first=0,
        then=20 * 40_960,
        batch=256,
        rate=3e-3,
        depths=(1, 2, 3, 4, 6),
        look={},
        processes=1,
        device="cuda" if torch.cuda.is_available() else "cpu",
    ),
}


def run(scale: str, seed: int) -> Outcome:
    size = SCALES[scale]
    seeds = [fold(seed, "run", number) % 2**31 for number in range(size.seeds)]
    named = kinds(size, seed)
    found: dict[str, dict[int, Result]] = {}
    total = sum(len(named(one)) for one in seeds)
    for result in track(runs.results(size, named, seeds, seed), "learning", total=total):
        found.setdefault(result.name, {})[result.seed] = result
    accuracy = {
        name: np.array([100 * by[one].right.mean() for one in seeds if one in by]) for name, by in sorted(found.items())
    }
    values: dict[str, Value | Scalar] = {f"accuracy_{name}": spread(part, "%") for name, part in accuracy.items()}
    values |= compared(accuracy) | routed(size, found, accuracy, seeds, seed) | by_depth(size, accuracy)
    values |= cost(size, found, seeds, seed) | recovered(size, found["dense"], seeds, seed)
    series = {"accuracy by kind and seed": [[name, *np.round(part, 2).tolist()] for name, part in accuracy.items()]}
    return Outcome(values=values, series=series, notes=notes(size), reasons=reasons(values), config=asdict(size))


def kinds(size: Size, seed: int) -> Callable[[int], list[Kind]]:
    """The kinds of model that are trained from each seed; the wide one, which is there for orientation only, from the first."""
    firsts = fold(seed, "run", 0) % 2**31

    def of(one: int) -> list[Kind]:
        groups = np.random.default_rng(fold(one, "random groups")).permutation(CLASSES) % EXPERTS
        depths = [Kind(f"experts_in_{last}", last, PLANTED) for last in size.depths]
        others = [Kind("random", LAST, tuple(groups.tolist())), Kind("learned", LAST), Kind("dense")]
        return [*([Kind("wide", LAST, wide=True)] if one == firsts else []), *depths[::-1], *others]

    return of


# Accuracy -------------------------------------------------------------------------------------------------------------


def spread(parts: np.ndarray, unit: str, note: str = "") -> Value:
    """The mean over seeds, with the least and the most of them."""
    return Value(float(parts.mean()), unit, float(parts.min()), float(parts.max()), note)


def compared(accuracy: dict[str, np.ndarray]) -> dict[str, Value | Scalar]:
    ours = accuracy[f"experts_in_{LAST}"]
    wide = accuracy["wide"]
    return {
        "gain": spread(ours - accuracy["dense"], "points", "over the dense model of the same seed"),
        "over_random": spread(ours - accuracy["random"], "points"),
        "over_learned": spread(ours - accuracy["learned"], "points"),
        "under_wide": Value(
            float((wide - ours[: len(wide)]).mean()), "points", note="what a dense model of as many parameters has more"
        ),
    }


def by_depth(size: Size, accuracy: dict[str, np.ndarray]) -> dict[str, Value | Scalar]:
    means = {0: accuracy["dense"].mean(), **{last: accuracy[f"experts_in_{last}"].mean() for last in size.depths}}
    peak = max(means, key=lambda last: means[last])
    return {
        "peak_layers": Value(
            peak, "layers", note=f"with experts, of {size.layers}; tried: {', '.join(map(str, means))}"
        )
    }


# Routers --------------------------------------------------------------------------------------------------------------


def routed(
    size: Size, found: dict[str, dict[int, Result]], accuracy: dict[str, np.ndarray], seeds: list[int], seed: int
) -> dict[str, Value | Scalar]:
    """How often routers choose the group that they are taught, and whether that goes with what experts gain."""
    labels = runs.pictures(size, "test", seed).labels.cpu().numpy()
    right: dict[str, list[float]] = {}
    for one in seeds:
        for kind in kinds(size, seed)(one):
            if kind.groups is not None:
                taught = np.array(kind.groups)[labels]
                right.setdefault(kind.name, []).append(100 * float((found[kind.name][one].routed == taught).mean()))
    known = {name: np.array(parts) for name, parts in right.items()}
    alike = (f"experts_in_{LAST}", "random")  # with experts in the same layers: how many there are matters by itself
    x, y = (
        np.concatenate(parts)
        for parts in zip(*((known[n], accuracy[n] - accuracy["dense"]) for n in alike), strict=True)
    )
    families = [family_gains(found, labels, one) for one in seeds]
    return {
        **{f"router_accuracy_{name}": spread(part, "%") for name, part in known.items()},
        "router_accuracy": spread(known[f"experts_in_{LAST}"], "%"),
        "router_correlation": Value(
            correlation(x, y), note=f"Pearson's, of {len(x)} mixtures: taught planted groups or random ones"
        ),
        "router_correlation_families": Value(
            correlation(*np.concatenate(families, 1)),
            note="of families within mixtures, which also differ in difficulty",
        ),
    }


def family_gains(found: dict[str, dict[int, Result]], labels: np.ndarray, seed: int) -> np.ndarray:
    """For each family, how often images of it reach its expert, and what their accuracy gains: [2, families]."""
    ours, dense = found[f"experts_in_{LAST}"][seed], found["dense"][seed]
    assert ours.routed is not None
    family = np.array(PLANTED)[labels]
    of = [family == number for number in range(EXPERTS)]
    reached = [float((ours.routed[:, rows] == family[rows]).mean()) for rows in of]
    return np.array([reached, [float(ours.right[rows].mean() - dense.right[rows].mean()) for rows in of]])


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's; 0 where one side does not change."""
    return float(np.corrcoef(x, y)[0, 1]) if x.std() > 0 and y.std() > 0 else 0.0


# Cost and super-classes -----------------------------------------------------------------------------------------------


def cost(size: Size, found: dict[str, dict[int, Result]], seeds: list[int], seed: int) -> dict[str, Value | Scalar]:
    """Told from the trees; which experts an image really uses is counted as they run."""
    tree = ImageExperts(experts=EXPERTS, last=LAST)(size.tree())
    dense, mixture = costs(size.tree()), costs(tree)
    model: ViT = tree.build()
    weights = found[f"experts_in_{LAST}"][seeds[0]].weights
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    images = runs.pictures(size, "test", seed).images[:64].float().cpu()
    counts = np.array(used(model, images))  # [images, layers]
    return {
        "flops": Value(mixture.flops, "operations", note="an image"),
        "flops_ratio": Value(mixture.flops / dense.flops, "x", note="of the dense model"),
        "parameters": mixture.parameters,
        "touched_ratio": Value(mixture.touched / mixture.parameters, "x", note="of all parameters, by one image"),
        "experts_off": Value(
            int(np.abs(counts - 1).max()),
            "experts",
            note=f"the most that one of {len(images)} images uses more or less than k in a layer",
        ),
    }


def recovered(size: Size, dense: dict[int, Result], seeds: list[int], seed: int) -> dict[str, Value | Scalar]:
    """Super-classes from what each seed's dense model confuses, against the planted ones."""
    shown = runs.pictures(size, "held_out", seed).labels.cpu().numpy()
    agree, inside = [], []
    for one in seeds:
        counts = confusions(shown, dense[one].taken_for, CLASSES)
        agree.append(adjusted_rand(superclasses(counts, EXPERTS, seed=seed), PLANTED))
        np.fill_diagonal(counts, 0)
        same = np.equal.outer(np.array(PLANTED), np.array(PLANTED))
        inside.append(100 * counts[same].sum() / max(1.0, counts.sum()))
    return {
        "rand_index": spread(np.array(agree), "", "adjusted; of groups found on images that were held out"),
        "confused_inside": spread(np.array(inside), "%", "of confusions are within a family"),
    }


# In words -------------------------------------------------------------------------------------------------------------


def notes(size: Size) -> list[str]:
    begin = (
        f"All kinds of a seed begin with one dense model that saw {size.first:,} images, and see {size.then:,} more each."
        if size.first
        else f"Every kind sees {size.then:,} images, from scratch."
    )
    return [
        f"{begin} Accuracies are in percent of {size.test:,} test images.",
        f"Intervals are the least and the most of {size.seeds} seeds.",
        "The dense model of as many parameters as the mixture has in all costs more to run; it was trained from one seed.",
    ]


def reasons(values: dict[str, Value | Scalar]) -> dict[str, str]:
    """What to think of where a claim fails."""
    said = {
        "gain": "Likely: each expert sees an eighth of the images, and the dense model still learns: longer runs favour experts.",
        "random": "Likely: what a router cannot tell it mixes, and experts that see everything are no worse than one MLP.",
        "learned": "Likely: a router that learns by itself finds groups of its own, and at this scale they serve about as well.",
        "recovered": "Likely: too few confusions of images that were held out, or too many of them between families.",
        "some": "Experts gain nothing over the dense model in any number of layers that was tried.",
        "few": "Likely: with experts in all layers the router decides before it can tell families, but kinds begin with the same "
        "dense model, so experts that images reach by chance are hardly worse than the MLP they copied.",
    }
    return {claim.id: said[claim.id] for claim in CLAIMS if claim.id in said and not _holds(claim, values)}


def _holds(claim: Claim, values: dict[str, Value | Scalar]) -> bool:
    found = values[claim.metric]
    return claim.bound.holds(float(found.value if isinstance(found, Value) else found))  # type: ignore[arg-type]
