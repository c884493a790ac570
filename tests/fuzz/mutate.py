"""Ways to damage a file: small steps that turn valid bytes into almost valid ones. Shared by the fuzzers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

Field = tuple[int, int]  # where a little-endian integer starts, and how many bytes it has

# Numbers at which parsers break: around zero, signs, word sizes, and just below common limits.
BOUNDARIES = sorted(
    {0, 1, 2, 3, 5, 31, 33, 65_535, 65_536, 10**6, 10**9, 10**18}
    | {
        2**power + step
        for power in (7, 8, 15, 16, 20, 24, 30, 31, 32, 40, 48, 60, 61, 62, 63, 64)
        for step in (-1, 0, 1)
    }
)


def flip_bits(data: bytearray, rng: random.Random, end: int) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(end)] ^= 1 << rng.randrange(8)


def set_byte(data: bytearray, rng: random.Random, end: int) -> None:
    data[rng.randrange(end)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))


def set_integer(data: bytearray, rng: random.Random, at: int, width: int) -> None:
    """Overwrite one integer by a boundary value, by a neighbour of itself, or by noise."""
    old = int.from_bytes(data[at : at + width], "little")
    new = rng.choice((rng.choice(BOUNDARIES), old + rng.choice((-1, 1, 8)), rng.getrandbits(8 * width)))
    data[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "little")


def any_integer(data: bytearray, rng: random.Random, end: int) -> None:
    width = rng.choice((4, 8))
    if end > width:
        set_integer(data, rng, rng.randrange(end - width), width)


def truncate(data: bytearray, rng: random.Random, end: int) -> None:
    del data[rng.randrange(rng.choice((end, len(data)))) :]


def duplicate(data: bytearray, rng: random.Random, end: int) -> None:
    start = rng.randrange(end)
    stop = min(end, start + rng.choice((1, 8, 24, 64, 300)))
    data[stop:stop] = data[start:stop] * rng.choice((1, 1, 2, 50))


def delete(data: bytearray, rng: random.Random, end: int) -> None:
    start = rng.randrange(end)
    del data[start : start + rng.choice((1, 4, 8, 40))]


def insert(data: bytearray, rng: random.Random, end: int) -> None:
    at = rng.randrange(end)
    data[at:at] = rng.randbytes(rng.choice((1, 4, 8, 32)))


STEPS: list[Callable[[bytearray, random.Random, int], None]] = [
    flip_bits,
    flip_bits,
    set_byte,
    any_integer,
    truncate,
    duplicate,
    delete,
    insert,
]


def splice(one: bytes, other: bytes, rng: random.Random) -> bytearray:
    """The start of one file and the end of another."""
    return bytearray(one[: rng.randrange(len(one))] + other[rng.randrange(len(other)) :])


def damage(data: bytes, rng: random.Random, *, fields: list[Field], end: int) -> bytearray:
    """One to three random steps within the first `end` bytes; half of them aim at the integers in `fields`."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        limit = min(end, len(found))
        if limit < 1:
            break
        if fields and rng.random() < 0.5:
            at, width = rng.choice(fields)
            if at + width <= len(found):
                set_integer(found, rng, at, width)
        else:
            rng.choice(STEPS)(found, rng, limit)
    return found


_NUMBER = re.compile(rb"-?\d+")
_TEXT = re.compile(rb'"[^"]*"')
_JSON_VALUES = (b"null", b"true", b"[]", b"{}", b'""', b"-1", b"1.5", b"1e400", b"NaN", b'"\\ud800"', b"[[]]")


def damage_json(text: bytes, rng: random.Random) -> bytes:
    """Change a number, a text or the nesting of a JSON document."""
    choice = rng.randrange(8)
    if choice <= 2:
        return _replace_one(_NUMBER, text, rng, str(rng.choice(BOUNDARIES) * rng.choice((1, 1, 1, -1))).encode())
    if choice == 3:
        return _replace_one(rng.choice((_NUMBER, _TEXT)), text, rng, rng.choice(_JSON_VALUES))
    if choice == 4:  # names and types put in each other's place, which also makes duplicates
        return _replace_one(_TEXT, text, rng, rng.choice(_TEXT.findall(text) or [b'"x"']))
    if choice == 5:
        depth = rng.choice((2, 40, 990, 1010, 20_000))
        opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
        return _replace_one(_NUMBER, text, rng, opening * depth + b"1" + closing * rng.choice((0, depth)))
    if choice == 6:
        return _replace_one(_NUMBER, text, rng, b"9" * rng.choice((20, 400, 5000)))
    return _replace_one(_NUMBER, text, rng, b"1" + b",1" * rng.choice((1, 40, 3000)))


def _replace_one(pattern: re.Pattern[bytes], text: bytes, rng: random.Random, new: bytes) -> bytes:
    places = [match.span() for match in pattern.finditer(text)]
    if not places:
        return text + new
    start, stop = rng.choice(places)
    return text[:start] + new + text[stop:]
