"""What a compressed model learns from and is measured on: text that the original wrote itself, and files where they are given.

Text by kinds: `plain` (documents from a mark, or from one first token of many: arXiv 2305.17888 begins so), `chat` (both sides of
conversations, where the model has a template), `calm` (the same with answers that keep to what is likely, as people ask for) and
`text` (files). Of each kind some rows are held out, and nothing is learnt from
them. Everything is kept in a folder, piece by piece, so that what was written once is never written again.
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
from orchard.core.digest import sha256
from orchard.core.errors import TemplateError, UsageError
from orchard.core.seeds import fold
from orchard.data.batches import Batches
from orchard.data.encode import Encode
from orchard.data.order import Repeat
from orchard.data.packing import Pack
from orchard.data.source import Sample
from orchard.models.language.decoder import Decoder
from orchard.recipes.draft_text import SampleFile, write_samples
from orchard.recipes.files import rows_of
from orchard.recipes.own_text import Script, conversations, documents, own_text
from orchard.text.tokenizer import Tokenizer

PLAIN, CHAT, CALM, TEXT = "plain", "chat", "calm", "text"
COOL = 0.5
"""The temperature of calm answers."""
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

    learnt: Path | None
    held: dict[str, Path]
    """By kind."""
    tokens: int
    length: int
    seed: int

    def held_out(self, kind: str, rows: int = 8) -> Iterator[Batch]:
        """Always the same batches."""
        return iter(self._batches(self.held[kind], rows, ends=True).build())

    def held_sources(self, rows: int) -> dict[str, Any]:
        return {kind: self._batches(path, rows, ends=True) for kind, path in self.held.items()}

    def source(self, rows: int, seed: int) -> Any:
        """Batches to learn from, without end."""
        assert self.learnt is not None
        return self._batches(self.learnt, rows, ends=False, seed=seed)

    def looked_at(self, tokens: int, rows: int = 8) -> list[Batch]:
        """A few batches for transforms that look at text."""
        count = max(1, round(tokens / (rows * self.length)))
        made = self.source(rows, self.seed).build()
        try:
            return [batch.to("cpu") for batch in islice(made, count)]
        finally:
            made.close()

    def _batches(self, path: Path, rows: int, *, ends: bool, seed: int = 0) -> Any:
        samples: Any = SampleFile.Config(path=str(path), seed=seed)
        samples = samples if ends else Repeat.Config(source=samples)
        # What is held out is one document a row, so that a model can be made to read through its stores.
        packed = Pack.Config(source=samples, length=self.length, mode="padded" if ends else "packed", too_long="cut")
        return Batches.Config(source=packed, rows=rows, last="pad" if ends else "drop")


def texts_for(decoder: Decoder, tokenizer: Tokenizer, wanted: Wanted, folder: Path) -> Texts:
    """All the text of a run: what is in the folder already, and the rest now."""
    held: dict[str, Path] = {}
    learnt: list[Sample] = []
    scripts = _scripts(decoder, tokenizer, wanted.seed)
    own = wanted.own if wanted.files else 1.0
    for kind, script in scripts.items():
        held[kind] = folder / f"held-{kind}.safetensors"
        _written(decoder, tokenizer, script, kind, wanted, "held", wanted.held, held[kind])
        if wanted.learnt and own > 0:
            part = folder / f"learnt-{kind}.safetensors"
            _written(
                decoder, tokenizer, script, kind, wanted, "learnt", round(wanted.learnt * own / len(scripts)), part
            )
            learnt += _samples(part)
    if wanted.files:
        held[TEXT] = folder / f"held-{TEXT}.safetensors"
        part = folder / f"learnt-{TEXT}.safetensors"
        if not (held[TEXT].is_file() and part.is_file()):
            _from_files(tokenizer, wanted, round(wanted.learnt * (1 - own)) or wanted.length, part, held[TEXT])
        learnt += _samples(part)
    path = folder / "learnt.safetensors" if learnt else None
    if path is not None and not path.is_file():
        write_samples(path, learnt)
    return Texts(path, held, sum(len(one) for one in learnt), wanted.length, wanted.seed)


# What the model writes --------------------------------------------------------------------------------------------------


def _scripts(decoder: Decoder, tokenizer: Tokenizer, seed: int) -> dict[str, Script]:
    first = documents(tokenizer).openings[0]
    known = set(tokenizer.control_tokens.values())
    words = [token for token in range(min(tokenizer.vocab_size, decoder.config.vocab)) if token not in known]
    drawn = np.random.default_rng(fold(seed, "first tokens")).choice(words, min(OPENINGS, len(words)), replace=False)
    # Every second document begins as the model likes. An odd number of openings: even ones are turns of conversations.
    openings = [first]
    for token in drawn:
        openings += [[*first, int(token)], first]
    scripts = {PLAIN: Script(openings)}
    if tokenizer.chat_template is not None:
        with suppress(UsageError, TemplateError):  # a template that cannot be left open: documents alone, then
            scripts |= {CHAT: conversations(tokenizer), CALM: conversations(tokenizer, answers=COOL)}
    return scripts


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
    rows = max(1, -(-tokens // wanted.length))
    ends = sorted({*tokenizer.eos_ids, *(i for name, i in tokenizer.control_tokens.items() if name == "<|endoftext|>")})
    size = min(wanted.length + 1, decoder.config.context)
    made: list[Path] = []
    for number, start in enumerate(range(0, rows, wanted.batch)):
        piece = target.with_name(f"{target.stem}.{number}.safetensors")
        if not piece.is_file():
            ids = own_text(
                decoder,
                [script],
                rows=min(wanted.batch, rows - start),
                length=size,
                ends=[i for i in ends if i < decoder.config.vocab],
                seed=fold(wanted.seed, purpose, kind, number) % 2**31,
                batch=wanted.batch,
            )
            write_samples(piece, [Sample.of(row.tolist(), place=kind) for row in ids])
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
