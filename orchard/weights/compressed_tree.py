"""The config tree of a file from outside, checked before anything is built from it; and the tensors that a model is kept as.

A tree is data that names classes. Only parts of Orchard's are looked up, every field must hold what it is declared to hold, and
numbers must be such as the file has bytes for. What then still cannot be built is a `BadFile` like everything else.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchard.core.config import REQUIRED, BaseConfig
from orchard.core.errors import BadFile, OrchardError
from orchard.models.language.decoder import Decoder
from orchard.nn.attention import Rotary
from orchard.nn.attention.scaling import Scaling
from orchard.nn.formats import Format
from orchard.nn.linear import Embedding, Weight
from orchard.nn.moe import Router
from orchard.nn.tensors import tensor_names, tensor_shapes

KIND = re.compile(r"orchard\.(?:nn|cache|models\.language|transforms)(?:\.[a-z]\w{0,40}){1,4}:[A-Z]\w{0,60}", re.ASCII)
"""Where parts of models live. Nothing else of Orchard is imported because a file says so."""
SOCKETS: dict[str, type] = {"format": Format, "scaling": Scaling, "router": Router}
"""What a socket takes, by its name; any other takes a module."""
FOLDERS = {"codec": "orchard.cache.codecs.", "policy": "orchard.cache.policies."}
"""Sockets that take what lives in a folder."""
SIDES = ("lora_", "kept_")
"""How tensors of side paths are called: of one, or of the model's own beside that of an adapter."""
DEEPEST = 24
MOST_NODES = 200_000
LARGEST = 1 << 31
MOST_WEIGHTS_A_BYTE = 64  # fewer bits than that for each weight is no format; a tree that claims so is not this file's
WIDEST_HEAD = 1 << 16
DAMAGED = "the file is damaged, or of another version of Orchard"


def checked_tree(data: dict[str, Any], path: Path, size: int) -> Decoder.Config:
    """The completed tree that a file of `size` bytes describes; `BadFile` names what is wrong with it. Nothing is built."""
    _refuse_shape(data, path)
    try:
        tree = BaseConfig.from_dict(data)
        if type(tree) is not Decoder.Config:
            raise _bad(path, f"its root is a {type(tree).__qualname__}, not a decoder")
        for where, node in tree.walk():
            _refuse_fields(node, where, path)
        whole = tree.complete()
    except BadFile:
        raise
    except OrchardError as error:
        raise _bad(path, error.message) from error
    if whole != tree:
        raise _bad(path, "its dimensions contradict each other")
    claimed = sum(math.prod(shape) for shape in tensor_shapes(tree).values())
    if claimed > MOST_WEIGHTS_A_BYTE * size:
        raise _bad(path, f"it claims {claimed:,} weights in {size:,} bytes")
    return typing.cast(Decoder.Config, tree)


def sketch(tree: Decoder.Config, path: Path) -> Decoder:
    """The model without its tensors' memory."""
    try:
        with torch.device("meta"):
            model: Decoder = tree.build()
        return model
    except OrchardError as error:
        raise _bad(path, error.message) from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError) as error:
        raise _bad(path, f"it cannot be built: {error}") from error


# The tensors of a model -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One tensor of a file: its name there, where it is in the model, and what it counts as."""

    name: str
    ours: str
    """The dense tensor that it belongs to."""
    module: nn.Module
    attribute: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None: a floating-point type that holds the values."""
    kind: str
    """A field of `Accounting`."""
    label: str = ""
    """The format, for weights."""


def parts_of(model: nn.Module) -> Iterator[Part]:
    """Every tensor that a model is kept as."""
    for ours, (module, attribute) in tensor_names(model).items():
        prefix = ours.removesuffix(attribute)
        if isinstance(module, Weight) and attribute == "weight":
            for place, (name, part) in enumerate(module.format.layout(module.shape).items()):
                kind = "embedding" if isinstance(module, Embedding) else "scales" if place else "weights"
                label = format_label(module.format) if kind == "weights" else ""
                yield Part(prefix + name, ours, module, name, tuple(part.shape), part.dtype, kind, label)
            continue
        shape = tuple(getattr(module, attribute).shape)
        side = attribute in getattr(module, "begin", {}) or attribute.startswith(SIDES)
        half = torch.float16 if side and len(shape) > 1 else None
        yield Part(ours, ours, module, attribute, shape, half, "sides" if side else "norms")


def format_label(format: Format) -> str:
    """A format in a word, with its bits where its name does not say them: `Int2`, `Palette4`."""
    name, bits = type(format).__name__, getattr(getattr(format, "config", None), "bits", None)
    return name if bits is None or name.endswith(str(bits)) else f"{name}{bits}"


# Inside ---------------------------------------------------------------------------------------------------------------


def _bad(path: Path, what: str) -> BadFile:
    said = "".join(letter if letter.isprintable() else "?" for letter in what[:300])
    return BadFile(f"{path}: its config tree is wrong: {said}", hint=DAMAGED)


def _refuse_shape(data: dict[str, Any], path: Path) -> None:
    """Depth, size and kinds, before anything is looked up."""
    count = 0
    waiting: list[tuple[Any, int]] = [(data, 1)]
    while waiting:
        value, depth = waiting.pop()
        count += 1
        below = len(value) if isinstance(value, dict | list) else 0
        if depth > DEEPEST or count + len(waiting) + below > MOST_NODES:
            raise _bad(path, f"it is deeper than {DEEPEST} or larger than {MOST_NODES:,}")
        if isinstance(value, dict):
            kind = value.get("kind")
            if kind is not None and (not isinstance(kind, str) or not KIND.fullmatch(kind)):
                raise _bad(path, f"{str(kind)[:80]!r} is no part of a model")
            waiting += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            waiting += [(item, depth + 1) for item in value]


def _refuse_fields(node: BaseConfig, where: str, path: Path) -> None:
    kind: Any = type(node)
    hints = _hints(kind)
    for field in fields(node):  # type: ignore[arg-type]
        value = getattr(node, field.name)
        place = f"{where}.{field.name}".removeprefix(".")
        if value is REQUIRED or not _fits(value, hints[field.name]):
            raise _bad(path, f"{place} cannot be {_shown(value)}")
        if isinstance(value, BaseConfig) and hints[field.name] in (BaseConfig, BaseConfig | None):
            built, wanted = value.builds, SOCKETS.get(field.name, nn.Module)
            if field.name in FOLDERS:
                right = built.__module__.startswith(FOLDERS[field.name])
            else:
                right = isinstance(built, type) and issubclass(built, wanted)
            if not right:
                raise _bad(path, f"{place} cannot be {_shown(value)}")
    if isinstance(node, Rotary.Config) and not (0 <= node.fraction <= 1 and node.theta > 0 and node.dim <= WIDEST_HEAD):
        raise _bad(path, f"{where} cannot turn {node.fraction:g} of {node.dim:,} channels by {node.theta:g}")


def _shown(value: Any) -> str:
    if isinstance(value, BaseConfig):
        return f"a {type(value).__qualname__.removesuffix('.Config')}"
    return repr(value)[:60]


@cache
def _hints(kind: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except NameError:  # a type that is only known to type checkers: whatever it is, building it checks it
        return {field.name: Any for field in fields(kind)}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is what a field is declared to hold; numbers must be such as a model can have."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _fits(value, int | float | str | bool | None | BaseConfig | list | tuple | dict)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is typing.Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if hint is None or hint is type(None):
        return value is None
    if hint is bool:
        return type(value) is bool
    if hint is int:
        return type(value) is int and abs(value) < LARGEST
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    if origin in (list, tuple) or hint in (list, tuple):
        if not isinstance(value, origin or hint):
            return False
        return all(_fits(item, inner[0] if inner else Any) for item in value)
    if hint is dict or hasattr(origin, "keys"):
        return isinstance(value, dict) and all(_fits(item, inner[1] if inner else Any) for item in value.values())
    if origin is not None:  # sequences and other promises of the kind
        return isinstance(value, list | tuple) and all(_fits(item, inner[0]) for item in value)
    return isinstance(hint, type) and isinstance(value, hint)
