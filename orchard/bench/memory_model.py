"""A model with the keys and values that are asked for: codec × owner by rewriting its tree, and who keeps them under a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchard.bench.memory_policies import KeptMaker
from orchard.core.config import REQUIRED
from orchard.core.errors import BadFile, OrchardError, UnsupportedPair, UsageError
from orchard.generate.memory.episodes import Embed
from orchard.generate.memory.protocol import Kept

if TYPE_CHECKING:
    from orchard.session.model import Model

OWN = "own"
"""As the model has it."""
OWNERS = ("share-kv", "retain")
FITTED = ("kv-commvq", "kv-int4")
"""Steps of compression that say whose keys and values layers read, and how they are kept by what was fitted."""


def codecs() -> dict[str, Any]:
    """Codecs that need nothing fitted, by name: config classes."""
    from orchard.cache import codecs as found
    from orchard.cache.codecs import Codec

    kinds = [getattr(found, name) for name in found.__all__]
    every = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Codec) and hasattr(kind, "Config")]
    return {kind.__name__.lower(): kind.Config for kind in every if not _needs(kind.Config())}


def rewriting(codec: str, owner: str) -> Callable[[Any], Any] | None:
    """What makes a model's tree into one with this codec and these owners; None where both are the model's own.

    Both may be steps of compression: share-kv:last=10 says whose keys and values layers read, kv-commvq:file=PATH how they are
    kept. Only the tree changes: what an owner's step would fit or train is left out, and so is what that would be worth."""
    steps: list[Callable[[Any], Any]] = []
    if owner != OWN:
        steps.append(_step(owner, OWNERS, "says no owners"))
    if codec != OWN:
        steps.append(_step(codec, FITTED, "is no codec") if ":" in codec else _plain(codec))
    if not steps:
        return None

    def rewritten(tree: Any) -> Any:
        for step in steps:
            tree = step(tree)
        return tree

    return rewritten


def opened(name: str, codec: str, owner: str) -> Model:
    """A model that keeps its keys and values so; `BadFile` where a codec was fitted to another model, or not at all."""
    from orchard.session.model import load

    rewrite = rewriting(codec, owner)
    if ":" in codec:
        _check_fitted(name, codec)
    return load(name, rewrite=rewrite, draft=False)


def keeper(model: Model) -> tuple[KeptMaker, str]:
    """Who keeps this model's sequences under a budget, and its name: the native engine where it can, torch otherwise."""
    from orchard.generate.memory.torch_kept import TorchKept
    from orchard.generate.native import NativeRunner
    from orchard.ops.kernels.native.kept import obstacle

    runner = model.runner
    if isinstance(runner, NativeRunner):
        reason = obstacle(runner.program)
        if reason is None:
            from orchard.generate.memory.native_kept import NativeKept

            return (lambda **given: NativeKept(runner, **given)), "native"

    def make(**given: Any) -> Kept:
        try:
            return TorchKept(model.decoder, **given)
        except UnsupportedPair as error:
            raise UnsupportedPair(f"{model.name}: {error.message}", hint=error.hint) from error

    return make, "torch"


def token_bytes(make: KeptMaker) -> tuple[float, float]:
    """Bytes of one more token, and those that are there without any."""
    sizes = []
    for budget in (256, 512):
        kept = make(budget=budget, block=128, sinks=4, scoring="recent")
        kept.read([0])
        sizes.append(kept.nbytes)
    each = (sizes[1] - sizes[0]) / 256
    return each, max(0.0, sizes[0] - each * (256 + 128))


def embedding(name: str | None) -> tuple[Embed, str]:
    """What compares texts, and what it is called. Without a name: MiniLM where it is at hand, words otherwise."""
    from orchard.generate.memory.lexical import Lexical
    from orchard.weights.names import EMBEDDING_MODEL

    if name == "lexical":
        return Lexical(), Lexical.name
    from orchard.session.embedder import load_embedder

    try:
        embedder = load_embedder(name or EMBEDDING_MODEL)
    except OrchardError:
        if name is not None:
            raise
        return Lexical(), f"{Lexical.name}; `orchard pull {EMBEDDING_MODEL}` gets one that knows meanings"
    return (lambda texts: embedder.embed(list(texts), truncate=True).vectors), embedder.name


def _needs(config: Any) -> bool:
    """Whether a codec must be told something, such as the file that it was fitted into."""
    return any(getattr(config, one.name) is REQUIRED for one in fields(config))


def _plain(name: str) -> Callable[[Any], Any]:
    known = codecs()
    if name not in known:
        raise UsageError(
            f"no codec called {name!r} can be taken as it is",
            hint=f"one of {', '.join((OWN, *known))}, or a fitted one, such as kv-commvq:file=PATH",
        )
    return lambda tree: _coded(tree, known[name])


def _coded(tree: Any, codec: Any) -> Any:
    from orchard.cache.store import Store

    tree = tree.complete()
    if not tree.find(Store):
        raise UsageError("this model keeps no keys and values", hint="name a model with attention")
    return tree.rewrite(Store, lambda store: store.clone(codec=codec()))


def _step(words: str, names: tuple[str, ...], problem: str) -> Callable[[Any], Any]:
    """The transform of a step of compression, if it is one of these."""
    from orchard.recipes.compressing.plan import read_plan
    from orchard.recipes.compressing.steps import steps

    known = [name for name in names if name in steps()]
    if words.partition(":")[0] not in known:
        raise UsageError(f"{words!r} {problem}", hint=f"{OWN}, or a step such as {' or '.join(known)}:…")
    (step,) = read_plan(words).steps
    assert step.transform is not None
    return step.transform


def _check_fitted(name: str, codec: str) -> None:
    from orchard.cache.codecs import commvq, int4
    from orchard.cache.codecs.fitted import model_of
    from orchard.session.build import build
    from orchard.transforms.kv_samples import fingerprint
    from orchard.weights.library import Library

    step: Any = _step(codec, FITTED, "is no codec")
    kind = {"kv-commvq": commvq.KIND, "kv-int4": int4.KIND}[codec.partition(":")[0]]
    if step.file is None:
        return
    if not Path(step.file).is_file():
        raise BadFile(f"there is no {step.file}", hint=f"`orchard compress {name} {codec}` fits it first")
    if model_of(step.file, kind) != fingerprint(build(Library().resolve(name), None)[1].decoder):
        raise BadFile(
            f"{step.file} was fitted to another model", hint=f"`orchard compress {name} {codec}` with another file"
        )
