"""The adapters of a model: loaded by name, applied alone or together, each combination a model of its own on shared weights.

adapters = model.adapters
adapters.load("my-adapter")
adapters.model(("my-adapter",)).generate("…")

A combination (a variant) has its own plan and shares the base's engine: requests to several of them run in the same steps, and
what is kept of prompts is kept apart. It holds the base's tensors themselves and costs only its own A and B. The last few are
kept; one that was dropped or whose adapter was removed works on for whoever still has it.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.core.errors import ModelNotFound, UnsupportedPair, UsageError
from orchard.session.build import Built, Later
from orchard.session.errors import AssetsUnavailableError
from orchard.weights.adapters import Adapter, Base, hf_modules, read_adapter, signature
from orchard.weights.package import DRAFT, MANIFEST, is_package, read_package

if TYPE_CHECKING:
    import numpy as np

    from orchard.generate.engine import Engine
    from orchard.models.language.decoder import Decoder
    from orchard.ops.plan.steps import Plan
    from orchard.session.model import Model

KEPT = 4
"""Variants that are kept ready."""
LONGEST_NAME = 120
Sides = dict[str, list[tuple[Any, Any, float]]]
Biases = dict[str, list[Any]]
Facts = tuple[str, tuple[tuple[int, int], ...]]


class UnknownAdapter(UsageError):
    """No adapter of that name is loaded."""

    code = "unknown-adapter"


class Adapters:
    """The adapters of one model. Safe to share between threads."""

    def __init__(self, model: Model, *, kept: int = KEPT) -> None:
        # Not the model itself, which holds this object: the two would keep each other alive.
        self._model = weakref.ref(model)
        self._name, self._source, self._tokenizer = model.name, model.source, model.tokenizer
        self._plan, self._runner, self._later, self._engine = model.plan, model.runner, model._later, model.engine
        self._made_so_far = 0
        self._loaded: dict[str, Adapter] = {}
        self._files: dict[str, Facts] = {}
        self._drafts: dict[str, Path] = {}
        self._variants: OrderedDict[tuple[str, ...], Model] = OrderedDict()
        self._kept = kept
        self._lock = threading.RLock()

    @cached_property
    def base(self) -> Base:
        """What adapters are held against, and what a new one says it was made for."""
        whole = self._plan is not None and self._plan.whole
        shapes, vectors = _plan_parts(self._plan) if whole else _torch_parts(self._later().decoder)  # type: ignore[arg-type]
        return Base(self._name, signature(shapes, vectors), shapes, lambda: self._family_names(shapes))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the adapters that are loaded, in the order they were."""
        with self._lock:
            return tuple(self._loaded)

    def __getitem__(self, name: str) -> Adapter:
        with self._lock:
            if name not in self._loaded:
                known = ", ".join(map(repr, self._loaded)) or "none"
                raise UnknownAdapter(f"no adapter called {name!r} is loaded", hint=f"loaded: {known}; load(path) first")
            return self._loaded[name]

    def load(self, path: str | Path, name: str | None = None) -> str:
        """Read a PEFT folder or a package and keep it under a name, by default the folder's; the name is the answer. Where it
        brings a draft model (`draft.gguf`), that one guesses for the model with this adapter alone.

        The same folder under the same name is read again only when it changed on disk; another one has to wait until `remove`.
        `AssetsUnavailableError` where there is no such folder, `OtherBase` where it was made for another model,
        `UnsupportedFormat` and `BadFile` name what else is wrong with it.
        """
        path = Path(path)
        name = path.resolve().name if name is None else name
        if not name or len(name) > LONGEST_NAME or not name.isprintable() or "+" in name:
            raise UsageError(f"an adapter cannot be called {name[:40]!r}", hint="use a short name without '+'")
        facts = _facts(path)
        with self._lock:
            if self._files.get(name) == facts:
                return name
            if name in self._loaded and self._files[name][0] != facts[0]:
                raise UsageError(
                    f"an adapter called {name!r} is loaded already", hint="give another name, or remove that one first"
                )
        try:
            if is_package(path):
                read_package(path)  # every file is held against its sum
            found = read_adapter(path, self.base, dora=True)
        except ModelNotFound as error:
            raise AssetsUnavailableError(error.message, hint=error.hint) from error
        with self._lock:
            self._forget(name)
            self._loaded[name], self._files[name] = found, facts
            if (path / DRAFT).is_file():
                self._drafts[name] = path / DRAFT
        return name

    def remove(self, name: str) -> None:
        """Forget an adapter. Answers that are under way with it go on."""
        with self._lock:
            self[name]
            self._forget(name)
            del self._loaded[name], self._files[name]

    def model(self, names: Sequence[str] | str) -> Model:
        """The model with these adapters applied together, in whatever order; without any, the base."""
        asked = (names,) if isinstance(names, str) else tuple(names)
        key = tuple(sorted(asked))
        if len(set(key)) != len(key):
            raise UsageError(f"an adapter is named twice: {', '.join(asked)}", hint="name each once")
        with self._lock:
            found = [self[name] for name in key]
            if not key:
                return self._model() or self._made(key, found)
            if key not in self._variants:
                self._variants[key] = self._with_draft(self._made(key, found), key)
            self._variants.move_to_end(key)
            while len(self._variants) > self._kept:
                self._variants.popitem(last=False)
            return self._variants[key]

    # Inside -----------------------------------------------------------------------------------------------------------

    def _forget(self, name: str) -> None:
        for key in [key for key in self._variants if name in key]:
            del self._variants[key]
        self._drafts.pop(name, None)

    def _with_draft(self, model: Model, names: tuple[str, ...]) -> Model:
        """Adapters together are guessed for by the base's draft model: nobody taught one for all of them."""
        path = self._drafts.get(names[0]) if len(names) == 1 else None
        if path is not None:
            from orchard.session.model import load

            model.guess_with(load(path, device=str(getattr(self._runner, "device", "cpu"))))
        elif (base := self._model()) is not None and base.draft is not None:
            if model.engine.model is self._runner:  # there it guesses for variants too
                model.draft = base.draft
            else:
                model.guess_with(base.draft)
        return model

    def _made(self, names: tuple[str, ...], adapters: list[Adapter]) -> Model:
        from orchard.session.model import Model

        sides, biases = together(adapters)
        magnitudes = _magnitudes(names, adapters)
        base = self._later
        named: dict[str, Any] = {"name": "+".join((self._name, *names)), "source": self._source}
        later = Later(lambda: _with_sides(base(), sides, biases, magnitudes))
        if self._plan is None:
            return Model(later, self._tokenizer, **named)
        if self._plan.elsewhere:
            raise UnsupportedPair(
                "adapters do not go together with experts that live elsewhere",
                hint="load the model without experts_budget",
            )
        from orchard.generate.native import NativeRunner
        from orchard.ops.plan.adapt import adapted

        plan, base_runner = adapted(self._plan, sides, biases, magnitudes), self._runner
        if hasattr(base_runner, "adapted"):  # on a GPU
            runner: Any = base_runner.adapted(plan)
        elif isinstance(base_runner, NativeRunner):
            program = base_runner.program
            runner = NativeRunner(plan, decoder=lambda: later().decoder, threads=program.threads, level=program.level)
        else:
            runner = NativeRunner(plan, decoder=lambda: later().decoder)
        if not hasattr(base_runner, "add_variant"):
            return Model(later, self._tokenizer, plan=plan, runner=runner, **named)
        return self._variant(Model, runner, later, plan, named)

    def _variant(self, kind: type[Model], runner: Any, later: Later, plan: Plan, named: dict[str, Any]) -> Model:
        """On the base's engine, for as long as somebody has the model. Its name there is used once: rows that an earlier one left
        must not meet another's keys and values."""
        self._made_so_far += 1
        known = f"{named['name']} #{self._made_so_far}"
        self._runner.add_variant(known, runner)  # type: ignore[attr-defined]
        model = kind(later, self._tokenizer, plan=plan, runner=runner, engine=self._engine.variant(known), **named)
        weakref.finalize(model, _dropped, self._engine, known)
        return model

    def _family_names(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
        """The family's names of linear maps, from the headers of the model's files."""
        if self._source is None:
            return {}
        from orchard.weights.checkpoint import open_checkpoint

        with open_checkpoint(self._source) as checkpoint:
            return hf_modules(checkpoint.family, shapes)


def _dropped(engine: Engine, name: str) -> None:
    engine.model.drop_variant(name)  # type: ignore[attr-defined]
    engine.prefixes.drop(name)
    engine.drafts.drop(name)


def together(adapters: Sequence[Adapter]) -> tuple[Sides, Biases]:
    """All side paths and biases by the path of their linear map."""
    sides: Sides = {}
    biases: Biases = {}
    for adapter in adapters:
        for path, side in adapter.sides.items():
            sides.setdefault(path, []).append((side.a, side.b, side.scale))
        for path, bias in adapter.biases.items():
            biases.setdefault(path, []).append(bias)
    return sides, biases


def _magnitudes(names: Sequence[str], adapters: Sequence[Adapter]) -> dict[str, np.ndarray]:
    """DoRA's lengths of rows. They are measured with one side path there: with a second they would be others."""
    for name, adapter in zip(names, adapters, strict=True):
        if adapter.magnitudes and len(adapters) > 1:
            others = ", ".join(repr(other) for other in names if other != name)
            raise UnsupportedPair(
                f"the adapter {name!r} is a DoRA adapter, which cannot be applied together with {others}",
                hint="apply it alone, or merge it into the base first (orchard export)",
            )
    return {path: lengths for adapter in adapters for path, lengths in adapter.magnitudes.items()}


def _with_sides(built: Built, sides: Sides, biases: Biases, magnitudes: Mapping[str, Any]) -> Built:
    from orchard.transforms.lora import with_sides

    return Built(with_sides(built.decoder, sides, biases, magnitudes), built.family, built.hf_config)


def _plan_parts(plan: Plan) -> tuple[dict[str, tuple[int, ...]], dict[str, np.ndarray]]:
    from orchard.ops.plan.adapt import parts

    return parts(plan)


def _torch_parts(decoder: Decoder) -> tuple[dict[str, tuple[int, ...]], dict[str, np.ndarray]]:
    """The same of a model in torch: shapes of its tensors, and the values of norms and biases."""
    from orchard.weights.load import dense_tensor, tensor_names

    shapes: dict[str, tuple[int, ...]] = {}
    vectors: dict[str, np.ndarray] = {}
    for name, (module, attribute) in tensor_names(decoder).items():
        if attribute.startswith("lora_"):
            continue
        packed = getattr(module, "shape", None) if attribute == "weight" else None
        shapes[name] = tuple(packed if packed is not None else getattr(module, attribute).shape)
        if len(shapes[name]) == 1:
            scales: Any = getattr(module, "scales", None)  # a norm's weight with its offset, as plans keep it
            values = dense_tensor(module, attribute).detach().float().cpu().numpy()
            vectors[name] = values if scales is None else scales()
    return shapes, vectors


def _facts(path: Path) -> Facts:
    """What tells one state of an adapter's folder from another."""
    found = []
    for file in ("adapter_config.json", "adapter_model.safetensors", DRAFT, MANIFEST):
        try:
            state = (path / file).stat()
            found.append((state.st_size, state.st_mtime_ns))
        except OSError:  # reading it says what is wrong
            found.append((-1, -1))
    return str(path.absolute()), tuple(found)
