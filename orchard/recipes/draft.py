"""Making a draft model: some layers of a model, taught to say what the whole model would say.

    from orchard.recipes.draft import distil_draft
    path = distil_draft(model, "rows.jsonl", folder)         # folder/draft.gguf
    faster = orchard.load("smollm2", draft=path)

`model` may be a model with adapters applied: the draft then learns to guess for that. It learns from the rows, from the model's
own answers to their prompts, and (`invent`) from prompts that the model makes up. What the draft is trained on decides how often
it is right, never what an answer is: guesses that the model would not have made are thrown away.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from orchard.core.digest import sha256
from orchard.core.errors import UsageError
from orchard.core.files import write_text
from orchard.data.batches import Batches
from orchard.data.encode import Encode
from orchard.data.files import find
from orchard.data.jsonl import Jsonl
from orchard.data.order import Repeat
from orchard.data.packing import Pack
from orchard.data.source import Sample
from orchard.models.language.decoder import Decoder
from orchard.objectives.distill import Distill
from orchard.recipes.draft_model import (
    describe_draft,
    draft_config,
    draft_from,
    draft_layers,
    freeze_ends,
    without_sides,
)
from orchard.recipes.draft_text import Asked, SampleFile, answered, at, invented, prompts_of, write_samples
from orchard.session.build import Built
from orchard.session.place import device_of
from orchard.session.save import save_built
from orchard.train.optim import AdamW
from orchard.train.trainer import Saving, Told, Trainer
from orchard.weights.safetensors import SafetensorsFile

if TYPE_CHECKING:
    from orchard.session.model import Model

__all__ = ["Lessons", "distil", "distil_draft", "draft_config", "draft_from", "draft_layers"]

NAME = "draft.gguf"
TEXT = "draft-text.safetensors"
RUN = "draft-run"
ROWS = "draft-rows.jsonl"
Data = str | Path | Sequence[str | Path] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Lessons:
    """How a draft is taught. The defaults suit a few hundred rows and two cores."""

    steps: int = 300
    rows: int = 4
    length: int = 256
    """Tokens of a row of the batch; longer samples are cut off."""
    rate: float = 1e-3
    divergence: str = "forward"
    """One of orchard/objectives/divergence.py."""
    hard: float = 0.0
    """The share of plain cross-entropy with what was written."""
    top_k: int | None = None
    ends: bool = False
    """Whether embedding and head are trained as well; otherwise they stay the model's."""
    dtype: str = "auto"
    """What is computed in; "auto": bfloat16 where the device multiplies it quickly, else float32."""
    chunk: int = 1024
    micro: int | None = None
    compile: bool = False
    type: str = "q8_0"
    """How the file's weights are stored."""


def distil_draft(
    model: Model,
    data: Data,
    folder: Path,
    *,
    steps: int | None = None,
    layers: int | Sequence[int] | None = None,
    device: str = "auto",
    seed: int = 0,
    told: Iterable[Told] = (),
    start: Model | None = None,
    lessons: Lessons | None = None,
    own: bool = True,
    invent: int = 0,
    max_tokens: int = 128,
) -> Path:
    """Teach a draft from rows (paths, or rows themselves) and write `folder/draft.gguf`. The same call goes on where it was
    interrupted. `start`: a draft to begin from, instead of layers of the model (by default the model's own, if it has one and no
    `layers` are asked for); `own`: the model's answers to the prompts of the rows, greedy and sampled, are learnt from too;
    `invent`: so many prompts that it makes up, with its answers."""
    folder = Path(folder)
    lessons = lessons or Lessons()
    lessons = lessons if steps is None else replace(lessons, steps=steps)
    wishes: dict[str, Any] = {"own": own, "invent": invent, "max_tokens": max_tokens, "seed": seed}
    paths, text = _kept(data, folder), folder / TEXT
    facts = _facts(model, paths, wishes)
    if not _made_with(text, facts):
        write_samples(text, text_for(model, paths, **wishes), facts)
    return distil(model, text, folder, layers=layers, start=start, lessons=lessons, device=device, seed=seed, told=told)


def text_for(
    model: Model, paths: Sequence[Path], *, own: bool, invent: int, max_tokens: int, seed: int
) -> list[Sample]:
    """All that a draft is to learn from: rows as they are, and what the model itself says to their prompts and to others."""
    samples = rows_of(model, paths)
    asked: list[Asked] = []
    if own:
        prompts = prompts_of(samples)
        asked += [*prompts, *at(prompts, 0.7)]
    if invent:
        asked += invented(model, invent, seed=seed)
    return [*samples, *answered(model, asked, max_tokens=max_tokens, seed=seed)] if asked else samples


def distil(
    model: Model,
    text: Path,
    folder: Path,
    *,
    layers: int | Sequence[int] | None = None,
    start: Model | None = None,
    lessons: Lessons | None = None,
    device: str = "auto",
    seed: int = 0,
    told: Iterable[Told] = (),
) -> Path:
    """Teach a draft from a file of samples and write it as one GGUF file with the model's tokenizer."""
    if start is None and layers is None:
        start = model.draft
    lessons, place = lessons or Lessons(), device_of(device)
    built = model.built
    if built.family is None:
        raise UsageError(
            f"{model.name} belongs to no family that files know, and so would its draft",
            hint="make a draft of a model that was loaded from files",
        )
    if start is None:
        count = len(built.decoder.config.stack.layers)
        chosen = draft_layers(count, layers)
        draft, described = draft_from(built.decoder, chosen), describe_draft(built.hf_config, chosen, count)
    else:
        count = len(start.config.stack.layers)
        draft, described = draft_from(start.decoder, count), start.hf_config  # all of them: a copy in float32
    run = Path(folder) / RUN
    trainer = trainer_of(draft, teacher_of(built.decoder, lessons, place), text, run, lessons, place, seed, model)
    trainer.run(told)
    path = Path(folder) / NAME
    save_built(Built(draft.float().cpu(), built.family, described), model.tokenizer, model.source, path, lessons.type)
    for old in run.glob("step-*"):  # what could go on is done
        shutil.rmtree(old, ignore_errors=True)
    return path


def trainer_of(
    draft: Decoder,
    teacher: Decoder,
    text: Path,
    folder: Path,
    lessons: Lessons,
    device: torch.device,
    seed: int,
    model: Model,
) -> Trainer:
    """The run: packed samples, the teacher's whole distribution at every token that is learnt."""
    draft.requires_grad_(True)
    if not lessons.ends:
        freeze_ends(draft)
    samples = Repeat.Config(source=SampleFile.Config(path=str(text), seed=seed))
    packed = Pack.Config(source=samples, length=lessons.length, too_long="cut")
    objective = Distill.Config(
        divergence=lessons.divergence, hard=lessons.hard, top_k=lessons.top_k, chunk=lessons.chunk
    )
    settings = Trainer.Config(
        objective=objective,
        source=Batches.Config(source=packed, rows=lessons.rows),
        steps=lessons.steps,
        micro=lessons.micro,
        optim=AdamW.Config(lr=lessons.rate, decay=0.01),
        dtype=dtype_of(lessons, device),
        compile=lessons.compile,
        seed=seed,
        save=Saving.Config(every=max(lessons.steps, 1), keep=1),
    )
    trainer: Trainer = settings.build(
        folder=folder,
        tokenizer=model.tokenizer,
        with_model=draft,
        with_objective=objective.build(teacher=teacher),
        device=device,
    )
    return trainer


def teacher_of(decoder: Decoder, lessons: Lessons, device: torch.device) -> Decoder:
    """The whole model, to be read only, in what is computed in: a copy, so that the model's own numbers stay what they are."""
    dtype = torch.bfloat16 if dtype_of(lessons, device) == "bfloat16" else torch.float32
    return copy.deepcopy(without_sides(decoder)).to(device=device, dtype=dtype).eval().requires_grad_(False)


def dtype_of(lessons: Lessons, device: torch.device) -> str:
    if lessons.dtype != "auto":
        return lessons.dtype
    if device.type == "cuda":
        return "bfloat16"
    quick = device.type == "cpu" and getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return "bfloat16" if quick else "float32"


def rows_of(model: Model, paths: Sequence[Path]) -> list[Sample]:
    """The samples of files of JSON lines; preferences teach their first answer."""
    if not paths:
        return []
    source = Encode.Config(source=Jsonl.Config(paths=[str(path) for path in paths])).build(tokenizer=model.tokenizer)
    try:
        return [item if isinstance(item, Sample) else item.chosen for item in source]
    finally:
        source.close()


def _kept(data: Data, folder: Path) -> list[Path]:
    """The files of the rows; rows that Python has are written to one."""
    if isinstance(data, str | Path):
        return [Path(data)]
    rows = [one for one in data if isinstance(one, Mapping)]
    if not rows:
        return [Path(one) for one in data]  # type: ignore[arg-type]
    if len(rows) != len(data):
        raise UsageError("data are rows and paths together", hint="give paths, or rows")
    write_text(folder / ROWS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return [folder / ROWS]


def _facts(model: Model, paths: Sequence[Path], settings: Mapping[str, Any]) -> dict[str, str]:
    """What the text depends on, so that a run that goes on need not have it written again."""
    files = [sha256(file.read_bytes()).hex() for file in find(paths, Jsonl.suffixes)] if paths else []
    known = [model.name, getattr(model.runner, "signature", ""), files, dict(sorted(settings.items()))]
    return {"made": sha256(json.dumps(known).encode()).hex()}


def _made_with(path: Path, facts: Mapping[str, str]) -> bool:
    if not path.is_file():
        return False
    with SafetensorsFile.open(path) as file:
        return dict(file.metadata) == dict(facts)
