"""Keys and values kept in four bits, in every layer: a quarter of the bytes of bfloat16 and a little for scales.

With a file, key channels are moved and scaled by what texts say about them (`cache/codecs/int4.py`); where the file is there
already and was fitted to this model, it is taken as it is. Without a file nothing is looked at. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from orchard.cache.codecs import Int4
from orchard.cache.codecs.fitted import AGAIN, model_of, write_fitted
from orchard.cache.codecs.int4 import KIND
from orchard.core.batch import Batch
from orchard.core.errors import BadFile
from orchard.transforms.base import Tell, Transform, silent
from orchard.transforms.kv_samples import fingerprint, keeping, samples_of
from orchard.transforms.reformat import learning_like

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class KV4(Transform):
    """`file`: what key channels need, found on the texts; `sinks`: the first so many tokens stay as they are."""

    file: str | None = None
    sinks: int = 4
    tokens: int = 8192
    seed: int = 0

    def __call__(self, tree: Any) -> Any:
        there = self.file is not None and Path(self.file).is_file()
        return self._with(tree, model_of(self.file or "", KIND) if there else "not fitted yet")

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        any_model: Any = model
        whose = fingerprint(model)
        if self.file is not None and not Path(self.file).is_file():
            found = samples_of(
                model, texts, tokens=self.tokens, skip=self.sinks, who="kv-int4", seed=self.seed, tell=tell
            )
            made = {
                layer: {"middle": each.k.mean(1), "width": each.k.std(1).clamp_min(1e-6)}
                for layer, each in found.items()
            }
            write_fitted(self.file, KIND, made, model=whose)
        elif self.file is not None and model_of(self.file, KIND) != whose:
            raise BadFile(f"{self.file} was fitted to another model", hint=f"give another file, or {AGAIN}")
        made_model = learning_like(self._in(model, self._with(any_model.config, whose)), model)
        tell(1.0)
        return made_model

    def _with(self, tree: Any, whose: str) -> Any:
        tree = tree.complete()
        file = None if self.file is None else str(Path(self.file).absolute())
        for layer, mixer in keeping(tree, "kv-int4").items():
            mixer.store.codec = Int4.Config(file=file, model=whose if file else "", layer=layer, sinks=self.sinks)
        return tree.complete()
