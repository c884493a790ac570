"""Where a number came from: the machine, the versions, the commit and the command. Needs no torch.

Everything here may be published: no host name, no user name, no path of the machine.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
_CPU_INFO = Path("/proc/cpuinfo")
# What decides which kernels run: the flag as the system names it → the name people use.
_FLAGS = {
    "avx2": "avx2",
    "avx512f": "avx512",
    "avx512_vnni": "avx512-vnni",
    "avx512_bf16": "avx512-bf16",
    "amx_tile": "amx",
    "asimd": "neon",
    "sve": "sve",
}
_PACKAGES = ("orchard", "torch", "numpy", "safetensors", "tokenizers")
# A path from the root, unless it is part of an address or of a longer word.
_ABSOLUTE = re.compile(r"(?<![\w.:/~\\])(?:[A-Za-z]:\\|~?/)(?:[^\s\"'\\/:;,=()]+[\\/])+([^\s\"'\\/:;,=()]*)")
_SECRET = re.compile(r"(?i)^(--?[\w-]*(?:key|token|secret|password)(?!s\b)[\w-]*)(?:=(.*))?$")
"""Options that hold one. Counts are none: `--tokens 20M`, `--max-tokens 64`."""


def hardware() -> dict[str, Any]:
    """CPU, cores this process may use, memory, vector flags, accelerator, operating system and Python."""
    return {**_still_facts(), "accelerator": _accelerator()}


@cache
def _still_facts() -> dict[str, Any]:
    name, flags = _cpu()
    return {
        "cpu": name,
        "cores": _cores(),
        "memory_bytes": _memory(),
        "flags": flags,
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Versions of Orchard and of those packages that this process has loaded."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


def commit(folder: Path = CHECKOUT) -> str | None:
    """The commit of Orchard's own checkout, `…+changes` when files differ from it; None outside a checkout. ORCHARD_COMMIT wins.

    Results and cards are left out of that comparison: a run writes them, and they change no number.
    """
    told = os.environ.get("ORCHARD_COMMIT")  # a copy of a checkout can be told what it is a copy of
    if told or not (folder / ".git").exists():  # an installed package may lie inside somebody else's repository
        return told or None
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not head:
        return None
    changed = _git(folder, "status", "--porcelain", "--", ".", ":!results", ":!docs/techniques")
    return head if changed == "" else f"{head}+changes"


def command(arguments: list[str] | None = None) -> str:
    """The command line that runs this process, without the machine's own paths and without secrets."""
    words = list(sys.orig_argv if arguments is None else arguments)
    if words and re.fullmatch(r"(?i)python[\d.]*(\.exe)?", _base(words[0])):
        words[0] = "python"
        # A console script is run as `python …/bin/orchard`: say what the person typed.
        if len(words) > 1 and "." not in _base(words[1]) and _base(words[1]) != words[1]:
            words = words[1:]
    words = [_ABSOLUTE.sub(lambda match: match.group(1) or "…", word) for word in words]
    return " ".join(map(_quoted, _without_secrets(words)))


def _without_secrets(words: list[str]) -> list[str]:
    clean, hide = [], False
    for word in words:
        match = _SECRET.match(word)
        if hide and not word.startswith("-"):
            clean.append("…")
        elif match and match.group(2) is not None:
            clean.append(f"{match.group(1)}=…")
        else:
            clean.append(word)
        hide = bool(match) and "=" not in word
    return clean


def _quoted(word: str) -> str:
    """As `shlex.quote`, but readable for a program text that has single quotes in it."""
    if "'" in word and not set(word) & set('"$`\\!'):
        return f'"{word}"'
    return word if re.fullmatch(r"[\w@%+=:,./…-]+", word) else shlex.quote(word)


def _base(word: str) -> str:
    return re.split(r"[\\/]", word)[-1]


def _cpu() -> tuple[str, list[str]]:
    name, raw = platform.processor() or platform.machine(), set[str]()
    if _CPU_INFO.exists():
        text = _CPU_INFO.read_text(errors="replace")
        model = re.search(r"(?m)^(?:model name|Model)\s*:\s*(.+)$", text)
        listed = re.search(r"(?m)^(?:flags|Features)\s*:\s*(.+)$", text)
        name = model.group(1).strip() if model else name
        raw = set(listed.group(1).split()) if listed else raw
    elif sys.platform == "darwin":
        name = _output(["sysctl", "-n", "machdep.cpu.brand_string"]) or name
        raw = {"asimd"} if platform.machine() == "arm64" else {"avx2"}
    return name, [label for flag, label in _FLAGS.items() if flag in raw]


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int | None:
    """Bytes of memory this process may use: the machine's, or the container's limit when that is smaller."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
    for place in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = Path(place).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def _accelerator() -> str | None:
    """Asked of torch only where something else has already paid for importing it."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return None
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return f"{count} x {torch.cuda.get_device_name(0)}" if count > 1 else str(torch.cuda.get_device_name(0))
    return "Apple GPU (MPS)" if torch.backends.mps.is_available() else None


def _git(folder: Path, *arguments: str) -> str | None:
    return _output(["git", "-C", str(folder), "-c", "core.fsmonitor=false", *arguments])


def _output(words: list[str]) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
