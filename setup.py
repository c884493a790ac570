"""Builds the native kernels where a C++ compiler is at hand; everything else about the package is in pyproject.toml.

One shared library with a plain C interface, loaded by ctypes. Files whose names end in an instruction set are compiled
for it and only called where the processor has it. Without a compiler the package installs all the same and runs on torch.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SOURCES = Path("orchard/ops/kernels/native")
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
]


def flags_of(source: Path) -> list[str] | None:
    """The extra flags of a file; None: it is not compiled here."""
    for ending, flags in INSTRUCTIONS.items():
        if source.stem.endswith(ending):
            return flags
    return []


class BuildNative(build_ext):
    """Each file with its own flags, then one library. A failure is told and does not stop the installation."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            self._build(target)
        except Exception as error:
            target.unlink(missing_ok=True)  # one of an older source must not stay
            print(f"orchard: no native kernels ({error}); everything runs on torch instead", file=sys.stderr)

    def _build(self, target: Path) -> None:
        compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
        if compiler is None:
            raise RuntimeError("no C++ compiler found")
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        jobs = [
            (source, objects / f"{source.stem}.o", extra)
            for source in sorted((ROOT / SOURCES).glob("*.cpp"))
            if (extra := flags_of(source)) is not None
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(
                pool.map(
                    lambda job: self.spawn([compiler, *COMMON, *job[2], "-c", str(job[0]), "-o", str(job[1])]), jobs
                )
            )
        shared = ["-dynamiclib"] if sys.platform == "darwin" else ["-shared"]
        fresh = target.with_suffix(f".{os.getpid()}.tmp")
        self.spawn([compiler, *shared, "-pthread", *(str(job[1]) for job in jobs), "-o", str(fresh)])
        fresh.replace(target)

    def get_ext_filename(self, fullname: str) -> str:
        """No tag of a Python version: the library does not use Python's own interface."""
        return str(Path(*fullname.split("."))) + (".dylib" if sys.platform == "darwin" else ".so")


setup(ext_modules=[Extension("orchard.ops.kernels.native.engine", sources=[])], cmdclass={"build_ext": BuildNative})
