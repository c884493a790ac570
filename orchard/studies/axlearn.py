"""AXLearn: features enter models by rewriting their configs, not their code.

AXLearn (arXiv 2507.05411) builds every component from a config that holds its children's configs, never their flattened
arguments, so a rewrite of the tree puts rotary positions or a mixture of experts into any number of models. It measures
modularity as lines-of-code complexity: how many existing lines must change to give a feature with M variants to N
models (new layer code is not counted), and reports O(1) for itself where others need up to O(NM).

Orchard's config tree follows that pattern. This study rewrites every model it has, trains each one step, checks that no
line of any module changed, and counts the lines that a flat-argument reference of the same models needs, by real
differences of real sources that run (`_flat.py` states its assumptions). The claims are against flat models that each
have an argument class of their own. Flat code that shares one argument class among all models is reported beside it: for
positions it needs far fewer lines, less than ten times the rewrite's. The study then changes every default of every
part and counts how many a stored dump of the configs notices.

The paper's trainer commits a checkpoint by its last file and writes it while training goes on. So saves die here at every
touch of the disk and after every byte of every write, runs die and are taken up again, and the same steps are timed without
saving, with saving beside them, and with saving that they wait for.

What differs from the paper: plain dataclasses and a separate wiring step instead of a module system; models of a few
thousand weights; a reference of our own instead of other projects' code, so its numbers are no statement about any of
them. Figures marked "published" are quoted, not measured here.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from orchard.core.progress import progress
from orchard.core.report import Bound, Claim, Scalar, Value
from orchard.models.language import Decoder
from orchard.nn.attention import Rotary, scaling
from orchard.nn.linear import GroupedLinear
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE, TopK
from orchard.studies import _checkpointing, _flat, _golden, _lines, _positions, _reference, _steps, _trees
from orchard.studies.harness import Outcome

PACKAGE = Path(__file__).resolve().parents[1]
MODULES = [PACKAGE / name for name in ("nn", "ops", "cache", "models")]
STYLE = "own-args"
Change = Callable[[Rotary.Config], Any]

# Encodings that Orchard has.
BUILT_IN: dict[str, Change] = {
    "linear": lambda rotary: rotary.clone(scaling=scaling.Linear.Config(factor=3.0)),
    "ntk": lambda rotary: rotary.clone(scaling=scaling.Ntk.Config(factor=3.0)),
    "llama3": lambda rotary: rotary.clone(scaling=scaling.Llama3.Config(factor=3.0, original=32)),
    "yarn": lambda rotary: rotary.clone(scaling=scaling.Yarn.Config(factor=3.0, original=32)),
    "partial": lambda rotary: rotary.clone(fraction=0.34),
    "nope": lambda rotary: None,
}
# Encodings that no module knows.
ADDED: dict[str, Change] = {
    "truncated": lambda rotary: rotary.clone(scaling=_positions.Truncated.Config()),
    "neighbours": lambda rotary: rotary.derive(_positions.Neighbours),
    "grouped": lambda rotary: rotary.derive(_positions.Grouped),
    "logarithmic": lambda rotary: rotary.derive(_positions.Logarithmic),
    "randomized": lambda rotary: rotary.derive(_positions.Randomized),
    "axial": lambda rotary: rotary.derive(_positions.Axial),
    "sinusoidal": lambda rotary: rotary.derive(_positions.Sinusoidal),
    "learned": lambda rotary: rotary.derive(_positions.Learned),
}


def with_positions(tree: Decoder.Config, change: Change) -> Decoder.Config:
    """Any position encoding, in every layer that has one."""
    return tree.rewrite(Rotary, change)


def with_experts(tree: Decoder.Config, experts: int = 4, k: int = 2) -> Decoder.Config:
    """A mixture in the place of every feed-forward layer, as wide as it, in its weight format; experts have no biases."""

    def mixture(mlp: GatedMLP.Config) -> MoE.Config:
        parts = {name: getattr(mlp, name).derive(GroupedLinear) for name in ("gate", "up", "down")}
        return mlp.derive(MoE, experts=experts, router=TopK.Config(k=k), **parts)

    return tree.rewrite(GatedMLP, mixture)


CLAIMS = [
    Claim(
        "rope-lines", "A position encoding enters every model by a short rewrite", "rope_rewrite_lines", Bound("<=", 10)
    ),
    Claim(
        "moe-lines", "A mixture of experts enters every model by a short rewrite", "moe_rewrite_lines", Bound("<=", 10)
    ),
    Claim("rope-models", "Different models take all encodings and train a step", "rope_models", Bound(">=", 20)),
    Claim("moe-models", "Different models take the mixture and train a step", "moe_models", Bound(">=", 20)),
    Claim("failures", "No rewritten model fails to build and train", "failed_models", Bound("==", 0)),
    Claim("modules", "No line of any module changes", "module_lines_changed", Bound("==", 0)),
    Claim("reference", "The flat-argument reference runs, before and after", "reference_failures", Bound("==", 0)),
    Claim(
        "rope-ratio",
        "With arguments of their own, flat models change ten times the rewrite's lines for eight encodings",
        "rope_ratio_own-args",
        Bound(">=", 10),
    ),
    Claim(
        "moe-ratio",
        "With arguments of their own, flat models change ten times the rewrite's lines for a mixture",
        "moe_ratio_own-args",
        Bound(">=", 10),
    ),
    Claim(
        "slope",
        "Existing lines changed per further encoding",
        "slope_per_encoding",
        Bound("==", 0),
        baseline="slope_per_encoding_own-args",
    ),
    Claim(
        "reference-slope",
        "The reference's changed lines grow with each encoding",
        "slope_per_encoding_own-args",
        Bound(">", 0),
    ),
    Claim(
        "rope-class",
        "Growth of changed lines for positions",
        "rope_complexity",
        Bound("==", "O(1)"),
        "rope_complexity_own-args",
    ),
    Claim(
        "moe-class",
        "Growth of changed lines for a mixture",
        "moe_complexity",
        Bound("==", "O(1)"),
        "moe_complexity_own-args",
    ),
    Claim("golden", "Changed defaults that the dumps do not notice", "defaults_missed", Bound("==", 0)),
    Claim(
        "corrupt", "After a crash no step is restored that is not what was saved", "corrupt_restores", Bound("==", 0)
    ),
    Claim("restorable", "After every crash there is a step that can be restored", "restores_failed", Bound("==", 0)),
    Claim("resume", "Losses that differ after a crash and a resume", "differing_losses", Bound("==", 0)),
    Claim(
        "async",
        "Saving beside training adds at most a fifth to a step, at one save in ten steps",
        "async_added",
        Bound("<=", 0.2),
        baseline="sync_added",
    ),
]


NOTES = [
    "Changed lines are lines of existing files; new layer code is not counted on either side, as in the paper. "
    "Orchard's whole rewrite, with one line to name each encoding, counts against it in the ratios although it lives "
    "outside the modules.",
    "The ratios are against the reference style in which each model has its own argument class. With one argument class "
    "shared by all models, flat code is much cheaper for positions (see shared-args; no claim is made against it) and "
    "only the mixture still grows with the number of models.",
    "The experts have no biases: the rewrite drops those of a feed-forward layer that had some (llama_bias).",
    "A family's checkpoint reader (models/zoo) still names each scaling and mixture that its files may ask for: that "
    "grows with the formats of files, not with the models that use a part.",
    "Published figures were not measured here. The abstract of arXiv 2507.05411 gives 10 lines against hundreds, and "
    "constant against linear or quadratic growth; the classes by system are taken from public summaries of the paper.",
    "On a CPU the thread that saves takes its time from the same cores as training: copying, hashing and writing are work "
    "that only a free core hides. Beside a GPU the copy alone is in the way.",
]
PUBLISHED: dict[str, Value | Scalar] = {
    "published_axlearn_rope": Value("O(1)", note="published: about 10 lines in all"),
    "published_axlearn_moe": Value("O(1)", note="published"),
    "published_others_rope": Value("O(NM)", note="published, upper end: DeepSpeed, TorchTitan, MaxText"),
    "published_megatron_moe": Value("O(N)", note="published"),
}
Failures = dict[str, dict[str, str]]
"""By model, then by feature: what went wrong."""


def run(scale: str, seed: int) -> Outcome:
    trees = _trees.trees(extra=172 if scale == "full" else 0, seed=seed)
    before = _lines.sources(MODULES)
    rope, moe, by_encoding = rewrite_all(trees, before, seed)
    named = {name: tree for name, tree in trees.items() if not name.startswith("drawn_")}
    shapes = [_steps.shape_of(name, tree) for name, tree in named.items()]
    counts = [count for count in (1, 5, 10, 15, 20) if count < len(shapes)] + [len(shapes)]
    costs = {style: _reference.cost(shapes, style, counts) for style in _flat.STYLES}
    noticed = _golden.noticed(_golden.kinds(), _trees.trees)
    wrong = _reference.failures(shapes, seed)
    saved, unsaved = _checkpointing.values(scale, seed)
    values = {
        **own_values(trees, rope, moe, by_encoding, before),
        **reference_values(costs, wrong),
        "defaults_changed": Value(len(noticed), note="every field of every part, one at a time"),
        "defaults_missed": Value(
            sum(not both for _, both in noticed.values()),
            note="by dumps of all models and of each part with nothing set",
        ),
        "defaults_noticed_by_models": Value(
            sum(by_models for by_models, _ in noticed.values()), note=f"by the dumps of {len(named)} models alone"
        ),
        "rewrite_time": rewrite_time(),
        **saved,
        **PUBLISHED,
    }
    failed = [
        f"{x} in {name}: {why}" for found in (rope, moe) for name, whys in found.items() for x, why in whys.items()
    ]
    ours = costs[STYLE].encodings
    return Outcome(
        values=values,
        series={
            "changed lines by encodings, Orchard": [[k + 1, lines] for k, lines in enumerate(by_encoding)],
            f"changed lines by encodings, {STYLE}": [[k + 1, ours[counts[-1], k + 1]] for k in range(len(ADDED))],
            f"changed lines by models, {STYLE}": [[n, ours[n, len(ADDED)]] for n in counts],
        },
        notes=[*NOTES, *(f"failed: {text}" for text in [*failed, *wrong, *unsaved][:10])],
        config={"models": list(trees), "built_in": list(BUILT_IN), "added": list(ADDED)},
    )


def rewrite_all(
    trees: Mapping[str, Decoder.Config], before: Mapping[str, str], seed: int
) -> tuple[Failures, Failures, list[int]]:
    """Every encoding into every tree, then the mixture: what failed, and module lines changed after each added one."""
    rope: Failures = {name: {} for name in trees}
    moe: Failures = {}
    by_encoding = []
    was = {name: _steps.outputs(tree, seed) for name, tree in trees.items()}
    with progress("rewriting", total=len(trees) * (len(BUILT_IN) + len(ADDED) + 1)) as advance:
        for variant, change in {**BUILT_IN, **ADDED}.items():
            for name, tree in trees.items():
                wrong = _steps.try_tree(partial(with_positions, tree, change), was[name], seed)
                rope[name] |= {variant: wrong} if wrong else {}
                advance(note=f"{variant} into {name}")
            if variant in ADDED:
                by_encoding.append(module_lines(before))
        for name, tree in trees.items():
            if tree.find(GatedMLP):
                wrong = _steps.try_tree(partial(with_experts, tree), was[name], seed)
                moe[name] = {"experts": wrong} if wrong else {}
            advance(note=f"experts into {name}")
    return rope, moe, by_encoding


def module_lines(before: Mapping[str, str]) -> int:
    """Lines of modules that differ from `before`, and lines of modules that know this study."""
    now = _lines.sources(MODULES)
    return _lines.changed_lines(before, now) + len(_lines.importers(now, "orchard.studies"))


def own_values(
    trees: Mapping[str, Decoder.Config],
    rope: Failures,
    moe: Failures,
    by_encoding: list[int],
    before: Mapping[str, str],
) -> dict[str, Value | Scalar]:
    """Orchard's side. A tree that fails would need a line of its own: it counts as one."""
    entries = _lines.entry_lines(sys.modules[__name__], "ADDED")
    rewrite = _lines.function_lines(with_positions)
    inside = {path: text for path, text in before.items() if "/zoo/" not in path and "/moe/" not in path}
    knows = len(_lines.importers(inside, "orchard.nn.moe"))
    names, some = list(trees), (max(len(trees) // 2, 1), len(trees))
    grid = {
        (n, k): by_encoding[k - 1] + sum(x in rope[name] for name in names[:n] for x in list(ADDED)[:k])
        for n in some
        for k in range(1, len(ADDED) + 1)
    }
    mixture = {(n, 1): knows + sum(len(moe.get(name, ())) for name in names[:n]) for n in some}
    different = {json.dumps(tree.to_dict(), sort_keys=True) for tree in trees.values()}
    return {
        "models": Value(len(different), note="different config trees"),
        "encodings": Value(len(BUILT_IN) + len(ADDED), note=f"{len(ADDED)} of them unknown to every module"),
        "rope_rewrite_lines": Value(rewrite + max(entries.values()), "lines", note="with the line naming the encoding"),
        "rope_program_lines": Value(
            rewrite + sum(entries.values()), "lines", note=f"for all {len(entries)} added ones"
        ),
        "moe_rewrite_lines": Value(_lines.function_lines(with_experts), "lines"),
        "rope_models": Value(sum(not whys for whys in rope.values()), note="took every encoding"),
        "moe_models": Value(sum(not whys for whys in moe.values()), note="of those with feed-forward layers"),
        "failed_models": sum(len(whys) for found in (rope, moe) for whys in found.values()),
        "module_lines_changed": Value(module_lines(before), "lines"),
        "slope_per_encoding": Value(
            _lines.fit([(k, lines) for (n, k), lines in grid.items() if n == some[-1]])[0], "lines"
        ),
        "rope_complexity": Value(_lines.growth(grid), note="measured growth of changed existing lines"),
        "moe_complexity": Value(_lines.growth(mixture), note="measured growth of changed existing lines"),
    }


def reference_values(costs: Mapping[str, _reference.Cost], wrong: list[str]) -> dict[str, Value | Scalar]:
    """The reference's side, in all its styles; the claims are against one of them."""
    entries = _lines.entry_lines(sys.modules[__name__], "ADDED")
    program = _lines.function_lines(with_positions) + sum(entries.values())
    experts = _lines.function_lines(with_experts)
    values: dict[str, Value | Scalar] = {"reference_failures": len(wrong)}
    for style, cost in costs.items():
        most, k = cost.models[-1], len(entries)
        (rope_slope, rope_constant), (moe_slope, moe_constant) = map(cost.per_model, (cost.encodings, cost.mixture))
        rope, moe = cost.encodings[most, k], cost.mixture[most, 1]
        line = "{:.3g} a model + {:.3g}"
        values |= {
            f"rope_lines_{style}": Value(rope, "lines", note=line.format(rope_slope, rope_constant)),
            f"moe_lines_{style}": Value(moe, "lines", note=line.format(moe_slope, moe_constant)),
            f"rope_ratio_{style}": Value(rope / program, "x"),
            f"moe_ratio_{style}": Value(moe / experts, "x"),
            f"rope_complexity_{style}": _lines.growth(cost.encodings),
            f"moe_complexity_{style}": _lines.growth(cost.mixture),
            f"slope_per_encoding_{style}": Value(cost.per_encoding(), "lines"),
        }
    return values


def rewrite_time(layers: int = 30, rounds: int = 15) -> Value:
    """How long a rewrite of a deep tree takes."""
    tree = _trees.long_tree(layers)
    took = []
    for _ in range(rounds):
        start = time.perf_counter()
        with_positions(tree, ADDED["grouped"])
        took.append((time.perf_counter() - start) * 1e3)
    note = f"{layers} layers; median of {rounds}, with the range"
    return Value(statistics.median(took), "ms", low=min(took), high=max(took), note=note)
