"""Files are written whole or not at all, and names from outside stay in their folder."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import BadFile, DiskFull
from orchard.core.files import atomic_write, disk_errors, safe_join, write_text

# safe_join ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.txt", "a/b/c", "./a", "a/../b", "a..b", "...", "~", "with space", "é"])
def test_names_inside_are_joined(tmp_path: Path, name: str) -> None:
    joined = safe_join(tmp_path, name)
    assert joined.is_relative_to(tmp_path.resolve()) and joined != tmp_path.resolve()


@pytest.mark.parametrize("name", ["", ".", "./", "..", "../x", "a/../../x", "/etc/passwd", "//x", "a\x00b", "x/../.."])
def test_names_outside_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadFile) as caught:
        safe_join(tmp_path, name)
    assert caught.value.hint


def test_a_folder_with_a_longer_name_is_not_inside(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base-other").mkdir()
    with pytest.raises(BadFile):
        safe_join(tmp_path / "base", "../base-other/x")


def test_links_are_followed(tmp_path: Path) -> None:
    base, outside = tmp_path / "base", tmp_path / "outside"
    base.mkdir()
    outside.mkdir()
    (base / "out").symlink_to(outside)
    (base / "in").symlink_to(base / "real")
    with pytest.raises(BadFile):
        safe_join(base, "out/x")
    assert safe_join(base, "in/x") == base.resolve() / "real" / "x"


@given(st.lists(st.sampled_from(["..", ".", "a", "b", "", "/"]), min_size=1, max_size=6).map("/".join))
def test_no_mixture_of_dots_and_slashes_gets_out(name: str) -> None:
    base = Path("/nowhere/base")
    try:
        joined = safe_join(base, name)
    except BadFile:
        return
    assert joined.is_relative_to(base) and joined != base and ".." not in joined.parts


# atomic_write ---------------------------------------------------------------------------------------------------------


def test_a_whole_file_appears_in_a_new_folder(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "file.txt"
    write_text(target, "grüße")
    assert target.read_bytes() == "grüße".encode()
    assert [path.name for path in target.parent.iterdir()] == ["file.txt"]


@pytest.mark.parametrize("problem", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, problem: type[BaseException]) -> None:
    target = tmp_path / "file"
    write_text(target, "old")
    with pytest.raises(problem), atomic_write(target) as file:
        file.write(b"half of the new")
        raise problem
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_nothing_is_seen_under_the_name_until_the_end(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with atomic_write(target) as file:
        file.write(b"x")
        file.flush()
        assert not target.exists()
    assert target.read_bytes() == b"x"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_a_typed_error_and_leaves_nothing(tmp_path: Path, code: int) -> None:
    with pytest.raises(DiskFull) as caught, atomic_write(tmp_path / "file") as file:
        file.write(b"half")
        raise OSError(code, os.strerror(code))
    assert caught.value.retryable and "file" in str(caught.value) and list(tmp_path.iterdir()) == []


def test_a_really_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files, in a process of its own: the write itself fails, as on a full disk."""
    code = f"""
        import resource, signal
        from pathlib import Path
        from orchard.core.errors import DiskFull
        from orchard.core.files import atomic_write
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            with atomic_write(Path({str(tmp_path / "file")!r})) as file:
                file.write(b"x" * 100_000)
        except DiskFull:
            raise SystemExit(7)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60, capture_output=True)
    assert done.returncode == 7, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_other_operating_system_errors_pass_through(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), disk_errors(tmp_path):
        raise PermissionError(errno.EACCES, "no")
    (tmp_path / "a file").write_text("")
    with pytest.raises(OSError), atomic_write(tmp_path / "a file" / "below"):
        pass


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_text(target, "old")
    code = f"""
        import os, signal
        from pathlib import Path
        from orchard.core.files import atomic_write
        with atomic_write(Path({str(target)!r})) as file:
            file.write(b"half of the new")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert target.read_text() == "old"
