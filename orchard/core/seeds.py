"""Random numbers that can be repeated: a seed and a path of names give the same stream on every machine."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def fresh_seed() -> int:
    """A new seed, small enough for a person to copy."""
    return secrets.randbelow(2**31)


def fold(seed: int, *names: str | int) -> int:
    """A seed of its own for each named part: independent of the order in which parts are made."""
    text = json.dumps([seed, *names])  # unlike a joined text, no two lists of names give the same
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator for the named part."""
    import torch

    return torch.Generator().manual_seed(fold(seed, *names))
