"""A plan in the hands of the native engine: encoded once, then run call by call with the interpreter's lock released.

The plan has been checked (`orchard.ops.plan.check`) before it comes here: native code trusts its numbers.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from orchard.core.errors import ContextOverflow, OrchardError, UsageError
from orchard.ops.kernels.native import library, why_not
from orchard.ops.plan import steps
from orchard.ops.plan.steps import ACTIVATIONS, CODECS, KINDS, Matrix, Norm, Output, Plan, Step

CHUNK = 512
"""The most rows of one call: it bounds memory, and rings keep this many slots more than they promise."""

LONGEST = 2**31 - 64
"""Tokens of a sequence."""
BLOCK = 64
"""Tokens of one piece of what `Stores.take` gives, so that sequences that begin alike can share their first pieces."""

Copied = np.ndarray | tuple[np.ndarray, ...]
"""Bytes of keys and values: one array per BLOCK tokens, or one for all where a store is a ring."""

Homes = Mapping[str, tuple[int, int]]
"""Tensor → its address in the first slot, and the bytes from one slot to the next: experts that come and go."""

ORDER = ("embed", "linear", "gated", "attend", "norm", "add", "clip", "experts", "narrow", "head", "torch", "gate")
"""Step kinds in the order of StepKind in engine.h."""


@cache
def _calls() -> ctypes.CDLL:
    found = library()
    if found is None:
        raise OrchardError(
            f"no native engine: {why_not()}", hint="`orchard doctor` says what is lost and how to mend it"
        )
    handle, number, pointer = ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
    found.orchard_engine_new.restype, found.orchard_engine_new.argtypes = handle, [pointer, number, number]
    found.orchard_engine_delete.restype, found.orchard_engine_delete.argtypes = None, [handle]
    found.orchard_cache_new.restype, found.orchard_cache_new.argtypes = handle, [handle, number, number, number]
    found.orchard_cache_delete.restype, found.orchard_cache_delete.argtypes = None, [handle]
    found.orchard_cache_release.restype, found.orchard_cache_release.argtypes = None, [handle, number]
    found.orchard_cache_open.restype, found.orchard_cache_open.argtypes = None, [handle, number, number]
    found.orchard_cache_reserve.restype, found.orchard_cache_reserve.argtypes = number, [handle, number, number]
    found.orchard_cache_copy.restype, found.orchard_cache_copy.argtypes = number, [handle, *[number] * 3]
    size = ctypes.c_size_t
    found.orchard_cache_memory.restype, found.orchard_cache_memory.argtypes = size, [handle, number]
    found.orchard_cache_bytes.restype, found.orchard_cache_bytes.argtypes = size, [handle, number]
    found.orchard_cache_take.restype, found.orchard_cache_take.argtypes = None, [handle, number, number, pointer]
    found.orchard_cache_put.restype, found.orchard_cache_put.argtypes = None, [handle, number, number, number, pointer]
    stretch: list[Any] = [handle, *[number] * 4, pointer]
    found.orchard_cache_take_range.restype, found.orchard_cache_take_range.argtypes = None, stretch
    found.orchard_cache_put_range.restype, found.orchard_cache_put_range.argtypes = (
        None,
        [*stretch[:-1], number, pointer],
    )
    run: list[Any] = [handle, handle, *[number] * 4, *[pointer] * 3, number, pointer, pointer]
    found.orchard_engine_run.restype, found.orchard_engine_run.argtypes = number, run
    found.orchard_engine_buffer.restype, found.orchard_engine_buffer.argtypes = handle, [handle, number]
    found.orchard_engine_part.restype, found.orchard_engine_part.argtypes = None, [handle, number, number, pointer]
    found.orchard_engine_choices.restype, found.orchard_engine_choices.argtypes = handle, [handle]
    found.orchard_engine_rows.restype, found.orchard_engine_rows.argtypes = number, [handle]
    found.orchard_engine_timing.restype, found.orchard_engine_timing.argtypes = None, [handle, number, pointer]
    return found


def usable_cores() -> int:
    """Threads to use: `ORCHARD_THREADS`, or the cores that this process may use by its affinity and its container's quota."""
    asked = os.environ.get("ORCHARD_THREADS", "")
    if asked.isdigit() and int(asked):
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return cores


class Program:
    """A plan ready to run. `level` bounds the instruction set (see kernels.h); -1: the best this machine has."""

    def __init__(self, plan: Plan, *, threads: int | None = None, level: int = -1, homes: Homes | None = None) -> None:
        """`homes`: where tensors are that the plan does not hold itself (`plan.elsewhere`)."""
        if threads is not None and threads < 1:
            raise UsageError(f"{threads} threads", hint="use a whole number from 1")
        self.plan = plan
        self._calls = _calls()
        self.threads = threads or usable_cores()
        self.level = level
        words = _Words(plan, homes or {})
        self._kept = words.kept  # arrays whose addresses the engine holds
        self._words = words.array()
        self._start()
        self.lock = threading.Lock()

    def _start(self) -> None:
        self._engine = self._calls.orchard_engine_new(self._words.ctypes.data, self.threads, self.level)
        if not self._engine:
            raise OrchardError("the native engine could not start", hint="there is no memory or no thread to be had")
        self._process = os.getpid()

    def awake(self) -> None:
        """To be asked before the engine is: in a forked process its threads are not there, and it starts again."""
        if self._process != os.getpid():
            self._start()
            self.lock = threading.Lock()

    def __del__(self, process: Callable[[], int] = os.getpid) -> None:  # `os` may be gone when the interpreter ends
        # In a forked child the engine's threads are not there to be joined: its memory goes with the process.
        if getattr(self, "_engine", None) and self._process == process():
            self._calls.orchard_engine_delete(self._engine)

    def stores(self, sequences: int, length: int) -> Stores:
        return Stores(self, sequences, length)

    def run(
        self,
        stores: Stores,
        tokens: np.ndarray,
        sequences: np.ndarray,
        positions: np.ndarray,
        wanted: np.ndarray,
        scores: np.ndarray,
        *,
        first: int = 0,
        last: int | None = None,
        prompt: bool = False,
    ) -> None:
        """Steps [first, last) for rows given by three int32 arrays; scores of `wanted` rows (int32, ascending) go to the
        float32 table `scores` [wanted, vocab]. Rows of a sequence stand together, in order. `prompt`: what is computed for
        a token does not depend on how many others are in the call; slower for a few rows."""
        self.awake()
        problem = self._calls.orchard_engine_run(
            self._engine,
            stores.handle,
            first,
            len(self.plan.steps) if last is None else last,
            int(prompt),
            len(tokens),
            tokens.ctypes.data,
            sequences.ctypes.data,
            positions.ctypes.data,
            len(wanted),
            wanted.ctypes.data,
            scores.ctypes.data,
        )
        if problem:
            raise _problem(problem, positions, stores)

    def buffer(self, number: int, rows: int) -> np.ndarray:
        """A view of the first rows of a buffer, between two runs."""
        width = self.plan.widths[number]
        address = self._calls.orchard_engine_buffer(self._engine, number)
        values = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(values, (rows, width))

    def timing(self, on: bool) -> dict[str, float]:
        """Seconds per kind of step since timing was last turned on; turns it on or off. Also how many `calls` of few rows
        there were, and how many of them ran `alone`, on one thread, because another program wanted a core."""
        seconds = np.zeros(16)
        self._calls.orchard_engine_timing(self._engine, int(on), seconds.ctypes.data)
        names = {**dict(enumerate(ORDER)), 14: "calls", 15: "alone"}
        return {name: float(seconds[place]) for place, name in names.items() if seconds[place]}


class Stores:
    """Keys and values of some sequences. Memory is taken as tokens come."""

    def __init__(self, program: Program, sequences: int, length: int = 0) -> None:
        """`length`: what every sequence may grow to; 0: each is opened by itself (`open`)."""
        self.length = length
        self._program = program
        self._lengths = [length] * sequences
        self._rings = any(store.keep for store in program.plan.stores)
        # What only the first piece of a copy has: tokens that stores of codes keep as they come.
        self._exact = sum(spec.books.exact_bytes(spec.heads, spec.dim) for spec in program.plan.stores if spec.books)
        if length > LONGEST:
            raise UsageError(f"no memory for sequences of {length:,} tokens", hint="ask for fewer tokens (max_tokens)")
        self.handle = program._calls.orchard_cache_new(program._engine, sequences, length, CHUNK)
        if not self.handle:
            raise UsageError(
                f"no memory for {sequences} sequences of {length:,} tokens",
                hint="ask for fewer tokens (max_tokens) or fewer requests at once",
            )

    def open(self, sequence: int, length: int) -> None:
        """An empty sequence that may grow to so many tokens, in the place of what was there."""
        if not 0 < length <= LONGEST:
            raise UsageError(f"no memory for sequences of {length:,} tokens", hint="ask for fewer tokens (max_tokens)")
        self._program._calls.orchard_cache_open(self.handle, sequence, length)
        self._lengths[sequence] = length
        self.length = max(self._lengths)

    def release(self, sequence: int) -> None:
        """Give a finished sequence's memory back."""
        self._program._calls.orchard_cache_release(self.handle, sequence)
        self._lengths[sequence] = 0

    def reserve(self, sequence: int, tokens: int) -> None:
        """Memory for so many tokens now."""
        if not self._program._calls.orchard_cache_reserve(self.handle, sequence, tokens):
            raise UsageError(f"no memory for {tokens:,} tokens", hint="ask for fewer tokens or fewer requests at once")

    def copy(self, source: int, target: int, tokens: int) -> bool:
        """The first tokens of one sequence into another that has fewer; False where its rings no longer hold all of them."""
        done = self._program._calls.orchard_cache_copy(self.handle, source, target, tokens)
        if done < 0:
            raise UsageError(f"no memory for {tokens:,} tokens", hint="ask for fewer tokens or fewer requests at once")
        return bool(done)

    def memory(self, tokens: int = -1) -> int:
        """Bytes of memory of a sequence that has so many tokens; without a number, of all sequences now."""
        return int(self._program._calls.orchard_cache_memory(self.handle, tokens))

    def bytes(self, tokens: int) -> int:
        """What `take` gives for so many tokens."""
        return int(self._program._calls.orchard_cache_bytes(self.handle, tokens))

    def _piece_bytes(self, first: int, tokens: int) -> int:
        return self.bytes(tokens) - (self._exact if first else 0)

    def take(self, sequence: int, tokens: int, known: Sequence[np.ndarray] = ()) -> Copied:
        """Keys and values of a sequence's first tokens, copied: what `put` of any stores of this plan takes. `known`: whole
        pieces of its beginning that were copied before, and need not be again."""
        calls = self._program._calls
        if self._rings:
            held = np.empty(self.bytes(tokens), np.uint8)
            calls.orchard_cache_take(self.handle, sequence, tokens, held.ctypes.data)
            return held
        pieces = list(known[: tokens // BLOCK])
        for first in range(len(pieces) * BLOCK, tokens, BLOCK):
            count = min(BLOCK, tokens - first)
            pieces.append(np.empty(self._piece_bytes(first, count), np.uint8))
            stores = len(self._program.plan.stores)
            calls.orchard_cache_take_range(self.handle, stores, sequence, first, count, pieces[-1].ctypes.data)
        return tuple(pieces)

    def put(self, sequence: int, tokens: int, held: Copied, held_tokens: int) -> None:
        """Fill an empty sequence with the first `tokens` of what `take` gave for `held_tokens`."""
        length = self._lengths[sequence]
        if not 0 < tokens <= held_tokens or tokens >= length or (self._rings and tokens != held_tokens):
            raise ValueError(f"{tokens} of {held_tokens} held tokens do not fit stores of {length}")
        pieces = (held,) if isinstance(held, np.ndarray) else held
        counts = [held_tokens] if self._rings else [min(BLOCK, held_tokens - at) for at in range(0, held_tokens, BLOCK)]
        sizes = [self._piece_bytes(number * BLOCK, count) for number, count in enumerate(counts)]
        if [piece.nbytes for piece in pieces] != sizes or any(piece.dtype != np.uint8 for piece in pieces):
            size = sum(piece.nbytes for piece in pieces)
            raise ValueError(f"{size:,} bytes are not keys and values of {held_tokens} tokens of this plan")
        calls, stores = self._program._calls, len(self._program.plan.stores)
        self.reserve(sequence, tokens)
        for number, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
            raw, first = np.ascontiguousarray(piece), number * BLOCK
            if self._rings:
                calls.orchard_cache_put(self.handle, sequence, tokens, held_tokens, raw.ctypes.data)
            elif first < tokens:
                used = min(count, tokens - first)
                calls.orchard_cache_put_range(self.handle, stores, sequence, first, used, count, raw.ctypes.data)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._program._calls.orchard_cache_delete(self.handle)


def _problem(code: int, positions: np.ndarray, stores: Stores) -> Exception:
    if code == -1:
        return UsageError(
            "a token id is outside the vocabulary", hint="encode the text with this model's own tokenizer"
        )
    if code == -3:
        return ContextOverflow(tokens=int(positions.max(initial=0)) + 1, limit=stores.length)
    if code == -4:
        return UsageError("no memory for this step", hint="ask for fewer tokens or fewer requests at once")
    return OrchardError(f"the native engine refused a call (code {code})", hint="this is a fault of Orchard: report it")


class _Words:
    """The plan as 64-bit words, in the order that plan.cpp reads."""

    def __init__(self, plan: Plan, homes: Homes) -> None:
        self.plan = plan
        self._homes = homes
        self.kept: list[np.ndarray] = []
        self._addresses: dict[str, int] = {}
        self._words: list[int] = []
        self._numbers(plan.vocab, len(plan.widths), *plan.widths)
        self._numbers(len(plan.stores))
        for store in plan.stores:
            self._numbers(CODECS.index(store.codec), store.heads, store.dim, store.keep, store.sinks)
            if store.books is not None:
                self._numbers(*store.books.numbers(), *map(self._address, store.books.tensors))
        self._numbers(len(plan.rotaries))
        for rotary in plan.rotaries:
            self._numbers(self._address(rotary.tensor), len(plan.tensors[rotary.tensor]), _bits(rotary.gain))
        self._numbers(len(plan.steps))
        for step in plan.steps:
            self._step(step)

    def array(self) -> np.ndarray:
        return np.array(self._words, np.int64)

    def _numbers(self, *values: int | bool) -> None:
        self._words.extend(int(value) for value in values)

    def _address(self, tensor: str | None) -> int:
        if tensor is None:
            return 0
        if tensor in self._homes:
            return self._homes[tensor][0]
        if tensor not in self._addresses:
            array = _aligned(self.plan.tensors[tensor])
            self.kept.append(array)
            self._addresses[tensor] = int(array.ctypes.data)
        return self._addresses[tensor]

    def _norm(self, norm: Norm | None) -> tuple[int, int]:
        return (0, _bits(0.0)) if norm is None else (self._address(norm.tensor), _bits(norm.eps))

    def _outputs(self, outputs: Sequence[Output]) -> None:
        self._numbers(len(outputs))
        for output in outputs:
            matrix = output.matrix
            self._numbers(KINDS.index(matrix.kind), matrix.group, matrix.minimum, matrix.rows, matrix.cols)
            self._numbers(output.begin or 0, output.width or 0)
            self._numbers(self._address(matrix.tensor), self._address(output.gain), self._address(output.bias))
            self._numbers(output.to, output.add)

    def _step(self, step: Step) -> None:
        outputs: tuple[Output, ...] = _outputs_of(step)
        attend = step if isinstance(step, steps.Attend) else None
        experts = step if isinstance(step, steps.Experts) else None
        bound = getattr(step, "softcap", getattr(step, "bound", 0.0))
        gate = step if isinstance(step, steps.Gate) else None
        source = attend.q if attend else gate.gate if gate else getattr(step, "src", getattr(step, "buffer", 0))
        self._numbers(ORDER.index(step.kind), source, getattr(step, "to", getattr(step, "buffer", 0)))
        self._numbers(*self._norm(getattr(step, "norm", None)), getattr(step, "add", False))
        self._outputs(outputs)
        self._numbers(_bits(getattr(step, "scale", 1.0)), ACTIVATIONS.index(getattr(step, "activation", "silu")))
        self._numbers(getattr(step, "groups", 1), _bits(bound))
        if attend:
            self._numbers(-1 if attend.k is None else attend.k, -1 if attend.v is None else attend.v, attend.store)
            self._numbers(attend.heads, attend.kv_heads, attend.dim, attend.window)
            self._numbers(-1 if attend.rotary is None else attend.rotary)
            self._numbers(*self._norm(attend.q_norm), *self._norm(attend.k_norm))
        else:
            self._numbers(gate.up if gate else -1, -1, 0, 0, 0, 0, 0, -1, *self._norm(None), *self._norm(None))
        self._numbers(experts.gate.count if experts else 0, experts.k if experts else 0)
        self._numbers(experts.renormalize if experts else True)
        self._numbers(self._homes[experts.gate.tensor][1] if experts and experts.gate.tensor in self._homes else 0)
        buffers = step.buffers if isinstance(step, steps.Narrow) else ()
        self._numbers(len(buffers), *buffers)


def _outputs_of(step: Step) -> tuple[Output, ...]:
    def only(*matrices: tuple[Matrix, str | None]) -> tuple[Output, ...]:
        return tuple(Output(matrix=matrix, to=0, bias=bias) for matrix, bias in matrices)

    if isinstance(step, steps.Linear):
        return step.outputs
    if isinstance(step, steps.Embed):
        return only((step.matrix, None))
    if isinstance(step, steps.Head):
        return only((step.matrix, step.bias))
    if isinstance(step, steps.Gated):
        return only((step.gate, step.gate_bias), (step.up, step.up_bias))
    if isinstance(step, steps.Experts):
        return only((step.router, step.router_bias), (step.gate, None), (step.up, None), (step.down, None))
    return ()


def _aligned(array: np.ndarray) -> np.ndarray:
    """The array where kernels may read it: in one piece, from a multiple of 64 bytes. Copied only where it is not."""
    array = np.ascontiguousarray(array)
    if array.ctypes.data % 64 == 0:
        return array
    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _bits(value: float) -> int:
    """The bits of a double as a whole number."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
