"""Files of kept beginnings: all of it comes back, and damage, lies, other models and a full disk do no harm."""

from __future__ import annotations

import itertools
import json
import resource
import threading
import tracemalloc
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import BadFile, DiskFull, UsageError
from orchard.generate.prefix import GRAIN, Prefixes
from orchard.generate.prefix_file import BLOCK, MAGIC, PIECE, ROW, WAY
from orchard.generate.prefix_tree import KEEPING
from orchard.generate.protocol import Held

SIZE = 10 * GRAIN


class Owner:
    def __init__(self, signature: str = "mine", **variants: Owner) -> None:
        self.signature, self.variants = signature, variants

    def fits(self, held: Held) -> bool:
        return held.nbytes == (10 + 8) * len(held.ids)


def held(ids: tuple[int, ...], whole: bool = False) -> Held:
    data = np.random.default_rng(len(ids)).integers(0, 256, 10 * len(ids), np.uint8)
    blocks = tuple(data[at : at + SIZE].copy() for at in range(0, len(data), SIZE))
    return Held(ids, data if whole else blocks, whole)


LONG = tuple(range(4 * GRAIN))
SHORT = (5,) * 2 * GRAIN


def saved(folder: Path, whole: bool = False) -> Path:
    kept, path = Prefixes(Owner()), folder / "kept"
    kept.add(held(LONG, whole))
    kept.add(held(SHORT, whole))
    assert kept.save(path, LONG) == len(LONG)
    return path


def is_long(kept: Prefixes, whole: bool = False) -> bool:
    use = kept.find((*LONG, 5))
    return use is not None and use.held.ids == LONG and all(map(np.array_equal, use.held.data, held(LONG, whole).data))


@pytest.mark.parametrize("whole", [False, True])
def test_a_file_round_trip(tmp_path: Path, whole: bool) -> None:
    again = Prefixes(Owner())
    assert again.load(saved(tmp_path, whole)) == len(LONG)
    assert is_long(again, whole) and again.find((*SHORT, 1)) is None
    assert len(again) == (1 if whole else 4)


def test_as_much_as_is_kept_of_a_longer_prompt(tmp_path: Path) -> None:
    kept = Prefixes(Owner())
    kept.add(held(LONG))
    assert kept.save(tmp_path / "kept", (*LONG, *range(500))) == len(LONG)
    assert (
        kept.save(tmp_path / "less", (*LONG[: 2 * GRAIN], 1)) == 2 * GRAIN == Prefixes(Owner()).load(tmp_path / "less")
    )
    assert kept.save(tmp_path / "none", (1, *LONG)) == 0 and not (tmp_path / "none").exists()


@pytest.mark.parametrize("whole", [False, True])
def test_everything(tmp_path: Path, whole: bool) -> None:
    kept, path = Prefixes(Owner(poet=Owner("rhymes"))), tmp_path / "kept"
    assert kept.save_all(path) == 0 and not path.exists()
    for ids in (LONG, SHORT, LONG[:GRAIN], (*LONG[:GRAIN], *SHORT)):
        kept.add(held(ids, whole))
    kept.add(held(SHORT, whole), "poet")
    kept.add(held(SHORT, whole), "gone")  # the runner has no such variant
    here = len(kept) - (1 if whole else 2)
    assert kept.save_all(path) == here
    again = Prefixes(Owner(poet=Owner("rhymes")))
    assert again.load_all(path) == len(again) == here
    kept.drop("gone")
    assert again.nbytes == kept.nbytes
    for ids, variant in ((LONG, None), (SHORT, None), ((*LONG[:GRAIN], *SHORT), None), (SHORT, "poet")):
        use, before = again.find((*ids, 1), variant), kept.find((*ids, 1), variant)
        assert use is not None and before is not None and use.tokens == before.tokens
        assert all(map(np.array_equal, use.held.data, before.held.data))
    other = Prefixes(Owner(poet=Owner("another poet")))
    assert other.load_all(path) == here - (1 if whole else 2) and other.find((*SHORT, 1), "poet") is None


def test_a_file_of_a_variant(tmp_path: Path) -> None:
    kept, path = Prefixes(Owner(poet=Owner("rhymes"))), tmp_path / "kept"
    kept.add(held(LONG), "poet")
    assert kept.save(path, LONG) == 0 and kept.save(path, LONG, "poet") == len(LONG)
    with pytest.raises(BadFile, match="another model"):
        Prefixes(Owner("rhymes")).load(path)
    assert Prefixes(Owner("any", poet=Owner("rhymes"))).load(path) == len(LONG)


@pytest.mark.parametrize("whole", [False, True])
def test_a_reader_with_little_room_takes_what_was_used_last(tmp_path: Path, whole: bool) -> None:
    kept, path = Prefixes(Owner()), tmp_path / "kept"
    for token in range(20):
        kept.add(held((token,) * 2 * GRAIN, whole))
    assert kept.find((7,) * 200) is not None
    kept.save_all(path)
    room = KEEPING + 4 * (KEEPING + SIZE) + 10  # for two prompts, and no more
    again = Prefixes(Owner(), limit=room)
    again.add(held((99,) * GRAIN))
    assert again.load_all(path) == (2 if whole else 4) and again.nbytes <= room
    found = [token for token in (99, *range(20)) if again.find((token,) * 200) is not None]
    assert found == [7, 19]
    assert Prefixes(Owner(), limit=0).load_all(path) == 0
    tight = Prefixes(Owner(), limit=2 * KEEPING + SIZE)  # one block, or the way to a piece and not the piece
    assert tight.load_all(path) == (0 if whole else 1) and tight.nbytes == (0 if whole else tight.limit)


def test_a_large_file_is_read_in_little_memory(tmp_path: Path) -> None:
    class Large(Owner):
        def fits(self, held: Held) -> bool:
            return True

    kept, path = Prefixes(Large()), tmp_path / "kept"
    for token in range(40):
        kept.add(Held((token,) * GRAIN, (np.zeros(1 << 20, np.uint8),)))
    assert kept.save_all(path) == 40
    again = Prefixes(Large(), limit=3 << 20)
    tracemalloc.start()
    try:
        assert again.load_all(path) == 2
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


def test_files_for_others(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(BadFile, match="another model"):
        Prefixes(Owner("another")).load(path)
    with pytest.raises(BadFile, match="another model"):
        Prefixes().load(path)
    with pytest.raises(BadFile, match="no file of keys"):
        Prefixes(Owner()).load(tmp_path / "absent")
    with pytest.raises(BadFile, match="no file of keys"):
        Prefixes(Owner()).load_all(tmp_path)
    nobody = Prefixes()
    nobody.add(held(LONG))
    assert nobody.save(tmp_path / "nobody", LONG) == nobody.save_all(tmp_path / "nobody") == 0
    assert not (tmp_path / "nobody").exists()


def test_sizes_that_are_not_the_models(tmp_path: Path) -> None:
    class Wider(Owner):
        def fits(self, held: Held) -> bool:
            return held.nbytes == (11 + 8) * len(held.ids)

    for whole, tokens in ((False, "64"), (True, "256")):
        kept = Prefixes(Wider())
        with pytest.raises(BadFile, match=f"size of {tokens} tokens"):
            kept.load(saved(tmp_path, whole))
        assert len(kept) == 0


def test_saving_while_others_add_and_blocks_go(tmp_path: Path) -> None:
    kept, done = Prefixes(Owner(), limit=KEEPING + 12 * (KEEPING + SIZE)), threading.Event()

    def busy() -> None:
        for number in itertools.count():
            if done.is_set():
                return
            kept.add(held((*LONG[: number % 3 * GRAIN], *(number,) * GRAIN)))

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(25):
            kept.add(held(LONG))
            pieces, again = kept.save_all(tmp_path / "kept"), Prefixes(Owner())
            assert pieces and again.load_all(tmp_path / "kept") == pieces == len(again)
            tokens = kept.save(tmp_path / "one", LONG)
            assert not tokens or Prefixes(Owner()).load(tmp_path / "one") == tokens
    finally:
        done.set()
        thread.join()


def test_an_older_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b'orchard prefix 1\n{"signature": "mine"}\n')
    with pytest.raises(BadFile, match="older version") as caught:
        Prefixes(Owner()).load(tmp_path / "old")
    assert "save" in caught.value.hint


def test_a_full_disk_leaves_nothing_and_what_was_there(tmp_path: Path) -> None:
    kept = Prefixes(Owner())
    kept.add(Held(LONG, tuple(np.zeros(1 << 18, np.uint8) for _ in range(4))))
    (tmp_path / "kept").write_text("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, limits[1]))
    try:
        for save in (lambda: kept.save(tmp_path / "kept", LONG), lambda: kept.save_all(tmp_path / "kept")):
            with pytest.raises(DiskFull):
                save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and (tmp_path / "kept").read_text() == "before"
    assert kept.save_all(tmp_path / "kept") == 4


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    kept = Prefixes(Owner())
    kept.add(held(LONG))
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="cannot be written") as caught:
            kept.save(path, LONG)
        assert caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("whole", [False, True])
@given(data=st.data())
def test_damage_is_noticed(tmp_path_factory: pytest.TempPathFactory, whole: bool, data: st.DataObject) -> None:
    path = saved(tmp_path_factory.mktemp("damage"), whole)
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        place = data.draw(st.one_of(st.integers(0, 300), st.integers(0, len(raw) - 1)))
        raw[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    kept = Prefixes(Owner())
    try:
        kept.load(path)
    except BadFile:
        assert len(kept) == kept.nbytes == 0
    else:  # a change in the words of the header that changes no meaning, such as a key's white space
        assert is_long(kept, whole)


def forged(path: Path, rows: list[tuple[int, int, int]], **changes: Any) -> Path:
    """A file with a right checksum that says these things."""
    key = np.arange(GRAIN, dtype="<i8").tobytes()
    body = b"".join(np.array(row, "<i8").tobytes() + key + bytes(max(0, min(row[2], SIZE))) for row in rows)
    about = {"grain": GRAIN, "variants": [[None, "mine"]], "entries": len(rows), "bytes": len(body)} | changes
    digest = sha256(json.dumps(about, sort_keys=True).encode() + body).hexdigest()
    path.write_bytes(MAGIC + json.dumps(about | {"sha256": digest}).encode() + b"\n" + body)
    return path


LIES: dict[str, Callable[[Path], Path]] = {
    "its own parent": lambda path: forged(path, [(0, BLOCK, SIZE)]),
    "a later parent": lambda path: forged(path, [(1, BLOCK, SIZE), (-1, BLOCK, SIZE)]),
    "no such variant": lambda path: forged(path, [(-2, BLOCK, SIZE)]),
    "no such kind": lambda path: forged(path, [(-1, 3, SIZE)]),
    "less than no bytes": lambda path: forged(path, [(-1, BLOCK, -1)]),
    "more bytes than there are": lambda path: forged(path, [(-1, BLOCK, 1 << 40)]),
    "bytes beyond all numbers": lambda path: forged(path, [(-1, BLOCK, 2**63 - 1)] * 3),
    "a block without the one before": lambda path: forged(path, [(-1, WAY, 0), (0, BLOCK, SIZE)]),
    "a block after a piece": lambda path: forged(path, [(-1, PIECE, SIZE), (0, BLOCK, SIZE)]),
    "data on the way": lambda path: forged(path, [(-1, WAY, SIZE)]),
    "another size": lambda path: forged(path, [(-1, BLOCK, SIZE - 1)]),
    "one block of another size": lambda path: forged(path, [(-1, BLOCK, SIZE), (0, BLOCK, SIZE - 1)]),
    "fewer entries": lambda path: forged(path, [(-1, BLOCK, SIZE)] * 2, entries=1),
    "more entries": lambda path: forged(path, [(-1, BLOCK, SIZE)], entries=2),
    "no entries": lambda path: forged(path, [], entries=0),
    "entries as words": lambda path: forged(path, [(-1, BLOCK, SIZE)], entries="1"),
    "a length that is not so": lambda path: forged(path, [(-1, BLOCK, SIZE)], bytes=ROW),
    "other blocks": lambda path: forged(path, [(-1, BLOCK, SIZE)], grain=32),
    "variants as a number": lambda path: forged(path, [(-1, BLOCK, SIZE)], variants=3),
    "a variant that is a list": lambda path: forged(path, [(-1, BLOCK, SIZE)], variants=[[[1], "mine"]]),
    "no signature": lambda path: forged(path, [(-1, BLOCK, SIZE)], variants=[["gone", None]]),
}


@pytest.mark.parametrize("lie", sorted(LIES))
def test_a_file_that_lies(tmp_path: Path, lie: str) -> None:
    kept = Prefixes(Owner())
    with pytest.raises(BadFile) as caught:
        kept.load_all(LIES[lie](tmp_path / "lie"))
    assert caught.value.hint and len(kept) == kept.nbytes == 0


def test_what_the_forger_writes_is_read_when_it_is_true(tmp_path: Path) -> None:
    kept = Prefixes(Owner())
    assert kept.load_all(forged(tmp_path / "true", [(-1, BLOCK, SIZE), (0, BLOCK, SIZE)])) == 2
    path_only = forged(tmp_path / "way", [(-1, WAY, 0)])
    empty = Prefixes(Owner())
    assert empty.load_all(path_only) == 0 and empty.nbytes == 0


@pytest.mark.parametrize(
    "header", [b"[" * 100_000, b"{}", b"[]", b"null", b"9" * 5000, b"\xff", b'{"grain": 64}', b" " * (1 << 21)]
)
def test_headers_that_are_none(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "kept").write_bytes(MAGIC + header + b"\n")
    with pytest.raises(BadFile, match="no file of keys"):
        Prefixes(Owner()).load(tmp_path / "kept")
