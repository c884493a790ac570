"""The zoo: for each family of checkpoints, a config function and a key map, and nothing else.

A family is one file here. It is found by listing the folder, so that adding one edits nothing.
"""

from __future__ import annotations

import difflib
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from orchard.core.errors import UnknownArchitecture
from orchard.models.language.decoder import Decoder
from orchard.models.zoo.family import Family
from orchard.models.zoo.fields import refused, shown

__all__ = ["Family", "config", "families", "family_of"]


@cache
def families() -> dict[str, Family]:
    """Every known family by its Hugging Face `model_type`."""
    found: dict[str, Family] = {}
    for module in iter_modules(__path__):
        for family in getattr(import_module(f"{__name__}.{module.name}"), "FAMILIES", ()):
            found[family.name] = family
    return dict(sorted(found.items()))


def family_of(hf: dict[str, Any]) -> Family:
    """The family of a Hugging Face config."""
    name = hf.get("model_type")
    if not isinstance(name, str):
        raise refused("model_type", name, "the name of a family of language models")
    known = families()
    if name not in known:
        near = difflib.get_close_matches(name[:80], known, n=2)
        hint = f"known families: {', '.join(known)}"
        raise UnknownArchitecture(
            f"unknown architecture {shown(name)}", hint=f"{hint}; nearest: {', '.join(near)}" if near else hint
        )
    return known[name]


def config(hf: dict[str, Any]) -> Decoder.Config:
    """The config tree of a Hugging Face config."""
    return family_of(hf).tree(hf)
