"""RATTENTION: a short window, and linear attention over all that lies behind it.

Wang et al. (arXiv 2506.15545). In models with three local layers to a global one, windows are usually 2,000 to 4,000 tokens
wide, because shorter ones lose too much. RATTENTION gives local layers a second view without parameters of its own: linear
attention over the tokens that have left the window, normalised and added to what the window gives. Published, 12 billion
weights at 8k: with a window of 512 an average of 62.72 over benchmarks against 62.67 of full attention, 62.64 of a window of 4k
and 62.18 of one of 2k; 3 billion, RULER at 8k after training at 4k: 66.3 against 2.9 (full) and 6.9 (a window of 2k). A step
takes as long in training.

Here documents are made of facts that come again 2 w to 8 w symbols later (`_rattention_facts`), w being the short window. Four
models learn from the same documents in the same order: full attention with rotary positions in every layer, and three frames of
local layers with one global layer of four that knows no positions, whose local layers are a window of w, RATTENTION with that
window, and a window of 8 w. Facts have to be combined in several steps, which one global layer cannot do alone. Two more models
have no global layer at all, and learn single facts. Parts: `orchard.nn.attention.RAttention`, `orchard.ops.linear_attention`,
`orchard.cache.residue`, `LocalGlobal(mixer="rattention")`.

What differs from the paper: facts instead of web text; symbols instead of bytes, one for each that occurs; Muon, not RMSProp;
the small scale (w = 4, 64 symbols, 4 layers of width 32) is what two processors train in minutes, and the full scale has the
widths of the note that this study follows (w = 16, 512 symbols, 8 layers of width 128). Bytes are counted for the latter at
both scales.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from orchard.core.report import Bound, Claim, Scalar, Value
from orchard.core.seeds import fold
from orchard.studies import _rattention_models as models
from orchard.studies._rattention_models import LONGER, Measured, Size
from orchard.studies.harness import Outcome

SCALES = {
    "small": Size(),
    "full": Size(
        dim=128,
        layers=8,
        heads=8,
        hidden=384,
        window=16,
        length=512,
        rows=32,
        steps=640,
        rate=5e-3,
        letters=16,
        hops=3,
        held_out=256,
    ),
}
LEARNT = 0.6
"""The share of answers from which on we say that a model has learnt to find them."""
CLAIMS = [
    Claim(
        "gap",
        "It closes half of the gap between a window and full attention",
        "gap_closed",
        Bound(">=", 0.5),
        "loss_full",
    ),
    Claim(
        "wide", "… and does as well as a window eight times as wide", "over_wide", Bound("<=", 1.02), "loss_wide_window"
    ),
    Claim(
        "far",
        "Without global layers it finds facts behind all windows",
        "far_over_chance",
        Bound(">=", 3.0),
        "far_window_over_chance",
    ),
    Claim("blind", "… which a window alone cannot", "far_window_over_chance", Bound("<=", 1.5)),
    Claim(
        "longer",
        "At four times the length it loses less than full attention with rotary positions",
        "over_full_longer",
        Bound("<=", 0.9),
        "loss_longer_full",
    ),
    Claim("forms", "All pairs, pieces and token by token give the same scores", "difference", Bound("<=", 1e-4)),
    Claim("constant", "Stores of local layers take the same bytes for any length", "bytes_growth", Bound("==", 0)),
    Claim(
        "bytes",
        "… and less than a third of those of the wide window",
        "bytes_over_wide",
        Bound("<=", 0.3),
        "bytes_wide",
    ),
]
NOTES = [
    "Losses are nats a symbol of held-out documents. Letters that are asked for and marks are chance: no loss comes near 0.",
    "The gap is between the window of w and full attention, in loss; closed: loss won back, as a share.",
    "Far are answers that were told more than layers × w symbols back; chance is one letter of all letters.",
    "Bytes are those of one sequence in float32 with heads of 16 and windows of 16 and 128; a sum is float32 in any model, so "
    "that in bfloat16, where slots take half as much, it weighs twice as much.",
]


def run(scale: str, seed: int) -> Outcome:
    size = SCALES[scale]
    seed = fold(seed, "rattention") % 2**31
    short, long, difference = frames(size, seed)
    alone = without_global(size, seed)
    loss = {name: found.loss for name, found in short.items()}
    gap = loss["window"] - loss["full"]
    values: dict[str, Value | Scalar] = {
        **{f"loss_{name.replace(' ', '_')}": Value(each, "nats") for name, each in loss.items()},
        **{f"loss_longer_{name.replace(' ', '_')}": Value(each.loss, "nats") for name, each in long.items()},
        "gap": Value(gap, "nats"),
        "gap_closed": Value((loss["window"] - loss["rattention"]) / gap if gap > 0 else float("nan"), "of the gap"),
        "over_wide": Value(loss["rattention"] / loss["wide window"], "x"),
        "over_full_longer": Value(long["rattention"].loss / long["full"].loss, "x"),
        "far_over_chance": Value(alone["rattention"].far * size.letters, "x"),
        "far_window_over_chance": Value(alone["window"].far * size.letters, "x"),
        "far_answers": alone["rattention"].count,
        "difference": difference,
        **counted(size),
    }
    found = {
        "model, length, steps, right": [*_rows(short, 1), *_rows(long, LONGER)],
        "no global layer: model, steps, right": [
            [name, *row[2:]] for name, each in alone.items() for row in _rows({name: each}, 1)
        ],
    }
    return Outcome(values=values, series=found, notes=NOTES, reasons=why(short, alone, size), config=asdict(size))


def why(short: dict[str, Measured], alone: dict[str, Measured], size: Size) -> dict[str, str]:
    """Where a claim needs something to have been learnt that was not, as far as the accuracies tell."""
    reasons = {}
    most, full, narrow = size.hops, short["full"], short["window"]
    if full.right[most] < LEARNT:
        reasons["gap"] = (
            f"after {size.steps} steps full attention finds {full.right[most]:.0%} of the answers in {most} steps and "
            f"{full.right[1]:.0%} of those in one: what one global layer cannot do alone is not learnt by anyone yet"
        )
    elif full.loss >= narrow.loss:
        reasons["gap"] = "full attention is no better than the window here: there is no gap to close"
    if alone["rattention"].far < LEARNT:
        reasons["far"] = (
            f"after {size.steps} steps {alone['rattention'].far:.0%} of the far facts are found: the most frequent answer of a "
            "document is learnt first, facts later"
        )
    return reasons


def frames(size: Size, seed: int) -> tuple[dict[str, Measured], dict[str, Measured], float]:
    """What the four models that are compared do, at the length that they learnt from and at a longer one; and how far the forms
    of one of them are apart."""
    facts = size.facts()
    short, long, difference = {}, {}, float("nan")
    for name, config in models.framed(size, facts.vocab).items():
        model = models.trained(config, size, facts, seed, name)
        short[name] = models.measure(model, size, facts, seed)
        long[name] = models.measure(model, size, facts, seed, longer=LONGER)
        if name == "rattention":
            difference = models.difference(model, size, seed)
    return short, long, difference


def without_global(size: Size, seed: int) -> dict[str, Measured]:
    facts = size.facts(hops=1)
    found = {}
    for name, config in models.local_only(size, facts.vocab).items():
        model = models.trained(config, size, facts, seed, f"{name}, no global layer")
        found[name] = models.measure(model, size, facts, seed)
    return found


def counted(size: Size) -> dict[str, Value | Scalar]:
    """Bytes of stores of local layers."""
    shape = models.as_in_the_note(size)
    trees = models.framed(shape, shape.facts().vocab)
    most = {name: models.local_bytes(trees[name], 1 << 16) for name in ("rattention", "wide window")}
    half = [models.local_bytes(trees[name], 1 << 16, torch.bfloat16) for name in ("rattention", "wide window")]
    return {
        "bytes": Value(most["rattention"], "bytes"),
        "bytes_wide": Value(most["wide window"], "bytes"),
        "bytes_growth": most["rattention"] - models.local_bytes(trees["rattention"], shape.length),
        "bytes_over_wide": Value(most["rattention"] / most["wide window"], "x"),
        "bytes_over_wide_bfloat16": Value(half[0] / half[1], "x"),
    }


def _rows(found: dict[str, Measured], longer: int) -> list[list[str | int | float]]:
    return [
        [name, f"{longer} x", steps, round(share, 4)]
        for name, each in found.items()
        for steps, share in each.right.items()
    ]
