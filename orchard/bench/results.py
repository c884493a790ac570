"""Figures as they come in, by engine and setting and round, and what they say together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from orchard.bench.cases import smaller_is_better
from orchard.bench.peers import Subject


@dataclass
class Results:
    """`rounds[engine][setting][figure]`: one number for each round in which it was measured, by round."""

    rounds: dict[str, dict[str, dict[str, dict[int, float]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    )
    notes: list[str] = field(default_factory=list)
    about: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, subject: Subject, number: int, figures: Mapping[str, float]) -> None:
        for figure, value in figures.items():
            self.rounds[subject.engine][subject.setting][figure][number] = value

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def best(self, engine: str, figure: str) -> tuple[str, dict[int, float]] | None:
        """The setting of an engine with the best median, and its rounds."""
        found = [
            (setting, figures[figure])
            for setting, figures in self.rounds.get(engine, {}).items()
            if figures.get(figure)
        ]
        if not found:
            return None
        choose = min if smaller_is_better(figure) else max
        return choose(found, key=lambda pair: median(pair[1].values()))

    def values(self, engine: str, figure: str) -> list[float]:
        """The rounds of the best setting."""
        best = self.best(engine, figure)
        return list(best[1].values()) if best else []

    def figures(self) -> list[str]:
        """Every figure that some engine has, in the order in which they came."""
        return list(dict.fromkeys(name for settings in self.rounds.values() for f in settings.values() for name in f))

    def paired(self, over: str, under: str, figure: str, other: str | None = None) -> tuple[list[float], list[float]]:
        """Figures of two engines: first the rounds that both have, in order, so that ratios within a round can be taken."""
        one, two = self.best(over, figure), self.best(under, other or figure)
        if one is None or two is None:
            return [], []
        return _aligned(one[1], two[1])


def _aligned(one: Mapping[int, float], two: Mapping[int, float]) -> tuple[list[float], list[float]]:
    both = sorted(one.keys() & two.keys())

    def ordered(values: Mapping[int, float]) -> Iterable[float]:
        yield from (values[number] for number in both)
        yield from (value for number, value in sorted(values.items()) if number not in both)

    return list(ordered(one)), list(ordered(two))
