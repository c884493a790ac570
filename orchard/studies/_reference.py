"""What the flat-argument reference costs: changed lines by real differences of its sources, and whether it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchard.studies import _lines
from orchard.studies._flat import ENCODINGS, EXPERTS, STYLES, Feature, Shape, render
from orchard.studies._steps import imported, try_flat


@dataclass(frozen=True)
class Cost:
    """Changed lines of one style, by (models, encodings) and, for the mixture, by (models, 1)."""

    style: str
    encodings: _lines.Grid
    mixture: _lines.Grid

    @property
    def models(self) -> list[int]:
        return sorted({models for models, _ in self.mixture})

    def per_model(self, grid: _lines.Grid) -> tuple[float, float]:
        """Slope over models and constant, with all variants."""
        variants = max(variant for _, variant in grid)
        return _lines.fit([(models, grid[models, variants]) for models in self.models])

    def per_encoding(self) -> float:
        """Slope over encodings, with all models."""
        models = self.models[-1]
        return _lines.fit([(k, self.encodings[models, k]) for k in range(1, len(ENCODINGS) + 1)])[0]


def cost(shapes: Sequence[Shape], style: str, counts: Sequence[int]) -> Cost:
    """Render before and after, and count."""
    encodings, mixture = {}, {}
    for count in counts:
        some = shapes[:count]
        before = render(some, (), style)
        for k in range(1, len(ENCODINGS) + 1):
            encodings[count, k] = _lines.changed_lines(before, render(some, ENCODINGS[:k], style))
        mixture[count, 1] = _lines.changed_lines(before, render(some, (EXPERTS,), style))
    return Cost(style, encodings, mixture)


def failures(shapes: Sequence[Shape], seed: int) -> list[str]:
    """Import and train every reference model of every style: as it was, with an encoding, with a mixture.

    The encodings go round, so that each is used by several models; with fewer than eight models all are still tried.
    """
    found = []
    for style in STYLES:
        for features in ((), ENCODINGS, (EXPERTS,)):
            with imported(render(shapes, features, style)) as module:
                for i in range(max(len(shapes), len(features))):
                    shape = shapes[i % len(shapes)]
                    wrong = try_flat(module(shape.name), shape, _switch_on(features, i), seed)
                    found += [f"{style}/{shape.name}: {wrong}"] if wrong else []
    return found


def _switch_on(features: Sequence[Feature], i: int) -> dict[str, object]:
    if features == (EXPERTS,):
        return {"num_experts": 4}
    return {"rope_type": features[i % len(features)].name} if features else {}
