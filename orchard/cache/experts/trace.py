"""A trace: which experts a model chose, token by token, and what the gates ahead would have guessed.

One safetensors file with the name of the model in it, so that a trace of another model is refused. A pass is one call of
the model: it may read several tokens, whose experts are then needed together.
Shapes: N tokens, L layers, K chosen, H lookahead, P guesses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from orchard.cache.experts.errors import OtherModel
from orchard.core.errors import BadFile
from orchard.core.files import atomic_write

KIND = "orchard-experts-trace"
MOST_BYTES = 1 << 31
_AGAIN = "record it again"


@dataclass(frozen=True)
class Trace:
    """What was recorded of a model with `experts` experts in each of its layers."""

    model: str
    experts: int
    chosen: np.ndarray
    """int16 [N, L, K]."""
    scores: np.ndarray
    """float32 [N, L, K]: the weights that the router gave them."""
    passes: np.ndarray
    """int32 [N]: the pass of each token, counted from 0, never falling."""
    ahead: np.ndarray
    """int16 [N, L, H, P]: guesses for layer l made h + 1 layers before it, the surest first; -1 where there is none."""
    ahead_scores: np.ndarray
    """float32 [N, L, H, P]."""
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens, layers, chosen = self._shape(self.chosen, 3)
        _, _, lookahead, guesses = self._shape(self.ahead, 4)
        wanted = {
            "chosen": (self.chosen, np.int16, (tokens, layers, chosen)),
            "scores": (self.scores, np.float32, (tokens, layers, chosen)),
            "passes": (self.passes, np.int32, (tokens,)),
            "ahead": (self.ahead, np.int16, (tokens, layers, lookahead, guesses)),
            "ahead_scores": (self.ahead_scores, np.float32, (tokens, layers, lookahead, guesses)),
        }
        for name, (array, dtype, shape) in wanted.items():
            if array.dtype != dtype or array.shape != shape:
                raise BadFile(f"a trace whose {name} are {array.dtype} {array.shape}, not {shape}", hint=_AGAIN)
        if not tokens or not layers or not chosen:
            raise BadFile("a trace in which nothing was chosen", hint=_AGAIN)
        if not 0 < self.experts < 1 << 15 or self.chosen.min() < 0 or self.chosen.max() >= self.experts:
            raise BadFile(f"a trace that names experts outside 0 to {self.experts - 1}", hint=_AGAIN)
        if self.ahead.size and (self.ahead.min() < -1 or self.ahead.max() >= self.experts):
            raise BadFile(f"a trace that guesses experts outside 0 to {self.experts - 1}", hint=_AGAIN)
        if self.passes[0] != 0 or (np.diff(self.passes) < 0).any() or (np.diff(self.passes) > 1).any():
            raise BadFile("a trace whose passes do not follow each other", hint=_AGAIN)

    @staticmethod
    def _shape(array: np.ndarray, dims: int) -> tuple[int, ...]:
        if array.ndim != dims:
            raise BadFile(f"a trace with an array of {array.ndim} dimensions, not {dims}", hint=_AGAIN)
        return array.shape

    @property
    def layers(self) -> int:
        return self.chosen.shape[1]

    @property
    def k(self) -> int:
        return self.chosen.shape[2]

    @property
    def lookahead(self) -> int:
        return self.ahead.shape[2]

    @property
    def tokens(self) -> int:
        return len(self.chosen)

    def by_pass(self) -> Iterator[slice]:
        """The tokens of each pass."""
        ends = [*(np.flatnonzero(np.diff(self.passes)) + 1).tolist(), self.tokens]
        start = 0
        for end in ends:
            yield slice(start, end)
            start = end

    def require(self, model: str) -> None:
        """Refuse a trace of another model."""
        if self.model != model:
            raise OtherModel(f"this is a trace of {self.model!r}, not of {model!r}", hint="record one of this model")

    def save(self, path: Path | str) -> None:
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}
        facts = {"kind": KIND, "version": 1, "model": self.model, "experts": self.experts, "facts": self.facts}
        with atomic_write(Path(path)) as file:
            file.write(save(arrays, {"orchard": json.dumps(facts)}))

    @classmethod
    def open(cls, path: Path | str, *, model: str | None = None) -> Trace:
        """Read and check a trace; `model`: refuse one of any other."""
        path = Path(path)
        try:
            if path.stat().st_size > MOST_BYTES:
                raise BadFile(f"{path.name} is too large for a trace", hint=_AGAIN)
            data = path.read_bytes()
            length = int.from_bytes(data[:8], "little")
            facts = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["orchard"])
            if facts["kind"] != KIND or facts["version"] != 1:
                raise ValueError("another kind")
            arrays = load(data)
            fields = {name: arrays[name] for name in _ARRAYS}
            trace = cls(str(facts["model"]), int(facts["experts"]), **fields, facts=dict(facts["facts"]))
        except OSError as error:
            raise BadFile(f"{path.name} cannot be read: {error.strerror}", hint="give a recorded trace") from error
        except (ValueError, KeyError, TypeError, SafetensorError, RecursionError) as error:
            raise BadFile(f"{path.name} is no trace of experts, or a damaged one", hint=_AGAIN) from error
        if model is not None:
            trace.require(model)
        return trace


_ARRAYS = ("chosen", "scores", "passes", "ahead", "ahead_scores")
