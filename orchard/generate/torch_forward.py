"""A torch model as a runner. Shapes: B sequences, T tokens of a call, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from orchard.core.context import Context, KVCache
from orchard.generate.passes import SlotsPass
from orchard.generate.protocol import Runner, Shape, Use
from orchard.generate.slots_torch import TorchSlots
from orchard.generate.variants import Variants


class Stores(KVCache, Protocol):
    """A model's stores for a batch; `orchard.cache.store.Cache` is the real one."""

    def keep(self, rows: Tensor) -> None:
        """Keep only these sequences, in this order."""


class TorchModel(Protocol):
    """A causal model over token ids; `orchard.models.language.decoder.Decoder` is one."""

    @property
    def config(self) -> Shape: ...

    @property
    def device(self) -> torch.device: ...

    def hidden(self, ids: Tensor, context: Context) -> Tensor:
        """What the head reads: [B, T, dim] for ids [B, T]."""

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores [..., V] of the next token."""

    def cache(self, *, batch: int, length: int) -> Stores:
        """Empty stores for `batch` sequences of up to `length` tokens."""


def runner_of(model: Runner | TorchModel) -> Runner:
    """A runner as it is; a torch model wrapped into one."""
    return model if isinstance(model, Runner) else TorchRunner(model)


class TorchRunner:
    """Runs a torch model on whatever device it is."""

    def __init__(self, model: TorchModel) -> None:
        self.model = model
        self.variants: Variants[TorchRunner] = Variants(_shared(model.config))

    @property
    def config(self) -> Shape:
        return self.model.config

    def slots(self, count: int) -> TorchSlots:
        return TorchSlots(self, count)

    def begin(self, prompts: Sequence[Sequence[int]], *, length: int, held: Sequence[Use | None] = ()) -> SlotsPass:
        """A batch of prompts without an engine. Nothing is held here, so prompts are always read whole."""
        return SlotsPass(self.slots(len(prompts)), prompts, length, held)

    def add_variant(self, name: str, runner: TorchRunner) -> None:
        """Let requests name another runner over the same base (an adapter, say): both can share the slots of one engine."""
        self.variants.add(name, runner, _shared(runner.config))

    def drop_variant(self, name: str) -> None:
        self.variants.drop(name)

    def variant(self, name: str | None) -> TorchRunner:
        return self if name is None else self.variants.find(name)


def _shared(config: Shape) -> tuple[int, int]:
    """What variants have in common."""
    return config.vocab, config.context
