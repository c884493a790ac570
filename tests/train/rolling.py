"""Runs by rewards that are small enough for tests. `python -m tests.train.rolling '{"folder": …, "steps": 5}'` does one, alone
or as one process of several.

The task: after `n:` a digit is right, after `a:` a letter. A fresh model is right in one of fourteen cases.
"""

from __future__ import annotations

import json
import os
import signal
import string
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from orchard.data import Jsonl, Repeat
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.objectives.policy import PolicyGradient
from orchard.text.tokenizer import Tokenizer
from orchard.train.optim import AdamW
from orchard.train.rollout import Rollouts
from orchard.train.rollout_rewards import ExactMatch
from orchard.train.rollout_writer import EngineWriter
from orchard.train.schedule import Constant
from orchard.train.trainer import Saving, Trainer
from orchard.train.world import world
from tests.generate.conftest import make_tokenizer
from tests.train.training import weights

ASKED = [
    {"prompt": "n:", "completion": list(string.digits)},
    {"prompt": "a:", "completion": list(string.ascii_lowercase)},
]


def written(folder: Path, rows: Any = ASKED, name: str = "asked.jsonl") -> Jsonl.Config:
    path = folder / name
    if not path.exists():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Jsonl.Config(paths=str(path), form="prompts")


def small_model(vocab: int, context: int = 64) -> Decoder.Config:
    block = Block.Config(mixer=Attention.Config(heads=2, kv_heads=1, head_dim=16), mlp=GatedMLP.Config(hidden_dim=64))
    return Decoder.Config(vocab=vocab, dim=32, context=context, stack=Stack.Config(layers=[block]), head=None)


def rollouts(folder: Path, *, runner: str = "together", rows: Any = ASKED, **changes: Any) -> Rollouts.Config:
    settings: dict[str, Any] = {
        "source": Repeat.Config(source=written(folder, rows)),
        "reward": ExactMatch.Config(),
        "prompts": 8,
        "group": 8,
        "max_tokens": 1,
        "chat": False,
        "multiple": 1,
        "writer": EngineWriter.Config(runner=runner),
    }
    return Rollouts.Config(**settings | changes)


def run_config(
    folder: Path, tokenizer: Tokenizer, *, source: Mapping[str, Any] = MappingProxyType({}), **changes: Any
) -> Trainer.Config:
    settings: dict[str, Any] = {
        "model": small_model(tokenizer.vocab_size),
        "objective": PolicyGradient.Config(temperature=source.get("temperature", 1.0)),
        "source": rollouts(folder, **source),
        "steps": 45,
        "optim": AdamW.Config(lr=1e-2),
        "schedule": Constant.Config(),
        "save": Saving.Config(every=1000),
    }
    return Trainer.Config(**settings | changes)


def main() -> None:
    torch.set_num_threads(1)
    said: dict[str, Any] = json.loads(sys.argv[1])
    folder, tokenizer = Path(said["folder"]), make_tokenizer()
    with world(device="cpu", timeout=30) as here:
        cfg = run_config(folder, tokenizer, source=said.get("source", {}), steps=said["steps"])
        cfg.save = Saving.Config(every=said.get("every", 1000))
        cfg.mesh.shard = said.get("shard", True)
        trainer = cfg.build(folder=folder / said["name"], tokenizer=tokenizer, here=here)

        def stop(number: int, point: Any) -> None:
            if number == said.get("stop_at") and here.first:
                os.kill(os.getpid(), signal.SIGINT)

        report = trainer.run(told=[stop])
        if here.first:
            sums = {} if here.size > 1 else {k: v.double().sum().item().hex() for k, v in weights(trainer).items()}
            texts = [[answer.text for answer in group.answers] for group in trainer.source.last]
            print(json.dumps({"series": report.series, "weights": sums, "texts": texts, "notes": report.notes}))


if __name__ == "__main__":
    main()
