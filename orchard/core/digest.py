"""SHA-256 for names and seeds, without OpenSSL.

`hashlib` loads OpenSSL: four milliseconds and three and a half megabytes, for a name of twelve letters. Python's own SHA-256
is in a module whose name depends on the version (the standard library's `random` takes its SHA-512 in the same way). For
large files use `hashlib`, which is faster.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any


def sha256(data: bytes) -> bytes:
    """The same 32 bytes as `hashlib.sha256(data).digest()`."""
    found: bytes = _function()(data).digest()
    return found


@cache
def _function() -> Any:
    """Looked for once: an import that fails is tried anew each time, which takes a hundred times as long as a digest."""
    for home in ("_sha2", "_sha256", "hashlib"):  # Python 3.12 and later; 3.11; a build without either
        try:
            return import_module(home).sha256
        except (ImportError, AttributeError):
            continue
    raise ImportError("this Python has no SHA-256")
