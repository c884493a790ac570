"""MC-Suite: which experts can leave a mixture, and how.

Jaiswal et al. (arXiv 2504.05586). A trained mixture of experts is cut to half of its experts, the same number in every layer, and
takes about half of the memory at the same work for a token. Sixteen criteria say which experts matter least: by weights, by who
is asked, by what experts answer, by gradients. Published for Mixtral-8x7B at one half (perplexity 7.44 before): with the least
activation norm (EAN) 14.74 at once, 10.44 when experts are looked at anew after every eighth that leaves, 9.76 when the model
also learns from next tokens in between (a "lottery subnetwork"); random experts 15.85 in rounds.

Here three small mixtures (four layers, eight experts of which a token asks two, characters for tokens) learn a made-up language
from nothing and are pruned by each of these ways. Every criterion is also held against the truth: what the loss grows by without
each single expert. A criterion's place counts with the better of its two ends, but for EAN and EGE, of which the low end goes.

What differs from the paper: models of half a million weights in place of 47 billion, so that the same cut costs much more;
learning in between begins with five thousand tokens, doubled each round as published; it is with a balance loss (0.05; the
mixtures were trained with 0.001, so that experts differ), and for one mixture without it too. What the paper leaves open about
criteria is said in `orchard/transforms/prune_experts_scores.py`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from orchard.core.report import Bound, Claim, Scalar, Value
from orchard.core.seeds import fold
from orchard.studies import _afm_ground as ground_
from orchard.studies._mc_suite_model import Size
from orchard.studies._mc_suite_prune import LOTTERY, UNBALANCED, Found, measured
from orchard.studies.harness import Outcome
from orchard.transforms.prune_experts_scores import CRITERIA

OURS = ("ean", "ege")
CLAIMS = [
    Claim("lottery", "Learning after every round helps", "lottery_over_iterative", Bound("<=", 1.0)),
    Claim("iterative", "Looking anew after every round helps", "iterative_over_one_shot", Bound("<=", 0.95)),
    Claim("random", "The least activation norm beats chance", "iterative_over_random", Bound("<=", 0.85)),
    Claim("direction", "It matters which end goes", "low_over_high", Bound("<=", 0.9)),
    Claim("loads", "Learning evens out who is asked", "calmer_layers", Bound(">=", 0.75)),
    Claim("ranks", "EAN or EGE is among the best four of sixteen", "best_place", Bound("<=", 4)),
    Claim("memory", "Experts take exactly half", "memory_ratio", Bound("==", 0.5)),
]
SCALES = {
    "small": Size(),
    "full": Size(
        dim=128, hidden=256, length=128, steps=5000, rate=4e-3, heal=12, held_out=32, removal=8, looked=64, chances=8
    ),
}
NOTES = [
    "Ratios are of mean perplexities over the mixtures, with the least and the most ratio of one. Random is the mean of several "
    "choices for each mixture.",
    "Loads: of all layers, rounds and mixtures, the share in which the busiest expert's load over the mean is lower after "
    "learning than before.",
    "Agreement is Spearman's rank correlation of the order in which experts go with what the loss grows by without each of "
    "them, the mean over layers and mixtures.",
]


def run(scale: str, seed: int) -> Outcome:
    size = SCALES[scale]
    found = [measured(size, fold(seed, "mixture", number), unbalanced=number == 0) for number in range(size.models)]
    agreements, place = places(found)
    values: dict[str, Value | Scalar] = {
        **perplexities(found),
        **evenness(found),
        "best_place": Value(float(min(place[name] for name in OURS)), "", note="of EAN and EGE, among sixteen"),
        "memory_ratio": Value(max((one.memory for one in found), key=lambda ratio: abs(ratio - 0.5)), "x"),
    }
    for name in CRITERIA:
        values[f"agreement_{name}"] = ground_.mean([max(one.agreement[name]) for one in found], note="its better end")
    series: dict[str, list[Any]] = {
        "criterion, place, agreement (low end, high end), perplexity at once (low end, high end)": [
            [name, place[name], *(round(each, 3) for each in (*agreements[name], *_left(found, name)))]
            for name in sorted(CRITERIA, key=lambda name: place[name])
        ],
        "mixture, round, layer, busiest expert before and after learning": [
            [number, at, path, round(before, 3), round(after, 3)]
            for number, one in enumerate(found)
            for at, path, before, after in one.loads[LOTTERY]
        ],
        "random choices": [[round(each, 3) for each in one.chances] for one in found],
    }
    return Outcome(values=values, series=series, notes=NOTES, config=asdict(size))


def perplexities(found: list[Found]) -> dict[str, Value | Scalar]:
    each = {name: [one.perplexity[name] for one in found if name in one.perplexity] for name in found[0].perplexity}
    values: dict[str, Value | Scalar] = {"perplexity_whole": ground_.mean([one.whole for one in found])}
    values |= {
        f"perplexity_{name.replace(' ', '_').replace('-', '_')}": ground_.mean(told) for name, told in each.items()
    }

    def over(one: str, other: str) -> Value:
        return ground_.ratio(each[one], each[other], f"{one} over {other}")

    return values | {
        "lottery_over_iterative": over(LOTTERY, "iterative"),
        "iterative_over_one_shot": over("iterative", "one-shot"),
        "iterative_over_random": over("iterative", "random"),
        "low_over_high": over("iterative", "high end"),
    }


def evenness(found: list[Found]) -> dict[str, Value | Scalar]:
    values: dict[str, Value | Scalar] = {}
    for name, key in ((LOTTERY, "calmer_layers"), (UNBALANCED, "calmer_layers_without_balance_loss")):
        cells = [after < before for one in found for _, _, before, after in one.loads.get(name, ())]
        values[key] = Value(sum(cells) / len(cells), "", note=f"of {len(cells)} layers in rounds")
    return values


def places(found: list[Found]) -> tuple[dict[str, tuple[float, float]], dict[str, int]]:
    """Agreement of both ends, mean over mixtures, and who comes where by the better end (of ours: by the low end)."""
    count = len(found)
    agreements = {
        name: (
            sum(one.agreement[name][0] for one in found) / count,
            sum(one.agreement[name][1] for one in found) / count,
        )
        for name in CRITERIA
    }
    counted = {name: both[0] if name in OURS else max(both) for name, both in agreements.items()}
    return agreements, {name: 1 + sum(other > counted[name] for other in counted.values()) for name in CRITERIA}


def _left(found: list[Found], name: str) -> list[float]:
    return [sum(one.by_criterion[name][end] for one in found) / len(found) for end in (0, 1)]
