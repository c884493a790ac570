"""Orchard, llama.cpp and transformers on the same weights, in processes that take turns; the outcome is a Report.

The parent starts one worker at a time and does nothing meanwhile. Every figure is the median over rounds, between its
quartiles; ratios are of medians. What could not be measured is said, and no claim is left out because of it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from orchard.bench import gpu, many, peers, spawn, speculation, summary
from orchard.bench.cases import PROMPT, TOPICS, long_context, one_sequence
from orchard.bench.claims import CLAIMS
from orchard.bench.facts import Facts, facts, shape_bytes, shape_facts
from orchard.bench.peers import LLAMA, OWN, TRANSFORMERS, Found, Subject
from orchard.bench.results import Results
from orchard.bench.schedule import Job, Schedule
from orchard.bench.shapes import Shape
from orchard.bench.workers.run import token_ids
from orchard.core.errors import UsageError
from orchard.core.files import write_text
from orchard.core.machine import CHECKOUT, hardware
from orchard.core.progress import Advance, progress
from orchard.core.report import Report, Value
from orchard.weights.library import home

SHAPE = Shape()
TARGET = CHECKOUT / "results" / "bench" / "engine.json"
_LIMITS_SECONDS, _QUALITY_SECONDS, _MANY_SECONDS = 5.0, 60.0, 90.0


@dataclass(frozen=True)
class Options:
    """What a person may ask for. `only`: topics, none for all."""

    model: str = "smollm2"
    rounds: int = 5
    quick: bool = False
    only: tuple[str, ...] = ()
    peers_python: tuple[str, ...] = ()
    texts: int = 50

    def topics(self) -> frozenset[str]:
        wrong = sorted(set(self.only) - set(TOPICS))
        if wrong:
            raise UsageError(f"nothing called {', '.join(wrong)} is measured", hint="choose among " + ", ".join(TOPICS))
        beside = ("decode",) if "busy" in self.only else ()  # a busy figure says nothing without the quiet one
        return frozenset((*self.only, *beside) or TOPICS)


def run_and_save(options: Options, *, save: bool, target: Path = TARGET) -> tuple[Report, list[Path]]:
    """Run, and with `save` keep the Report and its chart. Whether they can be kept is asked before the work begins."""
    if save and not target.parent.is_dir():
        raise UsageError(
            f"there is no folder {target.parent}",
            hint="--save works in a checkout of Orchard; --json prints the Report",
        )
    report = bench(options)
    if not save:
        return report, []
    from orchard.bench.chart import svg

    picture = target.with_suffix(".svg")
    report.save(target)
    write_text(picture, svg(report))
    return report, [target, picture]


def bench(options: Options) -> Report:
    """Run all of it. Wrong options are refused before any work."""
    if options.rounds < 1:
        raise UsageError(f"{options.rounds} rounds", hint="one round or more")
    options.topics()
    return Bench(options, facts(options.model), peers.find(options.peers_python)).run()


class Bench:
    """One benchmark: what is known before it, what came out so far."""

    def __init__(self, options: Options, model: Facts, found: dict[str, Found]) -> None:
        self.options, self.model, self.found = options, model, found
        self.topics = options.topics()
        self.threads = int(hardware()["cores"])
        self.results = Results()
        self.limits: list[dict[str, float | None]] = []
        self.once: dict[str, Value] = {}
        self.cache = home() / "bench"
        stem = f"{model.path.parent.name}-{model.path.stem}-{model.file_bytes}"
        self.folder = self.cache / f"{stem}-bf16"
        self.shape_file = self.cache / f"shape-{SHAPE.parameters}-q4_0.gguf"

    def run(self) -> Report:
        started = time.perf_counter()
        schedule = self._schedule()
        rounds = [schedule.round(number) for number in range(self.options.rounds)]
        extra = _LIMITS_SECONDS * len(rounds) + _QUALITY_SECONDS * ("quality" in self.topics)
        extra += _MANY_SECONDS * len({"many", "speculation"} & self.topics)
        with progress("measuring", total=schedule.seconds() + extra) as advance:
            self._prepare([job for jobs in rounds for job in jobs], advance)
            for number, jobs in enumerate(rounds):
                self._say(f"round {number + 1} of {len(rounds)}: {len(jobs)} workers")
                if jobs:
                    self._limits(advance)
                for job in jobs:
                    self._job(job, number, advance)
            self._once(advance)
        return self._report(time.perf_counter() - started)

    # What to run ----------------------------------------------------------------------------------------------------

    def _schedule(self) -> Schedule:
        common: dict[str, Any] = {"model": self.options.model, "path": self.model.path, "threads": self.threads}
        return Schedule(
            subjects=peers.subjects(self.found, folder=self.folder, **common),
            other_ways=peers.other_ways(self.found, **common),
            shapes=self._shapes(),
            topics=self.topics,
            context=self.model.context,
            shape_vocab=SHAPE.vocab,
            rounds=self.options.rounds,
            quick=self.options.quick,
            sizes=(1, 8) if self.options.quick else (1, 8, 32),
        )

    def _shapes(self) -> list[Subject]:
        result = []
        for engine, kind in summary.SHAPES.items():
            if engine.startswith(OWN):
                own = {"shape": asdict(SHAPE), "kind": kind, "group": 64, "threads": self.threads}
                result.append(Subject(engine, "", sys.executable, "own_engine", own))
            elif self.found[LLAMA].python:
                peer = {
                    "path": str(self.shape_file),
                    "threads": self.threads,
                    "flash_attention": "auto",
                    "via": "batch",
                }
                result.append(Subject(engine, "", self.found[LLAMA].python, "peer_llama", peer))
        return result

    def _prepare(self, jobs: Iterable[Job], advance: Advance) -> None:
        """Files that peers read, made once and kept in the cache folder."""
        engines = {job.subject.engine for job in jobs}
        if TRANSFORMERS in engines and not self.folder.is_dir():
            advance(0, note="writing the model as transformers reads it")
            self._task("folder", {"model": self.options.model, "to": str(self.folder)})
        if "llama.cpp Q4_0" in engines and not self.shape_file.is_file():
            advance(0, note="writing random weights of the 1B shape")
            self._task("shape", {"to": str(self.shape_file), "shape": asdict(SHAPE), "words": str(self.model.path)})

    # Running --------------------------------------------------------------------------------------------------------

    def _job(self, job: Job, number: int, advance: Advance) -> None:
        subject = job.subject
        advance(0, note=f"round {number + 1}, {subject.name}, {job.label}")
        try:
            if job.kind == "start":
                self._start(subject, number)
            elif job.kind == "busy":
                with spawn.busy_core():
                    self._cases(job, number)
            else:
                self._cases(job, number)
        except spawn.WorkerFailed as error:
            self.results.note(f"{subject.name}, {job.label}: {error}")
        advance(job.seconds)

    def _cases(self, job: Job, number: int) -> None:
        subject = job.subject
        message = {
            "vocab": job.vocab or self.model.vocab,
            "options": subject.options,
            "cases": [case.message(slow=subject.slow) for case in job.cases],
        }
        answer = spawn.ask(subject.python, subject.module, message)
        self.results.about[subject.engine] = answer["about"]
        for case in job.cases:
            self.results.add(subject, number, case.measured(answer["cases"][case.name]))

    def _start(self, subject: Subject, number: int) -> None:
        """Of two runs in a round the quicker one counts: the first may have had to read files from disk."""
        options = {
            "model": self.options.model,
            "path": str(self.model.path),
            "folder": str(self.folder),
            "ids": token_ids(PROMPT, self.model.vocab, 0),
            "threads": self.threads,
        }
        took = spawn.seconds_to_first_token(subject.engine, subject.python, options)
        before = self.results.rounds[subject.engine][""].get("start", {}).get(number)
        self.results.add(replace(subject, setting=""), number, {"start": min(took, before) if before else took})

    def _limits(self, advance: Advance) -> None:
        advance(0, note="limits of this machine")
        found = self._task("limits", {"threads": self.threads})
        if found is not None:
            self.limits.append(found)
        advance(_LIMITS_SECONDS)

    def _once(self, advance: Advance) -> None:
        """What does not depend on the time of day."""
        if "quality" in self.topics:
            advance(0, note="quality against the float32 reading")
            texts = min(self.options.texts, 5) if self.options.quick else self.options.texts
            options = {"model": self.options.model, "texts": texts, "threads": self.threads}
            found = self._task("quality", options)
            self.once |= summary.quality_values(found) if found else {}
        if "many" in self.topics:
            advance(0, note="many requests at once")
            rounds = 1 if self.options.quick else self.options.rounds
            measured = self._task("many", {"model": self.options.model, "rounds": rounds, "quick": self.options.quick})
            self.once |= many.values(measured) if measured else {}
            advance(_MANY_SECONDS)
        if "speculation" in self.topics:
            advance(0, note="speculation")
            rounds = 1 if self.options.quick else self.options.rounds
            measured = self._task("speculation", {"model": self.options.model, "rounds": rounds})
            self.once |= speculation.values(measured) if measured else {}
            advance(_MANY_SECONDS)
        if "gpu" in self.topics:
            self._gpu(advance)
        if "families" in self.topics:
            advance(0, note="families that lower whole")
            nodes = self._task("families", {})
            self.once |= _families(nodes) if nodes is not None else {}

    def _gpu(self, advance: Advance) -> None:
        advance(0, note="on a GPU")
        rounds = 1 if self.options.quick else self.options.rounds
        before = len(self.results.notes)
        measured = self._task("gpu", {"rounds": rounds})
        if measured:
            self.once |= gpu.values(measured)
        elif len(self.results.notes) == before:
            self.results.note("gpu: there is no CUDA device here")

    def _task(self, name: str, options: dict[str, Any]) -> Any:
        try:
            return spawn.ask(sys.executable, "own_tasks", {"task": name, "options": options})["result"]
        except spawn.WorkerFailed as error:
            self.results.note(f"{name}: {error}")
            return None

    def _say(self, line: str) -> None:
        if not sys.stderr.isatty():  # on a terminal the bar says it
            print(line, file=sys.stderr, flush=True)

    # The outcome ----------------------------------------------------------------------------------------------------

    def _report(self, seconds: float) -> Report:
        results = self.results
        values = summary.engine_values(results)
        limits, best = summary.limit_values(self.limits)
        values |= summary.ratio_values(results) | summary.memory_values(results, self.model, self._rooms())
        values |= summary.linear_values(results) | limits
        values |= summary.share_values(values, self._facts(), best) | self.once
        values |= summary.paired_shares(results, self._facts())
        series = {
            f"{Subject(engine, setting, '', '').name} {figure}": list(rounds.values())
            for engine, settings in results.rounds.items()
            for setting, figures in settings.items()
            for figure, rounds in figures.items()
        }
        if any(" share of " in name and isinstance(v.value, float) and v.value > 1 for name, v in values.items()):
            results.note("an engine was faster than the limits that were measured: was the machine busy? run it again")
        untested = [claim.id for claim in CLAIMS if claim.metric not in values]
        notes = [*self._peer_notes(), *results.notes]
        if untested:
            notes.append("claims that this run could not test: " + ", ".join(untested))
        return Report.record(
            "bench",
            "engine",
            values=values,
            claims=CLAIMS,
            reasons=dict.fromkeys(untested, "not tested"),
            seed=0,
            wall_time=round(seconds, 1),
            series=series,
            notes=notes,
            config={
                "rounds": self.options.rounds,
                "quick": self.options.quick,
                "threads": self.threads,
                "shape": asdict(SHAPE),
            },
        )

    def _rooms(self) -> dict[str, int]:
        cases = [*one_sequence(), *long_context(self.model.context)]
        return {case.memory_gives: case.length for case in cases if case.memory_gives}

    def _facts(self) -> dict[str, Facts]:
        """Sizes by engine: transformers reads two bytes a number."""
        wide = replace(self.model, step_bytes=2 * (self.model.body + self.model.head))
        shapes = {
            name: shape_facts(SHAPE, step_bytes=shape_bytes(SHAPE, kind)) for name, kind in summary.SHAPES.items()
        }
        return {OWN: self.model, summary.GENERATE: self.model, LLAMA: self.model, TRANSFORMERS: wide, **shapes}

    def _peer_notes(self) -> list[str]:
        notes = [f"{engine}: {found.missing}" for engine, found in self.found.items() if found.missing]
        for engine in (OWN, LLAMA, TRANSFORMERS):
            about = self.results.about.get(engine)
            notes += [f"{engine} {about['version']}: {about['system'].strip(' |')}"] if about else []
        system = self.results.about.get(LLAMA, {}).get("system", "")
        if system and "amx" in hardware()["flags"] and "AMX_INT8 = 1" not in system:
            notes.append(
                "llama.cpp was built without AMX, which this machine has: clang builds it with (see `make bench`)"
            )
        return notes


def _families(nodes: dict[str, list[str]]) -> dict[str, Value]:
    from orchard.bench.families import WHOLE

    must = sum(len(nodes[name]) for name in WHOLE)
    mixed = {name: found for name, found in nodes.items() if found}
    words = "; ".join(f"{name}: {', '.join(found)}" for name, found in mixed.items())
    return {
        "nodes in torch": Value(must, note=", ".join(WHOLE)),
        "families that lower whole": Value(len(nodes) - len(mixed), note=words or f"all {len(nodes)}"),
    }
