"""How far Orchard's logits are from transformers', for every family and for the real default model.

Families are tiny random models (tests/parity/families.py): the largest difference over a whole prompt, over the same
tokens one by one through the stores, and in padded batches of unequal lengths. The default model is read from its GGUF
file by both; its greedy answers to twenty prompts are compared token by token.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import orchard  # noqa: E402
from orchard.core.context import Context  # noqa: E402
from orchard.core.progress import track  # noqa: E402
from orchard.core.report import Bound, Claim, Report, Value  # noqa: E402
from orchard.models.language import Decoder  # noqa: E402
from orchard.weights.checkpoint import open_checkpoint  # noqa: E402
from orchard.weights.load import load_decoder  # noqa: E402
from tests.parity.families import CASES, reference  # noqa: E402
from tests.parity.prompts import PROMPTS  # noqa: E402

TARGET = ROOT / "results" / "bench" / "parity.json"
LENGTHS, TOKENS = (4, 17, 40), 64
CLAIMS = [
    Claim("whole", "Whole prompts: logits of every family equal transformers'", "whole", Bound("<=", 1e-4)),
    Claim("steps", "Token by token through the stores: likewise", "steps", Bound("<=", 1e-4)),
    Claim("padded", "Padded batches of unequal lengths: likewise", "padded", Bound("<=", 1e-4)),
    Claim("greedy", "Prompts for which SmolLM2 gives the same 64 greedy tokens", "greedy", Bound("==", len(PROMPTS))),
]


def differences(theirs: Any, ours: Decoder) -> dict[str, float]:
    """The largest absolute difference of logits in each of the three situations."""
    rows = [torch.randint(3, 96, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    expected = [theirs(input_ids=row[None], use_cache=False).logits[0] for row in rows]
    whole = max((ours(row[None])[0] - logits).abs().max().item() for row, logits in zip(rows, expected, strict=True))
    cache = ours.cache(batch=1, length=LENGTHS[-1])
    steps = [
        ours(rows[-1][None, i : i + 1], Context(positions=torch.tensor([[i]]), cache=cache, upto=i + 1))
        for i in range(LENGTHS[-1])
    ]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    valid = torch.arange(LENGTHS[-1])[None] < torch.tensor(LENGTHS)[:, None]
    context = Context(positions=Context.whole(ids, valid).positions, cache=ours.cache(batch=3, length=LENGTHS[-1]))
    batch = ours(ids, context)
    padded = max((batch[i][valid[i]] - logits).abs().max().item() for i, logits in enumerate(expected))
    return {"whole": whole, "steps": (torch.cat(steps, 1)[0] - expected[-1]).abs().max().item(), "padded": padded}


def greedy_agreement(model: orchard.Model) -> int:
    """For how many prompts their best token after every prefix of our answer is our next token."""
    from transformers import AutoModelForCausalLM

    assert model.source is not None
    theirs = AutoModelForCausalLM.from_pretrained(
        model.source.parent, gguf_file=model.source.name, dtype=torch.float32
    ).eval()
    same = 0
    answers = model.generate_many(PROMPTS, max_tokens=TOKENS, logprobs=0)
    for prompt, answer in zip(track(PROMPTS, "comparing answers"), answers, strict=True):
        ids, produced = model.prompt_ids(prompt), list(answer.ids)
        logits = theirs(input_ids=torch.tensor([ids + produced])).logits[0, len(ids) - 1 :]
        best = logits.argmax(-1).tolist()
        ended = answer.finish != "stop" or best[len(produced)] in model.tokenizer.eos_ids
        same += best[: len(produced)] == produced and ended
    return same


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=TARGET, help="where the Report goes")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    started = time.perf_counter()
    values: dict[str, Value | float] = {}
    for case in track(sorted(CASES), "comparing families"):
        with tempfile.TemporaryDirectory() as folder:
            theirs = reference(case)
            theirs.save_pretrained(folder)
            with open_checkpoint(folder) as checkpoint:
                found = differences(theirs, load_decoder(checkpoint))
        values |= {f"{case} {name}": value for name, value in found.items()}
    for name in ("whole", "steps", "padded"):
        worst = max(value for key, value in values.items() if key.endswith(f" {name}") and isinstance(value, float))
        values[name] = Value(worst, note=f"largest of {len(CASES)} models, float32")
    values["greedy"] = Value(
        greedy_agreement(orchard.load("smollm2", dtype="float32")), note=f"of {len(PROMPTS)}, float32, from the GGUF"
    )
    took = round(time.perf_counter() - started, 1)
    report = Report.record("bench", "parity", values=values, claims=CLAIMS, seed=0, wall_time=took)
    report.save(options.out)
    Console().print(report.table())
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
