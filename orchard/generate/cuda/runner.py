"""A runner on CUDA: the plan that the native engine runs on a CPU, with its weights and stores on a GPU.

`device="cpu"` runs the kernels' torch twins instead, step by step: for tests, and to see what a kernel should give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from orchard.core.errors import MissingExtra, UsageError
from orchard.generate.cuda.program import Program
from orchard.generate.cuda.slots import CudaSlots
from orchard.generate.passes import SlotsPass
from orchard.generate.variants import Variants
from orchard.ops.kernels.triton.rows import PAGE, page_bytes
from orchard.ops.kernels.triton.weights import Weight
from orchard.ops.plan.steps import Plan

if TYPE_CHECKING:
    from orchard.generate.protocol import Use

SHARE = 0.8
"""Of the memory that is free on the device, stores may take so much."""
ON_CPU = 1 << 28
"""Bytes of stores where there is no device to ask."""


class CudaRunner:
    """Runs a checked plan on a GPU. `weights`: matrices that are on the device already, by their names in the plan."""

    def __init__(
        self, plan: Plan, *, device: str | torch.device = "cuda", weights: Mapping[str, Weight] | None = None
    ) -> None:
        self.config = plan
        self.plan = plan
        self.device = _usable(torch.device(device))
        self._program = Program(plan, self.device, weights)
        self.variants: Variants[Program] = Variants(_shared(plan))

    def slots(self, count: int, *, kv_bytes: int | None = None) -> CudaSlots:
        """Stores for up to `count` sequences, in at most `kv_bytes` of memory; without a bound, as much as all of them could
        ever need, or most of what is free."""
        if count < 1:
            raise UsageError(f"{count} slots", hint="ask for at least one")
        each = sum(page_bytes(spec) for spec in self.plan.stores) or 1
        longest = -(-self.plan.context // PAGE)
        allowed = kv_bytes if kv_bytes is not None else self._free()
        pages = min(count * longest, allowed // each)
        if pages < 1:
            raise UsageError(
                f"no memory for stores: a page of {PAGE} tokens takes {each:,} bytes and {allowed:,} are allowed",
                hint="allow more memory (kv_bytes)",
            )
        return CudaSlots(self, count, pages + 1)

    def begin(self, prompts: Sequence[Sequence[int]], *, length: int, held: Sequence[Use | None] = ()) -> SlotsPass:
        """A batch of prompts without an engine; `held` is not used here."""
        return SlotsPass(self.slots(len(prompts)), prompts, length, held)

    # Variants: other weights over the same base ------------------------------------------------------------------------

    def add_variant(self, name: str, runner: CudaRunner) -> None:
        """Other weights over the same stores, for slots that are opened with this name."""
        self.variants.add(name, runner.program(None), _shared(runner.plan))

    def drop_variant(self, name: str) -> None:
        self.variants.drop(name)

    def adapted(self, plan: Plan) -> CudaRunner:
        """A runner of an adapted form of this plan: matrices that both have are on the device once."""
        return CudaRunner(plan, device=self.device, weights=self.program(None).weights)

    def program(self, variant: str | None) -> Program:
        return self._program if variant is None else self.variants.find(variant)

    def has(self, program: Program | None) -> bool:
        """Whether a new sequence could still be run by it."""
        return program is self._program or any(program is known for known in self.variants.values())

    def _free(self) -> int:
        if self.device.type != "cuda":
            return ON_CPU
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free * SHARE)


def _shared(plan: Plan) -> tuple[object, ...]:
    """What variants have in common."""
    return plan.stores, plan.vocab, plan.context


def _usable(device: torch.device) -> torch.device:
    if device.type == "cpu":
        return device
    if device.type != "cuda" or not torch.cuda.is_available():
        raise UsageError(f"there is no device {str(device)!r} here", hint="`orchard doctor` shows what there is")
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise MissingExtra("Triton is not installed", hint="install torch for CUDA, which brings it") from error
    return device
