"""How much each weight's rounding costs: by path and format, in nats per token between the model's answers and those of the model
with only this weight in that format.

Running a model anew for each weight and format takes hours. Instead all of them are estimated together, to second order
(`sensitivity_fisher`), a few are measured (`sensitivity_trial`), and the estimates of a format are multiplied by what the
measured ones say. On SmolLM2-135M (50 short texts of 64 tokens; 35 maps in Int2 and Int4, groups of 64, each measured on 512
tokens) the logarithms of estimates and true values correlate by 0.96 for two bits, 0.98 for four and 0.99 for both, where plain
sums of squared rounding errors correlate by -0.01, 0.04 and 0.60; an estimate is off by a factor of 1.4 (one standard deviation).

Where weights share a budget, costs of several weights are added up, as if errors did not meet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from orchard.core.batch import Batch
from orchard.core.config import BaseConfig
from orchard.core.errors import UsageError
from orchard.nn.linear import Weight
from orchard.transforms.base import Tell, _tree, silent
from orchard.transforms.lora import ALL_LINEAR
from orchard.transforms.lora_twin import dotted
from orchard.transforms.ptq import NotFinite, fitted, holders, refuse_broken, words
from orchard.transforms.sensitivity_fisher import Rounded, divergences
from orchard.transforms.sensitivity_record import Option as Option
from orchard.transforms.sensitivity_record import Sensitivity as Sensitivity
from orchard.transforms.sensitivity_trial import Trial

FEW = 512
"""Tokens that a single weight is measured on."""


def sensitivity(
    model: Any,
    texts: Sequence[Batch],
    choices: Sequence[BaseConfig],
    tell: Tell = silent,
    *,
    targets: str | Sequence[str] = ALL_LINEAR,
    measured: int = 1,
    seed: int = 0,
) -> Sensitivity:
    """What each target costs in each of the formats.

    Many short rows of text are better than few long ones. `measured` weights of each kind (q, gate …) are measured in each
    format, on as much of the texts as `FEW` tokens; an embedding always is. A format that a weight cannot hold is replaced by
    the nearest that can, which the option's note says.
    """
    if not choices:
        raise UsageError("sensitivity needs formats to choose from", hint="give some, such as Int2.Config()")
    if not sum(len(batch) for batch in texts):
        raise UsageError("sensitivity looks at texts, and there are none", hint="give it some thousand tokens")
    tree = _tree(model)
    paths = list(holders(tree, targets))
    refuse_broken(model, paths)
    asked = {path: _held(tree.get(dotted(path)), choices) for path in paths}
    rounded = {
        path: Rounded(model.get_submodule(path), [format for format, _ in found]) for path, found in asked.items()
    }
    training = model.training
    model.eval()
    try:
        costs = divergences(model, texts, rounded, seed=seed, tell=lambda share: tell(share / 2))
        picked = _picked(paths, measured)
        truths = _measured(model, texts, rounded, asked, picked, tell)
    finally:
        model.train(training)
    for path, values in costs.items():
        if not all(math.isfinite(value) for value in values):
            raise NotFinite(f"what rounding {path} costs is no number", hint="look for broken weights or texts")
    factors, correlation, checks = _calibrated(costs, truths, asked)
    options = {}
    for path, found in asked.items():
        shape, made = rounded[path].module.shape, []
        for at, (format, note) in enumerate(found):
            true = truths.get((path, at))
            cost = costs[path][at] * factors.get(words(format), 1.0) if true is None else true
            nbytes = format.build().nbytes(shape, model.dtype)
            made.append(Option(format, nbytes, cost, true is not None, note))
        options[path] = tuple(made)
    weights, rest = _sizes(model, paths)
    tokens = sum(int((batch.positions >= 0).sum()) for batch in texts)
    return Sensitivity(options, weights, rest, tokens, correlation, checks, factors)


def kind_of(path: str) -> str:
    """What paths of different layers have in common: mixer.q, mlp.down."""
    return ".".join(part for part in path.split(".") if part not in ("stack", "layers") and not part.isdecimal())


def _held(node: Any, choices: Sequence[BaseConfig]) -> list[tuple[BaseConfig, str]]:
    """The choices that a weight can have, each once, with notes."""
    found: list[tuple[BaseConfig, str]] = []
    for choice in choices:
        format, note = fitted(node, choice)
        if format not in [one for one, _ in found]:
            found.append((format, note))
    return found


def _picked(paths: Sequence[str], measured: int) -> list[str]:
    """Paths to measure: some of each kind, in layers spread over the model."""
    kinds: dict[str, list[str]] = {}
    for path in paths:
        kinds.setdefault(kind_of(path), []).append(path)
    picked: list[str] = []
    for number, alike in enumerate(kinds.values()):
        every = len(alike) / max(1, measured)
        start = every * (number + 0.5) / len(kinds)
        places = {min(len(alike) - 1, int(start + every * i)) for i in range(min(measured, len(alike)))}
        picked += [alike[place] for place in sorted(places)]
    return picked + [path for path in paths if path == "embedding" and path not in picked]


def _measured(
    model: Any,
    texts: Sequence[Batch],
    rounded: Mapping[str, Rounded],
    asked: Mapping[str, Sequence[tuple[BaseConfig, str]]],
    picked: Sequence[str],
    tell: Tell,
) -> dict[tuple[str, int], float]:
    found: dict[tuple[str, int], float] = {}
    if not picked:
        tell(0.5)
        return found
    trial = Trial(model, few(texts, FEW))
    for path in picked:
        for at, (format, _) in enumerate(asked[path]):
            value = trial.divergence(path, format, rounded[path].packed[at])
            if not math.isfinite(value):
                raise NotFinite(f"what rounding {path} costs is no number", hint="look for broken weights or texts")
            found[path, at] = max(0.0, value)
        tell(0.5 / len(picked))
    return found


def few(texts: Sequence[Batch], tokens: int) -> list[Batch]:
    """Rows from all over the texts, as many as make up so many tokens, at least one."""
    rows = [(batch, row) for batch in texts for row in range(len(batch))]
    wanted = max(1, min(len(rows), tokens * len(rows) // max(1, sum(math.prod(batch.ids.shape) for batch in texts))))
    return [batch.part(row, row + 1) for batch, row in (rows[i * len(rows) // wanted] for i in range(wanted))]


def _calibrated(
    costs: Mapping[str, Sequence[float]],
    truths: Mapping[tuple[str, int], float],
    asked: Mapping[str, Sequence[tuple[BaseConfig, str]]],
) -> tuple[dict[str, float], float | None, int]:
    """Factors by format (geometric means), and how well estimates and measured values go together."""
    pairs = [
        (words(asked[path][at][0]), math.log(costs[path][at]), math.log(true))
        for (path, at), true in truths.items()
        if costs[path][at] > 0 and true > 0
    ]
    factors: dict[str, list[float]] = {}
    for name, guess, true in pairs:
        factors.setdefault(name, []).append(true - guess)
    made = {name: math.exp(sum(logs) / len(logs)) for name, logs in factors.items()}
    guesses, trues = [guess for _, guess, _ in pairs], [true for *_, true in pairs]
    if len(pairs) < 3 or not np.std(guesses) or not np.std(trues):
        return made, None, len(pairs)
    return made, float(np.corrcoef(guesses, trues)[0, 1]), len(pairs)


def _sizes(model: Any, paths: Sequence[str]) -> tuple[int, int]:
    """Values in all of a model, and bytes of what is not at these paths."""
    values = rest = 0
    for path, module in model.named_modules():
        if isinstance(module, Weight):
            values += math.prod(module.shape)
            rest += 0 if path in paths else module.nbytes
        packed = module.packed() if isinstance(module, Weight) else {}
        for name, parameter in module.named_parameters(recurse=False):
            if name not in packed:
                values += parameter.numel()
                rest += parameter.nbytes
    return values, rest
