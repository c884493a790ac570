"""Make a small mixture that talks: SmolLM2-135M-Instruct upcycled, then trained on its own text and on somebody's, on one GPU.

    python tools/mixture.py --text books/train --to build/mixture            # smollm2-moe.orchard, dense
    orchard compress build/mixture/smollm2-moe.orchard rtn:bits=4 embed8 --to build/mixture/smollm2-moe-4bit.orchard
    orchard bench experts trace.safetensors --record --model build/mixture/smollm2-moe-4bit.orchard

Every second feed-forward layer becomes eight copies of itself, of which a token meets two: traces, policies and pruning are then
measured on a model whose routers have learnt something. Experts begin alike, and nothing but text that the model does not
write itself, and a little noise, takes them apart: plain next-token training, not what the original says. What was interrupted
goes on with the same command. `--tokens 0.1` learns from a tenth.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from orchard.core.errors import OrchardError
from orchard.core.files import write_text
from orchard.objectives.collected import WithCollected
from orchard.objectives.lm import NextToken
from orchard.recipes.adapt_plan import fast_dtype
from orchard.recipes.compressing.follows import follows
from orchard.recipes.compressing.texts import Wanted, texts_for
from orchard.session.build import build
from orchard.session.model import Model
from orchard.session.place import device_of
from orchard.session.save import save_built
from orchard.train.optim import AdamW
from orchard.train.schedule import Cosine
from orchard.train.trainer import Saving, Trainer
from orchard.transforms.upcycle import Upcycle
from orchard.weights.library import Library

SOURCE, NAME = "smollm2", "smollm2-moe"
TRAIN, WRITTEN, OWN, LENGTH, ROWS = 40_000_000, 14_000_000, 0.5, 1024, 32
RATE, BALANCE, Z = 3e-4, 1e-2, 1e-3
TOGETHER = {"cuda": 1856, "cpu": 8}
"""Rows that are written at a time."""


def mixture(text: list[str], folder: Path, factor: float, device: str) -> None:
    place = device_of(device)
    source = Library().resolve(SOURCE)
    tokenizer, built = build(source, None, torch.float32, "cpu")
    original = built.decoder.to(place).eval().requires_grad_(False)
    writer = copy.deepcopy(original).bfloat16() if place.type == "cuda" else original
    wanted = Wanted(max(LENGTH, round(WRITTEN * factor)), 16_384, LENGTH, TOGETHER[place.type], tuple(text), OWN)
    texts = texts_for(writer, tokenizer, wanted, folder / "text")
    steps = max(1, round(TRAIN * factor / (ROWS * LENGTH)))
    model = Upcycle(experts=8, k=2, layers="second", noise=0.02).apply(original.cpu()).to(place).requires_grad_(True)
    objective = WithCollected.Config(objective=NextToken.Config(), collected={"moe.balance": BALANCE, "moe.z": Z})
    settings = Trainer.Config(
        objective=objective,
        source=texts.source(ROWS, 0),
        steps=steps,
        optim=AdamW.Config(lr=RATE, decay=0.0),
        schedule=Cosine.Config(warmup=max(1, steps // 20), steps=steps, floor=0.1),
        dtype=fast_dtype(device),
        compile=place.type == "cuda",
        save=Saving.Config(every=max(10, steps // 5), keep=1),
        held_out=texts.held_sources(ROWS),
        held_out_every=max(1, steps // 8),
        held_out_batches=4,
    )
    trainer: Trainer = settings.build(
        folder=folder / "run", tokenizer=tokenizer, with_model=model.train(), device=place
    )
    report = trainer.run([_told])
    made = replace(built, decoder=model.eval().requires_grad_(False))
    scores = {
        name: follows(Model(one, tokenizer, name=name, source=source))
        for name, one in (("original", replace(built, decoder=original.to(place))), (NAME, made))
    }
    model.to(torch.bfloat16)
    save_built(made, tokenizer, source, folder / f"{NAME}.orchard", None)
    write_text(folder / f"{NAME}.json", json.dumps({"checks": scores, "series": report.series}) + "\n")
    print(f"{NAME}: {(folder / f'{NAME}.orchard').stat().st_size:,} bytes; checks {scores}")


def _told(step: int, point: Mapping[str, float]) -> None:
    held = {name: round(value, 4) for name, value in point.items() if name.startswith(("held out", "moe"))}
    if any(name.startswith("held out") for name in held):
        print(f"  step {step}: {held}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", required=True, help="files or folders of plain text")
    parser.add_argument("--to", type=Path, required=True, help="a folder")
    parser.add_argument("--tokens", type=float, default=1.0, help="a factor of what is learnt from")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    given.to.mkdir(parents=True, exist_ok=True)
    try:
        mixture(given.text, given.to, given.tokens, given.device)
    except OrchardError as error:
        print(f"error: {error.message} ({error.hint})", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
