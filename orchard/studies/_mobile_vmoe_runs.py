"""The runs of the study: a dense ViT learns first, then every kind of model goes on from it for as long, and is measured.

Runs do not depend on each other but for that beginning, so on a CPU two of them go on at once, with one thread each.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orchard.core.batch import ImageBatch
from orchard.core.config import BaseConfig
from orchard.core.seeds import fold, generator
from orchard.data.scene_families import FAMILIES
from orchard.data.scenes import CLASSES, draw
from orchard.models.vision import ViT, small_vit
from orchard.models.vision.costs import costs
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE
from orchard.objectives import Classify, with_collected
from orchard.transforms.image_experts import ImageExperts

EXPERTS = len(FAMILIES)
TAUGHT, BALANCED = 0.3, 0.01
"""Of the router's loss, as published; of the balance of a router that is taught nothing."""
Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Size:
    """One scale of the study."""

    side: int = 24
    patch: int = 6
    dim: int = 24
    layers: int = 4
    heads: int = 2
    hidden_dim: int = 24
    train: int = 30_720
    held_out: int = 6_144
    test: int = 6_144
    first: int = 51_200
    """Images that the dense model learns from before kinds part; 0: each kind learns from scratch."""
    then: int = 40_960
    """Images that each kind learns from."""
    batch: int = 128
    rate: float = 6e-3
    decay: float = 0.05
    seeds: int = 3
    depths: tuple[int, ...] = (1, 2, 4)
    """How many of the last layers have experts."""
    look: dict[str, Any] = field(default_factory=lambda: {"jitter": 0.7})
    processes: int = 2
    device: str = "cpu"

    def tree(self, hidden_dim: int | None = None) -> ViT.Config:
        return small_vit(
            side=self.side,
            patch=self.patch,
            classes=CLASSES,
            dim=self.dim,
            layers=self.layers,
            heads=self.heads,
            hidden_dim=hidden_dim or self.hidden_dim,
        )


@dataclass(frozen=True)
class Kind:
    """A kind of model: in how many layers there are experts, and what their routers are taught."""

    name: str
    last: int = 0
    groups: tuple[int, ...] | None = None
    """The group of each class; None: routers learn by themselves, with a balance loss."""
    wide: bool = False
    """A dense model with as many parameters as the mixture has in all."""

    def experts(self, seed: int) -> ImageExperts:
        return ImageExperts(experts=EXPERTS, last=self.last, through=self.groups is None, seed=fold(seed, self.name))

    def objective(self) -> BaseConfig:
        if self.wide or not self.last:
            return Classify.Config()
        return with_collected(
            Classify.Config(), {"moe.balance": BALANCED} if self.groups is None else {"moe.router": TAUGHT}
        )


@dataclass(frozen=True)
class Result:
    """What became of one run."""

    name: str
    seed: int
    right: np.ndarray
    """Which test images it knows, bool."""
    taken_for: np.ndarray | None
    """What a dense model takes images for that were held out."""
    routed: np.ndarray | None
    """The first choice of each router, [layers, test images]."""
    loss: float
    weights: Weights


# Data -----------------------------------------------------------------------------------------------------------------


@cache
def _drawn(part: str, count: int, side: int, seed: int, look: tuple[tuple[str, Any], ...], device: str) -> ImageBatch:
    blocks = [
        draw(min(2048, count - at), seed, f"{part} {at}", side=side, **dict(look)) for at in range(0, count, 2048)
    ]
    images = torch.cat([torch.from_numpy(block.images).half() for block in blocks])
    labels = torch.cat([torch.from_numpy(block.labels) for block in blocks])
    return ImageBatch(images, labels).to(device)


def pictures(size: Size, part: str, seed: int) -> ImageBatch:
    """The images of one part (train, held_out, test), drawn once a process."""
    return _drawn(part, getattr(size, part), size.side, seed, tuple(sorted(size.look.items())), size.device)


# Learning -------------------------------------------------------------------------------------------------------------


def first(size: Size, seed: int, data_seed: int) -> Weights:
    """The dense model that all kinds of one seed begin with."""
    model = _fresh(size.tree(), seed).to(size.device)
    learn(model, Classify.Config(), None, size, seed, data_seed, 0, size.first)
    return _weights(model)


def then(size: Size, kind: Kind, seed: int, data_seed: int, begin: Weights) -> Result:
    """One kind of model, from where the dense one was, learnt to the end and measured."""
    model = _begun(size, kind, seed, begin).to(size.device)
    loss = learn(
        model, kind.objective(), kind.groups, size, seed, data_seed, size.first, size.first + size.then, falls=True
    )
    test = pictures(size, "test", data_seed)
    scores, routed = look(model, test)
    right = (scores == test.labels.cpu()).numpy()
    confused = None if kind.last else look(model, pictures(size, "held_out", data_seed))[0].numpy()
    return Result(kind.name, seed, right, confused, routed, loss, _weights(model))


def learn(
    model: nn.Module,
    objective: BaseConfig,
    groups: tuple[int, ...] | None,
    size: Size,
    seed: int,
    data_seed: int,
    start: int,
    stop: int,
    *,
    falls: bool = False,
) -> float:
    """Images `start` to `stop` of an endless order, which is the same for all kinds of a seed; the mean loss of the last tenth.
    The rate rises over the first steps and, where it `falls`, goes down to nothing in a line."""
    loss_of, data = objective.build(), pictures(size, "train", data_seed)
    group = None if groups is None else torch.tensor(groups, device=size.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate, weight_decay=size.decay, fused=True)
    steps, lost = max(0, stop - start) // size.batch, []
    for step, rows in zip(range(steps), _order(len(data), seed, start, size.batch), strict=False):
        labels = data.labels[rows]
        batch = ImageBatch(data.images[rows].float(), labels, None if group is None else group[labels])
        rate = min(1.0, (step + 1) / 40) * ((1 - step / steps) if falls else 1.0)
        for parameters in optimizer.param_groups:
            parameters["lr"] = size.rate * rate
        loss = loss_of(model, batch)
        optimizer.zero_grad(set_to_none=True)
        (loss.value / loss.weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step >= 0.9 * steps:
            lost.append(loss.parts["loss"] / loss.weight)
    return float(torch.stack(lost).mean()) if lost else float("nan")


@torch.no_grad()
def look(model: ViT, images: ImageBatch) -> tuple[Tensor, np.ndarray | None]:
    """What a model takes images for, and the first choices of its routers."""
    choices: list[Tensor] = []
    mixtures = [block.mlp for block in model.stack.layers if isinstance(block.mlp, MoE)]
    hooks = [
        moe.router.register_forward_hook(lambda _, __, routing: choices.append(routing.experts[:, 0]))
        for moe in mixtures
    ]
    taken_for, chosen = [], []
    for part in images.images.split(1024):
        taken_for.append(model(part.float()).argmax(-1).cpu())
        if mixtures:
            chosen.append(torch.stack([choice.view(len(part), -1)[:, 0] for choice in choices]).cpu())
            choices.clear()
    for hook in hooks:
        hook.remove()
    return torch.cat(taken_for), torch.cat(chosen, 1).numpy() if chosen else None


# Beginning ------------------------------------------------------------------------------------------------------------


def _begun(size: Size, kind: Kind, seed: int, begin: Weights) -> ViT:
    model = _fresh(size.tree(), seed)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in begin.items()})
    if kind.wide:
        return widened(model, wide_hidden(size, kind.last), seed)
    if not kind.last:
        return model
    grown = kind.experts(seed)
    if size.first:
        return grown.apply(model)
    made: ViT = _fresh(grown(size.tree()), seed)
    return made


def wide_hidden(size: Size, last: int) -> int:
    """How wide the MLPs of a dense model are that has as many parameters as a mixture in the last layers, or just more."""
    wanted = costs(ImageExperts(experts=EXPERTS, last=last)(size.tree())).parameters
    hidden = size.hidden_dim
    while costs(size.tree(hidden)).parameters < wanted:
        hidden += 1
    return hidden


@torch.no_grad()
def widened(model: ViT, hidden: int, seed: int) -> ViT:
    """The same function with wider MLPs: what new units make counts nothing at first."""
    tree = model.config.rewrite(GatedMLP, lambda mlp: mlp.clone(hidden_dim=hidden))
    made: ViT = _fresh(tree, seed)
    old = model.state_dict()
    for name, value in made.state_dict().items():
        if value.shape == old[name].shape:
            value.copy_(old[name])
        elif name.endswith("down.weight"):
            value.zero_()[:, : old[name].shape[1]] = old[name]
        else:
            value[: len(old[name])] = old[name]
    return made


def _fresh(tree: ViT.Config, seed: int) -> ViT:
    """A model whose maps begin as wide as their inputs ask for: the usual 0.02 is for models of hundreds of channels, and at
    this width they would learn very little for the first ten thousand images."""
    made: ViT = tree.build()
    dice = generator(seed, "model")
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                spread = 1 / math.sqrt(3 * parameter.shape[-1])
                parameter.copy_(torch.randn(parameter.shape, generator=dice) * spread)
        made.patches.places.mul_(0.1)
    return made


def _weights(model: nn.Module) -> Weights:
    return {name: value.detach().cpu().numpy().copy() for name, value in model.state_dict().items()}


def _order(count: int, seed: int, start: int, batch: int) -> Iterator[Tensor]:
    """Batches of an endless order, every image once an epoch, from some place on."""
    while True:
        epochs = range(start // count, (start + batch - 1) // count + 1)
        order = torch.cat([_epoch(count, seed, epoch) for epoch in epochs])
        place = start - epochs[0] * count
        yield order[place : place + batch]
        start += batch


@cache
def _epoch(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=generator(seed, "order", epoch))


# Several at once ------------------------------------------------------------------------------------------------------


def results(
    size: Size, kinds: Callable[[int], Sequence[Kind]], seeds: Sequence[int], data_seed: int
) -> Iterator[Result]:
    """Every kind of every seed, as they come; by so many processes with one thread each, or here."""
    if size.processes == 1:
        for seed in seeds:
            begin = first(size, seed, data_seed)
            yield from (then(size, kind, seed, data_seed, begin) for kind in kinds(seed))
        return
    with ProcessPoolExecutor(size.processes, multiprocessing.get_context("spawn"), _one_thread) as pool:
        begun = {pool.submit(first, size, seed, data_seed): seed for seed in seeds}
        waiting: set[Future[Any]] = set(begun)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for one in done:
                if one not in begun:
                    yield one.result()
                    continue
                seed = begun[one]
                waiting |= {pool.submit(then, size, kind, seed, data_seed, one.result()) for kind in kinds(seed)}


def _one_thread() -> None:
    torch.set_num_threads(1)
