"""The native library, where it was built: `library()` is None otherwise, and everything runs on torch.

`ORCHARD_NATIVE=0` turns it off; `ORCHARD_NATIVE_LIBRARY` names another build of it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path


def library_path() -> Path:
    named = os.environ.get("ORCHARD_NATIVE_LIBRARY")
    return (
        Path(named) if named else Path(__file__).with_name("engine.dylib" if sys.platform == "darwin" else "engine.so")
    )


def why_not() -> str:
    """Why there is no native library; empty when there is one."""
    if os.environ.get("ORCHARD_NATIVE") == "0":
        return "turned off by ORCHARD_NATIVE=0"
    if not library_path().is_file():
        return "not built: no C++ compiler was at hand when Orchard was installed"
    return "" if library() is not None else f"{library_path().name} cannot be loaded here"


@cache
def library() -> ctypes.CDLL | None:
    if os.environ.get("ORCHARD_NATIVE") == "0" or not library_path().is_file():
        return None
    try:
        return ctypes.CDLL(str(library_path()))
    except OSError:
        return None
