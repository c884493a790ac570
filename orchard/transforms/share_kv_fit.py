"""Layers that begin to read another's keys and values are fitted to it, each by itself, before anything is trained.

A layer that loses its key and value maps keeps an output map that was made for other values: what its attention adds is then
worse than nothing (an error of 1.3 to 11 times what it should add, in the layers of SmolLM2-135M). What it should add is known
from the model as it was, on any text, and is linear in the output map. So that map is solved for by least squares, which takes a
few thousand tokens and no gradient, and leaves training much less to heal.

Then, if steps are given (`refine`), all maps of those attentions learn together, and with them the key and value maps of the
layer that they read, which were made for that one alone. What each attention should add stays what it was, at the inputs that it
had: no gradient passes from layer to layer, so that a step costs little.

Each layer is fitted at the inputs it had in the model as it was. To fit it at what the layers before it give now, aiming at where
the state was, was tried on the same model and was worse on other text: what those layers left wrong is mostly noise to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchard.core.batch import Batch
from orchard.core.context import Context
from orchard.nn.formats.plain import Plain
from orchard.nn.linear import Linear, Weight
from orchard.transforms.base import Tell
from orchard.transforms.hessians import Stream

SMALL = 1e-3
"""What keeps a solution small, as a share of the mean square of what is read: texts are short, and maps are wide."""
RATE = 1e-3
"""The highest learning rate of `refine`; the maps' entries are about 0.05."""


@torch.no_grad()
def fit_readers(model: Any, made: Any, texts: Sequence[Batch], tell: Tell) -> list[str]:
    """Fit the layers of `made` that read keys and values which in `model` they kept themselves, in place. Says what it left."""
    stream = Stream(model, texts, "share-kv")
    stream.shared = {layer.mixer.config.store.owner for layer in made.stack.layers} - {None}
    notes = []
    for number, (old, new) in enumerate(zip(model.stack.layers, made.stack.layers, strict=True)):
        if new.mixer.config.store.owner is not None and old.mixer.config.store.owner is None:
            if isinstance(new.mixer.o, Linear) and isinstance(new.mixer.o.format, Plain):
                _fit(old, new, stream)
            else:
                notes.append(f"layer {number}: its output map is not dense, and stays as it is")
        stream.go(old)
        tell((number + 1) / len(made.stack.layers))
    return notes


def _fit(old: Any, new: Any, stream: Stream) -> None:
    out = new.mixer.o
    rows, width = out.weight.shape
    square = torch.zeros(width, width, dtype=torch.float64, device=out.weight.device)
    cross = torch.zeros(width, rows, dtype=torch.float64, device=out.weight.device)
    for batch, context in enumerate(stream.contexts):
        real = context.positions >= 0
        # The new layer first: the old one then leaves its own keys and values behind, as it did before.
        read = _heard(new, out, stream, batch)[0][real].double()
        wanted = _heard(old, old.mixer, stream, batch)[1][real].double()
        if out.bias is not None:
            wanted -= out.bias.double()
        square += read.mT @ read
        cross += read.mT @ wanted
    square.diagonal().add_(SMALL * square.diagonal().mean())
    found = torch.linalg.solve(square, cross)
    if bool(found.isfinite().all()):
        out.weight.copy_(found.mT)


def refine(model: Any, made: Any, texts: Sequence[Batch], steps: int, tell: Tell) -> None:
    """Let each layer that is read and its readers learn, for so many steps, to add what they added before."""
    stream = Stream(model, texts, "share-kv")
    groups: dict[int, list[int]] = {}
    for number, (old, new) in enumerate(zip(model.stack.layers, made.stack.layers, strict=True)):
        owner = new.mixer.config.store.owner
        if (
            owner is not None
            and old.mixer.config.store.owner is None
            and _dense(new.mixer, made.stack.layers[owner].mixer)
        ):
            groups.setdefault(owner, [owner]).append(number)
    kept: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for group in groups.values() for layer in group}
    with torch.no_grad():
        for number, old in enumerate(model.stack.layers):
            if number in kept:
                kept[number] = [_heard(old, old.mixer, stream, batch) for batch in range(len(texts))]
            stream.go(old)
    done = 0
    for group in groups.values():
        mixers = nn.ModuleList(made.stack.layers[layer].mixer for layer in group)
        learns = {parameter: parameter.requires_grad for parameter in mixers.parameters()}
        mixers.requires_grad_(True)
        optimizer = torch.optim.Adam(mixers.parameters(), lr=RATE, betas=(0.9, 0.95))
        slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for step in range(steps):
            batch = step % len(stream.contexts)
            with torch.enable_grad():
                loss = _apart(mixers, [kept[layer][batch] for layer in group], stream.contexts[batch])
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
            optimizer.step()
            slower.step()
            done += 1
            tell(done / (steps * len(groups)))
        for parameter, learnt in learns.items():
            parameter.grad = None
            parameter.requires_grad_(learnt)


def _apart(mixers: Sequence[Any] | nn.ModuleList, heard: list[tuple[Tensor, Tensor]], seen: Context) -> Tensor:
    """How far what attentions add is from what they added, as a share of its size; the first is the one that the others read."""
    context = Context(positions=seen.positions, documents=seen.documents, causal=seen.causal)
    real = (seen.positions >= 0)[..., None]
    found = []
    for mixer, (x, y) in zip(mixers, heard, strict=True):
        wrong = torch.where(real, mixer(x, context) - y, 0)
        found.append(wrong.square().sum() / torch.where(real, y, 0).square().sum().clamp_min(1e-12))
    return torch.stack(found).mean()


def _dense(*mixers: nn.Module) -> bool:
    return all(isinstance(one.format, Plain) for mixer in mixers for one in mixer.modules() if isinstance(one, Weight))


def _heard(layer: nn.Module, part: nn.Module, stream: Stream, batch: int) -> tuple[Tensor, Tensor]:
    """What goes into a part of a layer, and what comes out of it, when a batch passes the layer."""
    heard: list[tuple[Tensor, Tensor]] = []
    hook = part.register_forward_hook(lambda module, given, result: heard.append((given[0], result)))
    try:
        layer(stream.states[batch], stream.contexts[batch])
    finally:
        hook.remove()
    return heard[0]
