"""A package: an adapter's folder with what a stranger needs to trust it: what it is, which model it is for, sums of all files.

    adapter_config.json, adapter_model.safetensors     the adapter; PEFT reads the folder as it is
    README.md                                          its card
    draft.gguf                                         a small model that guesses for it (optional)
    package.json                                       what all this is, with bytes and SHA-256 of each file, and of itself

A package is good or it is refused: a byte that is another, a file that is missing or one that should not count, and nothing is
loaded. Files that the manifest does not name and that mean nothing here (`.gitattributes`) are left alone. Needs no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchard.core.digest import sha256
from orchard.core.errors import BadFile, ModelNotFound, UnsupportedFormat
from orchard.core.files import safe_join
from orchard.weights.adapters import CONFIG, WEIGHTS
from orchard.weights.mapped import json_object

MANIFEST, CARD, DRAFT = "package.json", "README.md", "draft.gguf"
FORMAT = 1
NEEDED = (CONFIG, WEIGHTS, CARD)
_LARGEST = 1 << 20
_WORDS = ("name", "method", "orchard", "created", "author", "description", "licence")
_SUM = re.compile("[0-9a-f]{64}")
AGAIN = "copy or download it again; a package that was changed on purpose has to be written again"


@dataclass(frozen=True)
class Listed:
    """What the manifest says of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Package:
    """What a package says of itself, once it was found whole."""

    path: Path
    name: str
    base: str
    """The name of the model that it is for."""
    signature: str
    """Of that model: see `adapter_parts`."""
    method: str
    rank: int
    files: Mapping[str, Listed]
    orchard: str
    """The version that wrote it."""
    created: str
    author: str = ""
    description: str = ""
    licence: str = ""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Steps, samples, losses: whatever was measured when it was made."""

    @property
    def draft(self) -> Path | None:
        """A small model that guesses for it, where it brings one."""
        return self.path / DRAFT if DRAFT in self.files else None

    def to_dict(self) -> dict[str, Any]:
        """As its manifest has it, without the sum."""
        return {
            "format": FORMAT,
            "name": self.name,
            "base": {"name": self.base, "signature": self.signature},
            "method": self.method,
            "rank": self.rank,
            "files": {name: {"bytes": one.bytes, "sha256": one.sha256} for name, one in sorted(self.files.items())},
            "orchard": self.orchard,
            "created": self.created,
            "author": self.author,
            "description": self.description,
            "licence": self.licence,
            "training": dict(self.training),
        }


def is_package(path: Path | str) -> bool:
    """Whether a folder says that it is one; whether it is a good one is for `read_package` to find out."""
    return (Path(path) / MANIFEST).is_file()


def read_package(path: Path | str) -> Package:
    """Read a package's manifest and hold every file against it.

    `ModelNotFound` where there is no such folder, `BadFile` where anything is not as it was written, `UnsupportedFormat` for a
    package of a later kind.
    """
    path = Path(path)
    if not path.is_dir():
        raise ModelNotFound(f"there is no package {path}", hint="name a folder that `orchard adapt` wrote")
    try:
        return _read(path)
    except OSError as error:
        raise BadFile(f"the package {path} cannot be read: {error}", hint="check its permissions") from error


def manifest_bytes(facts: Mapping[str, Any]) -> bytes:
    """A manifest as its file has it: one way of writing it, and a sum of everything else at its end."""
    plain = {name: value for name, value in facts.items() if name != "sha256"}
    return _written({**plain, "sha256": sha256(_written(plain)).hex()})


def listed(path: Path) -> Listed:
    """Size and sum of a file, read piece by piece."""
    import hashlib  # for large files; it brings OpenSSL with it

    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        return Listed(file.tell(), found)


# Inside -----------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> Package:
    place = path / MANIFEST
    if not place.is_file():
        raise BadFile(
            f"{path.name} has no {MANIFEST}: it is no package", hint="a plain PEFT folder has no sums to check"
        )
    if place.stat().st_size > _LARGEST:
        raise _damaged(path, f"{MANIFEST} is larger than any manifest")
    raw = place.read_bytes()
    facts = json_object(raw, str(place))
    form = facts.get("format")
    if type(form) is int and form > FORMAT:
        raise UnsupportedFormat(
            f"the package {path.name} is of format {form}, and this Orchard knows up to {FORMAT}", hint="update Orchard"
        )
    if type(form) is not int or form != FORMAT or raw != _rewritten(facts):
        raise _damaged(path, f"{MANIFEST} is not as it was written")
    package = _package(path, facts)
    for name, said in package.files.items():
        _check(path, name, said)
    for name in NEEDED:
        if name not in package.files:
            raise _damaged(path, f"its manifest does not name {name}")
    if DRAFT not in package.files and (path / DRAFT).exists():
        raise _damaged(path, f"{DRAFT} is there and its manifest does not name it")
    signed = json_object((path / CONFIG).read_bytes(), str(path / CONFIG)).get("orchard_base")
    if signed != package.signature:
        raise _damaged(path, "the adapter is signed by another model than the package")
    return package


def _rewritten(facts: Mapping[str, Any]) -> bytes:
    try:
        return manifest_bytes(facts)
    except (ValueError, RecursionError):  # such as half of a character, which JSON can spell and nothing can write
        return b""


def _package(path: Path, facts: Mapping[str, Any]) -> Package:
    base, files, training = facts.get("base"), facts.get("files"), facts.get("training")
    words = {name: facts.get(name) for name in _WORDS}
    sound = (
        isinstance(base, dict)
        and isinstance(files, dict)
        and isinstance(training, dict)
        and all(isinstance(value, str) for value in (*words.values(), base.get("name"), base.get("signature")))
        and type(facts.get("rank")) is int
        and facts["rank"] > 0
    )
    if not sound:
        raise _damaged(path, f"{MANIFEST} lacks something, or has it in another form")
    assert isinstance(base, dict) and isinstance(files, dict)
    return Package(
        path=path,
        base=base["name"],
        signature=base["signature"],
        rank=facts["rank"],
        files={name: _said(path, name, said) for name, said in files.items()},
        training=training or {},
        **words,  # type: ignore[arg-type]
    )


def _said(path: Path, name: str, said: Any) -> Listed:
    size, total = (said.get("bytes"), said.get("sha256")) if isinstance(said, dict) else (None, None)
    if type(size) is not int or size < 0 or not isinstance(total, str) or not _SUM.fullmatch(total):
        raise _damaged(path, f"{MANIFEST} says nothing sensible of {name[:80]!r}")
    return Listed(size, total)


def _check(path: Path, name: str, said: Listed) -> None:
    file = safe_join(path, name)
    if not file.is_file():
        raise _damaged(path, f"{name[:80]} is missing")
    size = file.stat().st_size
    if size != said.bytes:
        raise _damaged(path, f"{name[:80]} has {size:,} bytes, where its manifest says {said.bytes:,}")
    if listed(file) != said:
        raise _damaged(path, f"{name[:80]} is not what its sum says")


def _written(facts: Mapping[str, Any]) -> bytes:
    return (json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _damaged(path: Path, what: str) -> BadFile:
    return BadFile(f"the package {path.name} is damaged: {what}", hint=AGAIN)
