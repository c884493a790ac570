"""Make the flagship: two small forms of SmolLM2-135M-Instruct and the draft that guesses for both, on one GPU.

    python tools/flagship.py --text books/train --to build/flagship             # all three
    python tools/flagship.py --text books/train --to build/flagship --only draft
    python tools/weights.py split build/flagship/smollm2-mix.orchard --name smollm2-mix --draft build/flagship/draft.orchard …

`--text` is what is learnt from besides what the model writes itself: plain text of one kind, some
million tokens. What was interrupted goes on with the same command. `--tokens 0.1` learns from a tenth.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from orchard.core.errors import OrchardError
from orchard.core.files import write_text
from orchard.recipes.adapt_plan import fast_dtype
from orchard.recipes.compress import compress, take_over
from orchard.recipes.compressing.follows import follows
from orchard.recipes.compressing.runner import halve_vectors
from orchard.recipes.compressing.step import Lessons
from orchard.recipes.compressing.teach import Class, Taught, teach
from orchard.recipes.compressing.texts import Wanted, texts_for
from orchard.recipes.draft_model import draft_from
from orchard.session.build import build
from orchard.session.place import device_of
from orchard.session.save import save_built
from orchard.transforms.qat import Qat
from orchard.weights.library import Library

SOURCE = "smollm2"
HEAL, TRAIN, RECOVER, DRAFT = 20_000_000, 62_000_000, 3_000_000, 8_000_000
"""Tokens: to get used to shared keys and values, to learn in few bits, for side paths; for each half of the draft's lessons."""
SHARED = ["share-kv:last=11,refine=400", "heal:tokens={heal},lr=5e-4"]
SIDES = ["recover:r=2,alpha=4,tokens={recover},lr=1e-3", "kv8"]
PLANS = {
    "mix": ([*SHARED, "mixed:train=true,tokens={train},lr=1e-3", *SIDES], "3.2bpw"),
    "2bit": ([*SHARED, "qat:bits=2,group=96,tokens={train},lr=1e-3", *SIDES], "45MB"),
}
FIRST = f"step {len(SHARED) + 1} of"
"""What is said when the steps that both begin with are done."""
LENGTH, ROWS, OWN, REUSE = 1024, 32, 0.8, 3
LAYERS, WRITTEN, DRAFT_WORK = 3, 28_000_000, "draft.work"


class Reached(Exception):
    """The steps that both begin with are done."""


def asked_for(
    name: str, text: list[str], folder: Path, factor: float, device: str
) -> tuple[list[str], Path, dict[str, Any]]:
    """Plan, file, and everything else that is asked for."""
    words, budget = PLANS[name]
    counts = {"heal": HEAL, "train": TRAIN, "recover": RECOVER}
    sizes = {key: max(1, round(tokens * factor)) for key, tokens in counts.items()}
    asked: dict[str, Any] = {"text": text, "own": OWN, "reuse": REUSE, "length": LENGTH, "rows": ROWS, "device": device}
    asked |= {"budget": budget, "held": 16_384, "looked": 65_536, "tasks": follows}
    return [word.format(**sizes) for word in words], folder / f"{SOURCE}-{name}.orchard", asked


def both(*where: Any) -> None:
    """The steps that both begin with, once; the second goes on from there."""
    (words, one, asked), (other, two, more) = (asked_for(name, *where) for name in PLANS)
    if one.exists() or (two.with_suffix(".work") / "plan.json").exists():
        return

    def stop(line: str) -> None:
        print(line, flush=True)
        if line.startswith(FIRST):
            raise Reached

    try:
        compress(SOURCE, words, one, say=stop, told=[_told], **asked)
    except Reached:
        take_over(SOURCE, other, two, other=one, **more)
        shutil.copytree(one.with_suffix(".work") / "text", one.parent / DRAFT_WORK / "text", dirs_exist_ok=True)


def small(name: str, *where: Any) -> None:
    """One of the two, by its plan."""
    words, target, asked = asked_for(name, *where)
    made = compress(SOURCE, words, target, say=print, told=[_told], **asked)
    print(f"{target.stem}: {made.bytes:,} bytes, loss ratio {made.measured.all.ratio:.4f}", flush=True)


def draft(text: list[str], folder: Path, factor: float, device: str) -> None:
    """Three layers of the original between its own embedding and head, taught what it says, then all of it in two bits."""
    place = device_of(device)
    source = Library().resolve(SOURCE)
    tokenizer, built = build(source, None, torch.float32, "cpu")
    original = built.decoder.to(place).eval().requires_grad_(False)
    work = folder / DRAFT_WORK
    wanted = Wanted(max(LENGTH, round(WRITTEN * factor)), 16_384, LENGTH, 1856, tuple(text), OWN)
    writer = copy.deepcopy(original).bfloat16() if place.type == "cuda" else original
    texts = texts_for(writer, tokenizer, wanted, work / "text")
    where = Class(texts, tokenizer, place, fast_dtype(device), ROWS, None, 0)
    tokens = max(1, round(DRAFT * factor))
    student = draft_from(original, LAYERS).to(place)
    first = teach(student, original, Lessons(lr=2e-3), tokens, where, work / "dense", 1, [_told])
    qat = Qat(bits=2, group=96, embedding=2)
    student = qat.apply(student.eval(), [batch.to(place) for batch in texts.looked_at(16_384)])
    second = teach(student, original, Lessons(lr=1e-3), tokens, where, work / "two-bits", 2, [_told])
    student = qat.finish(student).eval().requires_grad_(False)
    halve_vectors(student)
    save_built(replace(built, decoder=student), tokenizer, source, folder / "draft.orchard", None)
    curves = {name: _curves(taught) for name, taught in (("dense", first), ("two bits", second))}
    write_text(folder / "draft.json", json.dumps(curves) + "\n")
    print(f"draft: {(folder / 'draft.orchard').stat().st_size:,} bytes")


def _curves(taught: Taught) -> dict[str, Any]:
    return {"tokens": taught.tokens, "learnt": taught.curve, "held out": taught.held}


def _told(step: int, point: Mapping[str, float]) -> None:
    held = {name: round(value, 4) for name, value in point.items() if name.startswith("held out")}
    if held:
        print(f"  step {step}: KL {point['kl']:.4f}, {held}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", required=True, help="files or folders of plain text")
    parser.add_argument("--to", type=Path, required=True, help="a folder")
    parser.add_argument("--only", choices=[*PLANS, "draft"], action="append", help="may be repeated")
    parser.add_argument("--tokens", type=float, default=1.0, help="a factor of what is learnt from")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    given.to.mkdir(parents=True, exist_ok=True)
    try:
        asked = (given.text, given.to, given.tokens, given.device)
        if not given.only or set(PLANS) <= set(given.only):
            both(*asked)
        for name in given.only or [*PLANS, "draft"]:
            draft(*asked) if name == "draft" else small(name, *asked)
    except OrchardError as error:
        print(f"error: {error.message} ({error.hint})", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
