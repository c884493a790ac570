"""Sub-networks of a loaded model: one for each prompt, or one for a task, under a name.

    model.subnets.by_prompt(keep=0.5)                     # from now on every prompt chooses half of the hidden units
    model.subnets.add("sql", model.subnets.for_task(prompts))
    fast = model.subnets.model("sql")                     # a model that shares the weights, the engine and its slots
    model.subnets.save("masks.safetensors"); model.subnets.load("masks.safetensors")

A sub-network is a variant of the model on the same engine, as one with an adapter is. On the native engine it is picked out of the
packed weights; nothing is unpacked, and all but its own hidden units is shared.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from orchard.core.errors import UnsupportedPair, UsageError
from orchard.generate.request import Request
from orchard.session.build import Built, Later

if TYPE_CHECKING:
    from orchard.generate.engine import Engine
    from orchard.session.model import Model
    from orchard.transforms.ifprune_choice import Choice

KEPT = 4
"""Sub-networks that stay ready after the last answer that used them."""
IN_TORCH = 32
"""Hidden units of a group where the model runs in torch and any number would do."""


class Chooser(Protocol):
    """Who says which units a prompt needs: `transforms.ifprune_activity.Activity`, or a trained predictor."""

    def choose(self, ids: Sequence[int], budget: int | None = None) -> Choice: ...


class Subnets(Mapping[str, "Choice"]):
    """The choices of one model that have names, and what chooses for its prompts. Safe to use from several threads."""

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        self._engine, self._name, self._plan = model.engine, model.name, model.plan
        self._lock = threading.RLock()
        self._named: dict[str, Choice] = {}
        self._ready: OrderedDict[Any, str] = OrderedDict()
        self._users: dict[str, int] = {}
        self._made = 0
        self._activity: dict[float, Chooser] = {}

    # By prompt ---------------------------------------------------------------------------------------------------------

    def by_prompt(self, chooser: Chooser | None = None, *, keep: float = 0.5) -> None:
        """Let every prompt choose, from now on: by `chooser`, or by which units it uses most. Requests with an adapter do not."""
        chosen = chooser or self.activity(keep)

        @contextmanager
        def on_prompt(request: Request) -> Iterator[Request]:
            name = self._take(chosen.choose(request.ids))
            try:
                yield replace(request, adapter=name)
            finally:
                self._release(name)

        self._engine.on_prompt = on_prompt

    def stop(self) -> None:
        """Prompts choose no more; answers under way go on."""
        self._engine.on_prompt = None

    def activity(self, keep: float = 0.5) -> Chooser:
        """Chooses by how much a prompt uses each unit. Builds the model in torch, which reads every prompt once."""
        from orchard.transforms.ifprune_activity import Activity

        with self._lock:
            if keep not in self._activity:
                self._activity[keep] = Activity(self._base().decoder, size=self._size(), keep=keep)
            return self._activity[keep]

    def for_task(self, prompts: Sequence[Any], keep: float = 0.5) -> Choice:
        """One choice for a task, from some of its prompts (texts, conversations or token ids)."""
        from orchard.transforms.ifprune_choice import Choice

        base, chooser = self._base(), self.activity(keep)
        return Choice.of_task([chooser.choose(base.prompt_ids(prompt)) for prompt in prompts])

    # By name -----------------------------------------------------------------------------------------------------------

    def add(self, name: str, choice: Choice) -> None:
        if not name or not name.isprintable():
            raise UsageError(f"a sub-network cannot be called {name[:40]!r}", hint="use a short printable name")
        with self._lock:
            self._named[name] = choice

    def save(self, path: Path | str) -> None:
        """Keep all choices that have names in a file, for this model."""
        from orchard.transforms.ifprune_masks import save_choices

        save_choices(path, self._named, self._name)

    def load(self, path: Path | str) -> list[str]:
        """Take up the choices of a file that this model wrote; answers their names."""
        from orchard.transforms.ifprune_masks import load_choices

        found = load_choices(path, self._name)
        with self._lock:
            self._named.update(found)
        return sorted(found)

    def model(self, chosen: str | Choice) -> Model:
        """The model of one choice, on the same engine, for as long as somebody has it."""
        from orchard.session.model import Model

        choice = self[chosen] if isinstance(chosen, str) else chosen
        base, name = self._base(), self._take(choice)
        runner = self._engine.model.variants[name]  # type: ignore[attr-defined]
        made = Model(
            Later(lambda: _cut(base.built, choice)),
            base.tokenizer,
            name=f"{self._name}/{chosen}" if isinstance(chosen, str) else self._name,
            source=base.source,
            plan=getattr(runner, "plan", None),
            runner=runner,
            engine=self._engine.variant(name),
        )
        weakref.finalize(made, self._release, name)
        return made

    # Inside ------------------------------------------------------------------------------------------------------------

    def _base(self) -> Model:
        model = self._model()
        if model is None:
            raise UsageError("the model of these sub-networks is gone", hint="keep it as long as they are used")
        return model

    def _size(self) -> int:
        if self._plan is None:
            return IN_TORCH
        from orchard.ops.plan.subset import gated_mlps, unit_of

        return max((unit_of(self._plan, path) for path in gated_mlps(self._plan)), default=IN_TORCH)

    def _take(self, choice: Choice) -> str:
        """The name of the variant that runs a choice, made where it is not there. It stays until as many `_release`s."""
        key = (tuple(choice.groups()), choice.temperature, None if choice.temperature is None else choice.scores.numpy().tobytes())
        with self._lock:
            if key not in self._ready:
                self._made += 1
                name = f"{self._name} / sub-network {self._made}"
                self._engine.model.add_variant(name, self._runner(choice))  # type: ignore[attr-defined]
                self._ready[key] = name
            name = self._ready[key]
            self._ready.move_to_end(key)
            self._users[name] = self._users.get(name, 0) + 1
            self._trim()
            return name

    def _release(self, name: str) -> None:
        with self._lock:
            self._users[name] -= 1
            self._trim()

    def _trim(self) -> None:
        idle = [key for key, name in self._ready.items() if not self._users[name]]
        for key in idle[: max(0, len(idle) - KEPT)]:
            name = self._ready.pop(key)
            del self._users[name]
            _dropped(self._engine, name)

    def _runner(self, choice: Choice) -> Any:
        from orchard.generate.native import NativeRunner
        from orchard.generate.torch_forward import TorchRunner

        base = self._engine.model
        if isinstance(base, NativeRunner):
            from orchard.ops.plan.subset import gated_mlps, subset

            paths = list(gated_mlps(base.plan))
            _check(choice, len(paths))
            kept = dict(zip(paths, choice.groups(), strict=True))
            weights = {path: [float(row[g]) for g in kept[path]] for path, row in zip(paths, choice.weights, strict=True)}
            plan = subset(base.plan, kept, None if choice.temperature is None else weights)
            later, program = self._base()._later, base.program
            return NativeRunner(plan, decoder=lambda: later().decoder, threads=program.threads, level=program.level)
        if isinstance(base, TorchRunner):
            return TorchRunner(_cut(self._base().built, choice).decoder)
        raise UnsupportedPair(f"{type(base).__name__} runs no sub-networks", hint="load the model with device='cpu'")

    def __getitem__(self, name: str) -> Choice:
        with self._lock:
            if name not in self._named:
                known = ", ".join(map(repr, self._named)) or "none"
                raise UsageError(f"no sub-network is called {name!r}", hint=f"known: {known}; add or load one first")
            return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self._named))

    def __len__(self) -> int:
        return len(self._named)


def _check(choice: Choice, layers: int) -> None:
    if choice.layers != layers:
        raise UsageError(f"a choice of {choice.layers} layers for a model of {layers}", hint="use one that it made")


def _cut(built: Built, choice: Choice) -> Built:
    """The model of a choice in torch: an ordinary decoder with narrower MLPs."""
    from orchard.transforms.ifprune_gather import picked

    return Built(picked(built.decoder, choice), built.family, built.hf_config)


def _dropped(engine: Engine, name: str) -> None:
    engine.model.drop_variant(name)  # type: ignore[attr-defined]
    engine.prefixes.drop(name)
    engine.drafts.drop(name)
