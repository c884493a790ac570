"""A native sequence under a budget of tokens per head: rows stay or only look, and what matters least is forgotten (kept.h).

Everything is counted before it goes to native code, which trusts its numbers. Slots are numbered per store and head from the
oldest token that is still there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from orchard.core.errors import OrchardError, UnsupportedPair, UsageError
from orchard.ops.kernels.native.program import CHUNK, Program, Stores, _calls, _problem
from orchard.ops.plan.steps import Attend

CODECS = ("f32", "bf16", "int8")
"""Codecs whose keys can be turned to other positions."""
NOTHING = np.empty(0, np.int32)


@cache
def _functions() -> ctypes.CDLL:
    found = _calls()
    handle, number, pointer = ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "open": (number, [handle, handle, number, pointer, number, number]),
        "memory": (ctypes.c_size_t, [handle, number]),
        "tokens": (number, [handle, number]),
        "room": (number, [handle, number]),
        "rows": (number, [handle, number]),
        "counts": (None, [handle, handle, number, pointer]),
        "keep": (number, [handle, number, number]),
        "back": (number, [handle, number, number]),
        "compact": (number, [handle, number, pointer, pointer, pointer, number, number]),
        "read": (None, [handle, number, number, number, pointer, pointer]),
        "bytes": (ctypes.c_size_t, [handle, number, pointer]),
        "take": (None, [handle, number, pointer]),
        "put": (None, [handle, number, pointer, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(found, f"orchard_kept_{name}")
        function.restype, function.argtypes = result, arguments
    run = found.orchard_engine_run.argtypes
    found.orchard_engine_watch.restype, found.orchard_engine_watch.argtypes = number, [*run, number, pointer, number]
    return found


def obstacle(program: Program) -> str | None:
    """Why sequences of a plan cannot be kept under a budget natively."""
    plan = program.plan
    if not plan.whole:
        return "the plan has steps in torch"
    if not plan.stores:
        return "the plan has no stores"
    for spec in plan.stores:
        if spec.keep:
            return f"the store of layer {spec.layer} is a window, which forgets by itself"
        if spec.codec not in CODECS:
            return f"the codec {spec.codec} of layer {spec.layer} has no keys that can be turned to other positions"
    return None


class KeptSequence:
    """One sequence of some stores, which may hold ordinary ones beside it."""

    def __init__(self, program: Program, stores: Stores, sequence: int, budgets: Sequence[int], block: int) -> None:
        """`budgets`: tokens by store, for each of its heads on average."""
        if (reason := obstacle(program)) is not None:
            raise UnsupportedPair(f"no native budget: {reason}", hint="run it in torch (TorchKept)")
        self.program, self.stores, self.sequence, self.block = program, stores, sequence, block
        self.heads = [spec.heads for spec in program.plan.stores]
        self._splits = np.cumsum(self.heads)[:-1]
        self._calls = _functions()
        self.scratch = 0
        self.budgets = self._checked(budgets)
        numbers = np.array(self.budgets, np.int32)
        self._must(
            self._calls.orchard_kept_open(
                program._engine, stores.handle, sequence, numbers.ctypes.data, block, self.scratch
            )
        )

    # What there is ----------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """The position of the next token, which is what the longest head has."""
        return int(self._calls.orchard_kept_tokens(self.stores.handle, self.sequence))

    @property
    def memory(self) -> int:
        """Bytes taken for keys and values, rows that only look included."""
        return int(self._calls.orchard_kept_memory(self.stores.handle, self.sequence))

    @property
    def room(self) -> int:
        """Tokens that may be kept before some must go."""
        return int(self._calls.orchard_kept_room(self.stores.handle, self.sequence))

    @property
    def counts(self) -> np.ndarray:
        """Tokens of every head, store after store: int32."""
        counts = np.empty(sum(self.heads), np.int32)
        self._calls.orchard_kept_counts(self.program._engine, self.stores.handle, self.sequence, counts.ctypes.data)
        return counts

    @property
    def used(self) -> list[int]:
        """Tokens by store, of a head on average (rounded up)."""
        shares = np.split(self.counts, self._splits)
        return [-(-int(share.sum()) // len(share)) for share in shares]

    def read(self, store: int, *, values: bool = False) -> list[np.ndarray]:
        """The rotated keys of every head, or the values: float32 [tokens, D]."""
        dim, found = self.program.plan.stores[store].dim, []
        for head, count in enumerate(np.split(self.counts, self._splits)[store]):
            found.append(np.empty((int(count), dim), np.float32))
            places = (None, found[-1].ctypes.data) if values else (found[-1].ctypes.data, None)
            self._calls.orchard_kept_read(self.stores.handle, self.sequence, store, head, *places)
        return found

    # Rows that stay, rows that look -------------------------------------------------------------------------------------

    def run(self, tokens: np.ndarray, wanted: int, scores: np.ndarray, *, prompt: bool) -> None:
        """Keep tokens (int32): scores after the last `wanted` of them go to the table [wanted, vocab]."""
        if len(tokens) > self.room:
            raise UsageError(
                f"{len(tokens)} tokens do not fit: there is room for {self.room}", hint="evict before reading more"
            )
        for at in range(0, len(tokens), CHUNK):
            rows = self.rows(tokens[at : at + CHUNK])
            last = np.arange(max(len(tokens) - wanted, at), min(at + CHUNK, len(tokens)), dtype=np.int32)
            done = max(0, at - (len(tokens) - wanted))
            self.program.run(
                self.stores,
                *rows,
                last - np.int32(at),
                scores[done : done + len(last)],
                prompt=prompt or len(tokens) > 1,
            )
            self.keep(len(rows[0]))

    def rows(self, tokens: np.ndarray, ahead: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, sequences and positions (int32) of rows that come next, or so many tokens after that: for `Program.run`,
        together with the rows of other sequences of the same stores. `keep` says afterwards that they stay."""
        start, count = self.tokens + ahead, len(tokens)
        places = np.arange(start, start + count, dtype=np.int32)
        return np.ascontiguousarray(tokens, np.int32), np.full(count, self.sequence, np.int32), places

    def keep(self, tokens: int) -> None:
        """So many rows that were just run, at the next positions, stay. Never more than the budget allows."""
        if not self._calls.orchard_kept_keep(self.stores.handle, self.sequence, tokens):
            raise OrchardError("more tokens than the budget allows", hint="evict before reading more")

    def watch(self, tokens: np.ndarray, *, again: bool = False) -> list[np.ndarray]:
        """Let tokens (int32) look at what is kept, and at each other, and keep nothing of them. For every head, store after
        store: each kept token's largest share of a softmax of theirs, float32.

        `again`: the tokens are the newest ones that are kept, and their shares are added up, on average over the query heads."""
        if self.program.plan.elsewhere:
            raise UnsupportedPair("no native probe: experts live elsewhere", hint="score by keys or by age")
        if not again and len(tokens) > int(self._calls.orchard_kept_rows(self.stores.handle, self.sequence)):
            self._change(self._everything(), self.budgets, len(tokens))
        self.program.awake()
        counts = self.counts
        best = np.zeros(counts.sum(), np.float32)
        plan, calls = self.program.plan, self._calls
        last = 1 + max(place for place, step in enumerate(plan.steps) if isinstance(step, Attend))
        for at in range(0, len(tokens), CHUNK):
            rows = self.rows(tokens[at : at + CHUNK], at - len(tokens) if again else at)
            every = np.arange(len(rows[0]), dtype=np.int32)  # all rows are wanted, so that none is dropped on the way
            problem = calls.orchard_engine_watch(
                self.program._engine,
                self.stores.handle,
                0,
                last,
                1,
                len(every),
                *[row.ctypes.data for row in rows],
                len(every),
                every.ctypes.data,
                None,
                self.sequence,
                best.ctypes.data,
                int(again),
            )
            if problem:
                raise _problem(problem, rows[2], self.stores)
        return np.split(best, np.cumsum(counts)[:-1])

    def back(self, tokens: int) -> None:
        """Forget the newest tokens."""
        if not self._calls.orchard_kept_back(self.stores.handle, self.sequence, tokens):
            raise ValueError(f"a head holds fewer than the {tokens} tokens to go back by")

    def compact(self, slots: Sequence[np.ndarray], budgets: Sequence[int] | None = None) -> None:
        """Keep only these slots (ascending) of every head, store after store; `budgets` hold from now on."""
        counts = self.counts
        if len(slots) != len(counts):
            raise ValueError(f"slots of {len(slots)} heads, not of {len(counts)}")
        for count, kept in zip(counts, slots, strict=True):
            if len(kept) and not (kept[0] >= 0 and kept[-1] < count and (np.diff(kept) > 0).all()):
                raise ValueError(f"slots that are not among {count}, or not in order")
        checked = self.budgets if budgets is None else self._checked(budgets)
        self._fit(np.array([len(kept) for kept in slots]), checked)
        self._change(slots, checked, self.scratch)

    # Out and in again ---------------------------------------------------------------------------------------------------

    def take(self) -> np.ndarray:
        """Keys and values as they are kept: bytes that `put` takes, with the same counts."""
        held = np.empty(self._bytes(self.counts), np.uint8)
        self._calls.orchard_kept_take(self.stores.handle, self.sequence, held.ctypes.data)
        return held

    def restore(self, counts: np.ndarray, held: np.ndarray, budgets: Sequence[int]) -> None:
        """What `take` gave under these budgets, in the place of what is there. `ValueError` or `UsageError` where it does not
        fit, and nothing has changed."""
        counts, budgets = np.ascontiguousarray(counts, np.int32), self._checked(budgets)
        if counts.shape != (sum(self.heads),) or (counts < 0).any():
            raise ValueError("these are not counts of this plan's heads")
        self._fit(counts, budgets)
        if held.dtype != np.uint8 or held.ndim != 1 or held.nbytes != self._bytes(counts):
            raise ValueError(f"{held.nbytes:,} bytes are not keys and values of so many tokens of this plan")
        raw = np.ascontiguousarray(held)
        self._change([NOTHING] * len(counts), budgets, self.scratch)
        self._calls.orchard_kept_put(self.stores.handle, self.sequence, counts.ctypes.data, raw.ctypes.data)

    # Inside -----------------------------------------------------------------------------------------------------------

    def _everything(self) -> list[np.ndarray]:
        return [np.arange(count, dtype=np.int32) for count in self.counts]

    def _change(self, slots: Sequence[np.ndarray], budgets: Sequence[int], scratch: int) -> None:
        counts = np.array([len(kept) for kept in slots], np.int32)
        flat = np.concatenate([NOTHING, *slots]).astype(np.int32)
        numbers = np.array(budgets, np.int32)
        addresses = (counts.ctypes.data, flat.ctypes.data, numbers.ctypes.data)
        threads = self.program.threads
        self._must(self._calls.orchard_kept_compact(self.stores.handle, self.sequence, *addresses, scratch, threads))
        self.budgets, self.scratch = list(budgets), scratch

    def _fit(self, counts: np.ndarray, budgets: Sequence[int]) -> None:
        for share, budget in zip(np.split(counts.astype(np.int64), self._splits), budgets, strict=True):
            if share.sum() > len(share) * (budget + self.block):
                raise ValueError(f"{share.sum()} tokens of {len(share)} heads are above the budget of {budget}")

    def _bytes(self, counts: np.ndarray) -> int:
        return int(self._calls.orchard_kept_bytes(self.stores.handle, self.sequence, counts.ctypes.data))

    def _checked(self, budgets: Sequence[int]) -> list[int]:
        if len(budgets) != len(self.heads) or min(budgets) < 1 or self.block < 1:
            raise UsageError(
                f"budgets {list(budgets)} with blocks of {self.block} for {len(self.heads)} stores",
                hint="give one budget from 1 on for every layer that has a store",
            )
        if max(budgets) + self.block > 2**24:
            raise UsageError(f"no memory for budgets of {max(budgets):,} tokens", hint="use a smaller budget")
        return [int(budget) for budget in budgets]

    def _must(self, done: int) -> None:
        if not done:
            raise UsageError("no memory for this budget of tokens", hint="use a smaller budget or a smaller block")
