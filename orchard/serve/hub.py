"""The models behind a server: loaded when they are first asked for, let go when others need the memory.

One entry for each base model, with one engine for all its clients; `base:adapter` is the same entry with an adapter applied. An
entry that somebody uses is never let go.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchard.core.errors import ModelNotFound, OrchardError
from orchard.serve.errors import ApiError
from orchard.serve.settings import ModelSpec, Settings

if TYPE_CHECKING:
    from orchard.session.embedder import Embedder
    from orchard.session.executors.local import LocalExecutor

log = logging.getLogger("orchard.serve")


@dataclass(frozen=True)
class Card:
    """What clients are told of a model."""

    id: str
    loaded: bool
    base: str
    context: int | None = None
    kind: str = "chat"
    """Or "embedding"."""


class Entry:
    """A base model. Everything but `loading` is guarded by the hub's lock."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.loading = threading.Lock()
        self.executor: LocalExecutor | None = None
        self.embedder: Embedder | None = None
        self.users = 0
        self.used = 0.0
        self.bytes = 0

    @property
    def loaded(self) -> bool:
        return self.executor is not None or self.embedder is not None


@dataclass(frozen=True)
class Held:
    """A model in somebody's hands, until `Hub.give`."""

    name: str
    entry: Entry
    executor: LocalExecutor | None
    embedder: Embedder | None
    adapters: tuple[str, ...] = ()

    def speaker(self) -> LocalExecutor:
        if self.executor is None:
            words = (
                f"{self.name} turns texts into vectors and writes nothing: ask /v1/embeddings, or name another model"
            )
            raise ApiError(400, "wrong_kind_of_model", words, param="model")
        return self.executor

    def vectors(self) -> Embedder:
        if self.embedder is None:
            words = f"{self.name} writes texts and gives no vectors: name an embedding model, such as minilm"
            raise ApiError(400, "wrong_kind_of_model", words, param="model")
        return self.embedder


class Hub:
    """Safe to use from several threads. `take` may have to load a model, which takes its time: not for an event loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.RLock()
        self._entries = {spec.name: Entry(spec) for spec in settings.models}
        self._limit = settings.memory if settings.memory is not None else _half_of_what_is_left()
        self.loads = 0
        self.unloads = 0

    def add(self, name: str, executor: LocalExecutor) -> None:
        """A model that is there already, and stays."""
        with self._lock:
            entry = self._entries.setdefault(name, Entry(ModelSpec(name, name)))
            entry.executor, entry.users = executor, entry.users + 1

    @property
    def default(self) -> str:
        return self.settings.models[0].name

    def take(self, name: str) -> Held:
        """A model by name, loaded; `give` it back. `ApiError` where there is no such model or it cannot be loaded."""
        entry, adapter = self._find(name)
        with self._lock:
            entry.users += 1
            entry.used = time.monotonic()
        try:
            if not entry.loaded:
                self._load(entry)
            if adapter is not None:
                executor = Held(name, entry, entry.executor, entry.embedder).speaker()
                executor.model.adapters.load(entry.spec.adapters[adapter], adapter)
        except BaseException:
            self._drop_user(entry)
            raise
        return Held(name, entry, entry.executor, entry.embedder, () if adapter is None else (adapter,))

    def ready(self, name: str) -> Held | None:
        """The same without waiting for anything, where a base model is loaded; else None."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or not entry.loaded:
                return None
            entry.users += 1
            entry.used = time.monotonic()
            return Held(name, entry, entry.executor, entry.embedder)

    def give(self, held: Held) -> None:
        self._drop_user(held.entry)

    def cards(self) -> list[Card]:
        """Every name that can be asked for."""
        with self._lock:
            entries = dict(self._entries)
        if self.settings.any_model:
            entries |= {name: Entry(ModelSpec(name, name)) for name in _library() if name not in entries}
        found = []
        for name, entry in entries.items():
            context = entry.executor.context_size if entry.executor is not None else None
            context = entry.embedder.max_tokens if entry.embedder is not None else context
            found.append(Card(name, entry.loaded, name, context, _kind(entry)))
            found += [Card(f"{name}:{adapter}", entry.loaded, name, context) for adapter in entry.spec.adapters]
        return found

    def card(self, name: str) -> Card:
        self._find(name)
        return next((card for card in self.cards() if card.id == name), Card(name, False, name))

    def facts(self) -> dict[str, dict[str, Any]]:
        """What the engines of loaded models do, by model."""
        with self._lock:
            loaded = [(name, entry.executor, entry.bytes) for name, entry in self._entries.items()]
        models = [(name, getattr(executor, "model", None), size) for name, executor, size in loaded]
        engines = [(name, model.engine, size) for name, model, size in models if model is not None]
        return {name: {**engine.facts(), "model_bytes": size} for name, engine, size in engines}

    # Inside -----------------------------------------------------------------------------------------------------------

    def _find(self, name: str) -> tuple[Entry, str | None]:
        with self._lock:
            if name in self._entries:
                return self._entries[name], None
            base, colon, adapter = name.rpartition(":")
            if colon and base in self._entries and adapter in self._entries[base].spec.adapters:
                return self._entries[base], adapter
            if self.settings.any_model and name in _library():
                self._entries[name] = Entry(ModelSpec(name, name))
                return self._entries[name], None
        known = ", ".join(card.id for card in self.cards()[:8])
        raise ApiError(
            404, "model_not_found", f"there is no model {name[:80]!r} here: known are {known}", param="model"
        )

    def _load(self, entry: Entry) -> None:
        with entry.loading:
            if entry.loaded:
                return
            begun = time.monotonic()
            wanted = sum(_file_bytes(one) for one in (entry.spec.source, entry.spec.draft) if one is not None)
            self._make_room(entry, wanted)
            try:
                executor, embedder = _loaded(entry.spec)
            except ModelNotFound as error:
                raise ApiError(404, "model_not_found", f"{error.message}: {error.hint}", param="model") from error
            except OrchardError as error:
                log.error("loading %s failed: %s", entry.spec.name, error)
                words = f"{entry.spec.name} cannot be loaded: {error.message}"
                raise ApiError(503, "model_unavailable", words) from error
            with self._lock:
                entry.executor, entry.embedder, entry.bytes = executor, embedder, wanted
                self.loads += 1
            log.info("loaded %s in %.1f s", entry.spec.name, time.monotonic() - begun)

    def _make_room(self, entry: Entry, wanted: int) -> None:
        """Let go of what nobody uses, the longest unused first, until there is room."""
        with self._lock:
            while sum(one.bytes for one in self._entries.values() if one.loaded) + wanted > self._limit:
                idle = [one for one in self._entries.values() if one.loaded and not one.users]
                if not idle:
                    if any(one.loaded for one in self._entries.values()):
                        words = (
                            f"there is no memory for {entry.spec.name} while other models are in use: try again later"
                        )
                        raise ApiError(503, "out_of_memory", words, retry_after=5)
                    return  # alone it may have whatever the machine gives
                self._unload(min(idle, key=lambda one: one.used))

    def _unload(self, entry: Entry) -> None:
        log.info("letting go of %s", entry.spec.name)
        entry.executor = entry.embedder = None
        entry.bytes = 0
        self.unloads += 1
        gc.collect()  # an engine and its parts know each other: without this its memory would go some time later

    def _drop_user(self, entry: Entry) -> None:
        with self._lock:
            entry.users -= 1
            entry.used = time.monotonic()


def _loaded(spec: ModelSpec) -> tuple[LocalExecutor | None, Embedder | None]:
    from orchard.session.executors.local import LocalExecutor
    from orchard.session.model import load
    from orchard.session.shelf import is_embedder

    if is_embedder(spec.source):
        from orchard.session.embedder import load_embedder

        return None, load_embedder(spec.source)
    model = load(spec.source, draft=spec.draft, experts_budget=spec.experts_budget)
    if spec.conversation is not None:
        from orchard.session.memory import Memory, Remembering

        model = Remembering(model, Memory(spec.conversation), spec.conversations).model
    return LocalExecutor(model), None


def _kind(entry: Entry) -> str:
    from orchard.session.shelf import is_embedder

    vectors = entry.embedder is not None or (entry.executor is None and is_embedder(entry.spec.source))
    return "embedding" if vectors else "chat"


def _library() -> list[str]:
    from orchard.session.shelf import installed

    return installed()


def _file_bytes(source: str) -> int:
    from orchard.session.shelf import bytes_of

    return bytes_of(source)


def _half_of_what_is_left() -> int:
    from orchard.session.shelf import memory_left

    return memory_left() // 2
