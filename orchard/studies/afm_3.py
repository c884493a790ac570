"""AFM 3 Core Advanced: weights in flash, a working set for each request.

Apple announced its third generation of foundation models in June 2026; a technical report was to follow. Of the larger of the two
models for devices it is known that its 20 billion weights live in flash, that 1 to 4 billion of them are in memory for a request,
that a small dense part reads the prompt and chooses them once (instruction-following pruning, arXiv 2501.02086), that the choice
is made anew only now and then, that many units are shared by all requests, and that budgets are set by use case and nest.

Here a model of characters with four kinds of text, each with facts of its own, learns to choose among 24 groups of hidden units
in each layer behind the first, a quarter of all units being shared. Budgets of an eighth, a quarter and a half of the groups
are drawn in training, where the choice for each span of text is made by the span before it. Groups lie in a file, one record
each; what is chosen is read, and every byte is counted. Parts: `orchard.transforms.ifprune*` over `orchard.cache.experts`.

What differs from what is known: everything about training, which was not published, follows instruction-following pruning and
slimmable networks (arXiv 1812.08928). The model is small (see the config: one layer reads, the others choose), learns from
nothing, and has no vision or speech. The static mask is that of a dense model with the same beginning, cut by activation after
two fifths of the steps and tuned for the rest of them.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from orchard.core.report import Bound, Claim, Scalar, Value
from orchard.studies import _afm3_disk as disk
from orchard.studies import _afm3_models as models
from orchard.studies._afm3_models import BUDGETS, Size
from orchard.studies._afm3_texts import DOMAINS
from orchard.studies.harness import Outcome

SCALES = {
    "small": Size(),
    "full": Size(
        dim=128,
        layers=4,
        hidden=1024,
        first=1024,
        rows=64,
        length=128,
        base=1500,
        steps=1500,
        rate=3e-3,
        tune=2e-3,
        held_out=128,
    ),
}
CLAIMS = [
    Claim(
        "static",
        "A quarter of the groups by prompt beats a fixed part of the same size",
        "over_static",
        Bound("<=", 0.97),
        "loss_static",
    ),
    Claim(
        "gap",
        "It closes two fifths of the gap between the dense models of active and of total size",
        "gap_closed",
        Bound(">=", 0.4),
        "loss_large",
    ),
    Claim(
        "bytes",
        "One choice a prompt reads a tenth of the bytes of one a token",
        "bytes_ratio",
        Bound("<=", 0.1),
        "bytes_a_token_tokens",
    ),
    Claim(
        "nested",
        "From a quarter to a half exactly the difference is read",
        "growth_excess",
        Bound("==", 0),
        "growth_bytes",
    ),
    Claim(
        "memory",
        "Weights in memory are those in use and at most a twentieth more",
        "memory_over_active",
        Bound("<=", 0.05),
        "memory",
    ),
    Claim(
        "anew",
        "Choosing anew every span pays when the text becomes another",
        "anew_over_frozen",
        Bound("<=", 0.95),
        "loss_frozen",
    ),
]
NOTES = [
    "Losses are nats a character of the text after a prompt of 64 characters, the mean over four kinds of text.",
    "Bytes are those asked of the file, with room in memory for one choice. The model that routes tokens is the same one: its "
    "scores are made of the last token's state alone, and the choice is made anew for every token.",
    "Keys and values of earlier text stay as other units made them when a choice is made anew.",
]


def run(scale: str, seed: int) -> Outcome:
    size = SCALES[scale]
    made = models.ways(size, seed)
    sparse = made["sparse"]
    loss = {name: models.losses(model, size, seed) for name, model in made.items()}
    for share in BUDGETS[1:]:
        loss[f"sparse_{share:g}"] = models.losses(sparse, size, seed, round(share * size.groups))
    mean = {name: statistics.fmean(each.values()) for name, each in loss.items()}
    gap = mean["small"] - mean["large"]
    frozen, anew = (models.after_a_switch(sparse, size, seed, every) for every in (None, size.span))
    counted, series = disk.counted(sparse, size, seed)
    values: dict[str, Value | Scalar] = {
        **{f"loss_{name}": Value(value, "nats") for name, value in mean.items()},
        "over_static": Value(mean["sparse"] / mean["static"], "x"),
        "gap": Value(gap, "nats"),
        "gap_closed": Value((mean["small"] - mean["sparse"]) / gap if gap > 0 else float("nan"), "of the gap"),
        "loss_frozen": Value(frozen, "nats", note="after the switch"),
        "loss_anew": Value(anew, "nats", note="after the switch"),
        "anew_over_frozen": Value(anew / frozen, "x"),
        **counted,
        "active_units": size.active / size.hidden,
    }
    reasons = idle(mean) if gap > 0 else {"gap": "the dense model of total size is no better: there is no gap to close"}
    by_domain: list[Any] = [[name, domain, round(each[domain], 4)] for name, each in loss.items() for domain in DOMAINS]
    return Outcome(
        values=values,
        series={"model, text, loss": by_domain, "text, choice, bytes a token": series},
        notes=NOTES,
        reasons=reasons,
        config=asdict(size),
    )


def idle(mean: dict[str, float]) -> dict[str, str]:
    """Why claims about choices may fail: where twice or half as many groups make no difference, which they are makes none."""
    losses = [value for name, value in mean.items() if name.startswith("sparse")]
    if max(losses) > 1.02 * min(losses):
        return {}
    reason = (
        f"all budgets lose {min(losses):.3f} to {max(losses):.3f} nats: after so few steps the shared units and the first layer "
        "say what the model knows, and groups have learnt little that is their own"
    )
    return dict.fromkeys(("static", "gap", "anew"), reason)
