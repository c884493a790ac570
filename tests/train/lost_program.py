"""One of two processes, one of which ends in some way in the middle of the run: `python -m tests.train.lost_program HOW`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch

from orchard.core.errors import OrchardError
from orchard.train.parallel import Mesh
from orchard.train.parallel_sums import gathered, same_everywhere, total
from orchard.train.world import World, world


def middle(here: World, how: str) -> None:
    """Steps that never end by themselves; in the third, one of the processes goes."""
    mesh = Mesh.Config().build(here=here)
    gone = 0 if how.startswith("first") else 1
    for step in range(1000):
        if step == 3 and here.rank == gone:
            if how.endswith("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            if how.endswith("raises"):
                raise ValueError("the third batch is bad")
            if how == "hangs":
                time.sleep(12)
                os._exit(0)  # nobody waits for it any more
        total(torch.ones(3), mesh)


def main(how: str) -> None:
    torch.set_num_threads(1)
    began = time.monotonic()
    said: dict[str, object]
    try:
        with world(device="cpu", timeout=5 if how == "hangs" else 30) as here:
            if how == "told differently":
                same_everywhere({"seed": here.rank}, here, what="the seed")
            elif how == "well":
                said = {"notes": gathered({"rank": here.rank, "text": "é" * (here.rank + 1)}, here)}
                same_everywhere(Mesh.Config(tensor=2), here)
            else:
                middle(here, how)
    except OrchardError as error:
        said = {"error": type(error).__name__, **error.to_dict(), "ranks": getattr(error, "ranks", None)}
    except ValueError as error:
        said = {"error": "ValueError", "message": str(error)}
    sys.stdout.write(json.dumps({**said, "took": time.monotonic() - began}))


if __name__ == "__main__":
    main(sys.argv[1])
