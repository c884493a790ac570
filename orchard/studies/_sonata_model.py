"""The model of the `sonata` study: a small decoder that learns both ways to answer, and what can be read off its layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from orchard.core.context import Context
from orchard.core.progress import progress
from orchard.core.seeds import fold
from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.studies import _sonata_tasks as tasks

AHEAD = 32
"""Batches that are made at once."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is."""

    dim: int
    layers: int
    steps: int
    batch: int
    """Problems of a step, each in both modes."""
    rate: float
    sizes: dict[str, int] = field(default_factory=dict)
    """The largest problems of each family."""
    calibration: int = 500
    validation: int = 500
    test: int = 1000
    samples: int = 16
    thoughts: int = 4
    """Answers with thinking, for each prompt."""


def config(scale: Scale) -> Decoder.Config:
    heads = scale.dim // 32
    block = Block.Config(
        mixer=Attention.Config(heads=heads, kv_heads=heads, head_dim=32),
        mlp=GatedMLP.Config(hidden_dim=scale.dim * 8 // 3 // 32 * 32),
    )
    layers = [block.clone() for _ in range(scale.layers)]
    return Decoder.Config(vocab=len(tasks.WORDS), dim=scale.dim, context=256, stack=Stack.Config(layers=layers))


def train(scale: Scale, seed: int, device: torch.device) -> tuple[Decoder, list[list[float]]]:
    """The trained model, and its loss on the way: [step, direct, think]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(seed, "weights") % 2**63)
        model: Decoder = config(scale).build().to(device)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=scale.rate, betas=(0.9, 0.98), fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, scale.steps))
    generator = torch.Generator(device).manual_seed(fold(seed, "problems") % 2**63)
    curve: list[list[float]] = []
    ready: list[list[tuple[Tensor, Tensor]]] = []
    with progress("training", total=scale.steps, unit="steps") as advance:
        for step in range(scale.steps):
            ready = ready or _batches(scale, min(AHEAD, scale.steps - step), generator)
            losses = []
            for ids, targets in ready.pop():
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    scores = model(ids)
                loss = nn.functional.cross_entropy(
                    scores.float().flatten(0, 1), targets.flatten(), ignore_index=tasks.IGNORED
                )
                (loss / 2).backward()
                losses.append(loss.detach())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            if step % max(1, scale.steps // 50) == 0 or step == scale.steps - 1:
                curve.append([step, *(round(float(loss), 4) for loss in losses)])
            advance()
    return model.eval(), curve


def _rate(step: int, steps: int) -> float:
    """Up for a twentieth of the way, then down along a cosine."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def _batches(scale: Scale, count: int, generator: torch.Generator) -> list[list[tuple[Tensor, Tensor]]]:
    """Some batches of all kinds in both modes, each mode by itself: without thinking, sequences are short."""
    found = tasks.kinds(scale.sizes)
    each = scale.batch // len(found)
    made = [tasks.make(kind, each * count, generator) for kind in found]
    out: list[list[tuple[Tensor, Tensor]]] = []
    for place in range(count):
        part = slice(place * each, (place + 1) * each)
        here = [tasks.Problems(x.kind, x.prompt[part], x.steps[part], x.answer[part]) for x in made]
        out.append([tasks.batch(here, think=False), tasks.batch(here, think=True)])
    return out


@torch.inference_mode()
def features(model: Decoder, problems: Sequence[tasks.Problems]) -> tuple[Tensor, Tensor]:
    """What the first layer gives for each prompt's last token, before any mark, [N, dim]; and the entropy [N] of the first
    token of a direct answer, in nats."""
    first, entropy = [], []
    seen: list[Tensor] = []
    handle = model.stack.layers[0].register_forward_hook(lambda module, given, out: seen.append(out))
    for each in problems:
        prompt = each.prompt.to(model.device)
        seen.clear()
        model.hidden(prompt, Context.whole(prompt))
        first.append(seen[0][:, -1].float().cpu())
        marked = torch.cat([prompt, torch.full_like(prompt[:, :1], tasks.DIRECT)], 1)
        scores = model(marked)[:, -1].float().log_softmax(-1).cpu()
        entropy.append(-(scores.exp() * scores).sum(-1))
    handle.remove()
    return torch.cat(first), torch.cat(entropy)
