"""What others make of the same model: llama.cpp's Q2_K and Q4_0, torchao's two bits. Each is a subject that gives scores.

llama.cpp quantises the original (as an f16 GGUF file of ours) and computes by itself, in its own process. torchao quantises the
linear maps, and the values it would compute with are put into our modules; its kernels do not matter for quality. Both begin from
the same weights as everything else here. A peer that cannot run is left out with the reason.
"""

from __future__ import annotations

import copy
import math
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchard.bench import peers, spawn
from orchard.bench.ondevice_claims import TORCHAO
from orchard.bench.ondevice_quality import Modules, Rows, compare
from orchard.bench.ondevice_size import Original
from orchard.core.errors import OrchardError
from orchard.core.machine import CHECKOUT
from orchard.core.report import Value
from orchard.nn.formats import Int4, Plain
from orchard.nn.linear import Linear
from orchard.nn.tensors import dense_tensor, fill, tensor_names

GROUP = 64
LLAMA_TYPES = ("Q2_K", "Q2_0", "Q4_0")
EMBEDDING_LEFT = f"{TORCHAO}, embedding left"
EMBEDDING_4 = f"{TORCHAO}, embedding at 4 bits"


@dataclass
class Peer:
    """A subject, and what is known of it: values beside those that its scores give."""

    name: str
    subject: Any
    values: dict[str, Value]
    note: str = ""


@dataclass(frozen=True)
class Ground:
    """What all peers begin from. `probe`: a few rows to choose settings by."""

    original: Original
    reference: Any
    probe: Rows
    work: Path
    threads: int


class PeerFailed(OrchardError):
    """A peer that began well and then gave no scores."""

    code = "peer-failed"

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why, hint="the rest is measured without it")
        self.name = name


class LlamaFile:
    """A GGUF file in llama.cpp. Scores of the rows that are asked for together lie in one file meanwhile."""

    def __init__(self, name: str, python: str, path: Path, ground: Ground) -> None:
        self.name, self.python, self.path, self.threads = name, python, path, ground.threads
        self.scratch = ground.work / f"{path.stem}.scores"

    def scores(self, rows: Rows) -> Iterator[np.ndarray | Tensor]:
        options = {
            "path": str(self.path),
            "rows": [row.tolist() for row in rows],
            "to": str(self.scratch),
            "threads": self.threads,
        }
        try:
            answer = spawn.ask(self.python, "peer_quantise", {"task": "scores", "options": options}, limit=3600)
        except spawn.WorkerFailed as error:
            raise PeerFailed(self.name, str(error)) from error
        table = np.fromfile(self.scratch, np.float32).reshape(-1, answer["result"]["vocab"])
        self.scratch.unlink()
        at = 0
        for row in rows:
            yield table[at : at + len(row)]
            at += len(row)


def llama_peers(python: str, ground: Ground, missing: list[str]) -> list[Peer]:
    """Quantised files of the original, made by llama.cpp. A type that it cannot make or run is told in `missing`. The file that
    they are made from is compared too, on the probe: what llama.cpp and this script lose by themselves."""
    from orchard.session.export import export

    dense = ground.work / f"original-{ground.original.bytes}-f16.gguf"  # a folder that is kept may hold another model's
    if not dense.is_file():
        export(ground.original.path, dense, format="gguf", type="f16")
    control = LlamaFile("llama.cpp f16", python, dense, ground)
    lost = compare({"f16": control}, Modules(ground.reference), ground.probe)["f16"].kl
    found = []
    for kind in LLAMA_TYPES:
        try:
            found.append(_llama_peer(python, kind, dense, ground))
        except (spawn.WorkerFailed, PeerFailed) as error:
            missing.append(f"llama.cpp {kind}: {error}")
    if found:
        note = f"a control, on {_places(ground.probe)}: what is lost before anything is quantised"
        found[0].values["llama.cpp f16 KL"] = Value(lost, unit="nats", note=note)
    return found


def _llama_peer(python: str, kind: str, dense: Path, ground: Ground) -> Peer:
    path = ground.work / f"original-{ground.original.bytes}-{kind}.gguf"
    options = {"from": str(dense), "to": str(path), "type": kind, "threads": ground.threads}
    made = spawn.ask(python, "peer_quantise", {"task": "quantise", "options": options}, limit=3600)["result"]
    name = f"llama.cpp {kind}"
    size, types = path.stat().st_size, _types(path)
    values = {
        f"{name} file": Value(size, unit="bytes", note=types),
        f"{name} bits per weight": Value(8 * size / ground.original.dense, note="all of the file, as for ours"),
    }
    subject = LlamaFile(name, python, path, ground)
    next(subject.scores([np.arange(8)]))  # what it cannot read is said now, not after an hour
    note = f"{name}: llama-cpp-python {made['version']}, its defaults, no importance matrix; {types}"
    return Peer(name, subject, values, note)


def torchao_peers(python: str, ground: Ground, embedding: Any) -> list[Peer]:
    """Our modules with torchao's values in every linear map, and the embedding once as it was, once packed by `embedding`. Of its
    ways to choose scales the one that comes closest on the probe is kept: the least error in weights may be far off in scores."""
    folder = ground.work / "torchao"
    folder.mkdir(exist_ok=True)
    linears = _linears(ground.reference)
    for ours, place in linears.items():
        np.save(folder / f"{ours}.npy", dense_tensor(*place).numpy())
    options = {"folder": str(folder), "group": GROUP, "threads": ground.threads}
    made = spawn.ask(python, "peer_torchao", {"task": "dequantise", "options": options}, limit=3600)["result"]
    ways = {way: _with_values(ground.reference, folder / way) for way in made["errors"]}
    shutil.rmtree(folder)
    modules = {way: Modules(decoder) for way, decoder in ways.items()}
    probed = compare(modules, Modules(ground.reference), ground.probe)
    best = min(ways, key=lambda way: probed[way].kl)
    left, four = ways[best], copy.deepcopy(ways[best])
    table: Any
    table, name = tensor_names(four)["embedding.weight"]
    format = (Int4.Config(group=GROUP) if isinstance(embedding, Plain.Config | None) else embedding).build()
    values = format.unpack(format.pack(dense_tensor(table, name)), torch.float32)
    fill(table, name, "embedding.weight", values, torch.float32, "cpu")
    weights, entries = sum(math.prod(place[0].shape) for place in linears.values()), math.prod(table.shape)
    codes = weights * (2 + 16 / GROUP + (8 / GROUP if best == "asymmetric" else 0))  # zero points have eight bits
    others = 16 * (ground.original.dense - weights - entries)
    tables = {EMBEDDING_LEFT: 16 * entries, EMBEDDING_4: 8 * format.nbytes(tuple(table.shape), torch.float16)}
    tried = ", ".join(f"{way} {probed[way].kl:.2f} nats" for way in ways)
    found = []
    for label, decoder in ((EMBEDDING_LEFT, left), (EMBEDDING_4, four)):
        bits = (codes + others + tables[label]) / ground.original.dense
        told = Value(bits, note="counted: 2-bit codes, half-precision scales, no file and no tokenizer")
        note = f"{label}: torchao {made['version']}, {best}, groups of {GROUP}; on {_places(ground.probe)}: {tried}"
        found.append(Peer(label, Modules(decoder), {f"{label} bits per weight": told}, note))
    found[0].values[f"{TORCHAO} weight error"] = Value(
        made["errors"][best], note=f"squared, over squared weights; {best}"
    )
    found[0].note += "".join(f"; {way} did not work: {why}" for way, why in made["failed"].items())
    return found


def _linears(decoder: Any) -> dict[str, tuple[Any, str]]:
    """Every linear map of the layers; not the head."""
    return {
        ours: place
        for ours, place in tensor_names(decoder).items()
        if isinstance(place[0], Linear) and place[1] == "weight" and not ours.startswith("head.")
    }


def _with_values(decoder: Any, folder: Path) -> Any:
    """A copy of modules with the matrices of a folder in place of theirs."""
    made = copy.deepcopy(decoder)
    for ours, place in _linears(made).items():
        values = torch.from_numpy(np.array(np.lib.format.open_memmap(folder / f"{ours}.npy", mode="r")))
        fill(*place, ours, values, torch.float32, "cpu")
    return made


def _places(rows: Rows) -> str:
    return f"{sum(len(row) - 1 for row in rows):,} tokens"


def python_with(module: str, asked: Sequence[str]) -> str | None:
    """The first environment that has a module: those asked for, the peers', this one."""
    usual = [str(path) for path in (Path.cwd() / peers.ENVIRONMENT, CHECKOUT / peers.ENVIRONMENT) if path.is_file()]
    for python in dict.fromkeys([*asked, *usual, sys.executable]):
        look = f"import importlib.util as u; raise SystemExit(u.find_spec({module!r}) is None)"
        with suppress(OSError, subprocess.SubprocessError):
            command = [python, "-c", look]
            if (
                subprocess.run(
                    command, capture_output=True, timeout=60, check=False, env=peers.environment()
                ).returncode
                == 0
            ):
                return python
    return None


def found_peers(asked: Sequence[str], ground: Ground, embedding: Any) -> tuple[list[Peer], list[str]]:
    """All peers that run here, and why others do not. `embedding`: the format that ours keeps its embedding in."""
    found: list[Peer] = []
    missing: list[str] = []
    ways: tuple[tuple[str, str, Any], ...] = (
        ("llama.cpp", "llama_cpp", lambda python: llama_peers(python, ground, missing)),
        (TORCHAO, "torchao", lambda python: torchao_peers(python, ground, embedding)),
    )
    for name, module, make in ways:
        python = python_with(module, asked)
        if python is None:
            missing.append(f"{name}: no environment here has {module}; name one with --peers-python")
            continue
        try:
            found += make(python)
        except (OrchardError, OSError) as error:
            missing.append(f"{name}: {error}")
    return found, missing


def _types(path: Path) -> str:
    """What a file's weights are kept as, by share of them: a type whose blocks do not fit the rows falls back to another."""
    from orchard.weights.gguf.reader import GGUFFile

    counts: Counter[str] = Counter()
    try:
        with GGUFFile.open(path) as file:
            for info in file.tensors.values():
                counts[info.type.name] += math.prod(info.shape)
    except OrchardError:
        return "a type that Orchard does not read"
    total = counts.total()
    return ", ".join(f"{kind} {count / total:.1%}" for kind, count in counts.most_common() if count / total >= 0.001)
