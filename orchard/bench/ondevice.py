"""Compressed models beside the original 4-bit file and beside peers: sizes, speed, quality by kind of text, instructions.

One run gives everything that the on-device model is held to (`ondevice_claims`). Sizes are of the files themselves. Speed is that
of our engine on each file, in one process and by turns. Quality is what the engine gives on rows that every subject reads,
against the original's weights in bfloat16. What cannot be measured here is said, and its claims stay failed.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchard.bench import ondevice_speed, spawn
from orchard.bench.ondevice_claims import (
    BARS,
    CHECKS,
    ORIGINAL,
    PROMPT,
    Q2_0,
    Q2_K,
    Q4_0,
    SHORT,
    TORCHAO,
    bars_named,
    claims_of,
)
from orchard.bench.ondevice_peers import EMBEDDING_4, EMBEDDING_LEFT, Ground, Peer, PeerFailed, found_peers
from orchard.bench.ondevice_quality import Modules, OwnEngine, Rows, Subject, compare, followed, reference_of
from orchard.bench.ondevice_size import Original, size_values
from orchard.bench.ondevice_texts import Given, parsed, rows_of
from orchard.core.errors import UsageError
from orchard.core.machine import hardware
from orchard.core.progress import progress
from orchard.core.report import Report, Value
from orchard.evals.following import following
from orchard.evals.likeness import Likeness, together
from orchard.session.model import load
from orchard.weights.library import Library

ENGINE = f"{ORIGINAL}, our engine"
"""The original as a subject: what the engine itself costs, beside what compression does."""
Found = dict[str, dict[str, Likeness]]
"""By kind of text and subject."""


@dataclass(frozen=True)
class Options:
    """What a person may ask for. `models` and `texts` as on the command line: names or files, and KIND=FILE."""

    models: tuple[str, ...] = ("smollm2-mix", "smollm2-2bit")
    original: str = "smollm2"
    texts: tuple[str, ...] = ()
    tokens: int = 8192
    window: int = 1024
    rounds: int = 7
    steps: int = 64
    prompt: int = PROMPT
    checks: int = CHECKS
    peers: bool = True
    peers_python: tuple[str, ...] = ()
    work: Path | None = None


@dataclass(frozen=True)
class Compressed:
    """A model that is measured, and the bars it is held to."""

    name: str
    bars: str
    path: Path


def models_of(arguments: Sequence[str]) -> list[Compressed]:
    """`FILE`, a name of the library, or `BARS=` before either. Models that are not there, or share a name, are refused."""
    found: list[Compressed] = []
    for argument in arguments:
        first, equals, rest = argument.partition("=")
        bars, place = (first, rest) if equals and first in BARS else ("", argument)
        path = Library().resolve(place)
        name = Path(place).stem if Path(place).suffix else place
        if any(one.name == name for one in found):
            raise UsageError(f"two models are called {name}", hint="rename one of the files")
        found.append(Compressed(name, bars or bars_named(name), path))
    if not found:
        raise UsageError("no model is named", hint="--model smollm2-mix smollm2-2bit")
    return found


def bench(options: Options) -> Report:
    """Run all of it. Wrong options are refused before any work."""
    if min(options.rounds, options.steps, options.checks, options.prompt) < 1:
        raise UsageError("a number of rounds, steps, checks or tokens below 1", hint="use whole numbers from 1")
    texts, models = parsed(options.texts), models_of(options.models)
    with ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orchard-ondevice-")))
        work.mkdir(parents=True, exist_ok=True)
        return Bench(options, models, texts, work).run()


@dataclass
class Bench:
    """One run: what is asked for, what came out so far."""

    options: Options
    models: list[Compressed]
    texts: list[Given]
    work: Path
    values: dict[str, Value] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def run(self) -> Report:
        began = time.perf_counter()
        self.threads = int(hardware()["cores"])
        self.original = Original.of(Library().resolve(self.options.original))
        with progress("measuring", total=3 + len(self.models) + 2 * len(self.texts)) as advance:
            self._sizes()
            advance(1, note="speed")
            self._speed()
            advance(1, note="instructions")
            loaded = {model.name: load(model.path, draft=False) for model in self.models}
            loaded[ENGINE] = load(self.original.path, draft=False)
            self._following(loaded)
            advance(1, note="texts")
            if self.texts:
                self._quality(loaded, advance)
        return self._report(time.perf_counter() - began)

    # Measuring ------------------------------------------------------------------------------------------------------

    def _sizes(self) -> None:
        self.values[f"{ORIGINAL} file"] = Value(self.original.bytes, unit="bytes", note=self.original.path.name)
        bits = 8 * self.original.bytes / self.original.dense
        self.values[f"{ORIGINAL} bits per weight"] = Value(bits, note=f"of {self.original.dense:,} weights")
        self.values[f"{ORIGINAL} KV"] = Value(self.original.kv, unit="bytes per token", note="in bfloat16")
        for model in self.models:
            self.values |= dict(size_values(model.name, model.path, self.original))

    def _speed(self) -> None:
        with suppress(OSError):  # not every system tells
            self.values["load before speed"] = Value(
                os.getloadavg()[0], note="programs that wanted a core, last minute"
            )
        paths = {ORIGINAL: self.original.path} | {model.name: model.path for model in self.models}
        asked = {
            "prompt": self.options.prompt,
            "short": SHORT,
            "steps": self.options.steps,
            "rounds": self.options.rounds,
        }
        try:
            found = ondevice_speed.measure(paths, vocab=self.original.vocab, **asked)
        except spawn.WorkerFailed as error:
            self.notes.append(f"speed: {error}")
            return
        self.values |= ondevice_speed.values(found["figures"])
        for label, figures in found["figures"].items():
            self.series |= {f"{label} {figure}": list(rounds) for figure, rounds in figures.items()}
        systems = sorted({about["system"] for about in found["about"].values()})
        self.notes.append(f"speed: {' and '.join(systems)}, {self.options.rounds} rounds by turns in one process")

    def _following(self, loaded: Mapping[str, Any]) -> None:
        checks = following(each=self.options.checks)
        scores: dict[str, float] = {}
        for label, model in loaded.items():
            found = followed(model, checks)
            name = ORIGINAL if label == ENGINE else label
            scores[name] = found.score
            note = ", ".join(f"{kind} {score:.2f}" for kind, score in found.by_kind.items())
            self.values[f"{name} following {len(checks)}"] = Value(found.score, note=f"of {len(checks)}: {note}")
        for model in self.models:
            base = scores[ORIGINAL]
            share = scores[model.name] / base if base else None
            self.values[f"{model.name} following {len(checks)} over original"] = Value(
                share, note="" if base else "the original: none"
            )

    def _quality(self, loaded: Mapping[str, Any], advance: Any) -> None:
        reference = reference_of(self.original.path)
        subjects: dict[str, Subject] = {name: OwnEngine(model) for name, model in loaded.items()}
        asked = {"vocab": self.original.vocab, "tokens": self.options.tokens, "window": self.options.window}
        rows = {given.kind: rows_of(given, loaded[ENGINE].tokenizer, **asked) for given in self.texts}
        peers: list[Peer] = []
        if self.options.peers:
            embedding = loaded[self.models[0].name].config.embedding.format
            probe = next(iter(rows.values()))[:2]
            ground = Ground(self.original, reference, probe, self.work, self.threads)
            peers, missing = found_peers(self.options.peers_python, ground, embedding)
            self.notes += missing
        for peer in peers:
            subjects[peer.name] = peer.subject
            self.values |= peer.values
            self.notes += [peer.note] if peer.note else []
        found: Found = {}
        for kind, some in rows.items():
            advance(1, note=kind)
            found[kind] = self._compared(subjects, Modules(reference), some)
            advance(1)
        self.values |= likeness_values(found) | kl_values(found, [model.name for model in self.models])

    def _compared(self, subjects: dict[str, Subject], reference: Subject, rows: Rows) -> dict[str, Likeness]:
        """All subjects on some rows. A peer that dies on the way is left out of this kind, and the rest is measured again."""
        left = dict(subjects)
        while True:
            try:
                return compare(left, reference, rows)
            except PeerFailed as error:
                self.notes.append(f"{error.name}: {error}")
                del left[error.name]

    # The outcome ----------------------------------------------------------------------------------------------------

    def _report(self, seconds: float) -> Report:
        claims = [claim for model in self.models for claim in claims_of(model.name, model.bars)]
        untested = [claim.id for claim in claims if claim.metric not in self.values]
        if untested:
            self.notes.append("claims that this run could not test: " + ", ".join(untested))
        told = {
            name: getattr(self.options, name) for name in ("tokens", "window", "rounds", "steps", "prompt", "checks")
        }
        return Report.record(
            "bench",
            "ondevice",
            values=self.values,
            claims=claims,
            reasons=dict.fromkeys(untested, "not tested"),
            seed=0,
            wall_time=round(seconds, 1),
            series=self.series,
            notes=self.notes,
            config={**told, "threads": self.threads, "texts": {one.kind: one.path.name for one in self.texts}},
        )


def likeness_values(found: Found) -> dict[str, Value]:
    """Losses, ratios, divergences and agreements of every subject on every kind."""
    values: dict[str, Value] = {}
    for kind, subjects in found.items():
        for name, one in subjects.items():
            note = f"{one.tokens:,} tokens"
            values[f"{ORIGINAL} loss {kind}"] = Value(one.reference, unit="nats", note=f"{note}, weights in bfloat16")
            values[f"{name} loss {kind}"] = Value(one.loss, unit="nats", note=note)
            values[f"{name} loss ratio {kind}"] = Value(one.ratio, note=note)
            values[f"{name} KL {kind}"] = Value(one.kl, unit="nats", note=note)
            values[f"{name} agreement {kind}"] = Value(one.agreement, note=note)
    for name, whole in _everywhere(found).items():
        values[f"{name} KL"] = Value(whole.kl, unit="nats", note=f"{whole.tokens:,} tokens of all kinds")
    return values


def kl_values(found: Found, models: Sequence[str]) -> dict[str, Value]:
    """Divergences over those of peers, of all tokens together and by kind. Of torchao's two embeddings the closer one counts."""
    values: dict[str, Value] = {}
    whole = _everywhere(found)
    for peer, names in ((Q2_K, [Q2_K]), (Q2_0, [Q2_0]), (Q4_0, [Q4_0]), (TORCHAO, [EMBEDDING_LEFT, EMBEDDING_4])):
        there = [name for name in names if name in whole]
        if not there:
            continue
        best = min(there, key=lambda name: whole[name].kl)
        note = f"over {best}" if len(names) > 1 else ""
        for model in models:
            values[f"{model} KL over {peer}"] = Value(_over(whole[model], whole[best]), note=note)
            for kind, kinds in found.items():
                values[f"{model} KL over {peer} {kind}"] = Value(_over(kinds[model], kinds[best]), note=note)
    return values


def _everywhere(found: Found) -> dict[str, Likeness]:
    """All kinds together, of the subjects that read all of them."""
    first = next(iter(found.values()), {})
    names = [name for name in first if all(name in subjects for subjects in found.values())]
    return {name: together(subjects[name] for subjects in found.values()) for name in names}


def _over(one: Likeness, other: Likeness) -> float | None:
    return one.kl / other.kl if other.kl else None
