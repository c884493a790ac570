"""Keys and values of one or two bits, by codebooks that are fitted to a model (CommVQ, arXiv 2506.18879).

    small = FitCodebooks(file="model.codebooks.safetensors", bits=2).apply(model, texts)

Codebooks are found layer by layer (`ops/vq_fit.py`), from what the model keeps on the texts, and lie in a file beside the model.
Where the file is there and was fitted to this very model it is taken as it is, and no text is needed; one that was fitted to
another model is refused. Nothing is trained, and weights stay as they are.

Which errors matter: a pair of key channels counts by how much queries look at it, a direction of values by what the output map
makes of it (`weighted`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from orchard.cache.codecs import CommVQ
from orchard.cache.codecs.commvq import KIND
from orchard.cache.codecs.fitted import AGAIN, layers_of, model_of, write_fitted
from orchard.core.batch import Batch
from orchard.core.errors import BadFile, ConfigError
from orchard.ops import vq_fit
from orchard.ops.vq import Codebooks
from orchard.transforms.base import Tell, Transform, silent
from orchard.transforms.kv_samples import Samples, fingerprint, keeping, samples_of
from orchard.transforms.reformat import learning_like

M = TypeVar("M", bound=nn.Module)
FLOOR = 0.05
"""The least that a pair or a direction counts, beside the mean: what texts do not show may still matter."""


@dataclass(frozen=True)
class FitCodebooks(Transform):
    """`bits` a number, prescales counted at 2 and not at 1; or `rounds`, of which each takes 8 bits a head with 16 words."""

    file: str
    bits: int = 2
    rounds: int | None = None
    words: int = 16
    sinks: int = 4
    tokens: int = 8192
    """So many of the texts are fitted to."""
    weighted: bool = True
    soft: int = 3
    steps: int = 5
    passes: int = 1
    seed: int = 0

    looks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.bits not in (1, 2):
            raise ConfigError(f"keys and values of {self.bits} bits", hint="use bits=2 or bits=1")
        if self.tokens < 2 * self.words:
            raise ConfigError(f"{self.tokens} tokens for {self.words} codewords", hint="use some thousand tokens")

    def rounds_of(self, dim: int) -> int:
        """For heads of so many channels. Two bits of 64 channels are 16 bytes: 14 rounds of a byte and a prescale."""
        if self.rounds is not None:
            return self.rounds
        each = 2 * (self.words.bit_length() - 1)
        return max(1, (2 * dim - 16) // each if self.bits == 2 else dim // each)

    def __call__(self, tree: Any) -> Any:
        whose = model_of(self.file, KIND) if Path(self.file).is_file() else "not fitted yet"
        return self._with(tree, whose)

    def apply(self, model: M, texts: Sequence[Batch] = (), tell: Tell = silent) -> M:
        any_model: Any = model
        mixers, whose = keeping(any_model.config.complete(), "kv-commvq"), fingerprint(model)
        if not Path(self.file).is_file():
            found = samples_of(
                model, texts, tokens=self.tokens, skip=self.sinks, who="kv-commvq", seed=self.seed, tell=_half(tell)
            )
            made = {}
            for number, (layer, samples) in enumerate(found.items()):
                books = self.fitted(
                    samples.to(any_model.device), any_model.stack.layers[layer].mixer if self.weighted else None
                )
                made[layer] = {part.name: getattr(books, part.name) for part in fields(Codebooks)}
                tell(0.5 + (number + 1) / (2 * len(found)))
            write_fitted(self.file, KIND, made, model=whose)
        elif model_of(self.file, KIND) != whose:
            raise BadFile(f"{self.file} was fitted to another model", hint=f"give another file, or {AGAIN}")
        elif missing := sorted(mixers.keys() - layers_of(self.file).keys()):
            raise BadFile(f"{self.file} has nothing for layer {missing[0]}", hint=AGAIN)
        made_model = learning_like(self._in(model, self._with(any_model.config, whose)), model)
        any_made: Any = made_model
        for mixer in keeping(any_made.config, "kv-commvq").values():
            mixer.store.codec.build().check()  # a file that does not fit is refused now, not in the middle of a conversation
        tell(1.0)
        return made_model

    def fitted(self, samples: Samples, mixer: Any = None) -> Codebooks:
        """Codebooks of one layer; `mixer`: whose queries and output map say which errors matter (None: all alike)."""
        dim = samples.k.shape[-1]
        weight = metric = None
        if mixer is not None:
            weight = samples.looks / samples.looks.mean(-1, keepdim=True).clamp_min(1e-12) + FLOOR
            metric = output_metric(mixer.o.dense(torch.float32).detach().to(samples.k.device), samples.k.shape[0], dim)
        return vq_fit.fit(
            samples.k,
            samples.v,
            rounds=self.rounds_of(dim),
            words=self.words,
            weight=weight,
            metric=metric,
            soft=self.soft,
            steps=self.steps,
            passes=self.passes,
            seed=self.seed,
        )

    def _with(self, tree: Any, whose: str) -> Any:
        tree = tree.complete()
        for layer, mixer in keeping(tree, "kv-commvq").items():
            mixer.store.codec = CommVQ.Config(
                file=str(Path(self.file).absolute()),
                model=whose,
                layer=layer,
                rounds=self.rounds_of(mixer.head_dim),
                words=self.words,
                sinks=self.sinks,
            )
        return tree.complete()


def output_metric(weight: Tensor, heads: int, dim: int) -> Tensor:
    """What an error of a head's values does to what the layer adds: [H, D, D], of trace D and a little more, from the output map
    [out, Hq · D]."""
    maps = weight.unflatten(1, (heads, -1, dim)).permute(1, 2, 0, 3)  # [H, G, out, D]
    square = (maps.mT @ maps).sum(1)
    size = square.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp_min(1e-12)
    return square / size + FLOOR * torch.eye(dim, device=weight.device)


def _half(tell: Tell) -> Tell:
    return lambda share: tell(share / 2)
