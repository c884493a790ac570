"""A model with the keys and values that are asked for: codec × owner by rewriting its tree, and who keeps them under a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from orchard.bench.memory_policies import KeptMaker
from orchard.core.config import REQUIRED
from orchard.core.errors import OrchardError, UnsupportedPair, UsageError
from orchard.generate.memory.episodes import Embed
from orchard.generate.memory.protocol import Kept

if TYPE_CHECKING:
    from orchard.session.model import Model

OWN = "own"
"""As the model has it."""


def codecs() -> dict[str, Any]:
    """Codecs that need nothing fitted, by name: config classes."""
    from orchard.cache import codecs as found
    from orchard.cache.codecs import Codec

    kinds = [getattr(found, name) for name in found.__all__]
    every = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Codec) and hasattr(kind, "Config")]
    return {kind.__name__.lower(): kind.Config for kind in every if not _needs(kind.Config())}


def rewriting(codec: str, owner: str) -> Callable[[Any], Any] | None:
    """What makes a model's tree into one with this codec and these owners; None where both are the model's own.

    `owner` is a step of compression that says whose keys and values layers read, such as share-kv:last=10. Only the tree
    changes: what such a step would fit or train is left out, and so is what that would be worth."""
    steps: list[Callable[[Any], Any]] = []
    if owner != OWN:
        steps.append(_owner(owner))
    if codec != OWN:
        known = codecs()
        if codec not in known:
            raise UsageError(
                f"no codec called {codec!r} can be taken as it is",
                hint=f"one of {', '.join((OWN, *known))}; for one that is fitted, compress the model with it and name that file",
            )
        steps.append(lambda tree: _coded(tree, known[codec]))
    if not steps:
        return None

    def rewritten(tree: Any) -> Any:
        for step in steps:
            tree = step(tree)
        return tree

    return rewritten


def opened(name: str, codec: str, owner: str) -> Model:
    from orchard.session.model import load

    return load(name, rewrite=rewriting(codec, owner), draft=False)


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


def _coded(tree: Any, codec: Any) -> Any:
    from orchard.cache.store import Store

    tree = tree.complete()
    if not tree.find(Store):
        raise UsageError("this model keeps no keys and values", hint="name a model with attention")
    return tree.rewrite(Store, lambda store: store.clone(codec=codec()))


def _owner(words: str) -> Callable[[Any], Any]:
    from orchard.recipes.compressing.plan import read_plan
    from orchard.recipes.compressing.steps import steps

    sharing = [name for name in ("share-kv", "retain") if name in steps()]
    if words.partition(":")[0] not in sharing:
        raise UsageError(f"{words!r} says no owners", hint=f"{OWN}, or a step such as {' or '.join(sharing)}:…")
    (step,) = read_plan(words).steps
    assert step.transform is not None
    return step.transform
