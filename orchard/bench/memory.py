"""`orchard bench memory`: what a model remembers of long conversations, by policy × budget × codec × owner.

Conversations are made from a seed or read from a file. Each goes through every memory before the next begins, so that all are
measured in the same weather. An interrupt ends the run and keeps what is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from orchard.bench import memory_policies as policies
from orchard.bench.memory_files import READERS
from orchard.bench.memory_measure import Asked, measure
from orchard.bench.memory_model import OWN, embedding, keeper, opened, token_bytes
from orchard.bench.memory_options import RECALL, Budget, Options
from orchard.bench.memory_policies import FULL, Encoded, KeptMaker, Settings, encoded
from orchard.bench.memory_report import Row, Subject, judged, series
from orchard.bench.memory_tasks import Talk, recalls
from orchard.core.errors import UnsupportedPair, UsageError
from orchard.core.files import write_text
from orchard.core.machine import CHECKOUT
from orchard.core.progress import Advance, progress
from orchard.core.report import Report, Value

TARGET = CHECKOUT / "results" / "bench" / "memory.json"


def run_and_save(options: Options, *, save: bool, target: Path = TARGET) -> tuple[Bench, Report, list[Path]]:
    """Run, and with `save` keep the Report and its chart. Whether they can be kept is asked before the work begins."""
    if save and not target.parent.is_dir():
        raise UsageError(
            f"there is no folder {target.parent}",
            hint="--save works in a checkout of Orchard; --json prints the Report",
        )
    bench = Bench(options)
    report = bench.run()
    if not save:
        return bench, report, []
    from orchard.bench.memory_chart import curves

    picture = target.with_suffix(".svg")
    report.save(target)
    write_text(picture, curves(report))
    return bench, report, [target, picture]


class Bench:
    """One benchmark: what was asked for, what came out so far."""

    def __init__(self, options: Options) -> None:
        options.check()
        self.options = options
        self.rows: dict[Subject, Row] = {}
        self.notes: list[str] = []
        self.interrupted = False
        self.refused: UnsupportedPair | None = None
        self._files = {task: _read(task, options) for task in options.tasks if task != RECALL}

    def run(self) -> Report:
        started = time.perf_counter()
        asked = self.options
        pairs = [(codec, owner) for owner in asked.owners for codec in asked.codecs]
        talks = sum(len(self._files[task]) if task in self._files else asked.talks for task in asked.tasks)
        try:
            with progress("remembering", total=len(pairs) * talks * len(self._subjects(OWN, OWN))) as advance:
                for codec, owner in pairs:
                    self._model(codec, owner, advance)
        except KeyboardInterrupt:
            self.interrupted = True
            if not self.rows:
                raise
            self._note("Interrupted: what was complete by then is here, and no more.")
        if not self.rows:
            raise self.refused or UsageError(
                "no conversation has a question that can be asked", hint="take more --tokens of each"
            )
        return self._report(time.perf_counter() - started)

    # Inside -----------------------------------------------------------------------------------------------------------

    def _model(self, codec: str, owner: str, advance: Advance) -> None:
        advance(0, note=f"opening {self.options.model}")
        try:
            model = opened(self.options.model, codec, owner)
        except UnsupportedPair as error:
            self._refuse(f"codec {codec} with owner {owner}", error)
            return
        make, engine = keeper(model)
        self._note(f"Keys and values: codec {codec}, owner {owner}, kept by the {engine} engine.")
        size = cache(lambda: token_bytes(make))
        context = model.runner.config.context
        for talk in self._talks(model.tokenizer):
            whole = encoded(model.tokenizer, talk.begin, talk.utterances)
            questions = [Asked.of(model.tokenizer, one) for one in talk.questions]
            least = max(one.longest for one in questions) + self.options.decode
            for subject in self._subjects(codec, owner):
                if subject.policy == FULL and len(whole.tokens) + least > context:
                    self._note(f"{talk.name} is longer than the model's context of {context:,} tokens, also for full.")
                settings = self._settings(subject, len(whole.tokens), least, size)
                self._measure(
                    subject, make, settings, whole, questions, _told(advance, f"{talk.name}: {subject.label}")
                )

    def _measure(
        self,
        subject: Subject,
        make: KeptMaker,
        settings: Settings,
        talk: Encoded,
        questions: Sequence[Asked],
        tell: Callable[[float], None],
    ) -> None:
        tell(0)
        try:
            memory = policies.memory(subject.policy, make, lambda: self._embed[0], settings)
            found = measure(
                memory,
                talk,
                questions,
                decode=self.options.decode,
                tell=lambda: tell(1 / (1 + len(questions))),
            )
        except UnsupportedPair as error:
            self._refuse(subject.label, error)
            return
        self.rows.setdefault(subject, Row(subject)).outcomes.append(found)

    def _refuse(self, what: str, error: UnsupportedPair) -> None:
        """A pair that does not go together is said and left out; the others are measured."""
        self.refused = error
        self._note(f"Refused: {what}: {error.message}")

    def _talks(self, tokenizer: Any) -> Iterator[Talk]:
        asked = self.options

        def count(text: str) -> int:
            return len(tokenizer.encode(text))

        for task in asked.tasks:
            if task == RECALL:
                yield from recalls(asked.seed, asked.talks, tokens=asked.tokens, questions=asked.questions, count=count)
                continue
            for whole in self._files[task]:
                talk = whole.cut(asked.tokens, asked.questions, count, asked.seed)
                if talk.questions:
                    yield talk
                else:
                    self._note(
                        f"{talk.name}: no question is about its first {asked.tokens:,} tokens, so it is left out."
                    )

    def _subjects(self, codec: str, owner: str) -> list[Subject]:
        asked = self.options
        full = [Subject(codec, owner, "", FULL)] if FULL in asked.policies else []
        others = [one for one in asked.policies if one != FULL]
        return full + [Subject(codec, owner, budget, policy) for budget in asked.budgets for policy in others]

    def _settings(self, subject: Subject, tokens: int, least: int, size: Callable[[], tuple[float, float]]) -> Settings:
        asked = self.options
        if subject.policy == FULL:
            budget, block = tokens, max(asked.block or 0, least)
        else:
            budget, block = Budget.parse(subject.budget).settle(tokens, asked.block, least, size)
        if block < least:
            raise UsageError(
                f"a block of {block} tokens has no room for a question and its answer of {least}",
                hint=f"use --block {least} or more",
            )
        if budget <= asked.sinks:
            raise UsageError(
                f"a budget of {budget} tokens has no room beside {asked.sinks} sinks",
                hint="use a larger budget, or fewer --sinks",
            )
        return Settings(budget, block, asked.sinks, asked.episodes, asked.medoids)

    @cached_property
    def _embed(self) -> tuple[Any, str]:
        found = embedding(self.options.embedder)
        self._note(f"Episodes are found by the embedder {found[1]}.")
        return found

    def _report(self, seconds: float) -> Report:
        rows = list(self.rows.values())
        values: dict[str, Value] = {}
        for row in rows:
            values |= row.values()
        more, claims = judged(rows)
        return Report.record(
            "bench",
            "memory",
            values=values | more,
            claims=claims,
            series=series(rows),
            seed=self.options.seed,
            config=asdict(self.options),
            notes=[
                "Accuracy: the right answer is the likeliest of its alternatives (mean log-likelihood of a token).",
                "Bytes are all that is allocated for keys and values, the place of tokens that look and are not kept among them.",
                *self.notes,
            ],
            wall_time=round(seconds, 3),
        )

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _read(task: str, options: Options) -> list[Talk]:
    kind, colon, path = task.partition(":")
    if kind not in READERS or not colon:
        raise UsageError(
            f"no task {task!r}", hint=f"{RECALL}, or a file: " + ", ".join(f"{one}:PATH" for one in READERS)
        )
    return READERS[kind](Path(path).expanduser(), options.seed)[: options.talks]


def _told(advance: Advance, words: str) -> Callable[[float], None]:
    return lambda amount: advance(amount, note=words)
