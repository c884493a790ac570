"""Threads that fill slots from a file of records: what is urgent first, then what may be needed soon.

The caller reads beside them, so that without any thread everything still works, one read after another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from orchard.cache.experts.policies import Key
from orchard.cache.experts.records import Records
from orchard.cache.experts.table import Admitted, Table
from orchard.core.errors import OrchardError


@dataclass(eq=False)
class _Job:
    """A read that was asked for. Until it has begun it can be called off."""

    key: Key
    slot: int
    begun: bool = False


class Readers:
    """All methods but `finish` and `close` want the lock `changed` held; it guards the table as well."""

    def __init__(
        self, records: Records, memory: Tensor, table: Table, changed: threading.Condition, threads: int
    ) -> None:
        self._records = records
        self._memory = memory
        self._table = table
        self._changed = changed
        self._jobs: dict[Key, _Job] = {}
        self._urgent: deque[_Job] = deque()
        self._ahead: deque[_Job] = deque()
        self._failed: dict[Key, OrchardError] = {}
        self._closed = False
        self._threads = [threading.Thread(target=self._work, daemon=True, name="records") for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def reading(self, key: Key) -> bool:
        """A slot that is being read into cannot be given to another."""
        job = self._jobs.get(key)
        return job is not None and job.begun

    def waiting(self) -> bool:
        return any(job.begun for job in self._jobs.values())

    def enqueue(self, admitted: Admitted, *, ahead: bool = False) -> None:
        """Read a key into its slot; a read for the key that had the slot, not begun yet, is called off."""
        if admitted.evicted is not None and (old := self._jobs.pop(admitted.evicted, None)) is not None:
            (self._ahead if old in self._ahead else self._urgent).remove(old)
        job = self._jobs[admitted.key] = _Job(admitted.key, admitted.slot)
        self._failed.pop(admitted.key, None)
        (self._ahead if ahead else self._urgent).append(job)
        self._changed.notify_all()

    def hurry(self, key: Key) -> bool:
        """A key that was asked for ahead is needed now. True where its read is not finished."""
        job = self._jobs.get(key)
        if job is not None and job in self._ahead:
            self._ahead.remove(job)
            self._urgent.append(job)
            self._changed.notify_all()
        return job is not None

    def call_off(self) -> None:
        """Forget what was asked for ahead and not begun."""
        for job in self._ahead:
            del self._jobs[job.key]
            self._table.remove(job.key)
        self._ahead.clear()

    def finish(self, keys: Sequence[Key]) -> None:
        """Read what is urgent beside the other threads, then wait for what they still read. Raises what went wrong."""
        while True:
            with self._changed:
                job = self._next(self._urgent)
                if job is None:
                    while any(key in self._jobs for key in keys):
                        self._changed.wait()
                    failed = [error for key in keys if (error := self._failed.pop(key, None)) is not None]
                    break
            self._read(job)
        if failed:
            raise failed[0]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    @staticmethod
    def _next(*queues: deque[_Job]) -> _Job | None:
        for queue in queues:
            if queue:
                job = queue.popleft()
                job.begun = True
                return job
        return None

    def _read(self, job: _Job) -> None:
        error: OrchardError | None = None
        try:
            self._records.read(*job.key, self._memory[job.slot])
        except OrchardError as failure:
            error = failure
        except Exception as failure:  # a reader must not die unseen: whoever waits for it would wait for ever
            error = OrchardError(f"a record could not be read: {failure}", hint="this is a fault of Orchard: report it")
            error.__cause__ = failure
        with self._changed:
            del self._jobs[job.key]
            if error is None:
                self._table.counters.reads += 1
                self._table.counters.bytes += self._records.layers[job.key[0]].stride
            else:
                self._failed[job.key] = error
                self._table.remove(job.key)
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._urgent and not self._ahead:
                    self._changed.wait()
                if self._closed:
                    return
                job = self._next(self._urgent, self._ahead)
            if job is not None:
                self._read(job)
