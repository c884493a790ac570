"""One of two processes of a run; the second is killed in the middle of a save: `python -m tests.train.lost_saving_program '{…}'`.

`kill`: the step whose save it does not survive; 0: nobody is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from orchard.core.errors import OrchardError
from orchard.train import checkpoint_disk as disk
from orchard.train.trainer import Saving
from orchard.train.world import world
from tests.generate.conftest import make_tokenizer
from tests.train.training import run_config

STEPS, EVERY = 6, 3


def killed_in(step: int) -> Any:
    """`disk.create` of a process that dies when it opens a file of that step's checkpoint."""
    real = disk.create

    def create(path: Path) -> int:
        if f"step-{step:08d}-" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(path)

    return create


def main(folder: Path, kill: int) -> None:
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    try:
        with world(device="cpu", timeout=10) as here:
            cfg = run_config(folder, tokenizer, steps=STEPS, save=Saving.Config(every=EVERY))
            trainer = cfg.build(folder=folder / "run", tokenizer=tokenizer, here=here)
            if kill and here.rank == 1:
                disk.create = killed_in(kill)
            begun = trainer.checkpoints.latest()
            losses = trainer.run().series["loss"]
            said: dict[str, Any] = {"begun": begun, "losses": [loss.hex() for loss in losses]}
    except OrchardError as error:
        said = {"error": type(error).__name__, "ranks": getattr(error, "ranks", None), "message": str(error)}
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(Path(given["folder"]), given["kill"])
