"""One of the processes that have a model's tracks: `python -m tests.train.tracks_program CASES`, with torchrun's environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchard.core.batch import Batch
from orchard.core.context import Context
from orchard.core.errors import OrchardError
from orchard.generate.engine import Engine
from orchard.generate.request import Request
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE
from orchard.nn.stack import Block, Stack
from orchard.nn.tracks import Track, Tracks
from orchard.nn.tracks_apart import keep_tracks, talk
from orchard.objectives.collected import WithCollected
from orchard.objectives.lm import NextToken
from orchard.text.byte_tokens import byte_tokenizer
from orchard.train.clip import Clip
from orchard.train.optim import AdamW
from orchard.train.parallel import Mesh, spread
from orchard.train.recompute import Recompute, recompute
from orchard.train.step import Step
from orchard.train.world import World, world
from tests.train.parallel_program import VOCAB, batches

LENGTH = 20


def build(kind: str = "", tracks: int = 2, depth: int = 2, blocks: int = 2) -> Decoder:
    """A small decoder with tracks; `kind` names what is special: moe, sum, tied, odd (tracks that differ)."""
    torch.manual_seed(0)
    mlp: Any = MoE.Config(hidden_dim=16, experts=4) if "moe" in kind else GatedMLP.Config(hidden_dim=32)
    layers = []
    for _ in range(blocks):
        block = Block.Config(mixer=Attention.Config(heads=2, kv_heads=1, head_dim=8), mlp=mlp)
        each = [Track.Config(layers=[block.clone() for _ in range(depth)]) for _ in range(tracks)]
        if "odd" in kind:
            each[0].layers[0].mlp = GatedMLP.Config(hidden_dim=8)
        layers.append(Tracks.Config(tracks=each, combine="sum" if "sum" in kind else "mean"))
    tree = Decoder.Config(vocab=VOCAB, dim=32, context=64, stack=Stack.Config(layers=layers))
    if "tied" in kind:
        tree.head = None
    model: Decoder = tree.build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model


def objective() -> Any:
    return WithCollected.Config(objective=NextToken.Config(), collected={"moe.balance": 0.1}).build()


def slopes(model: Decoder, batch: Batch, kind: str) -> dict[str, Tensor]:
    """Gradients by name, of what a model holds."""
    loss = (objective() if "moe" in kind else NextToken.Config().build())(model, batch)
    loss.value.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def compared(kind: str, tracks: int) -> dict[str, Any]:
    """Scores, gradients, stores and answers of a model whose tracks are apart, beside the same model in one process."""
    whole, model = build(kind, tracks), build(kind, tracks)
    each = keep_tracks(model)
    batch = batches(1)[0]
    before = talk(model)
    with torch.no_grad():
        contexts = [Context.whole(batch.ids) for _ in range(2)]
        scores = [one(batch.ids, context) for one, context in zip((whole, model), contexts, strict=True)]
    after = talk(model)
    wanted, found = slopes(whole, batch, kind), slopes(model, batch, kind)
    away = max(float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in found)
    answers = [answer(one, [5, 9, 2, 30, 11]) for one in (whole, model)]
    sizes = [one.eval().cache(batch=1, length=LENGTH).nbytes for one in (whole, model)]
    return {
        "each": each,
        "scores": float((scores[0] - scores[1]).abs().max()),
        "losses": [[float(x) for x in one.collected.get("moe.balance", [])] for one in contexts],
        "messages": after.messages - before.messages,
        "meetings": after.meetings - before.meetings,
        "sent": after.sent - before.sent,
        "slopes": away,
        "parameters": [sum(p.numel() for p in one.parameters()) for one in (whole, model)],
        "answers": answers,
        "stores": sizes,
    }


def answer(model: Decoder, prompt: list[int]) -> list[int]:
    """The likeliest tokens, by the engine: every process runs one, and all of them choose the same."""
    engine = Engine(model.eval(), byte_tokenizer())
    return list(engine.answer([Request(ids=tuple(prompt), max_tokens=12)])[0].ids)


def learnt(kind: str, here: World, steps: int, every: int, mesh: Mesh.Config) -> dict[str, Any]:
    """Losses and norms of some steps, and the sums of all weights that this process has."""
    model = build(kind)
    cut = mesh.build(here=here)
    recompute(model, Recompute.Config(every=every))
    spread(model, cut)
    trained = list(model.named_parameters())
    optimizer = AdamW.Config(lr=1e-2).build(named_parameters=trained)
    step = Step(
        model,
        objective() if "moe" in kind else NextToken.Config().build(),
        optimizer,
        lambda _: 1.0,
        Clip.Config(limit=1.0).build(),
        micro=2,
        dtype="float32",
        seed=0,
        mesh=cut if here.size > 1 else None,
    )
    taken = [step(batch, number) for number, batch in enumerate(batches(steps))]
    weights = {name: float(p.detach().double().square().sum()) for name, p in model.named_parameters()}
    return {
        "losses": [one.loss for one in taken],
        "norms": [one.norm.value for one in taken],
        "weights": weights,
        "shared": [float(p.detach().double().sum()) for name, p in trained if ".tracks." not in name],
    }


def refused(kind: str, tracks: int) -> str:
    try:
        keep_tracks(build(kind, tracks))
    except OrchardError as error:
        return f"{error.code}: {error.message}"
    return ""


def main(asked: list[list[Any]], folder: Path) -> None:
    """Each case in one start of the processes; what each process found goes into a file of its own."""
    torch.set_num_threads(1)
    with world(device="cpu", timeout=30) as here:
        found = []
        for name, *rest in asked:
            if name == "compared":
                found.append(compared(*rest))
            elif name == "refused":
                found.append({"said": refused(*rest)})
            else:
                found.append(learnt(rest[0], here, rest[1], rest[2], Mesh.Config(track=here.size)))
        dist.barrier()
        (folder / f"{here.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(given["cases"], Path(given["folder"]))
