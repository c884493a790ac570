"""Linear maps and embeddings whose weight lives in any format.

Shapes: [..., in] → [..., out]; a weight is [out, in], or [experts, out, in] when grouped.
"""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor, nn

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.errors import ConfigError
from orchard.nn.formats import Format, Grouped, GroupedFormat, NativeWeight, Packed, Plain
from orchard.ops.grouped import grouped_linear

INIT_STD = 0.02


class Weight(nn.Module):
    """A weight in a format: the packed tensors are this module's own parameters (trained) or buffers (not)."""

    def __init__(self, cfg: BaseConfig, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.format: Format = cfg.build()
        self.shape = shape
        for name, part in self.format.layout(shape).items():
            if part.trained:
                self.register_parameter(name, nn.Parameter(torch.empty(part.shape)))
            else:
                self.register_buffer(name, torch.empty(part.shape, dtype=part.dtype))
        if not self._first().is_meta:
            self.assign(torch.empty(shape).normal_(std=INIT_STD))

    def _first(self) -> Tensor:
        return next(iter(self.packed().values()))

    def packed(self) -> Packed:
        return {name: getattr(self, name) for name in self.format.layout(self.shape)}

    def assign(self, weight: Tensor) -> None:
        """Pack a dense weight into this module, replacing what was there (also on the meta device)."""
        self._refuse_shape(weight)
        self._place(self.format.pack(weight))

    def assign_grouped(self, grouped: Grouped) -> bool:
        """Keep codes and scales exactly as they are; False, and nothing changed, where the format cannot."""
        self._refuse_shape(grouped.codes)
        packed = self.format.take(grouped) if isinstance(self.format, GroupedFormat) else None
        if packed is None:
            return False
        self._place(packed)
        return True

    def _refuse_shape(self, weight: Tensor) -> None:
        if tuple(weight.shape) != self.shape:
            raise ConfigError(f"a weight of shape {tuple(weight.shape)} where {self.shape} belongs", hint="reshape it")

    def _place(self, packed: Packed) -> None:
        for name, value in packed.items():
            old = getattr(self, name)
            new = value.detach()
            setattr(self, name, nn.Parameter(new, requires_grad=old.requires_grad) if name in self._parameters else new)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.format.unpack(self.packed(), dtype)

    def native(self) -> NativeWeight:
        """The weight as the native engine reads it; `NotLowered` says why not."""
        return self.format.native(self.packed(), self.shape)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.packed().values())


class Linear(Configurable, Weight):
    """y = x Wᵀ + b."""

    @config
    class Config(BaseConfig):
        in_dim: int = REQUIRED
        out_dim: int = REQUIRED
        bias: bool = False
        format: BaseConfig = field(default_factory=Plain.Config)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg.format, (cfg.out_dim, cfg.in_dim))
        self.config = cfg
        self.bias = nn.Parameter(torch.zeros(cfg.out_dim)) if cfg.bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.format.matmul(x, self.packed())
        return y if self.bias is None else y + self.bias.to(y.dtype)


class GroupedLinear(Configurable, Weight):
    """One linear map per expert, kept as one weight [experts, out, in]."""

    @config
    class Config(BaseConfig):
        count: int = REQUIRED
        in_dim: int = REQUIRED
        out_dim: int = REQUIRED
        format: BaseConfig = field(default_factory=Plain.Config)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg.format, (cfg.count, cfg.out_dim, cfg.in_dim))
        self.config = cfg

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """Apply one expert's map."""
        return self.format.matmul(x, {name: part[expert] for name, part in self.packed().items()})

    def grouped(self, x: Tensor, counts: Tensor) -> Tensor:
        """Apply all experts' maps at once, to rows [P, in] that are sorted by expert: `counts` [experts] says how many are whose.
        Only of plain weights."""
        return grouped_linear(x, self.packed()["weight"], counts)


class Embedding(Configurable, Weight):
    """Token ids to vectors, and (tied) vectors to scores. `scale` multiplies what is looked up (Gemma: √dim)."""

    @config
    class Config(BaseConfig):
        vocab: int = REQUIRED
        dim: int = REQUIRED
        scale: float | None = None
        format: BaseConfig = field(default_factory=Plain.Config)

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg.format, (cfg.vocab, cfg.dim))
        self.config = cfg

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        x = self.format.rows(self.packed(), ids, dtype)
        return x if self.config.scale is None else x * torch.tensor(self.config.scale, dtype=dtype, device=x.device)

    def scores(self, x: Tensor) -> Tensor:
        """Use the table the other way round, as an output head."""
        return self.format.matmul(x, self.packed())
