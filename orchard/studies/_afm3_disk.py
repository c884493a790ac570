"""What `afm-3` counts: bytes that are read from a file of groups while text is generated, and bytes of weights in memory."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from orchard.cache.experts import Records
from orchard.core.report import Scalar, Value
from orchard.generate.torch_forward import TorchRunner
from orchard.studies._afm3_models import BUDGETS, Size
from orchard.studies._afm3_texts import DOMAINS, rows
from orchard.transforms.ifprune_answer import Answering
from orchard.transforms.ifprune_choice import Choice
from orchard.transforms.ifprune_gather import choosing
from orchard.transforms.ifprune_model import Instructed
from orchard.transforms.ifprune_resident import Stored, write_groups


class TokenByToken:
    """The same model as one that routes each token: scores of the state of the last token alone."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stored, name)

    @torch.no_grad()
    def choose(self, ids: Sequence[int], budget: int | None = None) -> Choice:
        model: Instructed = self.stored.chooser
        tokens = torch.as_tensor(ids, device=model.device).reshape(1, -1)
        usual, model.predictor.config.window = model.predictor.config.window, 1  # type: ignore[union-attr]
        try:
            return model.choose(tokens, budget)
        finally:
            model.predictor.config.window = usual  # type: ignore[union-attr]


@contextmanager
def stored(model: Instructed, path: Path, budget: int) -> Iterator[Stored]:
    """The model over a file, with room for one choice of a budget."""
    records = Records.open(path)
    made = Stored(model, records, budget_bytes=len(records.layers) * budget * records.record_bytes, threads=1)
    try:
        yield made
    finally:
        made.close()


def generated(one: Answering, new: int) -> list[int]:
    """The likeliest tokens after the prompt."""
    run = TorchRunner(one).begin([list(one.prompt)], length=len(one.prompt) + new)
    run.read(0, len(one.prompt))
    ids = [int(run.first()[0].argmax())]
    while len(ids) < new:
        ids.append(int(run.step([ids[-1]])[0].argmax()))
    return ids


def counted(model: Instructed, size: Size, seed: int) -> tuple[dict[str, Value | Scalar], list[list[Any]]]:
    """Bytes by way of choosing, by budget, and in memory. On a CPU: slots are its memory."""
    model = copy.deepcopy(model).cpu()
    small, _, large = (round(share * size.groups) for share in BUDGETS)
    prompts = {domain: rows(1, size.prompt, seed, "generated", domain).ids[0].tolist() for domain in DOMAINS}
    series, by_way = [], {"prompt": 0, "spans": 0, "tokens": 0}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "groups"
        write_groups(model.decoder, path, {"study": "afm-3"})
        for domain, prompt in prompts.items():
            for way, every in (("prompt", None), ("spans", size.span), ("tokens", 1)):
                with stored(model, path, small) as disk:
                    source: Any = TokenByToken(disk) if way == "tokens" else disk
                    generated(Answering(source, prompt, every=every), size.new)
                    by_way[way] += disk.counters.bytes
                    series.append([domain, way, disk.counters.bytes / size.new])
                    held = disk.nbytes
        grown, exact = growth(model, path, prompts[DOMAINS[0]], small, large)
    chooser = sum(part.nbytes for part in model.predictor.parameters())
    active = active_bytes(model, small)
    per_token = {way: total / (size.new * len(prompts)) for way, total in by_way.items()}
    return {
        **{f"bytes_a_token_{way}": Value(value, "bytes") for way, value in per_token.items()},
        "bytes_ratio": Value(
            per_token["prompt"] / per_token["tokens"], "x", note="one choice a prompt over one a token"
        ),
        "bytes_ratio_spans": Value(
            per_token["spans"] / per_token["tokens"], "x", note=f"anew every {size.span} tokens"
        ),
        "growth_bytes": Value(grown, "bytes"),
        "growth_excess": Value(grown - exact, "bytes"),
        "memory": Value(held + chooser, "bytes", note="weights, slots and who chooses"),
        "memory_over_active": Value((held + chooser) / active - 1, "x", note="beyond the weights that a budget uses"),
    }, series


def growth(model: Instructed, path: Path, prompt: Sequence[int], small: int, large: int) -> tuple[int, int]:
    """Bytes read to go from one budget to a larger one, and what the groups between them take."""
    with stored(model, path, large) as disk:
        choice = disk.choose(prompt, small)
        disk.load(choice)
        before = disk.counters.bytes
        disk.load(choice.within(large))
        layers = disk.resident.records.layers
        return disk.counters.bytes - before, sum(layer.stride * (large - small) for layer in layers)


def active_bytes(model: Instructed, budget: int) -> int:
    """Weights of the decoder that a budget uses: all but the groups, and so many of these."""
    total = sum(part.nbytes for part in model.decoder.parameters())
    for part in choosing(model.decoder).values():
        cfg = part.config
        total -= 3 * cfg.dim * cfg.size * (cfg.groups - budget) * part.down.weight.element_size()  # type: ignore[operator]
    return total
