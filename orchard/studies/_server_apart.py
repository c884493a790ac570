"""A model in as many processes as it has tracks, beside the same model in one: `python -m orchard.studies._server_apart FILE`.

Every message is counted where torch sends it, not by what is measured. The model with one way through is cut by
tensor parallelism over the same processes and counted in the same way.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from orchard.core.config import BaseConfig
from orchard.core.context import Context
from orchard.core.errors import OrchardError
from orchard.core.files import write_text
from orchard.generate.engine import Engine
from orchard.generate.request import Request
from orchard.models.language import Decoder
from orchard.nn.tracks_apart import keep_tracks
from orchard.studies._afm_text import tokenizer
from orchard.train.parallel import Mesh, spread
from orchard.train.world import world
from orchard.weights.safetensors import SafetensorsFile, write_safetensors

WAIT = 240.0
TASK = "task.json"
COUNTED = ("one", "deep")
"""Models of which nothing but messages is of interest."""
SPEAKING = ("reduce", "gather", "scatter", "all_to_all", "alltoall", "broadcast", "send", "recv")
"""What torch's operations that send something have in their names; others of the kind wait, or wrap what came."""


class ProcessesFailed(OrchardError):
    """The processes of a study did not come to an end."""

    code = "study-processes"


@dataclass(frozen=True)
class Found:
    """What processes found, the worst of all of them."""

    scores: dict[str, float]
    """Model → how far scores of several processes are from those of one, at most."""
    slopes: dict[str, float]
    """Model → the same for gradients, for each parameter as a share of its largest."""
    answers: dict[str, int]
    """Model → answers that differ."""
    messages: dict[str, int]
    """Model → sums over processes for one forward pass."""
    stores: dict[str, float]
    """Model → the share of keys and values that a process keeps."""


def measured(models: dict[str, Decoder], ids: Tensor, processes: int, answer: int) -> Found:
    """Run models in several processes. All have tracks but `one`, which is cut by tensor parallelism."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name, model in models.items():
            write_text(folder / f"{name}.json", json.dumps(model.config.to_dict()))
            write_safetensors(folder / f"{name}.safetensors", {k: v.cpu() for k, v in model.state_dict().items()}, {})
        task = {"models": list(models), "ids": ids.tolist(), "answer": answer}
        write_text(folder / TASK, json.dumps(task))
        _start(folder, processes)
        each = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]

    def worst(what: str) -> dict[str, Any]:
        return {name: max(one[name][what] for one in each) for name in models if what in each[0][name]}

    return Found(worst("scores"), worst("slopes"), worst("answers"), worst("messages"), worst("stores"))


def _start(folder: Path, size: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    given["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", __spec__.name, str(folder)]
    running = [
        subprocess.Popen(
            command,
            env={**given, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=WAIT)[1] for process in running]
    except subprocess.TimeoutExpired as error:
        raise ProcessesFailed(f"{size} processes were not done after {WAIT:g} s", hint="run it again") from error
    finally:
        for process in running:
            process.kill()
    for rank, process in enumerate(running):
        if process.returncode:
            raise ProcessesFailed(f"process {rank} of {size} failed: {said[rank][-600:]}", hint="see what it says")


# In each process ----------------------------------------------------------------------------------------------------------


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    task = json.loads((folder / TASK).read_text())
    ids = torch.tensor(task["ids"])
    with world(device="cpu", timeout=WAIT) as here:
        found: dict[str, dict[str, float]] = {}
        for name in task["models"]:
            model = _loaded(folder, name)
            if name == "one":
                spread(model, Mesh.Config(tensor=here.size).build(here=here))
            else:
                keep_tracks(model)
            found[name] = {"messages": _messages(model, ids)}
            if name not in COUNTED:
                found[name] |= _compared(_loaded(folder, name), model, ids, task["answer"])
        write_text(folder / f"{here.rank}.json", json.dumps(found))


def _loaded(folder: Path, name: str) -> Decoder:
    tree: Any = BaseConfig.from_dict(json.loads((folder / f"{name}.json").read_text()))
    with torch.device("meta"):
        model: Decoder = tree.build()
    with SafetensorsFile.open(folder / f"{name}.safetensors") as file:
        state = {key: file.read(key).clone() for key in model.state_dict()}
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(True)


def _compared(whole: Decoder, model: Decoder, ids: Tensor, answer: int) -> dict[str, float]:
    scores = [one(ids) for one in (whole, model)]
    for each in scores:
        each.float().log_softmax(-1)[..., :-1, :].gather(-1, ids[:, 1:, None]).sum().backward()
    wanted = {name: parameter.grad for name, parameter in whole.named_parameters()}
    slopes = [_off(parameter.grad, wanted[name]) for name, parameter in model.named_parameters()]
    sizes = [one.cache(batch=1, length=ids.shape[1]).nbytes for one in (whole, model)]
    differ = 0
    for row in ids[:2, : ids.shape[1] // 2].tolist():
        answers = [_answer(one, row, answer) for one in (whole, model)]
        differ += answers[0] != answers[1]
    return {
        "scores": float((scores[0] - scores[1]).detach().abs().max()),
        "slopes": max(slopes),
        "answers": differ,
        "stores": sizes[1] / sizes[0],
    }


def _off(found: Tensor | None, wanted: Tensor | None) -> float:
    """How far a gradient is off, as a share of the largest number in it."""
    if found is None or wanted is None:
        return 0.0 if found is wanted else float("inf")
    largest = float(wanted.abs().max())
    return float((found - wanted).abs().max()) / largest if largest else float(found.abs().max())


def _answer(model: Decoder, prompt: list[int], tokens: int) -> tuple[int, ...]:
    """The likeliest tokens, by the engine: every process runs one, and all of them choose the same."""
    return Engine(model, tokenizer()).answer([Request(ids=tuple(prompt), max_tokens=tokens)])[0].ids


def _messages(model: Decoder, ids: Tensor) -> int:
    """Messages of one forward pass."""
    with torch.no_grad(), _Counted() as counted:
        model(ids, Context.whole(ids))
    return counted.messages


class _Counted(TorchDispatchMode):
    """Sees every operation that torch is asked for, and counts those that speak to other processes."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it asks again for what it is made of
        self.messages += "c10d" in func.namespace and any(word in func.__name__ for word in SPEAKING)
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
