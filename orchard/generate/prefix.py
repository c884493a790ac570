"""Prompts that begin alike are read once: keys and values of earlier prompts, kept up to a number of bytes.

What is kept always comes from reading a prompt, never from writing an answer, and the runner promises that reading gives the
same bytes however a prompt is cut. So an answer is the same, bit for bit, whether or not something was found here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

import numpy as np

from orchard.core.errors import BadFile, UsageError
from orchard.core.files import atomic_write
from orchard.generate.protocol import Held, Use

GRAIN = 64
"""Beginnings are used up to a multiple of this many tokens."""
LIMIT = 256 << 20
MAGIC = b"orchard prefix 1\n"


class Prefixes:
    """Safe to share between threads. The oldest ones go first; one that another begins with goes when that one comes."""

    def __init__(self, runner: Any = None, limit: int = LIMIT) -> None:
        """`limit`: bytes that may be kept; 0 keeps nothing. `runner`: whose keys and values they are, for files; one that
        holds nothing has no `signature`."""
        if limit < 0:
            raise UsageError(f"room for {limit} bytes", hint="use 0 to keep nothing")
        self.limit = limit
        self._runner = runner
        self._held: list[Held] = []  # used last at the end
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self._held)

    def __len__(self) -> int:
        return len(self._held)

    def find(self, ids: Sequence[int]) -> Use | None:
        """The longest usable beginning of a prompt. At least one token is left to read: its scores are wanted."""
        best: Use | None = None
        with self._lock:
            for held in self._held:
                tokens = min(_common(held.ids, ids), len(ids) - 1) // GRAIN * GRAIN
                if held.whole and tokens < len(held.ids):
                    continue
                if tokens and (best is None or tokens > best.tokens):
                    best = Use(held, tokens)
            if best is not None:
                self._held.remove(best.held)
                self._held.append(best.held)
        return best

    def worth(self, ids: Sequence[int], found: Use | None) -> int:
        """How many tokens of a prompt that was read are worth keeping; 0: none, or no more than there already are."""
        tokens = len(ids) // GRAIN * GRAIN
        return tokens if self.limit and tokens > (found.tokens if found is not None else 0) else 0

    def add(self, held: Held) -> None:
        with self._lock:
            self._held = [one for one in self._held if one.ids != held.ids[: len(one.ids)]]
            self._held.append(held)
            while self._held and self.nbytes > self.limit:
                del self._held[0]

    def clear(self) -> None:
        with self._lock:
            self._held = []

    # Files ----------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, ids: Sequence[int]) -> int:
        """Write what is kept of this prompt's beginning, whole or not at all. Answers how many tokens that is; 0: no file."""
        use, signature = self.find([*ids, -1]), getattr(self._runner, "signature", None)
        if use is None or signature is None:
            return 0
        ids = np.array(use.held.ids, "<i8").tobytes()
        about = {
            "signature": signature,
            "whole": use.held.whole,
            "tokens": len(use.held.ids),
            "bytes": use.held.data.nbytes,
        }
        known = sha256(ids)
        known.update(use.held.data.data)
        with atomic_write(Path(path)) as file:
            file.write(MAGIC + json.dumps(about | {"sha256": known.hexdigest()}).encode() + b"\n" + ids)
            file.write(use.held.data.data)
        return use.tokens

    def load(self, path: str | Path) -> int:
        """Take up what `save` wrote; answers the tokens. A file for another model, or a damaged one, raises `BadFile`."""
        try:
            with Path(path).open("rb") as file:
                held, signature = _read(file)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadFile(f"{path} is no file of keys and values: {error}", hint="save the session again") from error
        if signature != getattr(self._runner, "signature", None):
            raise BadFile(f"{path} belongs to another model", hint="load it with the model that it was saved with")
        if not self._runner.fits(held):
            raise BadFile(f"{path} has not the size of {len(held.ids):,} tokens", hint="save the session again")
        self.add(held)
        return len(held.ids)


def _read(file: IO[bytes]) -> tuple[Held, str]:
    """A file's keys and values, and whose they are. Sizes are held against the file before anything is made room for."""
    if file.readline(len(MAGIC)) != MAGIC:
        raise ValueError("it does not begin as one of this version")
    about = json.loads(file.readline(1 << 16))
    tokens, size = int(about["tokens"]), int(about["bytes"])
    begin, end = file.tell(), file.seek(0, 2)
    if tokens < 1 or size < 0 or end - begin != 8 * tokens + size:
        raise ValueError("its length is not what it says")
    file.seek(begin)
    raw = np.frombuffer(file.read(), np.uint8)
    if sha256(raw.data).hexdigest() != about["sha256"]:
        raise ValueError("it is damaged")
    ids = raw[: 8 * tokens].view("<i8").tolist()
    return Held(tuple(ids), raw[8 * tokens :], whole=bool(about["whole"])), str(about["signature"])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    length = min(len(one), len(other))
    if one[:length] == tuple(other[:length]):
        return length
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))
