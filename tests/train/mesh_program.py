"""One process of a trainer's run: `python -m tests.train.mesh_program '{"folder": …, "mesh": {…}, "steps": 20}'`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from orchard.core.errors import OrchardError
from orchard.train.parallel import Mesh
from orchard.train.recompute import Recompute
from orchard.train.trainer import Saving
from orchard.train.world import world
from tests.generate.conftest import make_tokenizer
from tests.train.training import run_config


def main() -> None:
    torch.set_num_threads(1)
    said: dict[str, Any] = json.loads(sys.argv[1])
    folder, tokenizer = Path(said["folder"]), make_tokenizer()
    try:
        with world(device="cpu", timeout=30) as here:
            cfg = run_config(
                folder,
                tokenizer,
                steps=said["steps"],
                micro=said.get("micro"),
                mesh=Mesh.Config(**said.get("mesh", {})),
                recompute=Recompute.Config(every=said.get("every", 0)),
                save=Saving.Config(every=4),
            )
            cfg.held_out, cfg.held_out_every = {"same": cfg.source.clone()}, 10
            run = folder / said.get("name", "run")
            trainer = cfg.build(folder=run, tokenizer=tokenizer, here=here)

            def fall(number: int, point: Any) -> None:
                if number == said.get("kill_at") and here.first:
                    os.kill(os.getpid(), signal.SIGKILL)
                if number == said.get("stop_at") and here.first:
                    os.kill(os.getpid(), signal.SIGINT)

            report = trainer.run(told=[fall])
            if here.first:
                print(json.dumps({"series": report.series, "notes": report.notes, "tokens": trainer.tokens}))
    except OrchardError as error:
        print(error.code, error.message, file=sys.stderr)
        sys.exit(3)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
