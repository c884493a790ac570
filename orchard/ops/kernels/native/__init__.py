"""The native library, where it was built: `library()` is None otherwise, `why_not()` says why, and everything runs on torch.

`ORCHARD_NATIVE=0` turns it off; `ORCHARD_NATIVE_LIBRARY` names another build of it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

ABI = 8
"""What `orchard_abi()` of a library must say (abi.cpp): one of other sources would be called wrongly."""

TURNED_OFF = "turned off by ORCHARD_NATIVE=0"
NOT_BUILT = "not built: no C++ compiler was at hand when Orchard was installed, or it failed"
OLDER = "built from older sources: run make setup"
NO_PLATFORM = "there are none for this platform ({platform})"


def library_path() -> Path:
    named = os.environ.get("ORCHARD_NATIVE_LIBRARY")
    return Path(named) if named else Path(__file__).with_name(f"engine.{'dylib' if sys.platform == 'darwin' else 'so'}")


def library() -> ctypes.CDLL | None:
    """The library, loaded once; None where it cannot be used."""
    return None if _turned_off() else _load(library_path())[0]


def why_not() -> str:
    """Why there is no native library; empty when there is one."""
    return TURNED_OFF if _turned_off() else _load(library_path())[1]


def _turned_off() -> bool:
    return os.environ.get("ORCHARD_NATIVE") == "0"


@cache
def _load(path: Path) -> tuple[ctypes.CDLL | None, str]:
    named = bool(os.environ.get("ORCHARD_NATIVE_LIBRARY"))
    if not path.is_file():
        if named:
            return None, f"ORCHARD_NATIVE_LIBRARY names {path}, which is not there"
        return None, NO_PLATFORM.format(platform=sys.platform) if sys.platform == "win32" else NOT_BUILT
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{path.name} cannot be loaded: {error}"
    number = getattr(found, "orchard_abi", None)
    if number is None or number() != ABI:
        return None, f"ORCHARD_NATIVE_LIBRARY names {path}, which is of other sources" if named else OLDER
    return found, ""
