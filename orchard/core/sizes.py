"""Sizes as people write them: 8GB, 500 MiB."""

from __future__ import annotations

import re

from orchard.core.errors import UsageError

UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?|)b?", re.IGNORECASE)


def bytes_of(text: str) -> int:
    """8GB → 8,000,000,000; 8GiB → 8,589,934,592."""
    found = _SIZE.fullmatch(text.strip())
    amount = int(float(found[1]) * UNITS[found[2].lower()]) if found else 0
    if amount <= 0:
        raise UsageError(f"{text[:40]!r} is no size", hint="write a number and a unit, as in 8GB or 500MB")
    return amount
