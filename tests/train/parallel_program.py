"""One of the processes of a small training run: `python -m tests.train.parallel_program CASE`, with torchrun's environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from orchard.core.batch import Batch
from orchard.core.context import Context
from orchard.core.errors import ConfigError
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.formats import Int8
from orchard.nn.linear import Linear
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE, TopK
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Block, Stack
from orchard.objectives.lm import NextToken
from orchard.train.clip import Clip
from orchard.train.optim import AdamW
from orchard.train.parallel import Mesh, Spread, spread
from orchard.train.parallel_shards import exchange, put_back
from orchard.train.parallel_sums import total
from orchard.train.recompute import Recompute, recompute
from orchard.train.world import World, world
from orchard.transforms.lora import Lora, freeze_base
from orchard.transforms.route_kv import RouteKV

VOCAB, ROWS, LENGTH = 48, 4, 12
STEPS = 20
CASES: dict[str, dict[str, Any]] = {
    "alone": {},
    "sharded": {"mesh": Mesh.Config()},
    "kept whole": {"mesh": Mesh.Config(shard=False)},
    "tensor": {"mesh": Mesh.Config(tensor=2)},
    "tensor and data": {"mesh": Mesh.Config(tensor=2, data=2)},
    "expert": {"mesh": Mesh.Config(expert=2)},
    "bfloat16": {"mesh": Mesh.Config(), "spread": Spread.Config(compute="bfloat16")},
}


def build(kind: str = "", layers: int = 2) -> Decoder:
    """A small decoder; `kind` names what is special: tied, norms, biases, moe, packed, lora, narrow, only head."""
    torch.manual_seed(0)
    stack = Stack.Config(layers=[_block(kind) for _ in range(layers)])
    tree = Decoder.Config(vocab=VOCAB, dim=32, context=64, stack=stack)
    if "tied" in kind:
        tree.head = None
    if "packed" in kind:
        tree = tree.rewrite(Linear, lambda node: node.clone(format=Int8.Config()), lambda path, _: path != "head")
    model: Decoder = tree.build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    if "narrow" in kind:
        model.to(torch.bfloat16)
    if "lora" in kind:
        model = Lora(r=4, alpha=8).attach(model)
        torch.manual_seed(1)
        for parameter in freeze_base(model):  # in the order of their names: `attach` takes them in any
            nn.init.normal_(parameter, std=0.1)
    if "only head" in kind:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("head"))
    return model


def _block(kind: str) -> Block.Config:
    mixer = Attention.Config(heads=4, kv_heads=2, head_dim=8)
    if "norms" in kind:
        mixer.q_norm, mixer.k_norm = RMSNorm.Config(), RMSNorm.Config()
    if "biases" in kind:
        for part in (mixer.q, mixer.k, mixer.o):
            part.bias = True  # type: ignore[union-attr]
    mlp: Any = GatedMLP.Config(hidden_dim=64)
    if "moe" in kind:
        mlp = MoE.Config(hidden_dim=16, experts=4, router=TopK.Config(k=2))
    return Block.Config(mixer=mixer, mlp=mlp)


def batches(count: int = STEPS) -> list[Batch]:
    """Rows of two documents each, padding at the end of some; the same on every process."""
    made, rows = torch.Generator().manual_seed(7), []
    for _ in range(count):
        ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=made)
        targets = (ids * 5 + 3) % VOCAB  # something to learn
        positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(ROWS, -1).clone()
        documents = torch.tensor([0] * 5 + [1] * (LENGTH - 5)).expand(ROWS, -1).clone()
        for row in (1, 3):  # rows weigh differently, so that a mean of means would be seen
            targets[row, -4 * row :], positions[row, -2 * row :], documents[row, -2 * row :] = -100, -1, -1
        rows.append(Batch(ids=ids, targets=targets, positions=positions, documents=documents))
    return rows


def train(model: nn.Module, mesh: Mesh, *, steps: int = STEPS, chunk: int | None = 8) -> dict[str, list[float]]:
    """The losses and gradient norms of each step. Every process reads its rows of each batch, in two micro-batches."""
    objective: Any = NextToken.Config(chunk=chunk).build()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = AdamW.Config(lr=1e-2).build(named_parameters=trained)
    clip = Clip.Config(limit=1.0).build()
    losses, norms = [], []
    for batch in batches(steps):
        sums = []
        for rows in torch.arange(ROWS).chunk(mesh.data)[mesh.data_rank].split(1 if mesh.data == 2 else 2):
            found = objective(model, _rows(batch, rows.tolist()))
            found.value.backward()
            sums.append(torch.stack([found.value.detach(), found.weight]))
        value, weight = total(torch.stack(sums).sum(0), mesh).tolist()
        norms.append(clip(trained, scale=1 / weight).value)
        losses.append(value / weight)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


def _rows(batch: Batch, rows: Sequence[int]) -> Batch:
    return Batch(
        ids=batch.ids[rows],
        targets=batch.targets[rows],
        positions=batch.positions[rows],
        documents=batch.documents[rows],
    )


def run(case: str, kind: str, here: World, every: int = 0, steps: int = STEPS) -> dict[str, Any]:
    chosen = CASES[case]
    model = build(kind)
    mesh = chosen.get("mesh", Mesh.Config()).build(here=here)
    recompute(model, Recompute.Config(every=every))
    spread(model, mesh, chosen.get("spread"))
    out: dict[str, Any] = train(model, mesh, steps=steps)
    out["weights"] = {
        name: float(_whole(p.detach()).double().square().sum().sqrt()) for name, p in model.named_parameters()
    }
    return out


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def checks(here: World) -> dict[str, Any]:
    """What is left of a spread model after other uses than training, in figures that the test compares."""
    batch, plain = batches(1)[0], build()
    mesh = Mesh.Config().build(here=here)
    model: Any = spread(build(), mesh)
    before = type(model).__name__
    shards = [id(parameter) for parameter in model.parameters()]
    context = Context.whole(batch.ids)
    with torch.no_grad():
        away = float((model.scores(model.hidden(batch.ids, context)) - plain(batch.ids)).abs().max())
        away = max(away, float((model(batch.ids) - plain(batch.ids)).abs().max()))
    closed = shards == [id(parameter) for parameter in model.parameters()]
    kept: Any = spread(build(), Mesh.Config(shard=False).build(here=here))
    shards_kept = [id(parameter) for parameter in kept.parameters()]
    with torch.no_grad():
        kept(batch.ids)
    closed = closed and shards_kept == [id(parameter) for parameter in kept.parameters()]
    model.hidden(batch.ids, context)  # a pass that is given up
    put_back(model)
    closed = closed and shards == [id(parameter) for parameter in model.parameters()]
    scores = model(batch.ids)  # the plain forward pass, hidden and scores inside it
    scores.square().sum().backward()
    plain(batch.ids).square().sum().backward()
    slopes = dict(plain.named_parameters())
    forward = max(float((_whole(p.grad) - 2 * slopes[n].grad).abs().max()) for n, p in model.named_parameters())  # type: ignore[operator]
    largest = max(float(p.grad.abs().max()) for p in slopes.values())  # type: ignore[union-attr]
    model.zero_grad()
    held: list[dict[str, torch.Tensor]] = []
    objective: Any = NextToken.Config().build()
    for always in (True, False):
        for row in (0, 1):
            exchange(model, always or row == 1)
            objective(model, _rows(batch, [2 * here.rank + row])).value.backward()
        held.append({name: _whole(p.grad).clone() for name, p in model.named_parameters()})
        model.zero_grad()
    exchanged = max(float((held[0][name] - held[1][name]).abs().max()) for name in held[0])
    other = build()
    torch.nn.init.normal_(other.norm.weight, generator=torch.Generator().manual_seed(here.rank))
    try:
        spread(other, mesh)
        refused = ""
    except ConfigError as error:
        refused = error.message
    sharded = all(p.to_local().numel() < p.numel() for p in model.parameters())
    return {
        "name": before,
        "away": away,
        "forward": forward / largest,
        "exchanged": exchanged,
        "refused": refused,
        "sharded": sharded,
        "closed": closed,
        "twice": _twice(model, plain, batch),
        "lent": _lent(mesh, here, batch.ids),
        "left": _left(mesh, batch.ids),
    }


def _twice(model: Any, plain: Any, batch: Batch) -> float:
    """Two passes, a look at scores without gradients between them, and one backward pass, as preferences have it."""
    slopes: list[dict[str, torch.Tensor]] = []
    for each in (plain, model):
        each.zero_grad()
        one, two = (each.hidden(ids, Context.whole(ids)) for ids in (batch.ids[:2], batch.ids[2:]))
        with torch.no_grad():
            each.scores(one)
        (each.scores(one).square().sum() + each.scores(two).sin().sum()).backward()
        slopes.append({name: _whole(p.grad).clone() for name, p in each.named_parameters()})
    largest = max(float(slope.abs().max()) for slope in slopes[0].values())
    return max(float((slopes[1][name] - 2 * slopes[0][name]).abs().max()) for name in slopes[0]) / largest


def _lent(mesh: Mesh, here: World, ids: torch.Tensor) -> float:
    """Layers that read other layers' keys and values, other ones on each process: gradients are still sums over both."""
    slopes: dict[str, torch.Tensor] = {}
    for rank in range(2):
        alone = RouteKV(0.6).apply(build(layers=4)).train()
        torch.manual_seed(50 + rank)
        alone(ids[rank : rank + 1]).square().sum().backward()
        for name, parameter in alone.named_parameters():
            slopes[name] = slopes.get(name, torch.zeros(())) + parameter.grad  # type: ignore[operator]
    spread_out = spread(RouteKV(0.6).apply(build(layers=4)).train(), mesh)
    torch.manual_seed(50 + here.rank)
    spread_out(ids[here.rank : here.rank + 1]).square().sum().backward()
    largest = max(float(slope.abs().max()) for slope in slopes.values())
    found = [float((_whole(p.grad) - slopes[name]).abs().max()) for name, p in spread_out.named_parameters()]
    return max(found) / largest


def _left(mesh: Mesh, ids: torch.Tensor) -> list[int]:
    """How many balance losses, and keys of how many layers, the layers of a mixture leave for whoever runs it."""
    context, model = Context.whole(ids), spread(build("moe").train(), mesh)
    model.hidden(ids, context)  # type: ignore[operator]
    put_back(model)
    return [len(context.collected["moe.balance"]), len(context.views)]


def main(asked: list[list[Any]]) -> None:
    """Each asked [case, kind, every, steps] in one start of the processes; results as JSON on standard output."""
    torch.set_num_threads(1)
    with world(device="cpu", timeout=30) as here:
        found = [checks(here) if one[0] == "checks" else run(one[0], one[1], here, *one[2:]) for one in asked]
        if here.first:
            sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
