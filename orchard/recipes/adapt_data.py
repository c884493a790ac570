"""Somebody's data, looked at line by line before anything is trained: what can be learnt, how long it is, what is wrong where.

Every line is rendered and encoded as training will do it, so a line that would stop a run later is named now. What comes out are
rows for `orchard.data`, those to learn from and those held out, which no sample is among twice.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchard.core.digest import sha256
from orchard.core.errors import ConfigError, OrchardError, TemplateError, UsageError
from orchard.core.progress import progress
from orchard.core.seeds import fold
from orchard.data.chat import conversation
from orchard.data.errors import BadSample
from orchard.data.files import find, open_at, reading
from orchard.data.jsonl import parsed
from orchard.data.source import Sample
from orchard.recipes.adapt_rows import Rendered, Renderer, Talk, talk_of
from orchard.text.tokenizer import Tokenizer

LONGEST_LINE = 16 << 20
USUAL_SHARE, FEWEST, MOST = 0.1, 20, 200
"""Of samples: a tenth is held out, at most 200; with fewer than 20 nobody can spare one."""
Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class Problem:
    """A line that cannot be learnt from."""

    place: str
    reason: str
    message: str


@dataclass
class Looked:
    """What a look at the data found."""

    rows: list[Rendered] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Tokens of each row."""
    learnt: int = 0
    """Tokens that are learnt, of all rows."""
    samples: int = 0
    """Lines that are good."""
    repeated: int = 0
    """Lines that say what an earlier one said."""
    longest_at: str = ""
    problems: list[Problem] = field(default_factory=list)
    turns: str = "all"
    """How the rows are to be encoded."""
    keys: list[str] = field(default_factory=list)
    """Of each row: rows of one line, and of equal lines, have the same."""
    lines: list[int] = field(default_factory=list)
    """Of each row: which of the good lines it comes from."""

    @property
    def tokens(self) -> int:
        return sum(self.sizes)

    @property
    def longest(self) -> int:
        return max(self.sizes, default=0)

    @property
    def reasons(self) -> dict[str, int]:
        return dict(Counter(problem.reason for problem in self.problems))


def look(paths: Paths, tokenizer: Tokenizer, limit: int, *, split: bool = False) -> Looked:
    """Read, render and encode every line. `limit`: the most tokens of a sample, the model's context. `split`: a row for each
    answer, also where one would do for all."""
    talks: list[Talk] = []
    found = Looked()
    for item in _lines(paths):
        if isinstance(item, Talk):
            talks.append(item)
        else:
            found.problems.append(item)
    renderer = Renderer(tokenizer)
    split = split or any(not talk.plain for talk in talks) or not _whole(talks, tokenizer)
    found.turns = "last" if split else "all"
    seen: set[str] = set()
    with progress("reading the data", total=len(talks), unit="samples") as advance:
        for talk in talks:
            _add(found, talk, renderer, split, limit, seen)
            advance()
    found.problems.sort(key=lambda problem: _order(problem.place))
    return found


def parted(looked: Looked, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Which rows are learnt from and which are held out. Rows of the same line, and of equal lines, stay together; which lines
    it is depends on what they say and on the seed, not on their order."""
    keys = sorted(set(looked.keys), key=lambda key: fold(seed, "held out", key))
    count = min(round(share * len(keys)), len(keys) - 1) if share > 0 else 0
    kept = set(keys[: max(count, 0)])
    held = [number for number, key in enumerate(looked.keys) if key in kept]
    return [number for number, key in enumerate(looked.keys) if key not in kept], held


def share_of(text: str | float | None, samples: int) -> float | None:
    """The share that is asked for; None where a file is named instead. Without a word: a tenth, of enough samples."""
    if text is None:
        return min(USUAL_SHARE, MOST / samples) if samples >= FEWEST else 0.0
    try:
        share = float(text)
    except ValueError:
        return None
    if not 0 <= share < 1:
        raise UsageError(f"{text} of the samples cannot be held out", hint="use a share from 0 to below 1, or a file")
    return share


def stop_at(problems: Sequence[Problem], samples: int) -> None:
    """Refuse to go on with data that has problems."""
    if problems:
        first = problems[0]
        more = f", and {len(problems) - 1:,} more lines" if len(problems) > 1 else ""
        raise BadSample(
            f"{first.message}{more}",
            reason=first.reason,
            hint="`orchard adapt --check` lists them all; mend them, or leave them out with --on-bad skip",
        )
    if not samples:
        raise UsageError("there is nothing to learn from in this data", hint="see docs/adapt.md for what a line may be")


# Inside -----------------------------------------------------------------------------------------------------------------


def _lines(paths: Paths) -> Iterator[Talk | Problem]:
    def read(value: Any, place: str) -> dict[str, Any]:
        return {"talk": talk_of(value, place)}

    for path in find(paths, (".jsonl", ".ndjson")):
        with reading(path), open_at(path) as file:
            number = 0
            while data := file.readline(LONGEST_LINE + 1):
                number += 1
                place = f"{path}:{number}"
                try:
                    row = parsed(data, place, LONGEST_LINE, first=number == 1, check=read)
                    if row is not None:
                        yield row.data["talk"]
                except BadSample as error:
                    yield Problem(place, error.reason, error.message)
                while len(data) > LONGEST_LINE and not data.endswith(b"\n"):  # the rest of a line that is too long
                    data = file.readline(LONGEST_LINE) or b"\n"


def _whole(talks: Sequence[Talk], tokenizer: Tokenizer) -> bool:
    """Whether this model's template lets one sequence serve all answers of a conversation."""
    several = [talk for talk in talks if len(talk.answers) > 1]
    for talk in several:
        try:
            conversation(tokenizer, [message.to_dict() for message in talk.messages])
        except TemplateError:
            return False
        except OrchardError:  # something else is wrong with it, and is told of later
            continue
    return True


def _add(found: Looked, talk: Talk, renderer: Renderer, split: bool, limit: int, seen: set[str]) -> None:
    try:
        rows = renderer.rows(talk, split=split)
        samples = [_sample(row, renderer.tokenizer, found.turns, talk.place) for row in rows]
        for sample in samples:
            if len(sample.ids) > limit:
                message = f"{len(sample.ids):,} tokens, and the model's context holds {limit:,}"
                raise BadSample(message, reason="too-long", place=talk.place)
    except (BadSample, TemplateError, UsageError, ConfigError) as error:
        message = error.message if talk.place in error.message else f"{talk.place}: {error.message}"
        found.problems.append(Problem(talk.place, str(getattr(error, "reason", error.code)), message))
        return
    key = sha256(json.dumps(rows, sort_keys=True).encode()).hex()
    found.samples += 1
    found.repeated += key in seen
    seen.add(key)
    for row, sample in zip(rows, samples, strict=True):
        if len(sample.ids) > found.longest:
            found.longest_at = talk.place
        found.rows.append(row)
        found.keys.append(key)
        found.lines.append(found.samples)
        found.sizes.append(len(sample.ids))
        found.learnt += int(sample.learnt.sum())


def _sample(row: Rendered, tokenizer: Tokenizer, turns: str, place: str) -> Sample:
    if "text" in row:
        ids = tokenizer.encode(row["text"], bos=tokenizer.add_bos)
        return Sample.of(ids + ([] if tokenizer.eos_id is None else [tokenizer.eos_id]), place=place)
    return conversation(tokenizer, row["messages"], tools=row.get("tools"), turns=turns, place=place)


def _order(place: str) -> tuple[str, int]:
    path, _, line = place.rpartition(":")
    return path, int(line) if line.isdecimal() else 0
