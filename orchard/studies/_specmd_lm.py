"""A tiny mixture that learns to write, and the trace of its choices, recorded by the engine that runs its experts from a file."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from orchard.cache.experts import Records, Resident
from orchard.cache.experts.prefetch import NextGates
from orchard.cache.experts.trace import Trace
from orchard.core.context import Context
from orchard.core.progress import track
from orchard.core.seeds import fold
from orchard.generate.experts import ExpertsProgram
from orchard.generate.experts_file import expert_steps, without_experts, write_experts
from orchard.generate.experts_trace import Recorder
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.generate.protocol import Work
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.moe import MoE, TopK
from orchard.nn.stack import Block, Stack
from orchard.studies._afm_text import ids_of, language

VOCAB, LOOKAHEAD = 128, 2


@dataclass(frozen=True)
class LM:
    layers: int = 8
    dim: int = 64
    experts: int = 32
    chosen: int = 4
    hidden: int = 32
    steps: int = 150
    batch: int = 8
    length: int = 64
    rate: float = 3e-3
    balance: float = 0.01
    tokens: int = 200
    prompt: int = 64


def tree(size: LM) -> Decoder.Config:
    block = Block.Config(
        mixer=Attention.Config(heads=4, kv_heads=2, head_dim=16),
        mlp=MoE.Config(hidden_dim=size.hidden, experts=size.experts, router=TopK.Config(k=size.chosen)),
    )
    stack = Stack.Config(layers=[block.clone() for _ in range(size.layers)])
    return Decoder.Config(vocab=VOCAB, dim=size.dim, context=1024, stack=stack, head=None)


def train(size: LM, seed: int) -> tuple[Decoder, list[float]]:
    """The model and its loss (nats a letter) step by step."""
    text = torch.from_numpy(ids_of(language().text(fold(seed, "text") % 2**31, 400_000)))
    dice = torch.Generator().manual_seed(fold(seed, "batches") % 2**63)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(seed, "weights") % 2**63)
        model: Decoder = tree(size).build()
    optimiser = torch.optim.AdamW(model.parameters(), lr=size.rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, size.rate, total_steps=size.steps, pct_start=0.1)
    losses = []
    for _ in track(range(size.steps), "training a mixture"):
        starts = torch.randint(0, len(text) - size.length - 1, (size.batch,), generator=dice)
        rows = torch.stack([text[start : start + size.length + 1] for start in starts.tolist()])
        context = Context.whole(rows[:, :-1])
        loss = functional.cross_entropy(model(rows[:, :-1], context).flatten(0, 1).float(), rows[:, 1:].flatten())
        (loss + size.balance * sum(context.collected["moe.balance"], torch.zeros(()))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return model.eval().requires_grad_(False), losses


def record(model: Decoder, size: LM, seed: int) -> Trace:
    """Let it read unseen text token by token, from a quarter of its experts in memory."""
    text = ids_of(language().text(fold(seed, "unseen") % 2**31, size.prompt + size.tokens)).tolist()
    plan = lower(model)
    recorder = Recorder(expert_steps(plan), lookahead=LOOKAHEAD)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experts"
        write_experts(path, plan, {"model": "specmd-lm"})
        with Records.open(path) as records, Resident(records, records.nbytes // 4, working_set=size.chosen) as resident:
            program = ExpertsProgram(without_experts(plan), resident, prefetcher=NextGates(LOOKAHEAD))
            slots = NativeRunner(program.plan, program=program).slots(1)
            slots.open(0, size.prompt + size.tokens + 1)
            slots.run([Work(0, text[: size.prompt], 1, prompt=True)])
            program.recorder = recorder
            for token in text[size.prompt : size.prompt + size.tokens]:
                slots.run([Work(0, (token,), 1)])
    return recorder.trace("specmd-lm")


def accuracy(trace: Trace, distance: int) -> float:
    """The share of chosen experts that the gates so many layers ahead had among their best."""
    layers = slice(distance - 1, None)
    guesses, chosen = trace.ahead[:, layers, distance - 1, : trace.k], trace.chosen[:, layers]
    return float(np.mean((chosen[..., None] == guesses[..., None, :]).any(-1)))
