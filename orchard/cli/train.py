"""`orchard train RECIPE [PATH…] [key=value…]`: train a model by a recipe, on one process or several, from where it was left."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from enum import StrEnum
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchard.cli.common import console, note, print_json
from orchard.cli.options import JsonOption
from orchard.core.errors import UsageError

if TYPE_CHECKING:
    from orchard.core.report import Report
    from orchard.recipes.run import Run
    from orchard.train.tensorboard import TensorBoard
    from orchard.train.trainer import Told


class OnBad(StrEnum):
    stop = "stop"
    skip = "skip"


def train(
    recipe: Annotated[str | None, typer.Argument(help="The recipe: --list shows them.", show_default=False)] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH|KEY=VALUE", help="What to learn from, and the recipe's own arguments.", show_default=False
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Set anything in the config; may be repeated."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="NAME[:K=V,...]", help="Train with a technique; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Where the run lives; runs/RECIPE unless given.")
    ] = None,
    processes: Annotated[int, typer.Option("--processes", metavar="N", min=1, help="Processes on this machine.")] = 1,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="cpu or cuda; what there is unless given.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Same seed, same run.")] = None,
    on_bad: Annotated[
        OnBad | None, typer.Option("--on-bad", help="At a row of data that is no good; stop unless given.")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", metavar="FOLDER", help="Write curves for TensorBoard, too.")
    ] = None,
    force_new: Annotated[
        bool, typer.Option("--force-new", help="Put the run that is in the folder aside, and begin anew.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the whole config, and do nothing.")] = False,
    list_all: Annotated[
        bool, typer.Option("--list", help="List recipes and techniques; with a RECIPE, what it takes.")
    ] = False,
    as_json: JsonOption = False,
) -> int | None:
    """Train a model by a recipe. A run that was interrupted goes on with the same command.

    The folder gets the model (or the adapter), checkpoints, and the Report as JSON, page and picture.
    """
    from orchard.cli.process import import_torch

    import_torch()
    from orchard.cli.train_words import config_of
    from orchard.cli.workers import belongs_to_a_group, start

    if list_all:
        _list(recipe, as_json)
        return None
    if recipe is None:
        raise UsageError("which recipe?", hint="`orchard train --list` shows them all")
    cfg = config_of(
        recipe,
        words or [],
        changes=changes or [],
        settings=settings or [],
        seed=seed,
        device=device,
        on_bad=None if on_bad is None else on_bad.value,
    )
    if show:
        print_json(cfg.to_dict()) if as_json else print(cfg.describe())
        return None
    folder = (out or Path("runs") / recipe).absolute()
    if belongs_to_a_group():
        if force_new:
            raise UsageError(
                "--force-new, and others are starting in the same folder", hint="move the folder away first"
            )
    else:
        _make_room(folder, cfg, force_new)
        if processes > 1:
            return start(
                _again(recipe, words, settings, changes, folder, device, seed, on_bad, tensorboard, as_json), processes
            )
    _run(cfg, folder, tensorboard, as_json)
    return None


def _run(cfg: Run.Config, folder: Path, tensorboard: Path | None, as_json: bool) -> None:
    from orchard.session.place import device_of
    from orchard.train.world import world

    # Of GPUs each process takes its own, so none is asked for by name here.
    asked = None if cfg.device == "auto" else cfg.device if cfg.device.startswith("cuda") else device_of(cfg.device)
    with world(device=asked) as here:
        report = _trained(cfg.build(folder=folder, here=here), folder, tensorboard)
    if here.first:
        _print(report, as_json)


def _trained(run: Run, folder: Path, tensorboard: Path | None) -> Report:
    try:
        with ExitStack() as stack:
            return run.start(told=_listeners(run, tensorboard, stack) if run.first else [])
    except KeyboardInterrupt:
        if run.first:
            at = run.trainer.checkpoints.latest()
            kept = "before the first checkpoint" if at is None else f"with a checkpoint after step {at}"
            note(f"stopped {kept}; the same command goes on from there (in {folder})")
        raise


def _listeners(run: Run, tensorboard: Path | None, stack: ExitStack) -> list[Told]:
    """Who is told of every step: logs, where no terminal shows a bar, and TensorBoard's files."""
    from orchard.train.tensorboard import TensorBoard
    from orchard.train.watch import Lines

    told: list[Told] = []
    if not sys.stderr.isatty():
        told.append(Lines(note, steps=run.config.train.steps))
    if tensorboard is not None:
        board = TensorBoard(tensorboard)
        stack.callback(_close, board)
        told.append(board)
    return told


def _close(board: TensorBoard) -> None:
    board.close()
    if board.problem is not None:
        note(f"the curves in {board.folder} are not whole: {board.problem}")


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        print_json(report.to_dict())
    else:
        console(markup=True).print(report.table())


def _make_room(folder: Path, cfg: Run.Config, force_new: bool) -> None:
    """Refuse a folder that holds another run, or something else; or give it another name."""
    from orchard.recipes.same import RECORD, put_aside, refuse_other

    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", hint="name a folder with --out")
    if force_new:
        aside = put_aside(folder)
        if aside is not None:
            note(f"what was in {folder} is in {aside} now")
    elif (folder / RECORD).is_file():
        refuse_other(folder, cfg)
    elif folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty, and holds no run", hint="name a new folder with --out")


def _again(
    recipe: str,
    words: list[str] | None,
    settings: list[str] | None,
    changes: list[str] | None,
    folder: Path,
    device: str | None,
    seed: int | None,
    on_bad: OnBad | None,
    tensorboard: Path | None,
    as_json: bool,
) -> list[str]:
    """The command line of a worker."""
    options: list[tuple[str, Any]] = [("--out", folder), ("--device", device), ("--seed", seed), ("--on-bad", on_bad)]
    options += [("--tensorboard", tensorboard), *(("--set", one) for one in settings or ())]
    options += [("--with", one) for one in changes or ()]
    given = [str(word) for name, value in options if value is not None for word in (name, value)]
    return ["train", *given, *(["--json"] if as_json else []), "--", recipe, *(words or [])]


# What there is ----------------------------------------------------------------------------------------------------------


def _list(recipe: str | None, as_json: bool) -> None:
    from orchard.cli.train_words import explanation, parameters
    from orchard.recipes.base import about, get, names
    from orchard.recipes.changes import changes

    if recipe is not None:
        function = get(recipe)
        known = parameters(function)
        if as_json:
            facts = [
                {"name": p.name, "type": p.kind, "required": p.required, "about": p.about}
                | ({} if p.required else {"default": p.default})
                for p in known.values()
            ]
            print_json({"name": recipe, "about": explanation(function), "arguments": facts})
            return
        print(explanation(function) + "\n")
        _columns([(p.name, _word(p.default), p.about) for p in known.values()])
        return
    recipes = {name: about(get(name)) for name in names()}
    techniques = {name: about(function) for name, function in changes().items()}
    if as_json:
        print_json({"recipes": recipes, "with": techniques})
        return
    print("recipes")
    _columns([(f"  {name}", line) for name, line in recipes.items()])
    print("\n--with")
    _columns([(f"  {name}", line) for name, line in techniques.items()])


def _word(default: Any) -> str:
    """A default as a person would write it."""
    if default is Parameter.empty:
        return "required"
    return default if isinstance(default, str) else json.dumps(default).replace("null", "none")


def _columns(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip())
