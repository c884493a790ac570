"""`adapt`: somebody's samples become an adapter in a package, measured on samples that it did not learn from.

    made = adapt("smollm2", "talks.jsonl", "my-adapter")
    print(made.losses, made.package.path)

What is unfinished lives in a folder beside the package (`my-adapter.run`): prepared rows, checkpoints, curves. The same call goes
on from there. At the end only the Report stays in it; the package has everything else, and is there whole or not at all.
"""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchard.core.digest import sha256
from orchard.core.errors import UsageError
from orchard.core.files import write_text
from orchard.core.report import Report
from orchard.recipes.adapt_data import Looked, Paths, look, parted, share_of, stop_at
from orchard.recipes.adapt_measure import Answers, Losses, answers_if_possible, before_of, facts, loss_of
from orchard.recipes.adapt_measure import told as measured
from orchard.recipes.adapt_plan import EPOCHS, RANK, Shape, plan, seconds_for
from orchard.recipes.package import About, Made, check_package_target, write_package
from orchard.recipes.run import Run
from orchard.recipes.same import RECORD, OtherRun
from orchard.session.build import tokenizer_of
from orchard.session.model import load
from orchard.train.trainer import Told
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.library import Library
from orchard.weights.package import Package

RUN = ".run"
"""What the folder of an unfinished run is called, after the package's name."""
TRAIN, HELD, DATA, BEFORE = "train.jsonl", "held-out.jsonl", "data.json", "before.json"
_ON_THE_WAY = ("step-", "adapter", "draft")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Adapted:
    """What came of it."""

    package: Package
    report: Report
    losses: Losses
    answers: Answers | None
    run: Path
    """Where the Report and its curves are."""
    seconds: float
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.package.path),
            "package": self.package.to_dict(),
            **facts(self.losses, self.answers),
            "seconds": round(self.seconds, 1),
            "run": str(self.run),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Checked:
    """A dry look: what the data holds, and what training on it would be."""

    looked: Looked
    train: int
    held: int
    """Rows to learn from, and rows held out."""
    steps: int
    seconds: float
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        looked = self.looked
        return {
            "samples": looked.samples,
            "rows": len(looked.rows),
            "repeated": looked.repeated,
            "tokens": looked.tokens,
            "learnt": looked.learnt,
            "longest": looked.longest,
            "longest_at": looked.longest_at,
            "train": self.train,
            "held_out": self.held,
            "steps": self.steps,
            "seconds": round(self.seconds),
            "dtype": self.dtype,
            "problems": [problem.__dict__ for problem in looked.problems],
            "reasons": looked.reasons,
        }


def adapt(
    model: str | Path,
    data: Paths,
    out: str | Path,
    *,
    method: str = "lora",
    rank: int = RANK,
    epochs: float = EPOCHS,
    steps: int | None = None,
    held_out: str | float | None = None,
    draft: bool = False,
    about: About | None = None,
    settings: Sequence[str] = (),
    on_bad: str = "stop",
    seed: int = 0,
    device: str = "auto",
    force: bool = False,
    told: Iterable[Told] = (),
    say: Say | None = None,
) -> Adapted:
    """Train an adapter for a model of the library (or a GGUF file, or a folder) and write its package to `out`.

    `method`: lora, dora, rslora or qlora. `held_out`: a file, or a share of the samples; a tenth unless told otherwise.
    `on_bad`: stop at lines that cannot be learnt from, or skip them. `settings`: `path=value` for anything in the run's config.
    `draft`: also teach a small model to guess for it. `force`: replace a package that is there.
    """
    begun, about, target, tell = time.perf_counter(), about or About(), Path(out).absolute(), say or (lambda line: None)
    about.check()
    check_package_target(target, force)
    if on_bad not in ("stop", "skip"):
        raise UsageError(f"on_bad is {on_bad!r}", hint="use stop or skip")
    folder = target.with_name(target.name + RUN)
    prepared = _prepare(str(model), data, held_out, on_bad, seed, folder, tell)
    wishes: dict[str, Any] = {"method": method, "rank": rank, "epochs": epochs, "steps": steps, "device": device}
    cfg = plan(str(model), prepared.shape, seed=seed, settings=settings, **wishes)
    report, losses = _train(cfg, folder, told, tell)
    adapter = folder / "adapter"
    with_draft = _draft(str(model), adapter, folder, seed, device, tell) if draft else None
    answers, problem = (
        answers_if_possible(load(str(model), device=device), adapter, prepared.held) if prepared.held else (None, "")
    )
    notes = [note for note in (*prepared.notes, problem) if note]
    training = {
        "steps": cfg.train.steps,
        "samples": prepared.samples,
        "tokens": report.values["tokens"].value,
        **facts(losses, answers),
        "seconds": report.wall_time,
    }
    lines = [("samples", f"{prepared.samples:,}"), ("steps", f"{cfg.train.steps:,}"), *measured(losses, answers)]
    tell(f"writing {target.name}")
    package = write_package(target, adapter, about, Made(method, training, lines), draft=with_draft, force=force)
    _tidy(folder)
    return Adapted(package, report, losses, answers, folder, time.perf_counter() - begun, tuple(notes))


def check(
    model: str | Path,
    data: Paths,
    *,
    held_out: str | float | None = None,
    seed: int = 0,
    settings: Sequence[str] = (),
    **wishes: Any,
) -> Checked:
    """Look at data without training: what is good, what is not and where, how long it would take."""
    tokenizer, context, parameters = _facts(str(model))
    looked = look(data, tokenizer, context)
    share = share_of(held_out, looked.samples)
    train, held = parted(looked, share or 0.0, seed)
    if not train:
        return Checked(looked, 0, len(held), 0, 0.0, "")
    sizes = [looked.sizes[number] for number in train]
    shape = Shape(Path(TRAIN), None, len(train), sum(sizes), max(sizes), looked.turns, context)
    cfg = plan(str(model), shape, seed=seed, settings=settings, **wishes)
    rows = cfg.get("train.source.source.rows")
    tokens = cfg.train.steps * rows * sum(sizes) / len(sizes)
    took = seconds_for(parameters, tokens, cfg.train.dtype, cfg.device)
    return Checked(looked, len(train), len(held), cfg.train.steps, took, cfg.train.dtype)


# Inside -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Prepared:
    shape: Shape
    held: list[dict[str, Any]]
    samples: int
    notes: tuple[str, ...]


def _facts(model: str) -> tuple[Any, int, int]:
    """A model's tokenizer, context and parameters, from its headers."""
    import math

    with open_checkpoint(Library().resolve(model)) as checkpoint:
        sizes = (math.prod(info.shape) for info in checkpoint.source.tensors.values() if len(info.shape) > 1)
        return tokenizer_of(checkpoint), checkpoint.config().context, sum(sizes)


def _prepare(
    model: str, data: Paths, held_out: str | float | None, on_bad: str, seed: int, folder: Path, tell: Say
) -> _Prepared:
    """Look at the data and write the rows of the run. The same data gives the same files, byte for byte."""
    tokenizer, context, _ = _facts(model)
    looked = look(data, tokenizer, context)
    notes = []
    if on_bad == "stop" or not looked.samples:
        stop_at(looked.problems, looked.samples)
    elif looked.problems:
        notes.append(f"{len(looked.problems):,} lines were left out, the first: {looked.problems[0].message}")
    share = share_of(held_out, looked.samples)
    train, held = parted(looked, share or 0.0, seed)
    other: Looked | None = None
    if share is None:
        other = look(str(held_out), tokenizer, context, split=looked.turns == "last")
        stop_at(other.problems, other.samples)
        if other.turns != looked.turns:  # one of them has tools or schemas: both are read answer by answer
            looked = look(data, tokenizer, context, split=True)
            train, _ = parted(looked, 0.0, seed)
        both = len(set(other.keys) & set(looked.keys))
        if both:
            notes.append(f"{both:,} held-out samples are in the training data as well: what is measured says little")
    rows = [looked.rows[number] for number in train]
    kept = other.rows if other is not None else [looked.rows[number] for number in held]
    sizes = [looked.sizes[number] for number in train] + (other.sizes if other else [looked.sizes[n] for n in held])
    tell(f"{len(rows):,} rows to learn from, {len(kept):,} held out, up to {max(sizes):,} tokens")
    texts = {TRAIN: _text(rows), HELD: _text(kept)}
    _same_data(folder, texts)
    learnt = sum(sizes[: len(rows)])
    paths = [folder / name if texts[name] else None for name in (TRAIN, HELD)]
    assert paths[0] is not None
    shape = Shape(paths[0], paths[1], len(rows), learnt, max(sizes), looked.turns, context)
    return _Prepared(shape, kept, len({looked.lines[number] for number in train}), tuple(notes))


def _text(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _same_data(folder: Path, texts: dict[str, str]) -> None:
    """Write the rows; a run that is under way with other rows is not gone on with."""
    sums = {name: sha256(text.encode()).hex() for name, text in texts.items()}
    place = folder / DATA
    if place.is_file():
        with suppress(ValueError):
            if json.loads(place.read_text()) != sums:
                raise UsageError(
                    f"{folder} holds an unfinished run on other data", hint="delete that folder, or name another --out"
                )
    for name, text in texts.items():
        write_text(folder / name, text)
    write_text(place, json.dumps(sums))


def _train(cfg: Run.Config, folder: Path, told: Iterable[Told], tell: Say) -> tuple[Report, Losses]:
    try:
        run: Run = cfg.build(folder=folder)
    except OtherRun as error:
        raise OtherRun(error.message, hint="repeat the command that was interrupted, or delete that folder") from error
    before = before_of(run, folder / BEFORE)
    tell(f"training for {cfg.train.steps:,} steps")
    report = run.start(told=told)
    after = loss_of(run)
    run.trainer.close()
    del run
    gc.collect()  # what holds the model in circles; the engine needs its room
    return report, Losses(before, after)


def _draft(model: str, adapter: Path, folder: Path, seed: int, device: str, tell: Say) -> Path:
    from orchard.recipes.draft import distil_draft

    tell("teaching a draft model")
    base = load(model, device=device)
    variant = base.adapters.model(base.adapters.load(adapter, name="adapted"))
    return distil_draft(variant, folder / TRAIN, folder / "draft", seed=seed, device=device)


def _tidy(folder: Path) -> None:
    """Take away what was needed on the way: rows, checkpoints, copies of what the package has. The Report stays."""
    for path in folder.iterdir():
        if path.is_dir() and path.name.lstrip(".").startswith(_ON_THE_WAY):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name in (TRAIN, HELD, DATA, BEFORE, RECORD):
            with suppress(OSError):
                path.unlink()
