"""A model and its variants share one engine: their requests run in the same steps, and each gets what it gets alone."""

from __future__ import annotations

import gc
from pathlib import Path

import orchard
from orchard.generate.request import Request
from orchard.session.adapters import Adapters
from tests.session.test_adapters import PROMPT, random_adapter
from tests.tiny import tiny_gguf


def test_a_base_and_two_variants_in_one_batch(tmp_path: Path) -> None:
    model = orchard.load(tiny_gguf(tmp_path / "tiny.gguf"))
    adapters = Adapters(model)
    for seed, name in ((1, "one"), (2, "two")):
        adapters.load(random_adapter(adapters, tmp_path / name, seed=seed))
    models = [model, adapters.model("one"), adapters.model("two")]
    alone = [one.engine.answer([Request(tuple(PROMPT), 12, seed=0)])[0].ids for one in models]
    assert len(set(alone)) == 3
    before = dict(model.engine.facts()["batch_sizes"])
    variants = sorted(model.engine.model.variants)  # type: ignore[attr-defined]
    named = [None, *variants]
    together = model.engine.answer([Request(tuple(PROMPT), 12, seed=0, adapter=name) for name in named])
    assert [answer.ids for answer in together] == alone
    sizes = model.engine.facts()["batch_sizes"]
    assert sizes.get(3, 0) > before.get(3, 0)


def test_a_variant_that_nobody_has_is_forgotten(tmp_path: Path) -> None:
    model = orchard.load(tiny_gguf(tmp_path / "tiny.gguf"))
    adapters = Adapters(model, kept=1)
    for seed, name in ((1, "one"), (2, "two")):
        adapters.load(random_adapter(adapters, tmp_path / name, seed=seed))
    first = adapters.model("one")
    wanted = first.engine.answer([Request(tuple(PROMPT), 4, seed=0)])[0].ids
    adapters.model("two")  # the first is not kept any more, but somebody has it
    assert first.engine.answer([Request(tuple(PROMPT), 4, seed=0)])[0].ids == wanted
    assert len(model.engine.model.variants) == 2  # type: ignore[attr-defined]
    del first
    gc.collect()
    assert len(model.engine.model.variants) == 1  # type: ignore[attr-defined]
