"""Packages are written: a trained adapter becomes a folder that can be given away, whole or not at all.

What a package is, and how one is read, is in `orchard.weights.package`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchard.core.errors import UsageError
from orchard.core.files import write_text
from orchard.core.version import VERSION
from orchard.session.export_place import is_empty_folder, placed
from orchard.weights.adapters import CONFIG, WEIGHTS
from orchard.weights.mapped import json_object
from orchard.weights.package import CARD, DRAFT, MANIFEST, Package, is_package, listed, manifest_bytes, read_package

LONGEST_NAME = 120
LONGEST_TEXT = 4000


@dataclass(frozen=True)
class About:
    """What people are told of an adapter. Without a name it is called as its folder is."""

    name: str = ""
    author: str = ""
    description: str = ""
    licence: str = ""

    def check(self) -> None:
        """Refuse what no manifest or no loader takes, before anything is trained."""
        name = self.name
        if name and (len(name) > LONGEST_NAME or not name.isprintable() or "+" in name or name != name.strip()):
            raise UsageError(f"an adapter cannot be called {name[:40]!r}", hint="use a short name without '+'")
        for what, text in (("author", self.author), ("description", self.description), ("licence", self.licence)):
            if len(text) > LONGEST_TEXT or any(not one.isprintable() and one not in "\n\t" for one in text):
                raise UsageError(
                    f"the {what} is too long or not plain text", hint=f"use up to {LONGEST_TEXT} characters"
                )


@dataclass(frozen=True)
class Made:
    """How an adapter came to be, as far as its card tells."""

    method: str
    training: Mapping[str, Any] = field(default_factory=dict)
    """Goes into the manifest as it is."""
    measured: Sequence[tuple[str, str]] = ()
    """Lines of the card's table."""


def check_package_target(target: Path, force: bool) -> None:
    """Refuse a place where a package cannot go, before the work is done."""
    if not target.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {target.absolute().parent}", hint="make it first")
    if not target.exists() or is_empty_folder(target):
        return
    if not force:
        raise UsageError(f"{target} is there already", hint="choose another name, or replace it with --force")
    if not is_package(target):
        raise UsageError(f"{target} is no package, so it is not replaced", hint="choose another name")


def write_package(
    target: Path, adapter: Path, about: About, made: Made, *, draft: Path | None = None, force: bool = False
) -> Package:
    """Copy an adapter's PEFT folder (and its draft model) to `target`, with card and manifest: all of it or nothing."""
    about.check()
    target = target.absolute()
    check_package_target(target, force)
    config = json_object((adapter / CONFIG).read_bytes(), str(adapter / CONFIG))
    with placed(target, force) as place:
        place.need(sum(file.stat().st_size for file in (adapter / WEIGHTS, *([draft] if draft else []))) + (1 << 16))
        folder = place.path
        folder.mkdir()
        shutil.copyfile(adapter / WEIGHTS, folder / WEIGHTS)
        base = public_name(str(config.get("base_model_name_or_path") or ""))
        write_text(folder / CONFIG, json.dumps({**config, "base_model_name_or_path": base}, indent=2) + "\n")
        if draft is not None:
            shutil.copyfile(draft, folder / DRAFT)
        known = Package(
            path=target,
            name=about.name or target.name,
            base=base,
            signature=str(config.get("orchard_base") or ""),
            method=made.method,
            rank=int(config["r"]),
            files={},
            orchard=VERSION,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            author=about.author,
            description=about.description,
            licence=about.licence,
            training=made.training,
        )
        write_text(folder / CARD, card(known, made.measured, drafted=draft is not None))
        files = {file.name: listed(file) for file in sorted(folder.iterdir())}
        whole = Package(**{**known.__dict__, "files": files})
        write_text(folder / MANIFEST, manifest_bytes(whole.to_dict()).decode())
        read_package(folder)  # what is kept has been read
        place.keep()
    return whole


def card(package: Package, measured: Sequence[tuple[str, str]], *, drafted: bool) -> str:
    """The card: what hubs read at its top, and what people read below."""
    about = {
        "library_name": "peft",
        "base_model": package.base,
        "license": package.licence,
        "tags": ["lora", "orchard"],
    }
    front = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in about.items() if value]
    lines = ["---", *front, "---", f"# {_plain(package.name)}", ""]
    if package.description:
        lines += [package.description, ""]
    kind = {"lora": "LoRA", "dora": "DoRA", "rslora": "rank-stabilised LoRA", "qlora": "QLoRA"}
    lines += [
        f"A {kind.get(package.method, package.method)} adapter of rank {package.rank} for {_plain(package.base)} "
        f"(signature {package.signature[2:14]}): it loads on that model and on no other.",
        "",
    ]
    if measured:
        lines += ["| | |", "|---|---|", *(f"| {_plain(name)} | {_plain(value)} |" for name, value in measured), ""]
    lines += ["```", f"orchard respond --model {package.base} --adapter FOLDER …", "```", ""]
    if drafted:
        lines += [f"`{DRAFT}` is a small model that guesses for this adapter; answers are the same without it.", ""]
    made_by = f" by {_plain(package.author)}" if package.author else ""
    lines += [f"Made{made_by} with Orchard {package.orchard}, {package.created[:10]}."]
    return "\n".join(lines) + "\n"


def public_name(model: str) -> str:
    """A model's name for others: of a path on this machine only its last part."""
    path = Path(model).expanduser()
    return path.absolute().name if path.is_absolute() or path.exists() or "\\" in model else model


def _plain(text: str) -> str:
    """Words that stay words in a table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()
