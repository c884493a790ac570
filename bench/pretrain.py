"""Pretraining beside transformers: the same Llama, the same weights to begin with, the same bytes in the same order.

Ours is the Trainer with its sources and curves. The peer is transformers' LlamaForCausalLM in a plain loop of torch: loss in
float32, gradients clipped at 1, torch's fused AdamW with the same groups, the same schedule. On a GPU the peer is compiled
(torch.compile of model and loss together); so are our blocks, there and on a CPU. Both compute in the same dtype, in one process,
by turns of a few steps; what is counted is the time of whole steps, batches included.

Losses are compared over a run of its own, after which both have seen the same batches.

    python bench/pretrain.py                 CPU: 10M parameters, float32 and bfloat16
    python bench/pretrain.py --device cuda   GPU: 135M and 1B, bfloat16; says how much of the arithmetic is used

What is learnt are bytes of text: of `--texts` (a file or a folder), or of this project's own pages and sources.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from llama_peer import random_llama

from orchard.bench.shapes import Shape
from orchard.core.report import Bound, Claim, Report, Value
from orchard.data import Batches, Encode, Pack, Prefetch, Repeat, Text
from orchard.objectives.lm import NextToken
from orchard.text.byte_tokens import byte_tokenizer
from orchard.train.memory import keep_freed_memory
from orchard.train.optim import AdamW
from orchard.train.schedule import Cosine
from orchard.train.stopping import Stopping
from orchard.train.trainer import Saving, Trainer
from orchard.train.watch_peak import peak_of
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.load import load_decoder

ROOT = Path(__file__).resolve().parent.parent
TURN = 5
"""Steps of one side before it is the other's turn."""


@dataclass(frozen=True)
class Size:
    """A model and its batches, whose rows are as long as the model's context."""

    shape: Shape
    tied: bool
    rows: int
    lr: float = 1e-3


SIZES = {
    "10m": Size(Shape(8, 320, 864, 5, 5, 64, vocab=258, context=256), tied=False, rows=8),
    "135m": Size(Shape(30, 576, 1536, 9, 3, 64, context=1024), tied=True, rows=64),
    "1b": Size(Shape(20, 2048, 5632, 16, 8, 128, context=2048), tied=True, rows=8),
}


def claims(device: str) -> list[Claim]:
    if device == "cpu":
        return [
            Claim(
                "loss",
                "10M: the final loss is that of transformers",
                "loss 10m float32 difference",
                Bound("<=", 0.005),
            ),
            Claim("speed", "10M, float32: at least 1.2 × its tokens a second", "10m float32 ratio", Bound(">=", 1.2)),
            Claim(
                "speed-bf16",
                "10M, bfloat16: at least 1.2 × its tokens a second",
                "10m bfloat16 ratio",
                Bound(">=", 1.2),
            ),
        ]
    found = [
        Claim(
            f"{size}",
            f"{size}, bfloat16: at least as fast as the compiled peer",
            f"{size} bfloat16 ratio",
            Bound(">=", 1.0),
        )
        for size in ("135m", "1b")
    ]
    return [*found, Claim("mfu", "At 135M or more, 45 % of the arithmetic in bfloat16", "best MFU", Bound(">=", 0.45))]


# The two programs -------------------------------------------------------------------------------------------------------


def our_model(peer: Any) -> Any:
    """The peer's weights in our modules."""
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        with open_checkpoint(Path(folder)) as checkpoint:
            return load_decoder(checkpoint).requires_grad_(True)


class Ours:
    def __init__(
        self, size: Size, texts: Path, device: str, dtype: str, steps: int, peer: Any, folder: Path, compile: bool
    ) -> None:
        cfg = Trainer.Config(
            source=source(size, texts),
            steps=steps,
            objective=NextToken.Config(),
            optim=AdamW.Config(lr=size.lr, betas=(0.9, 0.95), decay=0.1),
            schedule=Cosine.Config(warmup=max(1, steps // 50), steps=steps, floor=0.1),
            dtype=dtype,
            save=Saving.Config(every=10**9),
            compile=compile,
        )
        self.trainer = cfg.build(folder=folder, tokenizer=byte_tokenizer(), with_model=our_model(peer), device=device)
        self.stopping = Stopping()

    def step(self) -> float:
        point, _ = self.trainer._next(self.stopping)
        return point["loss"]


class Peer:
    def __init__(self, size: Size, texts: Path, device: str, dtype: str, steps: int, peer: Any, compile: bool) -> None:
        self.device, self.dtype, self.number = device, dtype, 0
        self.model = peer.to(device).train()
        kinds: dict[bool, list[Any]] = {True: [], False: []}
        for name, parameter in self.model.named_parameters():
            kinds[parameter.dim() > 1 and "embed" not in name].append(parameter)
        groups = [{"params": kinds[decayed], "weight_decay": 0.1 if decayed else 0.0} for decayed in (True, False)]
        self.optimizer = torch.optim.AdamW(groups, lr=size.lr, betas=(0.9, 0.95), fused=True)
        self.rate = Cosine.Config(warmup=max(1, steps // 50), steps=steps, floor=0.1).build()
        self.lr = size.lr
        self.batches: Any = source(size, texts).build(tokenizer=byte_tokenizer())
        self.loss: Callable[[Any, Any], Any] = torch.compile(self._loss) if compile else self._loss

    def _loss(self, ids: Any, targets: Any) -> Any:
        logits = self.model(input_ids=ids, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def step(self) -> float:
        batch = next(self.batches).to(self.device)
        narrow = torch.autocast(self.device, torch.bfloat16) if self.dtype == "bfloat16" else contextlib.nullcontext()
        with narrow:
            loss = self.loss(batch.ids, batch.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * self.rate(self.number)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.number += 1
        return float(loss.detach())


def source(size: Size, texts: Path) -> Any:
    """Rows of one document each, whole."""
    rows = Encode.Config(source=Repeat.Config(source=Text.Config(paths=str(texts), split="file")))
    packed = Pack.Config(source=rows, length=size.shape.context, mode="cut", open_rows=1)
    return Prefetch.Config(source=Batches.Config(source=packed, rows=size.rows))


def one_text(texts: Path | None, folder: Path) -> Path:
    """All texts as one, so that no row holds the end of one and the beginning of another: the peer would look across."""
    if texts is None:
        files = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("orchard/**/*.py"), *ROOT.glob("tests/**/*.py")])
    else:
        files = [texts] if texts.is_file() else sorted(texts.rglob("*.txt"))
    whole = folder / "all.txt"
    whole.write_bytes(b"\n".join(path.read_bytes() for path in files))
    return whole


# Measuring --------------------------------------------------------------------------------------------------------------


def timed(side: Any, steps: int, device: str) -> float:
    begun = time.perf_counter()
    for _ in range(steps):
        side.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / steps


def flops(size: Size) -> float:
    """Of a token: six for each weight that multiplies, and attention over half of a row, forwards and twice that backwards."""
    shape = size.shape
    weights = shape.layers * sum(rows * cols for _, rows, cols in shape.matrices()) + shape.vocab * shape.width
    return 6.0 * weights + 6.0 * shape.layers * shape.context * shape.heads * shape.head


def speed(name: str, device: str, dtype: str, texts: Path, rounds: int, compile: bool) -> dict[str, Value]:
    size = SIZES[name]
    with tempfile.TemporaryDirectory() as folder:
        peer = random_llama(size.shape, tied=size.tied)
        mine = Ours(size, texts, device, dtype, 10**6, peer, Path(folder), compile)
        other = Peer(size, texts, device, dtype, 10**6, peer, compile=device == "cuda")
        for side in (mine, other):
            begun = time.perf_counter()
            timed(side, 3, device)
            print(
                f"{name} {dtype}: {type(side).__name__} first steps {time.perf_counter() - begun:.1f} s",
                file=sys.stderr,
            )
        pairs = [(timed(mine, TURN, device), timed(other, TURN, device)) for _ in range(rounds)]
        mine.trainer.close()
        other.batches.close()
    tokens = size.rows * size.shape.context
    ours, theirs = ([tokens / pair[side] for pair in pairs] for side in (0, 1))
    ratios = [a / b for a, b in zip(ours, theirs)]
    found = {
        f"{name} {dtype} ours": Value(statistics.median(ours), "tokens/s", min(ours), max(ours)),
        f"{name} {dtype} transformers": Value(statistics.median(theirs), "tokens/s", min(theirs), max(theirs)),
        f"{name} {dtype} ratio": Value(statistics.median(ratios), "×", min(ratios), max(ratios)),
    }
    peak = peak_of(device, dtype)
    if peak is not None:
        half = f"of {peak.words}; attention counted for the half that is not masked"
        found[f"{name} {dtype} MFU"] = Value(statistics.median(ours) * flops(size) / peak.flops, note=half)
        found[f"{name} {dtype} MFU of transformers"] = Value(statistics.median(theirs) * flops(size) / peak.flops)
    for key, value in found.items():
        print(f"  {key}: {value.value:,.4g}", file=sys.stderr)
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


def losses(name: str, device: str, dtype: str, texts: Path, steps: int) -> dict[str, Value]:
    """Both from the same weights over the same batches; the mean of the last tenth of the steps."""
    size = SIZES[name]
    with tempfile.TemporaryDirectory() as folder:
        peer = random_llama(size.shape, tied=size.tied)
        mine = Ours(size, texts, device, dtype, steps, peer, Path(folder), compile=False)
        other = Peer(size, texts, device, dtype, steps, peer, compile=False)
        curves = [[side.step() for _ in range(steps)] for side in (mine, other)]
        mine.trainer.close()
    last = max(1, steps // 10)
    ours, theirs = (statistics.mean(curve[-last:]) for curve in curves)
    print(f"  loss {ours:.4f} beside {theirs:.4f}", file=sys.stderr)
    return {
        f"loss {name} {dtype} ours": Value(ours, note=f"mean of the last {last} of {steps} steps"),
        f"loss {name} {dtype} transformers": Value(theirs),
        f"loss {name} {dtype} difference": Value(abs(ours - theirs) / theirs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, help="a text file, or a folder of .txt files")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=150, help="of the comparison of losses")
    parser.add_argument("--sizes", nargs="*")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    begun = time.perf_counter()
    values: dict[str, Value] = {}
    keep_freed_memory()
    sizes = asked.sizes or (["10m"] if asked.device == "cpu" else ["135m", "1b"])
    with tempfile.TemporaryDirectory() as folder:
        texts = one_text(asked.texts, Path(folder))
        for name in sizes:
            for dtype in ("float32", "bfloat16") if asked.device == "cpu" else ("bfloat16",):
                values |= speed(name, asked.device, dtype, texts, asked.rounds, not asked.no_compile)
        if asked.steps:
            values |= losses("10m", asked.device, "float32", texts, asked.steps)
    shares = [value.value for name, value in values.items() if name.endswith(" MFU")]
    if shares:
        values["best MFU"] = Value(max(float(share or 0) for share in shares))
    report = Report.record(
        "bench",
        f"pretrain-{asked.device}",
        values=values,
        claims=claims(asked.device),
        seed=0,
        wall_time=time.perf_counter() - begun,
    )
    target = asked.out or ROOT / "results" / "bench" / f"pretrain-{asked.device}.json"
    report.save(target)
    for verdict in report.claims:
        print(f"{'passed' if verdict.passed else 'FAILED'}: {verdict.statement} ({verdict.value})", file=sys.stderr)
    return int(not report.passed)


if __name__ == "__main__":
    sys.exit(main())
