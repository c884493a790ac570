"""Batches made ahead of time by one thread, while the model is busy with the last one.

The state is that of what was taken, not of what was made: every so often the thread notes the state below before an item, and
a state is the latest note and how many items were taken since. Going back makes those few again, so that a note, which may be
large, is not taken at every step.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Mapping
from typing import Any, TypeVar

from orchard.core.config import REQUIRED, BaseConfig, config
from orchard.data.errors import at_least
from orchard.data.source import Stage, State
from orchard.text.tokenizer import Tokenizer

T = TypeVar("T")
_END = object()
_WAIT_S = 0.1


class Prefetch(Stage[T]):
    """The items of a source, up to `depth` of them made ahead. Errors below come out here, where they would have come."""

    @config
    class Config(BaseConfig):
        source: BaseConfig = REQUIRED
        depth: int = 2
        every: int = 16
        """A note of the state every so many items."""

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None = None) -> None:
        at_least("depth", cfg.depth, 1)
        at_least("every", cfg.every, 1)
        super().__init__([cfg.source.build(tokenizer=tokenizer)])
        self.cfg = cfg
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._made: queue.Queue[tuple[Any, State | None, dict[str, int]]] = queue.Queue(cfg.depth)
        self._note: State = self.sources[0].state()
        self._since = 0
        self._skip = 0
        self._finished: BaseException | None = None
        self._counts: dict[str, int] = {}

    def shard(self, rank: int, world: int) -> Prefetch[T]:
        """As `Batches.shard`; before anything was taken or after `restore`."""
        self._halt()
        self.sources[0].restore(self._note)
        self._skip = self._since
        self.sources[0].shard(rank, world)
        return self

    def __next__(self) -> T:
        if self._finished is not None:
            raise self._finished
        if self._thread is None:
            self._start()
        item, note, counts = self._made.get()
        if item is _END or isinstance(item, _Failure):
            self._halt()
            self._finished = item.error if isinstance(item, _Failure) else StopIteration()
            raise self._finished
        if note is not None:
            self._note, self._since = note, 0
        self._since += 1
        self._counts = counts
        return item

    def _start(self) -> None:
        self._stop = threading.Event()
        self._made = queue.Queue(self.cfg.depth)
        arguments = (self.sources[0], self._made, self._stop, self._skip, self._since, self.cfg.every)
        self._thread = threading.Thread(target=_work, args=arguments, name="orchard-prefetch", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._stop.set)  # nobody is left to take anything: the thread ends

    def _halt(self) -> None:
        """End the thread. What it made and nobody took is lost; the state does not count it."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.set()
        while thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._made.get_nowait()
            thread.join(_WAIT_S)

    def close(self) -> None:
        """Ends the thread; taking from it afterwards goes on where it was."""
        was_running = self._thread is not None
        self._halt()
        if was_running:
            self.sources[0].restore(self._note)
            self._skip = self._since
        super().close()

    def state(self) -> State:
        return {"kind": type(self).__name__, "since": self._since, "sources": [self._note]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._halt()
        super().restore(state)
        self._finished = None
        self._note, self._since = state["sources"][0], int(state["since"])
        self._skip = self._since

    def begin(self, epoch: int) -> None:
        self._halt()
        super().begin(epoch)
        self._note, self._since, self._skip, self._finished = self.sources[0].state(), 0, 0, None

    def counts(self) -> dict[str, int]:
        """As of what was taken."""
        return dict(self._counts)

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _work(source: Any, made: queue.Queue[Any], stop: threading.Event, skip: int, since: int, every: int) -> None:
    """What the thread does. It holds no reference to the `Prefetch`, which may go away while it runs."""

    def put(item: Any, note: State | None = None) -> bool:
        counts = source.counts()
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                made.put((item, note, counts), timeout=_WAIT_S)
                return True
        return False

    try:
        for _ in range(skip):
            next(source)
        while not stop.is_set():
            note = source.state() if since >= every else None
            since = 0 if note is not None else since
            since += 1
            if not put(next(source), note):
                return
    except StopIteration:
        put(_END)
    except BaseException as error:  # whatever it is, the one who takes has to hear of it
        put(_Failure(error))
