"""One training step of a tiny model, with everything that must be true of it; and the flat reference, imported and run."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchard.core.context import Context
from orchard.core.errors import OrchardError
from orchard.core.seeds import fold, generator
from orchard.models.language import Decoder
from orchard.studies._flat import Shape

BATCH, LENGTH = 2, 12
RATE = 0.05
_numbers = itertools.count()


def tokens(vocabulary: int, seed: int) -> Tensor:
    return torch.randint(0, vocabulary, (BATCH, LENGTH), generator=generator(seed, "tokens"))


def build(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The same seed gives the same weights; the caller's random numbers are left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(seed, "weights") % 2**63)
        return make()


def complaint(model: nn.Module, loss_of: Callable[[], Tensor]) -> str:
    """Take one step down the gradient; say what is wrong with it, or nothing."""
    loss = loss_of()
    if not torch.isfinite(loss):
        return f"the loss is {loss.item()}"
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    size = torch.stack([g.square().sum() for g in gradients]).sum().sqrt() if gradients else torch.zeros(())
    if not torch.isfinite(size) or size == 0:
        return f"the gradient's length is {size.item()}"
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(RATE / size.clamp_min(1.0) * parameter.grad)
        after = loss_of()
    return "" if after < loss else f"the step took the loss from {loss.item():.6f} to {after.item():.6f}"


def scored(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def outputs(tree: Decoder.Config, seed: int) -> Tensor:
    """What a tree's model computes with the weights of this seed."""
    with torch.no_grad():
        result: Tensor = build(tree.build, seed)(tokens(tree.vocab, seed))
    return result


def try_tree(rewrite: Callable[[], Decoder.Config], before: Tensor, seed: int) -> str:
    """Rewrite, build and train one step; say what went wrong, or nothing. `before` is what the tree computed as it was:
    a rewrite that changes nothing has failed."""
    try:
        tree = rewrite()
        ids, model = tokens(tree.vocab, seed), build(tree.build, seed)
        with torch.no_grad():
            if torch.equal(model(ids), before):
                return "the model computes what it did before"

        def loss_of() -> Tensor:
            context = Context.whole(ids)
            loss = scored(model(ids, context), ids)
            return loss + 0.01 * sum(context.collected.get("moe.balance", []), torch.zeros(()))

        return complaint(model, loss_of)
    except (OrchardError, RuntimeError, TypeError, AttributeError, ValueError, IndexError) as error:
        return f"{type(error).__name__}: {error}"


def shape_of(name: str, tree: Decoder.Config) -> Shape:
    """What the flat reference takes over from a tree: the first layer's numbers, for every layer."""
    first: Any = tree.complete().stack.layers[0]
    mixer, head_dim = first.mixer, first.mixer.head_dim
    return Shape(
        name=name,
        dim=tree.dim,
        layers=len(tree.stack.layers),
        heads=mixer.heads,
        kv_heads=mixer.kv_heads,
        head_dim=head_dim,
        hidden_dim=first.mlp.hidden_dim,
        vocabulary=tree.vocab,
        theta=mixer.rotary.theta if mixer.rotary is not None else 10_000.0,
        before=first.mixer_norm is not None,
        after=first.mixer_out_norm is not None,
        tied=tree.head is None,
        window=mixer.window,
    )


@contextmanager
def imported(files: Mapping[str, str]) -> Iterator[Callable[[str], ModuleType]]:
    """Write a package to a temporary folder, and import its modules by name while the block lasts."""
    package = f"orchard_flat_reference_{next(_numbers)}"
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        spec = util.spec_from_file_location(package, Path(folder) / "__init__.py", submodule_search_locations=[folder])
        assert spec is not None and spec.loader is not None
        module = util.module_from_spec(spec)
        sys.modules[package] = module
        try:
            spec.loader.exec_module(module)
            yield lambda name: import_module(f"{package}.{name}")
        finally:
            for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
                del sys.modules[name]


def try_flat(module: ModuleType, shape: Shape, arguments: Mapping[str, Any], seed: int) -> str:
    """Build and train one step of a reference model; say what went wrong, or nothing."""
    ids = tokens(shape.vocabulary, seed)
    try:
        args = getattr(module, f"{shape.title}Args")(**arguments)
        model = build(lambda: getattr(module, shape.title)(args), seed)
        return complaint(model, lambda: scored(model(ids), ids))
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
