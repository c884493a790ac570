"""API keys: made, kept, read and compared."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import BadFile, UsageError
from orchard.serve.keys import PREFIX, KeyRing, Slowdown, hashed, new_key, read_keys, write_key

GOOD = "a-key-of-24-characters-x"


def test_keys_are_long_and_never_the_same() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(key.startswith(PREFIX) and len(key) >= len(PREFIX) + 43 for key in made)


def test_a_ring_knows_its_keys_by_a_short_name() -> None:
    keys = [new_key() for _ in range(3)]
    ring = KeyRing(hashed(key).upper() for key in keys)
    assert [ring.name_of(key.encode()) for key in keys] == [hashed(key)[:8] for key in keys]
    assert ring and not KeyRing(())
    assert KeyRing(()).name_of(b"") is None


@given(st.binary(max_size=200))
def test_no_other_bytes_are_a_key(data: bytes) -> None:
    assert KeyRing([hashed(GOOD)]).name_of(data) is None
    assert KeyRing([hashed(GOOD)]).name_of(data + GOOD.encode()) == (hashed(GOOD)[:8] if not data else None)


def test_a_hash_is_no_key() -> None:
    assert KeyRing([hashed(GOOD)]).name_of(hashed(GOOD).encode()) is None


def test_a_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    other = new_key()
    file.write_text(f"# people\n\n  {GOOD}  \nsha256:{hashed(other).upper()}\r\n{GOOD}\n")
    file.chmod(0o600)
    found = read_keys(file)
    assert found.hashes == (hashed(GOOD), hashed(other)) and found.warning == ""


def test_a_file_that_others_can_read_is_warned_of(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(GOOD)
    for mode, warned in ((0o600, False), (0o640, True), (0o604, True), (0o400, False)):
        file.chmod(mode)
        found = read_keys(file)
        assert bool(found.warning) == warned and found.hashes
        assert not warned or f"chmod 600 {file}" in found.warning


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (b"", UsageError, "holds no key"),
        (b"# nothing\n\n", UsageError, "holds no key"),
        (b"short-secret\n", UsageError, "line 1"),
        (b"# x\ntwo words that are long\n", UsageError, "line 2"),
        ("schlüssel-der-lang-genug-ist".encode(), UsageError, "line 1"),
        (b"\xff\xfe" * 20, BadFile, "not text"),
        (b"x" * (1 << 20) + b"xx", BadFile, "larger"),
        (b"sha256:abc\n", UsageError, "line 1"),
        (b"".join(b"key-number-%09d-x\n" % n for n in range(1001)), UsageError, "1,001 keys"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, data: bytes, kind: type[Exception], words: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(data)
    with pytest.raises(kind, match=words) as error:
        read_keys(file)
    assert "secret" not in str(error.value) and "two words" not in str(error.value)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="No such file"):
        read_keys(tmp_path / "none")
    with pytest.raises(BadFile, match="directory"):
        read_keys(tmp_path)


def test_a_new_file_is_its_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    before = os.umask(0)
    try:
        key = write_key(file)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_keys(file).hashes == (hashed(key),) and read_keys(file).warning == ""
    with pytest.raises(BadFile, match="File exists"):
        write_key(file)
    assert read_keys(file).hashes == (hashed(key),)
    with pytest.raises(BadFile, match="No such file"):
        write_key(tmp_path / "none" / "keys")


def test_wrong_keys_wait_longer_each_time() -> None:
    slow = Slowdown()
    waits = [slow.failed("a", now) for now in range(12)]
    assert waits[:3] == [0, 0, 0] and waits[3] > 0
    assert waits == sorted(waits) and waits[-1] == Slowdown.LONGEST
    assert slow.failed("b", 12) == 0, "others do not wait"
    assert slow.failed("a", 12 + Slowdown.FORGET + 1) == 0, "and it is forgotten"


@given(st.lists(st.text(max_size=5), max_size=300))
def test_the_table_of_wrong_keys_is_bounded(addresses: list[str]) -> None:
    slow = Slowdown(most=10)
    for number, address in enumerate(addresses):
        assert 0 <= slow.failed(address, float(number)) <= Slowdown.LONGEST
    assert len(slow) <= 10
