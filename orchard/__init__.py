"""Orchard: an open foundation-model stack. `orchard.load("smollm2").generate("Hello")` is the first line to try.

Nothing heavy is imported here: each name below brings its module in when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from orchard.core.version import VERSION as __version__

_HOMES = {
    "load": "orchard.session.model",
    "Model": "orchard.session.model",
    "embedder": "orchard.session.embedder",
    "Embedder": "orchard.session.embedder",
    "Session": "orchard.session.session",
    "study": "orchard.studies",
    "Report": "orchard.core.report",
    "Config": "orchard.core.config",
    "OrchardError": "orchard.core.errors",
}
_MODULES = ("fm", "testing")
__all__ = [
    "Config", "Embedder", "Model", "OrchardError", "Report", "Session", "__version__", "embedder", "fm", "load", "study",
    "testing",
]  # fmt: skip

if TYPE_CHECKING:
    from orchard import fm, testing
    from orchard.core.config import Config
    from orchard.core.errors import OrchardError
    from orchard.core.report import Report
    from orchard.session.embedder import Embedder, embedder
    from orchard.session.model import Model, load
    from orchard.session.session import Session
    from orchard.studies import study


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"orchard.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'orchard' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
