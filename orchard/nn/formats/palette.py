"""A weight kept as numbers of a palette: every 16 rows share one table of 16 (4 bits) or 4 (2 bits) half-precision values.

As in Apple's first on-device model (arXiv 2407.21075). The tables are found by k-means, so they lie where the values
are, and values that matter more (`importance`) draw them nearer. A table is sorted; a weight of 16 × 576 values pays
0.03 bits each for it.

    codes   uint8 [..., out, in · bits / 8]                 neighbours share a byte, the first in its lowest bits
    table   float16 [..., ceil(out / rows), 2 ** bits]
    value   = table[row // rows, code]
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import ConfigError
from orchard.nn.formats.base import (
    LARGE,
    Format,
    NativeWeight,
    Packed,
    PackedPart,
    counted,
    finite_or_nan,
    spread,
    squeeze,
)
from orchard.nn.formats.native_tables import native_palette
from orchard.nn.formats.palette_means import codes_of, tables_of

CHOICES = (2, 4)


class Palette(Configurable, Format):
    """Values too large for half precision become the largest there is; a table of rows with a value that is not finite
    becomes not-a-number."""

    @config
    class Config(BaseConfig):
        bits: int = 4
        rows: int = 16
        """Rows that share a table; the last table may have fewer."""

    def __init__(self, cfg: Config) -> None:
        if cfg.bits not in CHOICES:
            raise ConfigError(f"a palette of {cfg.bits!r} bits", hint="use 2 or 4")
        if isinstance(cfg.rows, bool) or not isinstance(cfg.rows, int) or cfg.rows < 1:
            raise ConfigError(f"{cfg.rows!r} rows for a palette", hint="use a whole number from 1")
        self.config = cfg

    def layout(self, shape: tuple[int, ...]) -> dict[str, PackedPart]:
        (*lead, out, width), bits = shape, self.config.bits
        if width * bits % 8:
            raise ConfigError(f"{width} codes of {bits} bits are no whole number of bytes", hint="use Int8 or Blocks")
        return {
            "codes": PackedPart((*lead, out, width * bits // 8), torch.uint8),
            "table": PackedPart((*lead, -(-out // self.config.rows), 2**bits), torch.float16),
        }

    def pack(self, weight: Tensor, importance: Tensor | None = None) -> Packed:
        """The palette of least squared error that k-means finds; `importance` (broadcast to the weight, not negative)
        is how much the square of each value's error counts. A table of which nothing counts is made as if all did."""
        self.layout(tuple(weight.shape))  # refuses what cannot be
        values = finite_or_nan(weight.detach().float())
        counts = None if importance is None else counted(importance, values)
        bits, rows, whole = self.config.bits, self.config.rows, weight.shape[-2] // self.config.rows * self.config.rows
        codes, tables = [], []
        for part in (slice(0, whole), slice(whole, None)):  # the last table may have fewer rows
            some = values[..., part, :]
            if some.numel():
                shared = some.unflatten(-2, (-1, min(rows, some.shape[-2]))).flatten(-2)
                weights = None if counts is None else counts[..., part, :].reshape(shared.shape)
                table = tables_of(shared, weights, 2**bits)
                codes.append(codes_of(shared, table).reshape(some.shape))
                tables.append(table)
        return {"codes": squeeze(torch.cat(codes, -2), bits), "table": torch.cat(tables, -2)}

    def unpack(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        codes, table, rows = packed["codes"], packed["table"], self.config.rows
        if codes.dim() != 2 or codes.device.type != "cpu" or torch.compiler.is_compiling() or codes.numel() <= LARGE:
            return self._values(codes, table).to(dtype)
        # A large weight goes faster in pieces that a cache holds.
        made = codes.new_empty((len(codes), codes.shape[1] * 8 // self.config.bits), dtype=dtype)
        step = max(1, LARGE // (codes.shape[1] * rows))
        for first in range(0, len(table), step):
            here = slice(first * rows, (first + step) * rows)
            made[here] = self._values(codes[here], table[first : first + step])
        return made

    def _values(self, codes: Tensor, table: Tensor) -> Tensor:
        """By whole bytes: every table is written out once for all that a byte can say."""
        every = spread(torch.arange(256, dtype=torch.uint8, device=codes.device)[:, None], self.config.bits).int()
        written = table[..., every].flatten(0, -2)  # [tables · 256, codes in a byte]
        *lead, out, _ = codes.shape
        tables = torch.arange(written.shape[0] // 256, dtype=torch.int32, device=codes.device)
        own = tables.reshape(*lead, -1).repeat_interleave(self.config.rows, -1)[..., :out, None]
        return functional.embedding(codes.int() + own * 256, written).flatten(-2)

    def native(self, packed: Packed, shape: tuple[int, ...]) -> NativeWeight:
        bits = self.config.bits
        return native_palette(spread(packed["codes"], bits), packed["table"], bits=bits, rows=self.config.rows)

    def rows(self, packed: Packed, ids: Tensor, dtype: torch.dtype) -> Tensor:
        codes = spread(packed["codes"][ids], self.config.bits)
        return packed["table"][ids // self.config.rows].gather(-1, codes.long()).to(dtype)

    def fake(self, weight: Tensor) -> Tensor:
        rounded = self.unpack(self.pack(weight.detach()), weight.dtype)
        return weight + (rounded - weight).detach()
