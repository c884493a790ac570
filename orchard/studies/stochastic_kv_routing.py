"""Stochastic KV routing: one model that runs with the keys and values of any few of its layers.

Random Cross-Layer Attention (R-CLA, arXiv 2604.22782). While a model learns, each layer reads in each step, by chance, the keys
and values of an earlier layer instead of its own. Afterwards whoever serves it chooses which layers keep theirs, and all others
read the last kept one before them. Published: pretraining loss 2.424 without and 2.441 with p = 0.5; SQuAD v2 of Llama 3.1 8B at
100, 50 and 25 % of the layers 0.583, 0.427, 0.257 before and 0.758, 0.740, 0.628 after fine-tuning so; a deep model with a shared
cache beats a shallower one of equal cache.

Here five models of characters learn from the same text: one without routing (base), one with it, one with a fixed pattern (CLA@2:
every second layer keeps its own), one of half of the layers, and the base routed for a fifth of the steps more. D is the loss
with so many layers kept minus the loss of the base with all. Parts: `RouteKV`, `Retain`, `kv_bytes`, the trainer's step.

At the full scale SmolLM2-135M is routed too, for six million tokens that it writes itself, and cut beside the same without.

What differs from the paper: sizes (at the small scale a model of four layers, so that a quarter is one of them), a made-up
language instead of 34 billion tokens, losses instead of answers to questions. The note's bars for fine-tuning are "the same
within a factor of two": twice the shares of D, twice the excess over the base, and where two models are compared, no more than
twice the other's D.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from orchard.core.report import Bound, Claim, Scalar, Value
from orchard.studies import _routing_models as routing
from orchard.studies import _routing_smollm2 as smollm2
from orchard.studies._afm_ground import Ground
from orchard.studies._routing_models import Size
from orchard.studies.harness import Outcome
from orchard.transforms.share_kv import kv_bytes

SCALES = {
    "small": Size(ground=Ground(dim=64, layers=4, rows=8, length=128, steps=500, rate=6e-3)),
    "full": Size(
        ground=Ground(dim=192, layers=8, rows=32, length=256, steps=2400, rate=3e-3, held_out=512), smollm2=6_000_000
    ),
}
CLAIMS = [
    Claim(
        "half", "Half of the layers: at most a quarter of what it costs the base", "d50", Bound("<=", 0.25), "d_base_50"
    ),
    Claim("quarter", "A quarter of them: at most 0.35 of it", "d25", Bound("<=", 0.35), "d_base_25"),
    Claim("whole", "With all layers it is nearly as good as the base", "over_base", Bound("<=", 1.03), "loss_base_100"),
    Claim("fixed", "At a quarter, a fixed pattern of halves is worse", "cla_over_25", Bound(">", 1.0), "loss_rcla_25"),
    Claim("deep", "Deep with half kept beats half as deep", "over_shallow", Bound("<=", 1.0), "loss_shallow_100"),
    Claim("bytes", "Stores take exactly |S| / L", "bytes_off", Bound("==", 0)),
    Claim("decode", "Token by token it says what it says at once, for any S", "apart", Bound("<=", 1e-5)),
    Claim("tuned-half", "Fine-tuned: half of the layers", "tuned_d50", Bound("<=", 0.5), "d_base_50"),
    Claim("tuned-quarter", "… a quarter of them", "tuned_d25", Bound("<=", 0.7), "d_base_25"),
    Claim("tuned-whole", "… all of them", "tuned_over_base", Bound("<=", 1.06), "loss_base_100"),
    Claim(
        "tuned-fixed",
        "… at most twice what the fixed pattern loses at a quarter",
        "tuned_d25_over_cla",
        Bound("<=", 2.0),
    ),
    Claim("tuned-deep", "… at most twice what half as deep loses", "tuned_d50_over_shallow", Bound("<=", 2.0)),
]
NOTES = [
    "Losses are nats a character on text that nobody learnt from. Kept are layers 0, g, 2 g …; other halves are in the series.",
    "`longer` is the base for as many steps more as the fine-tuned one, on the same text, without routing.",
    "Apart is the largest difference of a score, as a share of the largest score, over sets of layers by chance.",
]


def run(scale: str, seed: int) -> Outcome:
    size = SCALES[scale]
    found = routing.models(size, seed)
    loss = routing.losses(found, size, seed)
    halves = routing.other_halves(found["rcla"], size, seed)
    bytes_off, apart = routing.exactness(found["rcla"], size, seed)
    values = compared(loss)
    values |= {
        "bytes_off": bytes_off,
        "apart": apart,
        "loss_rcla_50_any": Value(
            statistics.fmean(halves.values()), "nats", min(halves.values()), max(halves.values()), "over other halves"
        ),
        "kv_bytes": Value(kv_bytes(found["base"].config), "bytes a token"),
    }
    notes = list(NOTES)
    if size.smollm2 and smollm2.there():
        ratios = smollm2.cut_and_routed(size.smollm2, seed)
        values |= {f"smollm2_{name}": Value(one, "x", note="of its own loss") for name, one in ratios.items()}
    else:
        notes.append("SmolLM2 is routed at the full scale only, where the library has it (`orchard pull smollm2`).")
    rows = [[name, int(rate), round(one, 4)] for name, each in loss.items() for rate, one in each.items()]
    return Outcome(
        values=values,
        series={
            "model, percent kept, loss": rows,
            "layers kept, loss": [[name, round(one, 4)] for name, one in halves.items()],
        },
        notes=notes,
        reasons=reasons(values, size),
        config=asdict(size),
    )


def compared(loss: dict[str, dict[str, float]]) -> dict[str, Value | Scalar]:
    """What claims are about, from losses by model and percent."""
    start = loss["base"]["100"]
    lost = {name: {rate: one - start for rate, one in each.items()} for name, each in loss.items()}
    values: dict[str, Value | Scalar] = {
        f"loss_{name}_{rate}": Value(one, "nats") for name, each in loss.items() for rate, one in each.items()
    }
    for rate in ("50", "25"):
        values[f"d_base_{rate}"] = Value(lost["base"][rate], "nats")
        values[f"d{rate}"] = Value(lost["rcla"][rate] / lost["base"][rate], "of the base's")
        values[f"tuned_d{rate}"] = Value(lost["tuned"][rate] / lost["base"][rate], "of the base's")
    return values | {
        "over_base": Value(loss["rcla"]["100"] / start, "x"),
        "tuned_over_base": Value(loss["tuned"]["100"] / start, "x"),
        "cla_over_25": Value(loss["cla"]["25"] / loss["rcla"]["25"], "x"),
        "over_shallow": Value(loss["rcla"]["50"] / loss["shallow"]["100"], "x"),
        "tuned_d25_over_cla": Value(lost["tuned"]["25"] / lost["cla"]["25"], "x"),
        "tuned_d50_over_shallow": Value(_over(lost["tuned"]["50"], lost["shallow"]["100"]), "x"),
    }


def _over(one: float, other: float) -> float:
    """What one loses over what the other loses; one that loses nothing is nothing, whatever the other."""
    return max(one, 0.0) / other if other > 0 else 0.0 if one <= 0 else float("inf")


def reasons(values: dict[str, Any], size: Size) -> dict[str, str]:
    """Why a claim may fail whatever routing is worth."""
    found: dict[str, str] = {}
    if values["d_base_50"].value <= 0 or values["d_base_25"].value <= 0:
        why = "the base loses nothing without these keys and values: it has learnt too little to need them"
        found |= dict.fromkeys(("half", "quarter", "tuned-half", "tuned-quarter"), why)
    bounds = {claim.id: claim.bound for claim in CLAIMS}
    for prefix, names, share in (
        ("", {"whole": "over_base", "deep": "over_shallow"}, 1.0),
        ("tuned-", {"whole": "tuned_over_base", "deep": "tuned_d50_over_shallow"}, size.tuned),
    ):
        behind = values[names["whole"]].value
        if bounds[f"{prefix}whole"].holds(behind):
            continue
        why = (
            "a routed model learns later, for each layer reads its own keys and values in about half of the passes only, and "
            f"{share * size.ground.tokens / 1e6:.2f} million tokens are few (published: 34 billion, or 50,000 steps of tuning): "
            f"with all layers its loss is {behind:.3f} of the base's"
        )
        found |= {
            f"{prefix}{name}": why
            for name, of in names.items()
            if not bounds[f"{prefix}{name}"].holds(values[of].value)
        }
    return found
