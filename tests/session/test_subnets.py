"""Sub-networks of a loaded model: a prompt chooses, a task has a name, and the engine runs them beside each other."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import orchard
from orchard.core.errors import BadFile, UsageError
from orchard.session.model import Model
from orchard.session.options import GenerationOptions
from orchard.session.subnets import KEPT
from orchard.transforms.ifprune_choice import Choice
from orchard.transforms.ifprune_gather import picked
from tests.tiny import tiny_gguf

PROMPT = [72, 101, 108, 108, 111]
OTHERS = [[65, 66, 67], [120, 121], [48, 49, 50, 51, 52, 53]]


@pytest.fixture(params=["auto", "float32"])
def model(request: pytest.FixtureRequest, tmp_path: Path, empty_home: Path) -> Model:
    """On the native engine, and in torch."""
    return orchard.load(tiny_gguf(tmp_path / "tiny.gguf"), dtype=request.param)


def variants(model: Model) -> list[str]:
    return list(model.engine.model.variants)  # type: ignore[attr-defined]


def test_a_named_choice_is_the_smaller_model(model: Model) -> None:
    choice = Choice(torch.tensor([[0.0, 1.0]]), 1)
    model.subnets.add("second half", choice)
    small = model.subnets.model("second half")
    with torch.inference_mode():
        want = picked(model.decoder, choice)(torch.tensor([PROMPT]))[0].numpy()
    assert np.allclose(small.logits(PROMPT)[0].numpy(), want, atol=1e-4)
    assert small.decoder.config.stack.layers[0].mlp.hidden_dim == 32  # type: ignore[attr-defined]
    alone = small.generate(PROMPT, max_tokens=12)
    assert alone.ids[0] == int(want[-1].argmax())
    assert alone.ids != model.generate(PROMPT, max_tokens=12).ids
    del small
    gc.collect()


def test_every_prompt_chooses_and_answers_do_not_depend_on_company(model: Model) -> None:
    plain = [answer.ids for answer in model.generate_many([PROMPT, *OTHERS], max_tokens=8)]
    seen: list[Any] = []

    class Watching:
        def choose(self, ids: Any, budget: int | None = None) -> Choice:
            seen.append(tuple(ids))
            return Choice(torch.tensor([[float(len(ids) % 2), 0.5]]), 1)

    model.subnets.by_prompt(Watching())
    alone = [model.generate(prompt, max_tokens=8).ids for prompt in (PROMPT, *OTHERS)]
    together = [answer.ids for answer in model.generate_many([PROMPT, *OTHERS], max_tokens=8)]
    assert alone == together
    assert seen[:4] == [tuple(PROMPT), *map(tuple, OTHERS)]
    assert alone != plain
    model.subnets.stop()
    assert [answer.ids for answer in model.generate_many([PROMPT, *OTHERS], max_tokens=8)] == plain


def test_sub_networks_do_not_pile_up(model: Model) -> None:
    class Random:
        def choose(self, ids: Any, budget: int | None = None) -> Choice:
            return Choice(torch.randn(1, 2), 1, temperature=1.0)  # weights differ, so no two are alike

    model.subnets.by_prompt(Random())
    for _ in range(KEPT + 5):
        model.generate(PROMPT, max_tokens=2)
    assert len(variants(model)) == KEPT
    stream = model.generate(PROMPT, max_tokens=6, stream=True)
    next(iter(stream))
    for _ in range(KEPT + 2):
        model.generate(PROMPT, max_tokens=1)
    rest = list(stream)
    assert rest[-1].finish is not None and rest[-1].error is None
    stream.close()
    assert len(variants(model)) == KEPT


def test_by_activity_without_training(model: Model) -> None:
    model.subnets.by_prompt(keep=0.5)
    answer = model.generate(PROMPT, max_tokens=4)
    choice = model.subnets.activity(0.5).choose(model.prompt_ids(PROMPT))
    assert (choice.budget, choice.of) == (1, 2)
    small = model.subnets.model(choice)
    model.subnets.stop()
    assert small.generate(PROMPT, max_tokens=4).ids == answer.ids
    whole = model.subnets.activity(1.0).choose(PROMPT)
    assert model.subnets.model(whole).generate(PROMPT, max_tokens=6).ids == model.generate(PROMPT, max_tokens=6).ids


def test_named_choices_survive_a_process(model: Model, tmp_path: Path) -> None:
    task = model.subnets.for_task([PROMPT, *OTHERS])
    model.subnets.add("letters", task)
    model.subnets.save(tmp_path / "masks.safetensors")
    other = Model(model.decoder, model.tokenizer, name=model.name)
    assert other.subnets.load(tmp_path / "masks.safetensors") == ["letters"]
    assert other.subnets["letters"].groups() == task.groups()
    stranger = Model(model.decoder, model.tokenizer, name="stranger")
    with pytest.raises(UsageError, match="not of 'stranger'"):
        stranger.subnets.load(tmp_path / "masks.safetensors")
    (tmp_path / "masks.safetensors").write_bytes(b"no choices")
    with pytest.raises(BadFile):
        other.subnets.load(tmp_path / "masks.safetensors")


def test_a_chooser_that_fails_harms_one_request(model: Model) -> None:
    class Broken:
        def choose(self, ids: Any, budget: int | None = None) -> Choice:
            if len(ids) == 3:
                raise UsageError("no idea", hint="ask something else")
            return Choice(torch.zeros(1, 2), 2)

    model.subnets.by_prompt(Broken())
    with pytest.raises(UsageError, match="no idea"):
        model.generate([1, 2, 3], max_tokens=2)
    assert model.generate(PROMPT, max_tokens=2).usage.output == 2
    with pytest.raises(UsageError):
        model.subnets.model("unknown")
    with pytest.raises(UsageError):
        model.subnets.model(Choice(torch.zeros(2, 2), 1))


def test_many_threads(model: Model) -> None:
    class ByLength:
        def choose(self, ids: Any, budget: int | None = None) -> Choice:
            return Choice(torch.tensor([[float(len(ids) % 2), 0.5]]), 1)

    model.subnets.by_prompt(ByLength())
    want = {len(prompt): model.generate(prompt, max_tokens=5).ids for prompt in OTHERS}
    wrong: list[Any] = []

    def ask(prompt: list[int]) -> None:
        for _ in range(5):
            if model.generate(prompt, max_tokens=5).ids != want[len(prompt)]:
                wrong.append(prompt)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in OTHERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_session_talks_through_it(model: Model) -> None:
    asked: list[int] = []

    class Counting:
        def choose(self, ids: Any, budget: int | None = None) -> Choice:
            asked.append(len(ids))
            return Choice(torch.tensor([[0.0, 1.0]]), 1)

    model.subnets.by_prompt(Counting())
    with orchard.Session(model=model, guardrails=None) as session:
        session.respond("hello", options=GenerationOptions(maximum_response_tokens=3))
    assert len(asked) == 1
