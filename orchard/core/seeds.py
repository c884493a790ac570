"""Random numbers that can be repeated: a seed and a path of names give the same stream on every machine."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from orchard.core.digest import sha256

if TYPE_CHECKING:
    import torch


def fresh_seed() -> int:
    """A new seed, small enough for a person to copy."""
    return int.from_bytes(os.urandom(4), "little") >> 1


def fold(seed: int, *names: str | int) -> int:
    """A seed of its own for each named part: independent of the order in which parts are made."""
    text = json.dumps([seed, *names])  # unlike a joined text, no two lists of names give the same
    return int.from_bytes(sha256(text.encode())[:8], "little") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator for the named part."""
    import torch

    return torch.Generator().manual_seed(fold(seed, *names))
