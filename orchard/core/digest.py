"""SHA-256 for names and seeds, without OpenSSL.

`hashlib` loads OpenSSL: four milliseconds and three and a half megabytes, for a name of twelve letters. Python's own SHA-256
is in a module whose name depends on the version (the standard library's `random` takes its SHA-512 in the same way). For
large files use `hashlib`, which is faster.
"""

from __future__ import annotations

from importlib import import_module


def sha256(data: bytes) -> bytes:
    """The same 32 bytes as `hashlib.sha256(data).digest()`."""
    for home in ("_sha2", "_sha256", "hashlib"):  # Python 3.12 and later; 3.11; a build without either
        try:
            found: bytes = import_module(home).sha256(data).digest()
            return found
        except (ImportError, AttributeError):
            continue
    raise ImportError("this Python has no SHA-256")
