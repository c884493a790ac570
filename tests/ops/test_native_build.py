"""Building the native library, and what is said where it cannot be built or used."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from orchard.ops.kernels import native

ROOT = Path(__file__).resolve().parents[2]
KERNELS = Path("orchard", "ops", "kernels", "native")
COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
NAME = native.library_path().name
ANSWER = 'extern "C" __attribute__((visibility("default"))) int {name}() {{ return {value}; }}\n'

needs_compiler = pytest.mark.skipif(COMPILER is None or sys.platform == "win32", reason="no C++ compiler here")


# This machine --------------------------------------------------------------------------------------------------------


@needs_compiler
def test_where_there_is_a_compiler_there_are_kernels() -> None:
    """Everything passes on torch too, so a build that broke would not be noticed otherwise."""
    if native.why_not() == native.TURNED_OFF:
        pytest.skip(native.TURNED_OFF)
    assert native.library() is not None, f"{native.why_not()}. Run `make setup`."


def test_both_sides_state_the_same_number() -> None:
    source = (Path(native.__file__).parent / "abi.cpp").read_text()
    stated = re.search(r"orchard_abi\(\) \{ return (\d+); \}", source)
    assert stated is not None and int(stated[1]) == native.ABI


# The loader ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the loader looks for the library in this test."""
    path = tmp_path / NAME
    for name in ("ORCHARD_NATIVE", "ORCHARD_NATIVE_LIBRARY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(native, "library_path", lambda: path)
    return path


def build_answer(path: Path, name: str, value: int) -> None:
    source = path.with_suffix(".cpp")
    source.write_text(ANSWER.format(name=name, value=value))
    subprocess.run([str(COMPILER), "-shared", "-fPIC", str(source), "-o", str(path)], check=True, timeout=60)


def test_a_library_that_is_not_there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.library() is None and native.why_not() == native.NOT_BUILT
    monkeypatch.setenv("ORCHARD_NATIVE", "0")
    assert native.library() is None and native.why_not() == native.TURNED_OFF


def test_a_platform_without_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    assert native.library() is None and "none for this platform (win32)" in native.why_not()


def test_a_library_that_is_none(place: Path) -> None:
    place.write_bytes(b"not a library, but long enough to have a header of one" * 20)
    assert native.library() is None
    assert re.match(rf"{NAME} cannot be loaded: .+", native.why_not())


def test_a_named_library_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORCHARD_NATIVE", raising=False)
    monkeypatch.setenv("ORCHARD_NATIVE_LIBRARY", str(tmp_path / "gone.so"))
    assert native.library() is None and "gone.so, which is not there" in native.why_not()


@needs_compiler
@pytest.mark.parametrize(
    ("name", "value"), [("orchard_cpu_level", 0), ("orchard_abi", native.ABI - 1), ("orchard_abi", native.ABI + 1)]
)
def test_a_library_of_other_sources_is_left_alone(place: Path, name: str, value: int) -> None:
    build_answer(place, name, value)
    assert native.library() is None and native.why_not() == native.OLDER


@needs_compiler
def test_a_library_of_these_sources_is_loaded_once(place: Path) -> None:
    build_answer(place, "orchard_abi", native.ABI)
    found = native.library()
    assert found is not None and found is native.library() and native.why_not() == ""


# The build, on sources of two lines -----------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small package with this one's build files."""
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    folder = tmp_path / KERNELS
    folder.mkdir(parents=True)
    for path in (folder, *folder.parents[:3]):
        (path / "__init__.py").touch()
    (tmp_path / "orchard" / "py.typed").touch()
    (folder / "number.h").write_text("#define NUMBER 1\n")
    (folder / "abi.cpp").write_text('#include "number.h"\n' + ANSWER.format(name="orchard_abi", value="NUMBER"))
    (folder / "other.cpp").write_text(ANSWER.format(name="orchard_other", value=7))
    foreign = "avx2" if platform.machine().lower() in ("aarch64", "arm64") else "neon"
    (folder / f"kernels_{foreign}.cpp").write_text("#error for another family of processors\n")
    return tmp_path


def run_setup(tree: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", *(arguments or ("build_ext", "--inplace"))]
    clean = {key: value for key, value in os.environ.items() if key not in ("CXX", "PYTHONPATH")}
    done = subprocess.run(command, cwd=tree, env={**clean, **env}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def objects(tree: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (tree / "build" / "native").iterdir()}


@needs_compiler
def test_only_what_changed_is_compiled(tree: Path) -> None:
    assert run_setup(tree).stderr == ""
    first = objects(tree)
    (tree / KERNELS / "other.cpp").touch()
    run_setup(tree)
    assert objects(tree) == first and (tree / KERNELS / NAME).is_file()
    (tree / KERNELS / "number.h").write_text("#define NUMBER 2\n")
    run_setup(tree)
    second = objects(tree)
    assert len(first) == len(second) == 2 and len(first.keys() & second.keys()) == 1
    code = f"import ctypes; print(ctypes.CDLL({str(tree / KERNELS / NAME)!r}).orchard_abi())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "2\n"


@needs_compiler
@pytest.mark.parametrize(
    "failure", ["error in a source", "no compiler", "a compiler that is not there", "one that fails"]
)
def test_a_build_that_fails_is_told_once_and_leaves_nothing_stale(tree: Path, failure: str) -> None:
    run_setup(tree)
    env = {}
    if failure == "error in a source":
        (tree / KERNELS / "other.cpp").write_text("#error half-way\n")
    elif failure == "no compiler":
        env["PATH"] = str(tree)
    else:
        env["CXX"] = "no-such-compiler" if "not there" in failure else str(shutil.which("false"))
    done = run_setup(tree, **env)
    assert not (tree / KERNELS / NAME).exists() and list(tree.rglob("*.tmp")) == []
    assert done.stderr.count("orchard: no native kernels") == 1
    assert "everything runs on torch instead" in done.stderr.splitlines()[-1]


@needs_compiler
def test_the_named_compiler_is_used_with_its_arguments(tree: Path) -> None:
    (tree / KERNELS / "other.cpp").write_text("#ifndef FROM_CXX\n#error without\n#endif\n")
    assert run_setup(tree, CXX=f"{COMPILER} -DFROM_CXX").stderr == ""
    assert (tree / KERNELS / NAME).is_file()


@needs_compiler
def test_a_wheel_has_the_library_and_the_sdist_its_sources(tree: Path) -> None:
    run_setup(tree, "bdist_wheel", "--dist-dir", "made", "sdist", "--dist-dir", "made")
    (wheel,), (sdist,) = (tree / "made").glob("*.whl"), (tree / "made").glob("*.tar.gz")
    assert re.fullmatch(r"orchard-[^-]+-py3-none-(?!any)\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert (KERNELS / NAME).as_posix() in names and "orchard/py.typed" in names
        assert not any(name.endswith((".cpp", ".h", ".o")) for name in names)
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
        assert {"setup.py", f"{KERNELS.as_posix()}/abi.cpp", f"{KERNELS.as_posix()}/number.h"} <= set(names)
        assert not any(name.endswith((".so", ".dylib", ".o")) for name in names)


def test_without_a_compiler_a_wheel_is_made_all_the_same(tree: Path) -> None:
    done = run_setup(tree, "bdist_wheel", "--dist-dir", "made", PATH=str(tree))
    assert "no C++ compiler found" in done.stderr
    (wheel,) = (tree / "made").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not any(name.endswith((".so", ".dylib")) for name in archive.namelist())
