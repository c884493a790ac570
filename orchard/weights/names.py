"""What models are called: the known ones, their other names, and the folder a name stands for in the library."""

from __future__ import annotations

import re

from orchard.core.errors import UsageError

DEFAULT_MODEL = "smollm2"
EMBEDDING_MODEL = "minilm"
KNOWN = (DEFAULT_MODEL, EMBEDDING_MODEL)
"""Models that `orchard pull` knows by a name of their own."""
ALIASES = {
    "smollm2-135m": DEFAULT_MODEL,
    "smollm2-135m-instruct": DEFAULT_MODEL,
    "all-minilm-l6-v2": EMBEDDING_MODEL,
}
IN_PARTS = "weights:"
"""How the source of an entry begins that was joined from parts (`parts`)."""
HUB_NAME = re.compile(r"([^/:]+)/([^/:]+)(?::([^/:]+))?")

_PART = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9_-])?")


def stored_name(name: str) -> str:
    """The folder name of a model: aliases resolved, `org/name` as `org--name`, `org/name:file` as `org--name--file`."""
    name = ALIASES.get(name.lower(), name)
    hub = HUB_NAME.fullmatch(name)
    parts = [part for part in hub.groups() if part] if hub else [name]
    if not all(_PART.fullmatch(part) for part in parts):
        hint = "a name has letters, digits, '.', '_' and '-', and may have an organisation before it: org/name"
        raise UsageError(f"{name!r} is not a model name", hint=hint)
    if len(name) > 200:  # file systems stop at 255, and the names of locks and trash are longer
        raise UsageError(f"the model name {name[:40]}… has {len(name)} characters", hint="at most 200 fit")
    return "--".join(parts)
