"""What a compressed model learns from and is measured on: text that the original wrote itself, and files where they are given.

Text by kinds: `plain` (documents from a mark, or from one first token of many: arXiv 2305.17888 begins so), `chat` (both sides of
conversations, where the model has a template), `calm` (the same with answers that keep to what is likely, as people ask for),
`asked` (answers to prompts of ours: see `prompts`) and `text` (files). Of each kind some rows are held out, and nothing is learnt
from them. Everything is kept in a folder, piece by piece, so that what was written once is never written again.

Answers to prompts stand in short rows, so that most of them begin a context, as they do when people ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from orchard.core.batch import Batch
from orchard.core.config import BaseConfig
from orchard.core.digest import sha256
from orchard.core.errors import TemplateError, UsageError
from orchard.core.seeds import fold
from orchard.data.batches import Batches
from orchard.data.encode import Encode
from orchard.data.mix import Mix
from orchard.data.order import Repeat
from orchard.data.packing import Pack
from orchard.data.source import Sample
from orchard.models.language.decoder import Decoder
from orchard.recipes.compressing.prompts import prompts
from orchard.recipes.draft_text import SampleFile, write_samples
from orchard.recipes.files import rows_of
from orchard.recipes.own_text import Script, answers, conversations, documents, own_turns
from orchard.text.tokenizer import Tokenizer

PLAIN, CHAT, CALM, ASKED, TEXT = "plain", "chat", "calm", "asked", "text"
SHARES = {PLAIN: 0.2, CHAT: 0.15, CALM: 0.25, ASKED: 0.4}
"""Of what the model writes. Answers to short prompts have the largest: without them a small form of a model speaks as well as
before and does little of what it is told."""
COOL = 0.5
"""The temperature of calm answers."""
HEAT = (0.3, 0.6, 1.0)
"""Temperatures of answers to prompts, by turns."""
PARTS, SHORTEST = 4, 192
"""Rows of answers to prompts are so many times shorter than others, where that leaves them this long."""
PROMPTS, FEW = 30_000, 1_000_000
"""Prompts that are asked; a hundredth of them where fewer tokens than this are learnt from."""
OPENINGS = 255
"""First tokens that documents begin with."""
EVERY = 10
"""At most one piece in so many of somebody's files is held out."""
WHOLE = 0.9
"""Of the pieces of files: where so many fill a row, only those are used."""


@dataclass(frozen=True)
class Wanted:
    """How much text, in tokens. Rows of `length` tokens; `own`: the share that the model writes where files are given."""

    learnt: int
    held: int
    length: int
    batch: int
    """Rows that are written together."""
    files: tuple[str, ...] = ()
    own: float = 0.5
    seed: int = 0


@dataclass(frozen=True)
class Texts:
    """Text in its folder."""

    learnt: dict[int, Path]
    """By the length of rows."""
    held: dict[str, Path]
    """By kind."""
    lengths: dict[str, int]
    """Of rows, by kind."""
    tokens: dict[int, int]
    """What there is to learn from, by the length of rows."""
    length: int
    """Of the longest rows; a batch of shorter ones has as many more of them."""
    seed: int

    def held_out(self, kind: str, rows: int = 8) -> Iterator[Batch]:
        """Always the same batches."""
        return iter(self._held(kind, rows).build())

    def held_sources(self, rows: int) -> dict[str, Any]:
        return {kind: self._held(kind, rows) for kind in self.held}

    def source(self, rows: int, seed: int) -> Any:
        """Batches to learn from, without end: all of as many tokens, each of rows of one length."""
        assert self.learnt
        each: list[BaseConfig] = []
        for length, path in self.learnt.items():
            samples: BaseConfig = Repeat.Config(source=SampleFile.Config(path=str(path), seed=seed))
            packed = Pack.Config(source=samples, length=length, mode="packed", too_long="cut")
            each.append(Batches.Config(source=packed, rows=rows * self.length // length, last="drop"))
        if len(each) == 1:
            return each[0]
        return Mix.Config(sources=each, weights=[float(self.tokens[length]) for length in self.learnt], seed=seed)

    def looked_at(self, tokens: int, rows: int = 8) -> list[Batch]:
        """A few batches for transforms that look at text."""
        count = max(1, round(tokens / (rows * self.length)))
        made = self.source(rows, self.seed).build()
        try:
            return [batch.to("cpu") for batch in islice(made, count)]
        finally:
            made.close()

    def _held(self, kind: str, rows: int) -> Any:
        # One document a row, so that a model can be made to read through its stores.
        length = self.lengths[kind]
        samples = SampleFile.Config(path=str(self.held[kind]))
        packed = Pack.Config(source=samples, length=length, mode="padded", too_long="cut")
        return Batches.Config(source=packed, rows=rows * self.length // length, last="pad")


def texts_for(decoder: Decoder, tokenizer: Tokenizer, wanted: Wanted, folder: Path) -> Texts:
    """All the text of a run: what is in the folder already, and the rest now."""
    held: dict[str, Path] = {}
    lengths: dict[str, int] = {}
    learnt: dict[int, list[Sample]] = {}
    scripts = _scripts(decoder, tokenizer, wanted)
    own = wanted.own if wanted.files else 1.0
    # What is held out answers other prompts than what is learnt from.
    others = scripts | (_asked(decoder, tokenizer, wanted, wanted.seed + 1) if ASKED in scripts else {})
    whole = sum(SHARES[kind] for kind in scripts)
    for kind, script in scripts.items():
        held[kind], lengths[kind] = folder / f"held-{kind}.safetensors", row_length(kind, wanted.length)
        _written(decoder, tokenizer, others[kind], kind, wanted, "held", wanted.held, held[kind])
        if wanted.learnt and own > 0:
            part = folder / f"learnt-{kind}.safetensors"
            tokens = round(wanted.learnt * own * SHARES[kind] / whole)
            _written(decoder, tokenizer, script, kind, wanted, "learnt", tokens, part)
            learnt.setdefault(lengths[kind], []).extend(_samples(part))
    if wanted.files:
        held[TEXT], lengths[TEXT] = folder / f"held-{TEXT}.safetensors", wanted.length
        part = folder / f"learnt-{TEXT}.safetensors"
        if not (held[TEXT].is_file() and part.is_file()):
            _from_files(tokenizer, wanted, round(wanted.learnt * (1 - own)) or wanted.length, part, held[TEXT])
        learnt.setdefault(wanted.length, []).extend(_samples(part))
    paths = {length: folder / f"learnt-rows-of-{length}.safetensors" for length in learnt}
    for length, path in paths.items():
        if not path.is_file():
            write_samples(path, learnt[length])
    counts = {length: sum(map(len, samples)) for length, samples in learnt.items()}
    return Texts(paths, held, lengths, counts, wanted.length, wanted.seed)


def row_length(kind: str, length: int) -> int:
    """Tokens of a row of a kind, where rows of text have `length`."""
    short = length // PARTS
    return short if kind == ASKED and short >= SHORTEST and length % PARTS == 0 else length


# What the model writes --------------------------------------------------------------------------------------------------


def _scripts(decoder: Decoder, tokenizer: Tokenizer, wanted: Wanted) -> dict[str, Script]:
    first = documents(tokenizer).openings[0]
    known = set(tokenizer.control_tokens.values())
    words = [token for token in range(min(tokenizer.vocab_size, decoder.config.vocab)) if token not in known]
    drawn = np.random.default_rng(fold(wanted.seed, "first tokens")).choice(
        words, min(OPENINGS, len(words)), replace=False
    )
    # Every second document begins as the model likes. An odd number of openings: even ones are turns of conversations.
    openings = [first]
    for token in drawn:
        openings += [[*first, int(token)], first]
    scripts = {PLAIN: Script(openings)}
    if tokenizer.chat_template is not None:
        with suppress(UsageError, TemplateError):  # a template that cannot be left open: documents alone, then
            scripts |= {CHAT: conversations(tokenizer), CALM: conversations(tokenizer, answers=COOL)}
            scripts |= _asked(decoder, tokenizer, wanted, wanted.seed)
    return scripts


def _asked(decoder: Decoder, tokenizer: Tokenizer, wanted: Wanted, seed: int) -> dict[str, Script]:
    """Prompts that leave half of a row at least for the answer; nothing where rows are too short for most."""
    script = answers(tokenizer, prompts(PROMPTS if wanted.learnt > FEW else PROMPTS // 100, seed), HEAT)
    size = min(row_length(ASKED, wanted.length), decoder.config.context) // 2
    fits = [number for number, opening in enumerate(script.openings) if len(opening) <= size]
    fits = fits[: len(fits) - 1 + len(fits) % 2]  # an odd number, as above
    openings, heat = [script.openings[number] for number in fits], [script.heat[number] for number in fits]
    return {ASKED: Script(openings, heat=heat)} if len(fits) > len(script.openings) // 2 else {}


def _written(
    decoder: Decoder,
    tokenizer: Tokenizer,
    script: Script,
    kind: str,
    wanted: Wanted,
    purpose: str,
    tokens: int,
    target: Path,
) -> None:
    """Write text in pieces of a batch of rows, each kept when it is whole; then all of it in one file."""
    if target.is_file():
        return
    length = row_length(kind, wanted.length)
    batch = wanted.batch * wanted.length // length
    rows = max(1, -(-tokens // length))
    if rows > batch:  # a smaller last piece would take as long as a whole one
        rows = round(rows / batch) * batch
    ends = sorted({*tokenizer.eos_ids, *(i for name, i in tokenizer.control_tokens.items() if name == "<|endoftext|>")})
    size = min(length + 1, decoder.config.context)
    made: list[Path] = []
    for number, start in enumerate(range(0, rows, batch)):
        piece = target.with_name(f"{target.stem}.{number}.safetensors")
        if not piece.is_file():
            ids, chosen = own_turns(
                decoder,
                [script],
                rows=min(batch, rows - start),
                length=size,
                ends=[i for i in ends if i < decoder.config.vocab],
                seed=fold(wanted.seed, purpose, kind, number) % 2**31,
                batch=batch,
            )
            # Prompts of ours are not for the model to say. Rows of the other kinds stay whole: an opening there is a few tokens.
            marks = chosen if kind == ASKED else np.ones_like(chosen)
            write_samples(piece, [Sample.of(*row, place=kind) for row in zip(ids, marks, strict=True) if row[1].any()])
        made.append(piece)
    write_samples(target, [sample for piece in made for sample in _samples(piece)])
    for piece in made:
        piece.unlink(missing_ok=True)


def _samples(path: Path) -> list[Sample]:
    return list(SampleFile.Config(path=str(path)).build())


# Somebody's files -------------------------------------------------------------------------------------------------------


def _from_files(tokenizer: Tokenizer, wanted: Wanted, tokens: int, learnt: Path, held: Path) -> None:
    """Pieces of documents, as many as are wanted. Equal pieces are on one side; which are held out depends on what they say."""
    source = Encode.Config(source=rows_of(list(wanted.files), seed=wanted.seed)).build(tokenizer=tokenizer)
    pieces: dict[bytes, Sample] = {}
    count = 0
    try:
        for item in source:
            sample = item if isinstance(item, Sample) else item.chosen
            for start in range(0, len(sample), wanted.length):
                piece = sample.cut(start, min(start + wanted.length, len(sample)))
                if piece.learnt.any():
                    pieces.setdefault(sha256(piece.ids.tobytes()), piece)
                    count += len(piece)
            if count >= tokens + wanted.held:
                break
    finally:
        source.close()
    if len(pieces) < 2:
        raise UsageError(
            f"{', '.join(wanted.files)}: {len(pieces)} pieces of {wanted.length} tokens, too few to learn from and measure on",
            hint="give more text, or none: the model then writes its own",
        )
    order = sorted(pieces)
    whole = [key for key in order if len(pieces[key]) == wanted.length]
    # The ends of documents would make rows that need a mask. Where they are few, nothing is lost without them.
    order = whole if len(whole) >= WHOLE * len(order) else order
    out, so_far = 0, 0
    while out < max(1, len(order) // EVERY) and so_far < wanted.held:
        so_far += len(pieces[order[out]])
        out += 1
    write_samples(held, [pieces[key] for key in order[:out]])
    write_samples(learnt, [pieces[key] for key in order[out:]])
