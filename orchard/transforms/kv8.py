"""Keys and values kept in eight bits, in every layer: half the bytes of bfloat16 and a little for scales. Nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from orchard.cache.codecs import Int8
from orchard.cache.store import Store
from orchard.core.batch import Batch
from orchard.core.errors import ConfigError
from orchard.transforms.base import Tell, Transform, silent
from orchard.transforms.reformat import learning_like

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class KV8(Transform):
    """Weights stay as they are; only the config tree says how stores code their slots."""

    def __call__(self, tree: Any) -> Any:
        tree = tree.complete()
        if not tree.find(Store):
            raise ConfigError("this model keeps no keys and values", hint="leave KV8 out of the plan")
        return tree.rewrite(Store, lambda store: store.clone(codec=Int8.Config()))

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        made = learning_like(super().apply(model, texts, tell), model)
        tell(1.0)
        return made
