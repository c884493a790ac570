"""The engines that are compared, and the Python environments that hold them.

llama-cpp-python and transformers are no dependencies of Orchard. `make bench` puts them into `.venv-peers`; any other
environment can be named. For each package the first environment that has it is taken, this one last.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchard.core.errors import UsageError
from orchard.core.machine import CHECKOUT

PACKAGES = {"llama.cpp": ("llama_cpp", "llama_cpp_python"), "transformers": ("transformers", "transformers")}
OWN, LLAMA, TRANSFORMERS = "orchard", "llama.cpp", "transformers"
ENVIRONMENT = Path(".venv-peers") / "bin" / "python"
# Importing for real would cost seconds; a package that is there but broken shows itself as a worker that fails.
_ASK = (
    "import importlib.util as u, importlib.metadata as m, json, sys\n"
    "print(json.dumps({i: m.version(d) for i, d in json.loads(sys.argv[1]) if u.find_spec(i)"
    " and (i != 'transformers' or u.find_spec('torch'))}))"
)

# Each gets its arguments as JSON and prints a line when the first token is there.
START = {
    OWN: (
        "import json, sys; options = json.loads(sys.argv[1])\n"
        "import orchard\n"
        "answer = orchard.load(options['model']).generate(options['ids'], max_tokens=1)\n"
        "print(answer.usage.output, flush=True)"
    ),
    LLAMA: (
        "import json, sys; options = json.loads(sys.argv[1])\n"
        "from llama_cpp import Llama\n"
        "model = Llama(options['path'], n_ctx=512, n_threads=options['threads'], verbose=False)\n"
        "model.eval(options['ids'])\n"
        "print(model.sample(temp=0.0), flush=True)"
    ),
    TRANSFORMERS: (
        "import json, sys; options = json.loads(sys.argv[1])\n"
        "import torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "torch.set_num_threads(options['threads'])\n"
        "model = AutoModelForCausalLM.from_pretrained(options['folder'], dtype=torch.bfloat16)\n"
        "with torch.inference_mode():\n"
        "    print(model(torch.tensor([options['ids']]), logits_to_keep=1).logits.argmax().item(), flush=True)"
    ),
}


@dataclass(frozen=True)
class Subject:
    """One engine in one setting. Settings of an engine compete: each figure takes the best of them."""

    engine: str
    setting: str
    python: str
    module: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    slow: bool = False

    @property
    def name(self) -> str:
        return f"{self.engine} ({self.setting})" if self.setting else self.engine


@dataclass(frozen=True)
class Found:
    """Where a peer is: its interpreter and version, or why there is none."""

    python: str = ""
    version: str = ""
    missing: str = ""


def find(asked: Sequence[str]) -> dict[str, Found]:
    """For each peer the environment to run it in. A path that is named and has neither is refused."""
    pythons = [_given(path) for path in asked]
    for path in dict.fromkeys((Path.cwd() / ENVIRONMENT, CHECKOUT / ENVIRONMENT)):
        if path.is_file() and not asked:
            pythons.append(str(path))
    holds = {python: _packages(python) for python in dict.fromkeys([*pythons, sys.executable])}
    for python in pythons[: len(asked)]:
        if not holds[python]:
            raise UsageError(
                f"{python} has neither llama-cpp-python nor transformers with torch",
                hint="`make bench` sets up an environment with both",
            )
    found = {}
    for engine, (module, package) in PACKAGES.items():
        place = next((python for python, has in holds.items() if module in has), None)
        if place is None:
            name = package.replace("_", "-")
            found[engine] = Found(
                missing=f"no {name} here (`make bench` installs it, --peers-python names another place)"
            )
        else:
            found[engine] = Found(python=place, version=holds[place][module])
    return found


def _given(path: str) -> str:
    found = shutil.which(path)
    if found is None:
        raise UsageError(
            f"there is no program {path}",
            hint="--peers-python takes a Python interpreter, such as .venv-peers/bin/python",
        )
    return found


def _packages(python: str) -> dict[str, str]:
    """The peers that an environment has, with their versions."""
    command = [python, "-c", _ASK, json.dumps(list(PACKAGES.values()))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment())
        versions: dict[str, str] = json.loads(done.stdout) if done.returncode == 0 else {}
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return versions


def environment() -> dict[str, str]:
    """What workers inherit: no thread counts (each engine is told), no network, bytecode kept as on anybody's machine."""
    drop = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONDONTWRITEBYTECODE", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    kept = {name: value for name, value in os.environ.items() if name not in drop}
    return kept | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}


def subjects(found: dict[str, Found], *, model: str, path: Path, folder: Path, threads: int) -> list[Subject]:
    """Everything that decodes `model`: Orchard, and the peers that are there."""
    result = [Subject(OWN, "", sys.executable, "own_engine", {"model": model, "via": "runner"})]
    if found[LLAMA].python:
        for flash in ("on", "off"):
            options = {"path": str(path), "threads": threads, "flash_attention": flash, "via": "batch"}
            result.append(Subject(LLAMA, f"flash attention {flash}", found[LLAMA].python, "peer_llama", options))
    if found[TRANSFORMERS].python:
        options = {"path": str(folder), "threads": threads}
        result.append(Subject(TRANSFORMERS, "", found[TRANSFORMERS].python, "peer_transformers", options, slow=True))
    return result


def other_ways(found: dict[str, Found], *, model: str, path: Path, threads: int) -> list[Subject]:
    """The same engines through what their users call: `Model.generate`, and `Llama.eval`."""
    result = [Subject("orchard generate", "", sys.executable, "own_engine", {"model": model, "via": "generate"})]
    if found[LLAMA].python:
        options = {"path": str(path), "threads": threads, "flash_attention": "auto", "via": "eval"}
        result.append(Subject(LLAMA, "Llama.eval", found[LLAMA].python, "peer_llama", options))
    return result
