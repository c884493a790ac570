"""Texts that a compressed model is held against its original on: kinds, files, and rows of tokens that every subject reads alike.

    --texts own=own.npy books=held-out/ wikipedia=wiki.txt web=c4.jsonl wikitext2=test.txt

A file is text (`.txt`; a folder of them counts as one file), JSON lines with a "text" each, or token ids (`.npy`, whole numbers).
Documents follow each other with the mark that begins one, are cut into rows of one length, and so many rows as were asked for are
taken at even distances, so that every part of a file is heard.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from orchard.core.errors import UsageError

if TYPE_CHECKING:
    from orchard.text.tokenizer import Tokenizer

KINDS = ("own", "books", "wikipedia", "web", "wikitext2")
ENDINGS = (".txt", ".jsonl", ".npy")
MOST_BYTES = 1 << 30
_HINT = "write KIND=FILE, with a kind among " + ", ".join(KINDS)


class BadTexts(UsageError):
    """A text that nothing can be measured on."""

    code = "bad-texts"


@dataclass(frozen=True)
class Given:
    """A kind of text, and where it is."""

    kind: str
    path: Path


def parsed(arguments: Sequence[str]) -> list[Given]:
    """`KIND=FILE` arguments. Kinds that nobody knows, or that come twice, and files that are not there are refused."""
    found: list[Given] = []
    for argument in arguments:
        kind, equals, place = argument.partition("=")
        if not equals or not place or kind not in KINDS:
            raise BadTexts(f"{argument!r} names no kind of text and a file", hint=_HINT)
        if any(one.kind == kind for one in found):
            raise BadTexts(f"two texts are called {kind}", hint="put them into one file")
        path = Path(place)
        if path.is_dir() and not _files(path):
            raise BadTexts(f"{path} holds no .txt files", hint="name a file, or a folder of .txt files")
        if not path.is_dir() and (not path.is_file() or path.suffix not in ENDINGS):
            raise BadTexts(f"there is no file {path} of text", hint="it ends in " + ", ".join(ENDINGS))
        found.append(Given(kind, path))
    return found


def rows_of(given: Given, tokenizer: Tokenizer, *, vocab: int, tokens: int, window: int) -> list[np.ndarray]:
    """Rows of up to `window` tokens and one more (a target for each), about `tokens` targets in all, or what there is."""
    if tokens < 1 or window < 1:
        raise BadTexts(f"{tokens} tokens in rows of {window}", hint="use whole numbers from 1")
    stream = _stream(given.path, tokenizer)
    if len(stream) < 2:
        raise BadTexts(f"{given.path} has no two tokens", hint="give a longer text")
    if int(stream.min()) < 0 or int(stream.max()) >= vocab:
        worst = int(stream.max()) if int(stream.max()) >= vocab else int(stream.min())
        raise BadTexts(f"{given.path} holds token {worst:,}, and the model knows {vocab:,}", hint="encode it again")
    window = min(window, len(stream) - 1, tokens)
    whole = (len(stream) - 1) // window
    count = min(whole, -(-tokens // window))
    starts = [place * whole // count * window for place in range(count)]
    return [stream[start : start + window + 1].astype(np.int64) for start in starts]


# Inside -----------------------------------------------------------------------------------------------------------------


def _stream(path: Path, tokenizer: Tokenizer) -> np.ndarray:
    if path.suffix == ".npy":
        return _ids(path)
    mark = [_mark(tokenizer)] if _mark(tokenizer) is not None else []
    pieces = [[*mark, *tokenizer.encode(text)] for text in _documents(path)]
    return np.array([token for piece in pieces for token in piece], np.int64)


def _mark(tokenizer: Tokenizer) -> Any:
    """What stands before a document in what such models were trained on."""
    return tokenizer.control_tokens.get("<|endoftext|>", tokenizer.bos_id)


def _ids(path: Path) -> np.ndarray:
    try:
        found = np.lib.format.open_memmap(path, mode="r")  # maps numbers and nothing else: no objects
    except (ValueError, OSError, EOFError) as error:
        raise BadTexts(
            f"{path} is no .npy file of numbers: {error}", hint="save token ids as uint16 or int32"
        ) from error
    if found.dtype.kind not in "iu" or found.ndim not in (1, 2):
        raise BadTexts(f"{path} holds {found.dtype} of {found.ndim} dimensions", hint="save token ids as uint16")
    return found.reshape(-1)


def _documents(path: Path) -> Iterator[str]:
    for place in _files(path) if path.is_dir() else [path]:
        if place.stat().st_size > MOST_BYTES:
            raise BadTexts(f"{place} is larger than {MOST_BYTES:,} bytes", hint="a part of it is enough")
        try:
            text = place.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise BadTexts(f"{place} is not UTF-8", hint="convert it first") from error
        if place.suffix == ".jsonl":
            yield from (_line(line, f"{place}:{number}") for number, line in enumerate(text.splitlines(), 1) if line)
        else:
            yield text


def _line(line: str, place: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadTexts(f"{place}: no JSON: {error}", hint='each line is {"text": "…"}') from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise BadTexts(f"{place} has no text", hint='each line is {"text": "…"}')
    text: str = row["text"]
    return text


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.txt"))
