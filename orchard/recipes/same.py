"""Whether a folder's run is this run: its config is kept in `run.json`, and another one is refused by the first difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from orchard.core.config import BaseConfig
from orchard.core.config_text import Change, diff
from orchard.core.errors import ConfigError, OrchardError, UsageError
from orchard.core.files import write_text
from orchard.train.trainer import digest

if TYPE_CHECKING:
    from orchard.recipes.run import Run

RECORD = "run.json"
HINT = "choose another folder (--out), or put the run that is there aside and begin anew (--force-new)"
_FREE = ("device", "train.save", "train.held_out", "train.mesh", "train.compile", "train.recompute")
"""What may change from one start of a run to the next, where the trainer agrees that its weights do not depend on it."""


class OtherRun(UsageError):
    """The folder holds a run of another config."""

    code = "other-run"


def refuse_other(folder: Path, cfg: Run.Config) -> None:
    """Go on only where the folder holds nothing, or a run of the same config."""
    place = folder / RECORD
    if not place.is_file():
        return
    try:
        kept = BaseConfig.from_dict(json.loads(place.read_bytes()))
    except (OrchardError, ValueError, OSError) as error:
        raise OtherRun(f"{place} cannot be understood: {error}", hint=HINT) from error
    change = difference(kept, cfg)
    if change is not None:
        raise OtherRun(f"{folder} holds a run of another config: {change}", hint=HINT)


def difference(kept: Run.Config, cfg: Run.Config) -> Change | None:
    """The first thing that the weights depend on and that is not the same."""
    if type(kept) is not type(cfg):
        raise ConfigError("this is the config of something else", hint=HINT)
    if digest(kept.train) == digest(cfg.train):
        kept = kept.clone(train=cfg.train)
    changes = [change for change in diff(kept, cfg) if not change.path.startswith(_FREE)]
    return changes[0] if changes else None


def keep_config(folder: Path, cfg: Run.Config) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / RECORD, json.dumps(cfg.to_dict(), indent=2, ensure_ascii=False) + "\n")


def put_aside(folder: Path) -> Path | None:
    """Give a folder another name, so that its own is free; None where there is none."""
    if not folder.exists():
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.before-{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside
