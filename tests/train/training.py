"""A run small enough for tests: a tiny decoder learns sums. `python -m tests.train.training FOLDER STEPS` runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from orchard.data import Batches, Encode, Jsonl, Pack, Repeat
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.text.tokenizer import Tokenizer
from orchard.train.ema import EMA
from orchard.train.optim import AdamW
from orchard.train.trainer import Saving, Trainer
from tests.generate.conftest import make_tokenizer


def written(folder: Path) -> Path:
    path = folder / "sums.jsonl"
    if not path.exists():
        rows = [{"prompt": f"{n}+{n % 7}=", "completion": f"{n + n % 7};"} for n in range(60)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_config(folder: Path, tokenizer: Tokenizer, **changes: Any) -> Trainer.Config:
    block = Block.Config(mixer=Attention.Config(heads=2, kv_heads=1, head_dim=8), mlp=GatedMLP.Config(hidden_dim=32))
    model = Decoder.Config(
        vocab=tokenizer.vocab_size, dim=16, context=48, stack=Stack.Config(layers=[block, block.clone()]), head=None
    )
    rows = Jsonl.Config(paths=str(written(folder)), order="shuffled", seed=3)
    samples = Encode.Config(source=Repeat.Config(source=rows))
    source = Batches.Config(source=Pack.Config(source=samples, length=40), rows=4)
    settings: dict[str, Any] = {
        "model": model,
        "source": source,
        "steps": 12,
        "optim": AdamW.Config(lr=1e-2),
        "ema": EMA.Config(),
        "save": Saving.Config(every=4),
    }
    return Trainer.Config(**settings | changes)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def main() -> None:
    torch.set_num_threads(1)
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    tokenizer = make_tokenizer()
    trainer = run_config(folder, tokenizer, steps=steps, save=Saving.Config(every=3)).build(
        folder=folder / "run", tokenizer=tokenizer
    )
    trainer.run()
    total = {name: value.double().sum().item().hex() for name, value in weights(trainer).items()}
    (folder / "weights.json").write_text(json.dumps(total))


if __name__ == "__main__":
    main()
