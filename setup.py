"""Builds the native kernels where a C++ compiler is at hand; everything else about the package is in pyproject.toml.

One shared library with a plain C interface, loaded by ctypes. Files whose names end in an instruction set are compiled
for it and only called where the processor has it. Without a compiler the package installs all the same and runs on torch.

Objects are kept in `build/native` under a name made of everything that goes into them, so a second build compiles only what
changed: `pip install -e .` and `python setup.py build_ext --inplace` share them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
NAME = "orchard.ops.kernels.native.engine"
SOURCES = ROOT / "orchard" / "ops" / "kernels" / "native"
OBJECTS = ROOT / "build" / "native"
X86, ARM = platform.machine().lower() in ("x86_64", "amd64"), platform.machine().lower() in ("aarch64", "arm64")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
# Ending of a file's name → the flags it is compiled with, or None where this machine's family does not have it.
INSTRUCTIONS = {
    "_avx2": AVX2 if X86 else None,
    "_avx512": AVX512 if X86 else None,
    "_avx512bf16": [*AVX512, "-mavx512bf16"] if X86 else None,
    "_amx": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"] if X86 else None,
    "_neon": [] if ARM and sys.platform == "darwin" else ["-march=armv8.2-a+dotprod"] if ARM else None,
}
COMMON = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-pthread",
    "-fno-math-errno",
    # A product and a sum are two roundings wherever they are written as two: compilers that join them here and not there would
    # give a row other bits alone than among others. (Kernels that mean one rounding say so.)
    "-ffp-contract=off",
]


def flags_of(source: Path) -> list[str] | None:
    """The extra flags of a file; None: it is not compiled here."""
    for ending, flags in INSTRUCTIONS.items():
        if source.stem.endswith(ending):
            return flags
    return []


def compiler() -> list[str]:
    """`CXX`, which may have arguments of its own, or the first compiler there is."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = named or [name for name in ("c++", "g++", "clang++") if shutil.which(name)][:1]
    if not found:
        raise RuntimeError("no C++ compiler found: install g++ 11 or clang 12, or newer")
    if not shutil.which(found[0]):
        raise RuntimeError(f"the C++ compiler {found[0]!r} that CXX names is not there")
    return found


def run(command: list[str]) -> str:
    """The output of a command. What a compiler has to say is shown, and its failure ends the build."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.stderr:
        sys.stderr.write(done.stderr)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed with code {done.returncode}: {shlex.join(command)}")
    return done.stdout


def read_by(source: Path) -> list[Path]:
    """A file and all headers of ours that it includes, directly or not."""
    files = [source]
    for path in files:  # grows on the way
        included = (SOURCES / name for name in re.findall(r'^\s*#\s*include "(.+)"', path.read_text(), re.M))
        files += [header for header in included if header not in files and header.is_file()]
    return files


def compile_all(tool: list[str]) -> list[Path]:
    """The objects of all files that this machine's family can run; only those that are not there yet are compiled."""
    OBJECTS.mkdir(parents=True, exist_ok=True)
    version = run([*tool, "--version"])
    jobs: list[tuple[Path, list[str]]] = []
    for source in sorted(SOURCES.glob("*.cpp")):
        flags = flags_of(source)
        if flags is None:
            continue
        command = [*tool, *COMMON, *flags]
        facts = repr((command, version, platform.machine())).encode() + b"".join(
            path.read_bytes() for path in read_by(source)
        )
        made = OBJECTS / f"{source.stem}-{hashlib.sha256(facts).hexdigest()[:16]}.o"
        jobs.append((made, [*command, "-c", str(source)]))
    missing = [job for job in jobs if not job[0].is_file()]
    missing.sort(key=lambda job: -len(job[1]))  # the more instruction sets, the longer it takes: those first
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pool = ThreadPoolExecutor(cores)
    try:
        list(pool.map(lambda job: write(job[0], job[1]), missing))
    finally:
        pool.shutdown(cancel_futures=True)
    objects = [job[0] for job in jobs]
    for old in set(OBJECTS.glob("*.o")) - set(objects):
        old.unlink(missing_ok=True)
    return objects


def write(target: Path, command: list[str]) -> None:
    """Run a command that makes a file: it is there whole or not at all, and never changes under a program that uses it."""
    fresh = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        run([*command, "-o", str(fresh)])
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)


class BuildNative(build_ext):
    """Each file with its own flags, then one library. A failure is told and does not stop the installation."""

    def run(self) -> None:
        for ext in self.extensions:
            self.build_extension(ext)

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            tool, shared = compiler(), "-dynamiclib" if sys.platform == "darwin" else "-shared"
            write(target, [*tool, shared, "-pthread", *map(str, compile_all(tool))])
        except BaseException as error:
            target.unlink(missing_ok=True)  # one of an older source must not stay
            if not isinstance(error, Exception):
                raise
            print(f"orchard: no native kernels ({error}); everything runs on torch instead", file=sys.stderr)

    def get_ext_filename(self, fullname: str) -> str:
        """No tag of a Python version: the library does not use Python's own interface."""
        return str(Path(*fullname.split("."))) + (".dylib" if sys.platform == "darwin" else ".so")

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).is_file()]

    def get_output_mapping(self) -> dict[str, str]:
        return {built: kept for built, kept in super().get_output_mapping().items() if Path(kept).is_file()}


class AnyPython(bdist_wheel):
    """A wheel for this platform and every Python 3, because the library is for the platform only."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if sys.platform == "win32":
    print("orchard: there are no native kernels for Windows yet; everything runs on torch", file=sys.stderr)
    setup()
else:
    extension = Extension(NAME, sources=[], optional=True)
    setup(ext_modules=[extension], cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPython})
