"""Which jobs a round has, and in which order: engines take turns, and every second round goes the other way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from orchard.bench import cases as case_list
from orchard.bench.cases import Case
from orchard.bench.peers import LLAMA, OWN, Subject

Kind = Literal["cases", "start", "busy"]
# Seconds that a job may take on two cores, for the estimate of what is left.
_GUESS = {OWN: 4.0, LLAMA: 9.0, "transformers": 22.0}
_LONG = {OWN: 8.0, LLAMA: 40.0, "transformers": 25.0}


@dataclass(frozen=True)
class Job:
    """One worker process. `start`: a fresh program to its first token; `busy`: beside a process that spins."""

    subject: Subject
    label: str
    cases: tuple[Case, ...] = ()
    kind: Kind = "cases"
    seconds: float = 5.0
    vocab: int | None = None
    """Of another model than the one that is benchmarked."""


@dataclass(frozen=True)
class Schedule:
    """Everything that may be asked for; `round` gives one round's jobs."""

    subjects: Sequence[Subject]
    other_ways: Sequence[Subject]
    shapes: Sequence[Subject]
    topics: frozenset[str]
    context: int
    shape_vocab: int = 49_152
    rounds: int = 5
    quick: bool = False
    sizes: tuple[int, ...] = field(default=(1, 8, 32))

    def round(self, number: int) -> list[Job]:
        groups = [
            self._one_sequence(),
            self._other_ways(),
            self._batches(),
            self._busy(),
            self._shapes(),
            self._start(number),
        ]
        if number in (0, self.rounds - 1) and not self.quick:  # twice is enough to see whether they are steady
            groups += [self._long(number), self._linear()]
        jobs = []
        for group in groups:
            kept = [replace(job, cases=tuple(c for c in job.cases if c.wanted(self.topics))) for job in group]
            kept = [job for job in kept if job.cases or (job.kind == "start" and "start" in self.topics)]
            jobs += kept if number % 2 == 0 else kept[::-1]
        return jobs

    def seconds(self) -> float:
        """A guess at the time of all rounds."""
        return sum(job.seconds for number in range(self.rounds) for job in self.round(number))

    def _one_sequence(self) -> list[Job]:
        chosen = case_list.one_sequence()
        chosen = [case for case in chosen if max(case.prompts) + case.steps < self.context]
        more = case_list.batches(self.sizes)  # a slow engine loads its model once, and does these in the same process
        return [
            Job(one, "one sequence", tuple(chosen + more if one.slow else chosen), seconds=_GUESS[one.engine])
            for one in self.subjects
        ]

    def _long(self, number: int) -> list[Job]:
        """Peers take minutes for it, and no claim compares them here: once."""
        chosen = tuple(case_list.long_context(self.context))
        subjects = [one for one in self.subjects if number == 0 or one.engine == OWN]
        return [Job(one, "long context", chosen, seconds=_LONG[one.engine]) for one in subjects]

    def _other_ways(self) -> list[Job]:
        return [Job(one, "as users call it", (case_list.GENERATE,), seconds=2) for one in self.other_ways]

    def _batches(self) -> list[Job]:
        chosen = tuple(case_list.batches(self.sizes))
        return [Job(one, "batches", chosen, seconds=0.6 * _GUESS[one.engine]) for one in self.subjects if not one.slow]

    def _busy(self) -> list[Job]:
        return [
            Job(one, "beside a busy core", (case_list.BUSY,), kind="busy", seconds=4)
            for one in self.subjects
            if not one.slow and one.setting != "flash attention off"
        ]

    def _shapes(self) -> list[Job]:
        if self.quick:
            return []
        cases = {one: case_list.OWN_SHAPE if one.module == "own_engine" else case_list.SHAPE for one in self.shapes}
        return [Job(one, "1B shape", (case,), seconds=6, vocab=self.shape_vocab) for one, case in cases.items()]

    def _start(self, number: int) -> list[Job]:
        """Twice an engine; transformers, which takes seconds, in the first round only."""
        chosen = [
            one for one in self.subjects if one.setting != "flash attention off" and (number == 0 or not one.slow)
        ]
        return [Job(one, "start", kind="start", seconds=6 if one.slow else 0.6) for one in [*chosen, *chosen[::-1]]]

    def _linear(self) -> list[Job]:
        own = [one for one in self.subjects if one.engine == OWN]
        return [Job(one, "growing contexts", tuple(case_list.linear()), seconds=25) for one in own]
