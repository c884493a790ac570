"""`orchard doctor`: what this machine offers, what is missing, and the command that mends it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import typer

from orchard.cli.common import human_bytes, print_json
from orchard.cli.options import JsonOption

# import name → what pip calls it; a test holds both tables against pyproject.toml
REQUIRED = {
    "torch": "torch",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "huggingface_hub": "huggingface-hub",
    "filelock": "filelock",
    "jinja2": "jinja2",
    "pydantic": "pydantic",
    "llguidance": "llguidance",
    "numpy": "numpy",
    "PIL": "pillow",
    "rich": "rich",
    "typer": "typer",
}
EXTRAS = {
    "serve": {
        "fastapi": "fastapi",
        "uvicorn": "uvicorn",
        "httptools": "httptools",
        "prometheus_client": "prometheus-client",
    },
    "data": {"pyarrow": "pyarrow"},
    "evals": {"sklearn": "scikit-learn", "scipy": "scipy"},
    "cluster": {"ray": "ray"},
}
FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm")


def doctor(as_json: JsonOption = False) -> None:
    """Show what this machine offers and what is missing. Exit code 1 when something needed is missing."""
    facts = examine()
    if as_json:
        print_json(facts)
    else:
        for label, text in _lines(facts):
            print(f"{label:<10} {text}")
    if facts["problems"]:
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """Every fact as plain data; `problems` holds what keeps Orchard from working, each with its fix."""
    missing = [name for module, name in REQUIRED.items() if importlib.util.find_spec(module) is None]
    problems = [{"what": f"{name} is not installed", "fix": f"{_pip()} install {name}"} for name in missing]
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": f"{platform.system().lower()} {platform.machine()}",
        "cpu": _cpu(),
        "torch": _torch(problems) if "torch" not in missing else None,
        "native": _native(),
        "memory": _memory(),
        "library": _library(problems),
        "extras": {extra: _extra(extra, modules) for extra, modules in EXTRAS.items()},
        "problems": problems,
    }
    return facts


def _cpu() -> dict[str, Any]:
    name, flags = platform.processor() or platform.machine(), set()
    with_flags = Path("/proc/cpuinfo")
    if with_flags.is_file():
        for line in with_flags.read_text(errors="replace").splitlines():
            key, _, value = (part.strip() for part in line.partition(":"))
            if key == "model name":
                name = value
            elif key in ("flags", "Features"):
                flags = set(value.split())
                break
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"name": name, "cores": usable, "flags": [flag for flag in FLAGS if flag in flags]}


def _torch(problems: list[dict[str, str]]) -> dict[str, Any] | None:
    from orchard.cli.process import import_torch

    try:
        import_torch()
        import torch
    except Exception as error:  # a broken install fails in many ways, and this verb exists to say so
        fix = f"{_pip()} install --force-reinstall torch"
        problems.append({"what": f"torch cannot be imported: {error}", "fix": fix})
        return None
    device, name = "cpu", ""
    if torch.cuda.is_available():
        device, name = "cuda", torch.cuda.get_device_name(0)
    elif torch.backends.mps.is_available():
        device, name = "mps", "Apple GPU"
    return {
        "version": torch.__version__,
        "device": device,
        "device_name": name,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _native() -> dict[str, Any]:
    """Which kernels the native engine runs here; without them, why, and the command that brings them."""
    from orchard.ops.kernels.native import library, why_not

    reason, found = why_not(), library()
    level, kernels = None, {}
    if found is not None:
        found.orchard_kernel_names.restype = found.orchard_attention_name.restype = ctypes.c_char_p
        level = int(found.orchard_cpu_level())
        kernels = {
            "rows": found.orchard_kernel_names(-1, 0).decode(),
            "matrix": found.orchard_kernel_names(-1, 1).decode(),
            "attention": found.orchard_attention_name(-1).decode(),
        }
    return {"kernels": kernels, "level": level, "missing": reason, "fix": _native_fix(reason)}


def _native_fix(reason: str) -> str:
    """The command that brings the kernels; empty where nothing is missing, or nothing can be done about it."""
    from orchard.ops.kernels.native import NOT_BUILT

    if not reason or sys.platform == "win32":
        return ""
    for name, hides in (("ORCHARD_NATIVE", "0"), ("ORCHARD_NATIVE_LIBRARY", None)):
        value = os.environ.get(name)
        if value and hides in (value, None):
            return f"unset {name}"
    again = f"{_pip()} install --force-reinstall --no-deps {_package()}"
    return f"install a C++ compiler (g++ or clang++), then {again}" if reason == NOT_BUILT else again


def _memory() -> dict[str, int | None]:
    info = Path("/proc/meminfo")
    if info.is_file():
        rows = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        total, free = (int(rows[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
        return {"total": total, "free": free}
    if sys.platform == "win32":
        return {"total": None, "free": None}
    return {"total": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "free": None}


def _library(problems: list[dict[str, str]]) -> dict[str, Any]:
    from orchard.core.errors import OrchardError
    from orchard.session.prepare import packed_bytes
    from orchard.weights.library import DEFAULT_MODEL, OTHER_HOME, Library

    library = Library()
    entries, free = [], None
    try:
        entries = library.list()
        existing = next(path for path in (library.home, *library.home.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if not os.access(existing, os.W_OK) and not entries:  # models that are there can be used all the same
            problems.append({"what": f"{existing} cannot be written", "fix": OTHER_HOME})
    except (OrchardError, OSError) as error:
        problems.append({"what": str(error), "fix": OTHER_HOME})
    return {
        "home": str(library.home),
        "disk_free": free,
        "models": [entry.name for entry in entries if not entry.damaged],
        "damaged": [entry.name for entry in entries if entry.damaged],
        "packed_bytes": packed_bytes(),
        "leftover_bytes": library.leftovers(),
        "unfinished": library.unfinished(),
        "fix": "" if entries else f"orchard pull {DEFAULT_MODEL}",
    }


def _pip() -> str:
    """The pip of this Python, which need not be the first one on the path."""
    return f"{shlex.quote(sys.executable)} -m pip"


def _extra(extra: str, modules: dict[str, str]) -> dict[str, Any]:
    missing = [name for module, name in modules.items() if importlib.util.find_spec(module) is None]
    return {"missing": missing, "fix": f"{_pip()} install {_package(extra)}" if missing else ""}


def _package(extra: str = "") -> str:
    """What pip is to install: this checkout, or Orchard by its name."""
    checkout, wanted = Path(__file__).resolve().parents[2], f"[{extra}]" if extra else ""
    return f"-e '{checkout}{wanted}'" if (checkout / "pyproject.toml").is_file() else f"'orchard{wanted}'"


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    cpu, torch, memory, library = facts["cpu"], facts["torch"], facts["memory"], facts["library"]
    lines = [("python", f"{facts['python']}, {facts['platform']}")]
    if torch:
        lines.append(("torch", torch["version"]))
        lines.append(("device", f"{torch['device']} {torch['device_name']}".strip()))
        lines.append(("threads", f"{torch['threads']} of {cpu['cores']} usable cores"))
    fast = [flag for flag in cpu["flags"] if "bf16" in flag]
    halves = f"bfloat16 in hardware ({', '.join(fast)})" if fast else "bfloat16 without hardware help"
    lines.append(("cpu", cpu["name"]))
    lines.append(("dtype", f"float32; {halves}"))
    lines += _native_lines(facts["native"])
    if memory["total"]:
        free = f", {human_bytes(memory['free'])} free" if memory["free"] is not None else ""
        lines.append(("memory", f"{human_bytes(memory['total'])}{free}"))
    if library["disk_free"] is not None:
        lines.append(("disk", f"{human_bytes(library['disk_free'])} free at {library['home']}"))
    lines.append(("models", ", ".join(library["models"]) or f"none yet; get one: {library['fix'] or 'orchard list'}"))
    if library["packed_bytes"]:
        lines.append(("", f"{human_bytes(library['packed_bytes'])} held by models packed for the native engine"))
    for name in library["damaged"]:
        lines.append(("", f"{name} is damaged; get it again: orchard pull {name}"))
    if library["leftover_bytes"]:
        names = ", ".join(library["unfinished"]) or "models removed"
        text = f"{human_bytes(library['leftover_bytes'])} held by unfinished work on {names}"
        lines.append(("", f"{text}; `orchard pull` goes on with it, `orchard rm` deletes it"))
    for extra, state in facts["extras"].items():
        text = f"not installed; get it: {state['fix']}" if state["missing"] else "installed"
        lines.append(("extras" if extra == next(iter(facts["extras"])) else "", f"{extra}: {text}"))
    lines += [("problem", f"{problem['what']}; mend it: {problem['fix']}") for problem in facts["problems"]]
    if not facts["problems"]:
        lines.append(("", "all that is needed is here"))
    return lines


def _native_lines(native: dict[str, Any]) -> list[tuple[str, str]]:
    kernels = native["kernels"]
    if kernels:
        many = f"matrix units {kernels['matrix']}" if kernels["matrix"] else "no matrix units"
        plain = "; this processor has no vector instructions that they know" if native["level"] == 0 else ""
        return [("kernels", f"{kernels['rows']}, {many}, attention {kernels['attention']}{plain}")]
    lost = "models run on torch, which starts and answers several times more slowly"
    lines = [("kernels", f"no native ones: {native['missing']}"), ("", lost)]
    return [*lines, ("", f"to have them: {native['fix']}")] if native["fix"] else lines
