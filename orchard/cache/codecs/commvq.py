"""Slots kept as additive vector codes of one or two bits a number (CommVQ, arXiv 2506.18879).

Keys are coded before they are rotated, by codebooks that commute with rotations; values by plain additive codebooks. Codebooks
are fitted to a model (`orchard.transforms.fit_codebooks`) and lie in a file beside it. `ops/vq.py` says what codes mean.

A slot of a head of 64 channels takes `rounds` bytes and a prescale of two: with 14 rounds 16 bytes instead of 128, with 6 rounds
8 bytes. The first `sinks` tokens, which almost every query looks at, stay as they are (`cache/exact.py`).

What differs from the paper: one prescale a head instead of one a token, with an offset that is taken off before (most of a key's
length is the mean of its head); values are coded additively like keys, where the paper trains an encoder; 16 codewords a half
instead of 64, so that tables of all rounds fit the cache of one core.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orchard.cache.codecs.base import Attended, Codec, Parts, Role
from orchard.cache.codecs.fitted import AGAIN, read_fitted
from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.errors import BadFile, ConfigError
from orchard.ops import vq, vq_attend
from orchard.ops.plan.codes import Books
from orchard.ops.vq import Codebooks
from orchard.ops.vq_grid import on_grid

KIND = "codebooks"


class CommVQ(Configurable, Codec):
    """`rounds` rounds of keys and twice as many of values, `words` codewords in each."""

    native = "vq"
    before_rotation = True

    @config
    class Config(BaseConfig):
        file: str = REQUIRED
        """The codebooks of all layers."""
        model: str = REQUIRED
        """What the file must say about whose they are."""
        layer: int = REQUIRED
        """Whose codebooks of that file."""
        rounds: int = 14
        words: int = 16
        sinks: int = 4
        """The first so many tokens are kept as they are."""

    def __init__(self, cfg: Config) -> None:
        bits = cfg.words.bit_length() - 1
        if cfg.rounds < 1 or cfg.sinks < 0 or cfg.sinks > 255:
            raise ConfigError(f"{cfg.rounds} rounds and {cfg.sinks} sinks", hint="use rounds ≥ 1 and up to 255 sinks")
        if cfg.words != 1 << bits or not 2 <= cfg.words <= 64:
            raise ConfigError(f"{cfg.words} codewords a half", hint="use a power of two from 2 to 64")
        self.config = cfg
        self.bits = bits
        self.sinks = cfg.sinks
        self.bytes = -(-2 * cfg.rounds * bits // 8)
        self._books: dict[tuple[torch.device, int], Codebooks] = {}

    def layout(self, dim: int, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"codes": ((self.bytes,), torch.uint8), "scale": ((1,), torch.float16)}

    def encode(self, x: Tensor, role: Role) -> Parts:
        books = self.books(x)
        codes, scale = vq.encode_keys(books, x) if role == "k" else vq.encode_values(books, x)
        return {"codes": vq.packed(codes.flatten(3), self.bits), "scale": scale}

    def decode(self, parts: Parts, role: Role, dtype: torch.dtype) -> Tensor:
        codes, scale = self.unpacked(parts), parts["scale"]
        books = self.books(scale)
        if role == "v":
            return vq.decode_values(books, codes, scale).to(dtype)
        return vq.decode_keys(books, codes.unflatten(-1, (-1, 2)), scale).to(dtype)

    def attended(self, k: Parts, v: Parts) -> Attended:
        """Attention without keys and values in full: see `ops/vq_attend.py`."""
        coded = [(self.unpacked(parts), parts["scale"]) for parts in (k, v)]
        return vq_attend.Coded(self.books(k["scale"]), *coded[0], *coded[1])

    def native_books(self, heads: int, dim: int) -> Books:
        books = self.books(torch.empty(1, heads, 0))
        if books.dim != dim:
            raise BadFile(f"{self.config.file} is for heads of {books.dim} channels, not {dim}", hint=AGAIN)
        return Books.of(books, self.sinks)

    def unpacked(self, parts: Parts) -> Tensor:
        return vq.unpacked(parts["codes"], self.bits, 2 * self.config.rounds)

    def books(self, like: Tensor) -> Codebooks:
        """On the device of a tensor [B, H, …], for as many heads as it has. Codebooks of one head serve all."""
        key = like.device, like.shape[1]
        if key not in self._books:
            books = self._read()
            if books.heads not in (1, like.shape[1]):
                raise BadFile(f"{self.config.file} has {books.heads} heads a layer, not {like.shape[1]}", hint=AGAIN)
            self._books[key] = books.for_heads(like.shape[1]).to(like.device)
        return self._books[key]

    def check(self) -> None:
        """`BadFile` where the codebooks are not what this codec needs."""
        self._read()

    def _read(self) -> Codebooks:
        cfg = self.config
        found = read_fitted(cfg.file, KIND, layer=cfg.layer, model=cfg.model)
        books = codebooks_of(found, cfg.file)
        made = (books.key_rounds, books.value_rounds, books.keys.shape[2], books.values.shape[2])
        if made != (cfg.rounds, 2 * cfg.rounds, cfg.words, cfg.words):
            raise BadFile(
                f"{cfg.file} has {made[0]} rounds of {made[2]} codewords, not {cfg.rounds} of {cfg.words}", hint=AGAIN
            )
        return on_grid(books)  # here, so that torch and the native engine, which adds in whole numbers, read the same


def codebooks_of(found: dict[str, Tensor], file: str) -> Codebooks:
    """The tensors of a layer in a file as codebooks."""
    names: Any = Codebooks.__dataclass_fields__
    if found.keys() != names.keys():
        raise BadFile(f"{file} has {', '.join(sorted(found))} for a layer", hint=AGAIN)
    try:
        return Codebooks(**{name: tensor.float() for name, tensor in found.items()})
    except (ConfigError, ValueError) as error:
        raise BadFile(f"{file} does not fit together: {error}", hint=AGAIN) from None
