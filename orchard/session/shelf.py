"""What there is on this machine: the models of the library, how large they are, and how much memory is left for them."""

from __future__ import annotations

from pathlib import Path

from orchard.core.errors import OrchardError


def installed() -> list[str]:
    """Names of the models that can be loaded: those of the library that are whole, and those that came with the checkout."""
    from orchard.weights.library import Library
    from orchard.weights.parts import parcels

    try:
        here = {entry.name: not entry.damaged for entry in Library().list()}
    except OSError:
        here = {}
    waiting = {parcel.name: not parcel.damaged for parcel in parcels()}
    return [name for name, whole in {**waiting, **here}.items() if whole]


def path_of(source: str) -> Path:
    """Where a model's files are: a path as it is, or a name of the library. `ModelNotFound` where there is none."""
    from orchard.weights.library import Library

    return Library().resolve(source)


def bytes_of(source: str) -> int:
    """Bytes of a model's files; 0 where there is none."""
    try:
        path = path_of(source)
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        return sum(file.stat().st_size for file in files)
    except (OrchardError, OSError):
        return 0


def is_embedder(source: str) -> bool:
    """Whether a model turns texts into vectors, by what its config says."""
    import json

    from orchard.weights.sentence import is_encoder

    try:
        config = json.loads((path_of(source) / "config.json").read_bytes())
    except (OrchardError, OSError, ValueError):
        return False
    return isinstance(config, dict) and is_encoder(config)


def memory_left() -> int:
    """Bytes that this process may still take."""
    from orchard.generate.room import available

    return available()
