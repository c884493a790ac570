"""Files from outside, opened with care: mapped instead of read, and JSON that cannot blow up."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

from orchard.core.errors import BadFile, ModelNotFound

AGAIN = "the file is damaged or incomplete; download it again"


def map_file(path: Path) -> mmap.mmap | bytes:
    """The file's bytes, mapped and not read; typed errors where there is no such file. An empty file is `b""`."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelNotFound(f"there is no file {path}", hint="check the path") from error
    except IsADirectoryError as error:
        raise BadFile(f"{path} is a folder, not a file", hint="name the file inside it") from error
    except (OSError, ValueError) as error:
        raise BadFile(f"{path} cannot be opened: {error}", hint="check the path and its permissions") from error


def json_object(data: bytes, what: str) -> dict[str, Any]:
    """Parse JSON from outside that must be an object; anything wrong with it becomes `BadFile`."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name appears twice in one object")
        return found

    try:
        # Brackets cost far more memory than text; no header needs one in every few bytes.
        if data.count(b"[") + data.count(b"{") > 4096 + len(data) // 8:
            raise ValueError("it is made of brackets")
        parsed = json.loads(data.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise BadFile(f"{what} is not valid JSON: {reason}", hint=AGAIN) from None
    if not isinstance(parsed, dict):
        raise BadFile(f"{what} holds a JSON {type(parsed).__name__}, not an object", hint=AGAIN)
    return parsed
