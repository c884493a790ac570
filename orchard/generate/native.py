"""A runner on the native engine: one call per step for all sequences, torch only where a plan says so (`mixed`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from orchard.generate.passes import SlotsPass, all_scores
from orchard.generate.protocol import Held, Use
from orchard.generate.slots_native import NativeSlots
from orchard.generate.variants import Variants
from orchard.ops.kernels.native.program import CHUNK, Program
from orchard.ops.plan.file import to_json
from orchard.ops.plan.steps import Plan

if TYPE_CHECKING:
    from torch import nn

    Modules = Callable[[], nn.Module]


class NativeRunner:
    """Runs a checked plan. Safe to share between threads: calls take turns."""

    def __init__(
        self,
        plan: Plan,
        *,
        threads: int | None = None,
        decoder: Modules | None = None,
        level: int = -1,
        program: Program | None = None,
    ) -> None:
        """`decoder` gives the model that the plan was made from; it is asked only when the plan has `Torch` steps. `program`: one
        of the plan that is there already, such as one whose experts live elsewhere."""
        self.config = plan
        self.plan = plan
        self.program = program or Program(plan, threads=threads, level=level)
        self._decoder = decoder
        self._built: Any = None
        self.variants: Variants[NativeRunner] = Variants(_shared(plan))

    def slots(self, count: int) -> NativeSlots:
        return NativeSlots(self, count)

    def begin(self, prompts: Sequence[Sequence[int]], *, length: int, held: Sequence[Use | None] = ()) -> SlotsPass:
        """A batch of prompts without an engine. `length`: no sequence will be longer, its prompt included. `held`: for each
        prompt, what is known of its beginning."""
        return SlotsPass(self.slots(len(prompts)), prompts, length, held)

    # Variants: other weights over the same base ------------------------------------------------------------------------

    def add_variant(self, name: str, runner: NativeRunner) -> None:
        """Let requests name another runner whose stores are like ours (the same model with an adapter, say). Requests of both
        can then share the slots of one engine."""
        self.variants.add(name, runner, _shared(runner.plan))

    def drop_variant(self, name: str) -> None:
        self.variants.drop(name)

    def variant(self, name: str | None) -> NativeRunner:
        return self if name is None else self.variants.find(name)

    # What it knows of itself -------------------------------------------------------------------------------------------

    def fits(self, held: Held) -> bool:
        """Whether these are as many bytes as so many tokens of this model take."""
        return self.plan.whole and held.nbytes == self.program.stores(1, 32).bytes(len(held.ids)) + 8 * len(held.ids)

    @cached_property
    def signature(self) -> str:
        """Tells keys and values of this model from those of any other: by its plan and samples of all its tensors."""
        known = sha256(json.dumps(to_json(self.plan), sort_keys=True).encode())
        for name, tensor in sorted(self.plan.tensors.items()):
            raw = tensor.reshape(-1).view(np.uint8)
            known.update(f"{name} {raw.size} ".encode() + raw[:256].tobytes() + raw[-256:].tobytes())
        return known.hexdigest()

    def scores(self, ids: Sequence[int]) -> np.ndarray:
        """Scores after every position of one text: float32 [T, V]."""
        return all_scores(self.slots(1), ids, self.plan.vocab, CHUNK)

    @property
    def decoder(self) -> Any:
        if self._built is None:
            if self._decoder is None:
                raise ValueError("this plan has steps that run in torch, and no model was given for them")
            self._built = self._decoder()
        return self._built


def _shared(plan: Plan) -> tuple[object, ...]:
    """What variants have in common."""
    return plan.stores, plan.vocab, plan.context
