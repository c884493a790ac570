"""API keys: made here, kept as SHA-256 hashes, compared in constant time.

A key is 32 random bytes, so a fast hash is enough: nobody can try them all. What is compared are hashes, all of them each
time, so that neither a key nor how many there are can be read off the time it takes. In a file a key stands in a line of its own,
as itself or as `sha256:` and its hash.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from orchard.core.errors import BadFile, UsageError

PREFIX = "orchard-"
SHORTEST = 16
"""Characters of a key that somebody chose."""
MOST_KEYS = 1000
FILE_BYTES = 1 << 20
NAME_DIGITS = 8
_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")
_KEY = re.compile(r"[!-~]+")


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def hashed(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


class KeyRing:
    """The keys that are let in, by their hashes."""

    def __init__(self, hashes: Iterable[str]) -> None:
        self._hashes = tuple(one.lower() for one in hashes)

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def name_of(self, key: bytes) -> str | None:
        """A short, stable name of a key that is let in, for logs and for telling clients apart; None for any other."""
        given = hashlib.sha256(key).hexdigest()
        found = None
        for known in self._hashes:  # all of them, whichever it is
            if hmac.compare_digest(given, known):
                found = known[:NAME_DIGITS]
        return found


@dataclass(frozen=True)
class KeyFile:
    """What a key file holds. `warning`: a sentence for the person, or nothing."""

    hashes: tuple[str, ...]
    warning: str = ""


def read_keys(path: Path | str) -> KeyFile:
    """The keys of a file: one in a line; empty lines and what follows a # at the beginning of a line do not count."""
    place = Path(path)
    try:
        with place.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(FILE_BYTES + 1)
    except OSError as error:
        hint = "check the path and its permissions"
        raise BadFile(f"the key file {place} cannot be read: {error.strerror or error}", hint=hint) from error
    if len(data) > FILE_BYTES:
        raise BadFile(f"the key file {place} is larger than {FILE_BYTES:,} bytes", hint="write one key in each line")
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError as error:
        raise BadFile(f"the key file {place} is not text", hint="write one key in each line, in ASCII") from error
    hashes = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if key and not key.startswith("#"):
            hashes.append(_hash_of_line(key, place, number))
    if not hashes:
        hint = f"write a key into it, or delete it: `orchard serve --api-key-file {place}` then makes one"
        raise UsageError(f"the key file {place} holds no key", hint=hint)
    if len(hashes) > MOST_KEYS:
        raise UsageError(f"the key file {place} holds {len(hashes):,} keys", hint=f"use at most {MOST_KEYS:,}")
    return KeyFile(tuple(dict.fromkeys(hashes)), _others_can_read(place, mode))


def _hash_of_line(key: str, place: Path, number: int) -> str:
    stored = _HASHED.fullmatch(key)
    if stored:
        return stored[1].lower()
    where = f"line {number} of the key file {place}"  # never the key itself: errors end up in logs
    if not _KEY.fullmatch(key):
        raise UsageError(f"{where} is no key", hint="a key is made of visible ASCII characters, without spaces")
    if len(key) < SHORTEST:
        hint = f"use at least {SHORTEST}; `orchard serve` makes good ones by itself"
        raise UsageError(f"the key in {where} has only {len(key)} characters", hint=hint)
    return hashed(key)


def _others_can_read(place: Path, mode: int) -> str:
    if os.name != "posix" or not mode & (stat.S_IRGRP | stat.S_IROTH):
        return ""
    return f"the key file {place} can be read by other users of this machine: chmod 600 {place}"


def write_key(path: Path | str) -> str:
    """A new file that only its owner can read, with a new key; returns the key. A file that is there is left alone."""
    place = Path(path)
    key = new_key()
    try:
        number = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(f"# A key for `orchard serve --api-key-file`. Whoever has it may use the server.\n{key}\n")
    except OSError as error:
        hint = "name a file in a folder that is there and that you may write to"
        raise BadFile(f"the key file {place} cannot be made: {error.strerror or error}", hint=hint) from error
    return key


class Slowdown:
    """Makes addresses that keep sending wrong keys wait. It remembers a bounded number of them; a right key never waits."""

    FREE = 3
    """Wrong keys that cost nothing: people mistype."""
    FIRST = 0.1
    LONGEST = 2.0
    FORGET = 60.0
    """Seconds after which an address begins anew."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def failed(self, address: str, now: float | None = None) -> float:
        """Note a wrong key; returns the seconds to wait before saying so."""
        now = time.monotonic() if now is None else now
        count, last = self._failures.pop(address, (0, now))
        count = 1 if now - last > self.FORGET else count + 1
        self._failures[address] = (count, now)
        while len(self._failures) > self._most:
            self._failures.popitem(last=False)
        over = count - self.FREE
        return 0.0 if over <= 0 else min(self.LONGEST, self.FIRST * 2.0 ** min(over - 1, 10))

    def __len__(self) -> int:
        return len(self._failures)
