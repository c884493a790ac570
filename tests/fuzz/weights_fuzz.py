"""Fuzz the weights readers: damaged GGUF and safetensors headers may only give typed errors, soon and in little memory.

    python -m tests.fuzz.weights_fuzz --count 200000 --seed 0

Each case is made from (seed, number) alone, so a failure can be run again with `--start NUMBER --count 1`. Checked for
every case: no exception but `OrchardError`, no allocation above 64 MiB (by a limit on the address space, by the
process's peak memory and, for one case in 64, by tracemalloc), no more than a second.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import tracemalloc
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from orchard.core.errors import OrchardError, UnsupportedFormat
from orchard.weights.gguf import GGUFFile
from orchard.weights.safetensors import SafetensorsFile
from tests.fuzz.mutate import Field, damage, damage_json, splice

MEMORY_LIMIT = 64 << 20
TIME_LIMIT = 1.0
TRACE_EVERY = 64


class GGUFBuilder:
    """Builds a small GGUF file by hand, apart from Orchard's writer, and remembers where its integers are."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.fields: list[Field] = []

    def number(self, value: int, width: int) -> None:
        self.fields.append((len(self.data), width))
        self.data += value.to_bytes(width, "little")

    def text(self, value: str) -> None:
        self.number(len(value.encode()), 8)
        self.data += value.encode()

    def array(self, item: int, count: int) -> None:
        self.number(item, 4)
        self.number(count, 8)

    def key(self, name: str, kind: int) -> None:
        self.text(name)
        self.number(kind, 4)

    def tensor(self, name: str, dims: list[int], kind: int, offset: int) -> None:
        self.text(name)
        self.number(len(dims), 4)
        for dim in dims:
            self.number(dim, 8)
        self.number(kind, 4)
        self.number(offset, 8)


# name, GGUF dimensions, type id, bytes
_TENSORS = [
    ("f32", [5, 2], 0, 40),
    ("f16", [3, 2, 2], 1, 24),
    ("bf16", [1, 1, 1, 4], 30, 8),
    ("q4_0", [32, 2], 2, 36),
    ("q4_1", [32], 3, 20),
    ("q5_0", [32], 6, 22),
    ("q5_1", [32], 7, 24),
    ("q8_0", [64], 8, 68),
    ("q2_k", [256], 10, 84),
    ("q3_k", [256], 11, 110),
    ("q4_k", [256], 12, 144),
    ("q5_k", [256], 13, 176),
    ("q6_k", [256], 14, 210),
    ("iq2_xs", [256], 17, 74),
    ("i32", [2], 26, 8),
]


def gguf_sample(tensors: list[tuple[str, list[int], int, int]], alignment: int) -> tuple[bytes, list[Field], int]:
    build = GGUFBuilder()
    build.data += b"GGUF"
    build.number(3, 4)
    build.number(len(tensors), 8)
    build.number(7, 8)
    build.key("general.architecture", 8)
    build.text("llama")
    build.key("general.alignment", 4)
    build.number(alignment, 4)
    build.key("x.float", 6)
    build.data += struct.pack("<f", 0.5)
    build.key("x.flag", 7)
    build.number(1, 1)
    build.key("x.tokens", 9)
    build.array(8, 6)
    for token in ("<s>", "", "a", "Ġhello", "ß", "x" * 40):
        build.text(token)
    build.key("x.scores", 9)
    build.array(6, 8)
    build.data += bytes(32)
    build.key("x.nested", 9)
    build.array(9, 2)
    build.array(4, 2)
    build.data += bytes(8)
    build.array(9, 1)
    build.array(7, 3)
    build.data += b"\0\1\0"
    place = 0
    for name, dims, kind, size in tensors:
        build.tensor(name, dims, kind, place)
        place += size + -size % alignment
    end = len(build.data)
    build.data += bytes(-end % alignment)
    build.data += random.Random(0).randbytes(place)
    return bytes(build.data), build.fields, end


def safetensors_sample(entries: list[tuple[str, str, list[int], int]]) -> tuple[bytes, bytes]:
    header: dict[str, object] = {"__metadata__": {"format": "pt", "note": "x"}}
    place = 0
    for name, dtype, shape, size in entries:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    return json.dumps(header, separators=(",", ":")).encode(), random.Random(1).randbytes(place)


GGUF_SAMPLES = [
    gguf_sample(_TENSORS, 32),
    gguf_sample(_TENSORS[:1], 8),
    gguf_sample(_TENSORS[3:9], 64),
    gguf_sample([], 32),
]
SAFETENSORS_SAMPLES = [
    safetensors_sample([("a", "F32", [2, 3], 24), ("b", "BF16", [4], 8), ("c", "BOOL", [3], 3), ("d", "I64", [], 8)]),
    safetensors_sample(
        [("w", "F8_E4M3", [2, 2], 4), ("e", "F64", [0, 7], 0), ("z", "U8", [5], 5), ("f", "F4", [4], 2)]
    ),
    safetensors_sample([("only", "F16", [1, 1, 6], 12)]),
    safetensors_sample([]),
]


def make_case(seed: int, number: int) -> tuple[str, bytes]:
    """The bytes of one case and the reader they are for."""
    rng = random.Random(seed << 40 | number)
    if number % 2 == 0:
        data, fields, end = rng.choice(GGUF_SAMPLES)
        if rng.random() < 0.05:
            return "gguf", bytes(splice(data, rng.choice(GGUF_SAMPLES)[0], rng))
        if rng.random() < 0.03:  # arrays in arrays in arrays, put in the place of the first value
            deep = struct.pack("<IQ", 9, rng.choice((1, 2, 3))) * rng.choice((3, 5, 2000))
            at = data.index(b"x.nested") + 12
            return "gguf", data[:at] + deep + data[at:]
        return "gguf", bytes(damage(data, rng, fields=fields, end=end))
    header, body = rng.choice(SAFETENSORS_SAMPLES)
    if rng.random() < 0.6:
        for _ in range(rng.choice((1, 1, 2, 3))):
            header = damage_json(header, rng)
        length = len(header) if rng.random() < 0.9 else len(header) + rng.choice((-1, 1, 8))
        return "safetensors", max(0, length).to_bytes(8, "little") + header + body
    data = len(header).to_bytes(8, "little") + header + body
    if rng.random() < 0.1:
        other, tail = rng.choice(SAFETENSORS_SAMPLES)
        return "safetensors", bytes(splice(data, len(other).to_bytes(8, "little") + other + tail, rng))
    return "safetensors", bytes(damage(data, rng, fields=[(0, 8)] if rng.random() < 0.3 else [], end=8 + len(header)))


def put(path: Path, data: bytes) -> None:
    """A new file each time: some file systems flush to disk when an old one is truncated and written again."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def open_and_read(kind: str, path: Path) -> str:
    """What a user's first touch does: open the file and read every tensor. The outcome in a word."""
    try:
        file: GGUFFile | SafetensorsFile = (GGUFFile if kind == "gguf" else SafetensorsFile).open(path)
    except OrchardError as error:
        assert error.message and error.hint, "an error without a message or a hint"
        return error.code
    with file:
        for name, info in file.tensors.items():
            try:
                tensor = file.read(name)
            except UnsupportedFormat:
                continue
            assert tuple(tensor.shape) == info.shape, f"{name} has shape {tuple(tensor.shape)}, not {info.shape}"
    return "opened"


@dataclass(eq=False)
class Failure(Exception):
    number: int
    data: bytes
    why: str

    def __str__(self) -> str:
        return f"case {self.number}: {self.why}"


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def address_space_limit(extra: int) -> Iterator[None]:
    """Let the process map at most `extra` bytes more than it has now, so that a larger allocation fails at once."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux: the other two checks remain
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def run(count: int, seed: int, folder: Path, *, start: int = 0) -> Counter[str]:
    """Run cases `start` to `start + count`; count outcomes, raise `Failure` for the first that breaks a rule."""
    outcomes: Counter[str] = Counter()
    path = folder / "case"
    for data, _, _ in GGUF_SAMPLES:  # loads what is loaded lazily, and shows that the samples themselves are sound
        put(path, data)
        assert open_and_read("gguf", path) == "opened"
    for header, body in SAFETENSORS_SAMPLES:
        put(path, len(header).to_bytes(8, "little") + header + body)
        assert open_and_read("safetensors", path) == "opened"
    base = peak_memory()
    with address_space_limit(MEMORY_LIMIT):
        for number in range(start, start + count):
            kind, data = make_case(seed, number)
            put(path, data)
            outcomes[f"{kind} {_one(number, kind, data, path)}"] += 1
            if peak_memory() - base > MEMORY_LIMIT:
                raise Failure(number, data, f"peak memory grew by {peak_memory() - base:,} bytes")
    return outcomes


def _one(number: int, kind: str, data: bytes, path: Path) -> str:
    traced = number % TRACE_EVERY < 2
    try:
        if traced:
            tracemalloc.start()
        begin = time.perf_counter()
        outcome = open_and_read(kind, path)
        if time.perf_counter() - begin > TIME_LIMIT:  # once more: the machine may have been busy with something else
            begin = time.perf_counter()
            open_and_read(kind, path)
        took = time.perf_counter() - begin
        if took > TIME_LIMIT:
            raise Failure(number, data, f"took {took:.1f} s")
        if traced and tracemalloc.get_traced_memory()[1] > MEMORY_LIMIT:
            raise Failure(number, data, f"allocated {tracemalloc.get_traced_memory()[1]:,} bytes")
        return outcome
    except Failure:
        raise
    except Exception as error:
        raise Failure(number, data, f"{kind}: {type(error).__name__}: {error}") from error
    finally:
        if traced:
            tracemalloc.stop()


def _stuck(_signal: int, _frame: types.FrameType | None) -> None:
    raise TimeoutError("a thousand cases took more than two minutes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, _stuck)
    began = time.perf_counter()
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for first in range(options.start, options.start + options.count, 1000):
                signal.alarm(120)
                many = min(1000, options.start + options.count - first)
                total += run(many, options.seed, Path(folder), start=first)
        except Failure as failure:
            signal.alarm(0)
            with tempfile.NamedTemporaryFile(prefix="weights-fuzz-", delete=False) as kept:
                kept.write(failure.data)
            print(f"FAILED: seed {options.seed}, {failure}\ninput kept in {kept.name}", file=sys.stderr)
            return 1
        finally:
            signal.alarm(0)
    seconds = time.perf_counter() - began
    for outcome, number in sorted(total.items()):
        print(f"{outcome:32} {number:>9,}")
    print(f"{options.count:,} cases, seed {options.seed}, {seconds:.0f} s ({options.count / seconds:,.0f} a second)")
    print(f"peak memory of the process: {peak_memory() >> 20} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
