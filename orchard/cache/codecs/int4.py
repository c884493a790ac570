"""Slots kept as 4-bit integers, keys by channel and values by token (after KIVI, arXiv 2402.02750).

Some channels of keys are far from zero, or wide, for all tokens of a model. Where a file says which (`transforms/kv4.py` looks at
texts), keys are moved and scaled channel by channel before they are rounded; without one they are rounded like values. A token of
a head is rounded between its least and its largest number: 16 levels, and two float16 beside them.

What differs from KIVI: what channels need is fitted once to a model, not found anew in every group of 32 tokens, and every token
has a scale of its own beside it. So a slot can be written by itself, and does not depend on how a prompt was cut into pieces.
Keys are coded before they are rotated, where channels keep to themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orchard.cache.codecs.base import Codec, Parts, Role
from orchard.cache.codecs.fitted import AGAIN, read_fitted
from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.errors import BadFile, ConfigError
from orchard.ops.vq import packed, unpacked

KIND = "channels"
LEVELS = 15


class Int4(Configurable, Codec):
    """Two codes a byte."""

    before_rotation = True

    @config
    class Config(BaseConfig):
        file: str | None = None
        """Where the middle and the width of key channels are; None: keys are rounded as they come."""
        model: str = ""
        layer: int = 0
        sinks: int = 0
        """The first so many tokens are kept as they are."""

    def __init__(self, cfg: Config) -> None:
        if not 0 <= cfg.sinks <= 255:
            raise ConfigError(f"{cfg.sinks} sinks", hint="use 0 to 255")
        self.config = cfg
        self.sinks = cfg.sinks
        self._channels: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def layout(self, dim: int, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        half = torch.float16
        return {"codes": ((-(-dim // 2),), torch.uint8), "scale": ((1,), half), "low": ((1,), half)}

    def encode(self, x: Tensor, role: Role) -> Parts:
        x = x.float()
        if role == "k" and self.config.file is not None:
            middle, width = self._of(x)
            x = (x - middle) / width
        low = x.amin(-1, keepdim=True).clamp(-65504.0, 65504.0).to(torch.float16)
        scale = ((x.amax(-1, keepdim=True) - low.float()) / LEVELS).clamp(6e-8, 65504.0).to(torch.float16)
        codes = ((x - low.float()) / scale.float()).round().clamp(0, LEVELS).to(torch.uint8)
        if codes.shape[-1] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        return {"codes": packed(codes, 4), "scale": scale, "low": low}

    def decode(self, parts: Parts, role: Role, dtype: torch.dtype) -> Tensor:
        codes = unpacked(parts["codes"], 4, 2 * parts["codes"].shape[-1])
        x = codes.float() * parts["scale"].float() + parts["low"].float()
        if role == "k" and self.config.file is not None:
            middle, width = self._of(x)
            x = x * width + middle
        return x.to(dtype)

    def _of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The middle and the width of every channel, [H, 1, D]."""
        if x.device not in self._channels:
            cfg = self.config
            found = read_fitted(cfg.file or "", KIND, layer=cfg.layer, model=cfg.model)
            middle, width = (found.get(name) for name in ("middle", "width"))
            if middle is None or width is None or middle.shape != width.shape or not bool((width > 0).all()):
                raise BadFile(f"{cfg.file} does not say where key channels are", hint=AGAIN)
            self._channels[x.device] = middle.to(x.device)[:, None], width.to(x.device)[:, None]
        middle, width = self._channels[x.device]
        if (middle.shape[0], middle.shape[2]) != (x.shape[1], x.shape[3]):
            raise BadFile(f"{self.config.file} is for {middle.shape[0]} heads of {middle.shape[2]}", hint=AGAIN)
        return middle, width
