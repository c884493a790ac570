"""Instruction-following pruning: a sub-network for each prompt.

Hou et al. (arXiv 2501.02086, ICML 2025). A small predictor reads the instruction once and says which channels of the feed-forward
layers are worth keeping for this request; the rest of a 6 to 12 billion model is left out, and what is left has three billion
weights. Predictor and model are trained together through a relaxed top-k. Published: with 9 billion weights, of which 3 are used,
GSM8K 72.0 against 69.3 of a dense model of 3 and 75.4 of one of 9; first tokens up to 57 % sooner; one mask for a whole task does
nearly as well as one for each input; masks of the same topic overlap by about 80 %.

Here six kinds of small exercises with an instruction each (copy, reverse, add, sort, shift, close brackets) are learnt by four
models at equal steps and tokens, with the same attention and embeddings: dense with all hidden units, dense with a quarter,
a quarter chosen once for all prompts by the same relaxed top-k (`Fixed`), and a quarter chosen by a predictor for each prompt.
Parts: `orchard.transforms.ifprune*`, the objective `ByPrompt`.

What differs from the paper: the predictor is a transformer of two layers trained from nothing, of whose states the mean is taken;
all models are trained from nothing, with answers only (the second stage of the paper; the first, on running text, is in `afm-3`);
layers have 64 units of which 16 are used, and not 512 of which 128 are, because two processors train them in minutes; sums and
shifts move a letter by few steps, because sums of any two letters are learnt only after a long plateau.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

import torch

from orchard.core.context import Context
from orchard.core.report import Bound, Claim, Scalar, Value
from orchard.core.seeds import fold
from orchard.studies import _ifp_models as models
from orchard.studies._afm_ground import device
from orchard.studies._ifp_models import Size
from orchard.studies._ifp_tasks import DOMAINS, exercises
from orchard.studies.harness import Outcome
from orchard.transforms.ifprune_choice import Choice
from orchard.transforms.ifprune_gather import active, gathered
from orchard.transforms.ifprune_model import Instructed

SCALES = {
    "small": (Size(), 1),
    "full": (Size(dim=64, hidden=512, kept=128, reader=64, rows=256, steps=4000, rate=5e-3), 3),
}
"""Sizes, and how many seeds are trained."""
CLAIMS = [
    Claim("static", "A mask for each prompt beats one for all", "over_static", Bound("<=", 0.95), "loss_static"),
    Claim("small", "… and a dense model of the size that is used", "over_small", Bound("<=", 0.90), "loss_small"),
    Claim(
        "gap", "It closes half of the gap to the dense model of all units", "gap_closed", Bound(">=", 0.5), "loss_large"
    ),
    Claim("overlap", "Prompts of one kind choose alike", "overlap_gain", Bound(">=", 0.15), "overlap_across"),
    Claim("gathered", "A gathered model computes what the masked one does", "difference", Bound("<=", 1e-5)),
    Claim("active", "… with exactly the share of weights", "active_excess", Bound("==", 0)),
    Claim("task", "One choice for a task does nearly as well", "task_over_prompt", Bound("<=", 1.05), "loss_ifp"),
]
NOTES = [
    "Losses are nats a token of held-out answers, the mean over the six kinds of exercises.",
    "The gap is between the dense model of a quarter of the units and the one of all of them; closed: loss won back, as a share.",
    "Overlap is kept by both over kept by either (Jaccard), the mean over layers and pairs of prompts.",
    "How much a unit counts (λ) is part of a choice and goes into the columns of `down` where units are gathered.",
]


def run(scale: str, seed: int) -> Outcome:
    size, seeds = SCALES[scale]
    found = [one_seed(size, fold(seed, "ifp", number) % 2**31) for number in range(seeds)]
    names = ("large", "small", "static", "ifp", "task")
    by_domain = [
        [name, domain, round(statistics.fmean(each[0][name][domain] for each in found), 4)]
        for name in names
        for domain in DOMAINS
    ]
    loss = {name: statistics.fmean(models.mean(each[0][name]) for each in found) for name in names}
    rest = {key: statistics.fmean(each[1][key] for each in found) for key in found[0][1] if key != "difference"}
    gap = loss["small"] - loss["large"]
    values: dict[str, Value | Scalar] = {
        **{f"loss_{name}": Value(value, "nats") for name, value in loss.items()},
        "over_static": Value(loss["ifp"] / loss["static"], "x"),
        "over_small": Value(loss["ifp"] / loss["small"], "x"),
        "gap": Value(gap, "nats"),
        "gap_closed": Value((loss["small"] - loss["ifp"]) / gap if gap > 0 else float("nan"), "of the gap"),
        "task_over_prompt": Value(loss["task"] / loss["ifp"], "x"),
        **rest,
        "difference": max(each[1]["difference"] for each in found),
    }
    reasons = {} if gap > 0 else {"gap": "the dense model of all units is no better here: there is no gap to close"}
    return Outcome(
        values=values,
        series={"model, exercise, loss": by_domain},
        notes=NOTES,
        reasons=reasons,
        config={**asdict(size), "seeds": seeds},
    )


def one_seed(size: Size, seed: int) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Losses by model and kind of exercise, and what else is measured."""
    made = {name: models.trained(config, size, seed, name) for name, config in models.trees(size).items()}
    loss = {name: models.losses(model, seed) for name, model in made.items()}
    model: Instructed = made["ifp"]
    tasks = {domain: Choice.of_task(each) for domain, each in models.choices(model, size, seed, "task").items()}
    loss["task"] = models.losses(model, seed, tasks)
    compared = models.choices(model, size, seed, "compared")
    within, across = models.overlaps(compared)
    used, total = active(model.decoder, size.kept)
    found: dict[str, Any] = {
        "overlap_within": within,
        "overlap_across": across,
        "overlap_gain": within - across,
        "usage_entropy": models.usage_entropy(compared),
        "mean_weight": statistics.fmean(
            float(one.weights[one.weights > 0].mean()) for one in models.sequences(compared)
        ),
        "active_share": used / total,
        "active_excess": used / total - size.kept / size.hidden,
        "difference": difference(model, seed),
    }
    return loss, found


@torch.no_grad()
def difference(model: Instructed, seed: int) -> float:
    """The largest of any score between the masked model and the gathered one, as a share of the largest score."""
    worst = 0.0
    for domain in DOMAINS:
        read = exercises(2, seed, "gathered", domain)
        ids = read.batch.ids[:1].to(device())
        choice = model.choose(read.prompt(0))
        small = gathered(model.decoder, choice)
        units = {layer: part.to(device()) for layer, part in choice.units().items()}
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        want = model.decoder(ids, Context(positions=places, causal=True, units=units))
        worst = max(worst, float((small(ids) - want).abs().max() / want.abs().max()))
    return worst
