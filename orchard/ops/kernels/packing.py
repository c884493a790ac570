"""Weights in the order the native kernels read them, and back. The layout is described in `native/kernels.h`.

Packing moves bits and never changes a value: codes, scales and minima come back bit for bit. All of it is numpy over a few
blocks of rows at a time, so that a large matrix needs little room beside its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from orchard.core.errors import BadFile, UsageError

BLOCK = 32
"""Rows that lie side by side."""
BITS = {"q8": 8, "q4": 4, "q2": 2}
PALETTES = {"p4": 4, "p2": 2}
"""Kinds whose codes look values up in a table, and their bits."""
PALETTE_ROWS = 16
"""Rows that share a table."""
PALETTE_GROUP = 32
"""Columns of activations that are rounded together before they meet a palette."""
BLOCKS_GROUP = 48
"""Columns of 6×6 blocks that lie together (see `blocks`)."""
PLAIN = {"f32": 4, "bf16": 2, "f16": 2}
"""Kinds that keep every number by itself, and the bytes of one."""
_ZEROS = {"q8": 128.0, "q4": 8.0, "q2": 1.5}
KINDS = (*PLAIN, *BITS, *PALETTES, "blocks")
_ALIGNMENT = 64
_TABLES = 64
"""Bytes of a block's two tables."""
_AT_A_TIME = 1 << 22
"""Weights that are moved at a time: large enough for numpy to be fast, small enough for the cache of a processor."""


def zero_code(kind: str, minimum: bool) -> float:
    """The code that stands for zero (or for the minimum, where there are minima)."""
    return 0.0 if minimum else _ZEROS[kind]


def matrix_bytes(kind: str, rows: int, cols: int, group: int = 1, minimum: bool = False) -> int:
    """The size of a packed matrix [rows, cols]."""
    if rows < 1 or cols < 1:
        raise UsageError(
            f"a matrix of {rows} × {cols} has nothing to pack", hint="give at least one row and one column"
        )
    blocks = -(-rows // BLOCK)
    if kind in BITS:
        _check_group(group)
        return blocks * -(-cols // group) * _group_bytes(BITS[kind], group, minimum)
    if kind in PALETTES:
        if group != PALETTE_GROUP or minimum:
            raise UsageError(f"palettes in groups of {group}", hint=f"their group is {PALETTE_GROUP}, without minima")
        return blocks * (_TABLES + BLOCK * -(-cols // PALETTE_GROUP) * PALETTE_GROUP * PALETTES[kind] // 8)
    if kind == "blocks":
        if group != BLOCKS_GROUP or minimum:
            raise UsageError(f"blocks in groups of {group}", hint=f"their group is {BLOCKS_GROUP}, without minima")
        return blocks * -(-cols // BLOCKS_GROUP) * (64 + BLOCK * BLOCKS_GROUP // 2)
    if kind not in PLAIN:
        raise UsageError(f"no packed weights are called {kind!r}", hint="use one of " + ", ".join(KINDS))
    if kind == "f16":
        return 2 * cols * _half_rows(rows)
    return blocks * BLOCK * PLAIN[kind] * (-(-cols // 2) * 2 if kind == "bf16" else cols)


def pack_codes(
    codes: np.ndarray, scales: np.ndarray, minima: np.ndarray | None, *, bits: int, group: int
) -> np.ndarray:
    """uint8 codes [rows, cols] with float16 scales (and minima) [rows, groups] → packed bytes."""
    kind = _kind_of(bits)
    rows, cols = _shape(codes, np.uint8, "codes")
    size = matrix_bytes(kind, rows, cols, group, minima is not None)
    groups = -(-cols // group)
    for name, table in (("scales", scales), ("minima", minima)):
        if table is not None and _shape(table, np.float16, name) != (rows, groups):
            raise UsageError(
                f"{name} are {table.shape[0]} × {table.shape[1]}, not {rows} × {groups}",
                hint=f"give one for every {group} columns of every row",
            )
    out = room(size)
    header = _header(minima is not None)
    table_of_groups = out.reshape(-(-rows // BLOCK), groups, -1)
    for first, last, row, until in _pieces(rows, groups * group):
        piece = codes[row:until]
        if bits < 8 and piece.max() >> bits:
            raise UsageError(f"a code of {piece.max()} needs more than {bits} bits", hint=f"codes end at {2**bits - 1}")
        joined = _joined(_padded(piece, (last - first) * BLOCK, groups * group), bits)
        joined = joined.reshape(last - first, BLOCK, groups, group * bits // 32)
        to = table_of_groups[first:last]
        to[:, :, header:] = joined.transpose(0, 2, 3, 1).reshape(last - first, groups, -1).view(np.uint8)
        to[:, :, :64] = _side_by_side(scales[row:until], last - first)
        if minima is not None:
            to[:, :, 64:128] = _side_by_side(minima[row:until], last - first)
    return out


def unpack_codes(
    data: np.ndarray, rows: int, cols: int, *, bits: int, group: int, minimum: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Codes, scales and minima again, exactly as they were packed."""
    data = _checked(data, _kind_of(bits), rows, cols, group, minimum)
    groups = -(-cols // group)
    codes = np.empty((rows, cols), np.uint8)
    scales = np.empty((rows, groups), np.float16)
    minima = np.empty((rows, groups), np.float16) if minimum else None
    for first, last, row, until in _pieces(rows, groups * group):
        part = data.reshape(-1, groups, _group_bytes(bits, group, minimum))[first:last]
        piece = _codes_of(part, bits, group, minimum)
        codes[row:until] = piece[: until - row, :cols]
        scales[row:until] = _rows_again(part[:, :, :64])[: until - row]
        if minima is not None:
            minima[row:until] = _rows_again(part[:, :, 64:128])[: until - row]
    return codes, scales, minima


def pack_palette(codes: np.ndarray, tables: np.ndarray, *, bits: int) -> np.ndarray:
    """uint8 codes [rows, cols] and float16 tables [a sixteenth of the rows, 2**bits] → packed bytes."""
    kind = f"p{bits}"
    if kind not in PALETTES:
        raise UsageError(f"palettes of {bits} bits have no packed form", hint="use 4 or 2 bits")
    rows, cols = _shape(codes, np.uint8, "codes")
    wanted = (-(-rows // PALETTE_ROWS), 2**bits)
    if _shape(tables, np.float16, "tables") != wanted:
        raise UsageError(
            f"tables are {tables.shape[0]} × {tables.shape[1]}, not {wanted[0]} × {wanted[1]}",
            hint=f"give one for every {PALETTE_ROWS} rows",
        )
    if codes.max() >> bits:
        raise UsageError(f"a code of {codes.max()} needs more than {bits} bits", hint=f"codes end at {2**bits - 1}")
    columns = -(-cols // PALETTE_GROUP) * PALETTE_GROUP
    out = room(matrix_bytes(kind, rows, cols, PALETTE_GROUP))
    blocks = out.reshape(-(-rows // BLOCK), -1)
    both = np.zeros((len(blocks), 2, _TABLES // 4), np.float16)
    both.reshape(-1, _TABLES // 4)[: len(tables), : 2**bits] = tables
    blocks[:, :_TABLES] = both.reshape(len(blocks), -1).view(np.uint8)
    for first, last, row, until in _pieces(rows, columns):
        joined = _joined(_padded(codes[row:until], (last - first) * BLOCK, columns), bits)  # [rows, words]
        joined = joined.reshape(last - first, BLOCK, -1).transpose(0, 2, 1)
        blocks[first:last, _TABLES:] = np.ascontiguousarray(joined).view(np.uint8).reshape(last - first, -1)
    return out


def unpack_palette(data: np.ndarray, rows: int, cols: int, *, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and tables again, exactly as they were packed."""
    blocks = _checked(data, f"p{bits}", rows, cols, PALETTE_GROUP, False).reshape(-(-rows // BLOCK), -1)
    tables = np.ascontiguousarray(blocks[:, :_TABLES]).view(np.float16).reshape(-1, _TABLES // 4)
    codes = np.empty((rows, cols), np.uint8)
    for first, last, row, until in _pieces(rows, cols):
        part = blocks[first:last, None, _TABLES:]
        codes[row:until] = _apart(part, bits)[: until - row, :cols]
    return codes, np.ascontiguousarray(tables[: -(-rows // PALETTE_ROWS), : 2**bits])


def pack_plain(weight: np.ndarray, kind: str) -> np.ndarray:
    """float32 [rows, cols], or the bits of bfloat16 as uint16, → packed "f32", "bf16" or "f16" (rounded to nearest even)."""
    if weight.dtype != np.uint16:
        _shape(weight, np.float32, "weights")
    rows, cols = _shape(weight, weight.dtype.type, "weights")
    size = matrix_bytes(_plain(kind), rows, cols)
    out = room(size)
    if kind == "f16":
        with np.errstate(over="ignore"):
            _put_halves(out, (weight if weight.dtype == np.float32 else from_bfloat(weight)).astype(np.float16))
        return out
    columns = -(-cols // 2) * 2 if kind == "bf16" else cols
    for first, last, row, until in _pieces(rows, columns):
        piece = weight[row:until]
        if kind == "f32":
            wide = piece if weight.dtype == np.float32 else from_bfloat(piece)
            padded = _padded(wide, (last - first) * BLOCK, columns).view(np.uint32)
        else:
            short = piece if weight.dtype == np.uint16 else to_bfloat(piece)
            padded = _padded(short, (last - first) * BLOCK, columns).view(np.uint32)
        to = out.view(np.uint32).reshape(-1, padded.shape[1], BLOCK)[first:last]
        to[:] = padded.reshape(last - first, BLOCK, -1).transpose(0, 2, 1)
    return out


def unpack_plain(data: np.ndarray, kind: str, rows: int, cols: int) -> np.ndarray:
    """float32 [rows, cols] again; exact for all of these kinds."""
    data = _checked(data, _plain(kind), rows, cols, 1, False)
    if kind == "f16":
        whole = _half_rows(rows) // BLOCK * BLOCK
        halves = data.view(np.float16)
        parts = (halves[: whole * cols].reshape(-1, cols, BLOCK), halves[whole * cols :].reshape(-1, cols, BLOCK // 2))
        side_by_side = [part.transpose(0, 2, 1).reshape(-1, cols) for part in parts]
        return np.concatenate(side_by_side)[:rows].astype(np.float32)
    out = np.empty((rows, cols), np.float32)
    width = cols if kind == "f32" else -(-cols // 2)
    words = data.view(np.uint32).reshape(-1, width, BLOCK)
    for first, last, row, until in _pieces(rows, cols):
        piece = np.ascontiguousarray(words[first:last].transpose(0, 2, 1)).reshape(-1, width)[: until - row]
        out[row:until] = piece.view(np.float32) if kind == "f32" else from_bfloat(piece.view(np.uint16))[:, :cols]
    return out


def values(data: np.ndarray, kind: str, rows: int, cols: int, group: int = 1, minimum: bool = False) -> np.ndarray:
    """What a packed matrix stands for, as float32 [rows, cols]: scale · (code - zero) + minimum, or the code's entry."""
    if kind in PALETTES:
        codes, tables = unpack_palette(
            _checked(data, kind, rows, cols, group, minimum), rows, cols, bits=PALETTES[kind]
        )
        of_row = np.arange(rows)[:, None] // PALETTE_ROWS
        return tables.astype(np.float32)[of_row, codes]
    if kind == "blocks":
        from orchard.ops.kernels.blocks import block_values

        return block_values(_checked(data, kind, rows, cols, group, minimum), rows, cols)
    if kind not in BITS:
        return unpack_plain(data, kind, rows, cols)
    data = _checked(data, kind, rows, cols, group, minimum)
    groups, bits = -(-cols // group), BITS[kind]
    zero = np.float32(zero_code(kind, minimum))
    out = np.empty((rows, cols), np.float32)
    for first, last, row, until in _pieces(rows, groups * group):
        part = data.reshape(-1, groups, _group_bytes(bits, group, minimum))[first:last]
        piece = _codes_of(part, bits, group, minimum).astype(np.float32).reshape(-1, groups, group)
        piece -= zero
        piece *= _rows_again(part[:, :, :64]).astype(np.float32)[..., None]
        if minimum:
            piece += _rows_again(part[:, :, 64:128]).astype(np.float32)[..., None]
        out[row:until] = piece.reshape(-1, groups * group)[: until - row, :cols]
    return out


def to_bfloat(wide: np.ndarray) -> np.ndarray:
    """float32 → the bits of bfloat16, rounded to nearest even; not-a-number stays so."""
    bits = np.ascontiguousarray(wide, np.float32).view(np.uint32)
    with np.errstate(over="ignore"):
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(wide), quiet, rounded).astype(np.uint16)


def from_bfloat(short: np.ndarray) -> np.ndarray:
    """The bits of bfloat16 → float32."""
    return (short.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _half_rows(rows: int) -> int:
    """Rows that there is room for in `f16`: a last block of up to 16 rows has 16."""
    return -(-rows // (BLOCK // 2)) * (BLOCK // 2)


def _put_halves(out: np.ndarray, values: np.ndarray) -> None:
    rows, cols = _half_rows(len(values)), values.shape[1]
    whole = rows // BLOCK * BLOCK
    padded, to = _padded(values, rows, cols), out.view(np.float16)
    to[: whole * cols].reshape(-1, cols, BLOCK)[:] = padded[:whole].reshape(-1, BLOCK, cols).transpose(0, 2, 1)
    to[whole * cols :].reshape(-1, cols, BLOCK // 2)[:] = (
        padded[whole:].reshape(-1, BLOCK // 2, cols).transpose(0, 2, 1)
    )


def room(size: int) -> np.ndarray:
    """Bytes that begin on a boundary the kernels can load from; not zeroed."""
    room = np.empty(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + size]


def _header(minimum: bool) -> int:
    return 128 if minimum else 64


def _group_bytes(bits: int, group: int, minimum: bool) -> int:
    return _header(minimum) + BLOCK * group * bits // 8


def _pieces(rows: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """(first block, last block, first row, last row) of a few blocks at a time."""
    step = max(1, _AT_A_TIME // (BLOCK * columns))
    blocks = -(-rows // BLOCK)
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        yield first, last, first * BLOCK, min(last * BLOCK, rows)


def _padded(table: np.ndarray, rows: int, cols: int) -> np.ndarray:
    if table.shape == (rows, cols):
        return np.ascontiguousarray(table)
    out = np.zeros((rows, cols), table.dtype)
    out[: table.shape[0], : table.shape[1]] = table
    return out


def _side_by_side(table: np.ndarray, blocks: int) -> np.ndarray:
    """float16 [rows, groups] → bytes [blocks, groups, 64]."""
    padded = _padded(table, blocks * BLOCK, table.shape[1]).reshape(blocks, BLOCK, -1)
    return np.ascontiguousarray(padded.transpose(0, 2, 1)).view(np.uint8)


def _rows_again(part: np.ndarray) -> np.ndarray:
    """Bytes [blocks, groups, 64] → float16 [rows, groups]."""
    table = np.ascontiguousarray(part).view(np.float16)
    return table.transpose(0, 2, 1).reshape(-1, part.shape[1])


def _joined(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, columns] → words of four bytes [rows, columns · bits / 32], in which codes of one chunk share bytes."""
    words = codes.view(np.uint32).reshape(len(codes), -1, 8 // bits)
    joined = words[..., 0]
    for j in range(1, 8 // bits):  # codes are smaller than 2**bits, so nothing crosses from one byte to the next
        joined = joined | words[..., j] << np.uint32(j * bits)
    return joined


def _codes_of(part: np.ndarray, bits: int, group: int, minimum: bool) -> np.ndarray:
    """Bytes [blocks, groups, ...] → codes [rows, columns], padding included."""
    return _apart(part[:, :, _header(minimum) :], bits)


def _apart(part: np.ndarray, bits: int) -> np.ndarray:
    """Bytes of codes [blocks, groups, ...] → codes [rows, columns], padding included."""
    blocks, groups = part.shape[:2]
    words = np.ascontiguousarray(part).view(np.uint32)
    words = np.ascontiguousarray(words.reshape(blocks, groups, -1, BLOCK).transpose(0, 3, 1, 2))
    codes = np.empty((*words.shape, 8 // bits), np.uint32)
    mask = np.uint32((2**bits - 1) * 0x01010101)
    for j in range(8 // bits):
        np.bitwise_and(words >> np.uint32(j * bits), mask, out=codes[..., j])
    return codes.view(np.uint8).reshape(blocks * BLOCK, -1)


def _kind_of(bits: int) -> str:
    for kind, width in BITS.items():
        if width == bits:
            return kind
    raise UsageError(f"codes of {bits} bits have no packed form", hint="use 8, 4 or 2 bits")


def _plain(kind: str) -> str:
    if kind not in PLAIN:
        raise UsageError(f"{kind!r} is not a plain kind of weights", hint="use f32, bf16 or f16, or pack_codes")
    return kind


def _check_group(group: int) -> None:
    if group < 32 or group % 32:
        raise UsageError(f"groups of {group} columns have no packed form", hint="use a multiple of 32")


def _shape(table: np.ndarray, dtype: type, name: str) -> tuple[int, int]:
    if table.ndim != 2 or table.dtype != dtype:
        raise UsageError(
            f"{name} are {table.dtype} in {table.ndim} dimensions",
            hint=f"give a table of {np.dtype(dtype).name} with rows and columns",
        )
    return table.shape[0], table.shape[1]


def _checked(data: np.ndarray, kind: str, rows: int, cols: int, group: int, minimum: bool) -> np.ndarray:
    size = matrix_bytes(kind, rows, cols, group, minimum)
    if data.dtype != np.uint8 or data.ndim != 1 or data.size != size:
        raise BadFile(
            f"a packed {kind} matrix of {rows} × {cols} takes {size:,} bytes, not {data.size:,}",
            hint="pack the weights again from their source",
        )
    return np.ascontiguousarray(data)
