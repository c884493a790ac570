"""What an adapter is in memory, and which model it was made for.

**The base's signature** (`orchard_base` in an adapter's config) says which model that was. It is a SHA-256 over the names and
shapes of all tensors and over the values of those with one dimension (norms and biases), rounded to bfloat16. No format of
weights packs those, so the signature is the same for a model in its folder, in every GGUF type and in memory, and other for one
that was trained further. It cannot tell models apart that differ in their matrices alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from orchard.core.digest import sha256
from orchard.core.errors import BadFile

if TYPE_CHECKING:
    from orchard.models.zoo import Family

VERSION = "1:"
"""Of the signature; one of another version is as good as none."""
_STANDARD = re.compile(
    r"(?:model\.|language_model\.model\.|model\.language_model\.)?layers\.(\d{1,6})\."
    r"(?:self_attn\.([qkvo])|mlp\.(gate|up|down))_proj"
)


class OtherBase(BadFile):
    """An adapter was made for another base model; both are named."""

    code = "adapter-base"


@dataclass(frozen=True, eq=False)
class Side:
    """A [rank, in] and B [out, rank] in float32, and what their product is multiplied with."""

    a: np.ndarray
    b: np.ndarray
    scale: float


@dataclass(frozen=True, eq=False)
class Base:
    """The model that an adapter is held against."""

    name: str
    signature: str
    shapes: Mapping[str, tuple[int, ...]]  # of every tensor, by Orchard's name
    modules: Callable[[], Mapping[str, str]] | None = None
    """Hugging Face's names of linear maps → Orchard's paths; asked where the usual names do not do."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in memory, by Orchard's paths of the linear maps (`stack.layers.0.mixer.q`)."""

    sides: Mapping[str, Side]
    biases: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Trained in place of the base's own."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """As its file has it."""
    notes: tuple[str, ...] = ()
    """What could not be checked."""
    magnitudes: Mapping[str, np.ndarray] = field(default_factory=dict)
    """DoRA's lengths of the adapted weight's rows, [out]; only for who asked for them."""

    @property
    def digest(self) -> str:
        """Tells this adapter from every other: a hash of all it would do to a model."""
        lines = [f"{path} {side.scale!r} {_hash(side.a)} {_hash(side.b)}" for path, side in sorted(self.sides.items())]
        lines += [f"{path} {_hash(bias)}" for path, bias in sorted(self.biases.items())]
        lines += [f"{path} magnitude {_hash(size)}" for path, size in sorted(self.magnitudes.items())]
        return sha256("\n".join(lines).encode()).hex()


def signature(shapes: Mapping[str, tuple[int, ...]], vectors: Mapping[str, np.ndarray]) -> str:
    """The signature of a model from the shapes of its tensors and the values of those with one dimension."""
    lines = [f"{name} {list(shapes[name])}" for name in sorted(shapes)]
    for name in sorted(vectors):
        bits = np.ascontiguousarray(vectors[name], np.float32).view(np.uint32).astype(np.uint64)
        lines.append(f"{name} {_hash(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16))}")
    return VERSION + sha256("\n".join(lines).encode()).hex()


def hf_modules(family: Family, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """A family's names of its linear maps → Orchard's paths."""
    found: dict[str, str] = {}
    for ours in (name for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2):
        with suppress(KeyError):
            mixture = ".router." in ours
            found[family.hf_name(ours, mixture=mixture).removesuffix(".weight")] = ours.removesuffix(".weight")
    return found


def standard_path(hf_module: str) -> str | None:
    """Orchard's path of a linear map by the name that nearly all families give it; None where it is no such name."""
    match = _STANDARD.fullmatch(hf_module)
    if match is not None:
        return f"stack.layers.{match[1]}.{f'mixer.{match[2]}' if match[2] else f'mlp.{match[3]}'}"
    return "head" if hf_module == "lm_head" else None


def _hash(array: np.ndarray) -> str:
    return sha256(np.ascontiguousarray(array).tobytes()).hex()
