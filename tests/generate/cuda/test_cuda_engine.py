"""An engine over a GPU's slots, by the torch twins or by the kernels: several tokens at a time are chosen on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from orchard.bench.shapes import random_plan
from orchard.core.errors import OrchardError
from orchard.generate import Engine, Request
from orchard.generate.cuda.runner import CudaRunner
from orchard.generate.steps import BURST
from orchard.ops.plan.steps import Head
from orchard.text.tokenizer import Tokenizer
from tests.generate.cuda.test_cuda_slots import SHAPE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def runner(tokenizer: Tokenizer) -> CudaRunner:
    plan = random_plan(replace(SHAPE, vocab=tokenizer.vocab_size), "q8", group=32)
    random = np.random.default_rng(5)
    for name, tensor in plan.tensors.items():
        if tensor.dtype != np.uint8 and name != "rotary":
            tensor[:] = random.uniform(0.5, 1.5, len(tensor))
    return CudaRunner(plan, device=DEVICE)


def count_bursts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from orchard.generate.cuda.slots import CudaSlots

    found: list[int] = []
    own = CudaSlots.greedy_many

    def noted(self: CudaSlots, work, steps):  # type: ignore[no-untyped-def]
        found.append(steps)
        return own(self, work, steps)

    monkeypatch.setattr(CudaSlots, "greedy_many", noted)
    return found


def test_bursts_say_what_single_steps_say(
    runner: CudaRunner, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(runner, tokenizer, slots=4)
    bursts = count_bursts(engine, monkeypatch)
    prompts = [(5, 17, 3, 99, 42), (7,), (20, 21, 22, 23)]
    requests = [Request(prompt, max_tokens=limit) for prompt, limit in zip(prompts, (20, 3, 29))]
    many = engine.answer(requests)
    assert BURST in bursts and all(1 < steps <= BURST for steps in bursts)
    bursts.clear()
    single = engine.answer([replace(request, logprobs=0) for request in requests])
    assert not bursts, "log-probabilities need the scores"
    for a, b in zip(many, single):
        assert (a.ids, a.text, a.finish) == (b.ids, b.text, b.finish)
    assert [len(answer.ids) for answer in many] == [20, 3, 29]


def test_a_burst_goes_no_further_than_a_stop_string(runner: CudaRunner, tokenizer: Tokenizer) -> None:
    engine = Engine(runner, tokenizer, slots=4)
    request = Request((5, 17, 3, 99, 42), max_tokens=30)
    whole = engine.answer([request])[0]
    middle = whole.text[len(whole.text) // 3 :][:2]
    cut = engine.answer([replace(request, stop=(middle,))])[0]
    assert cut.finish == "stop"
    assert cut.text == whole.text[: whole.text.index(middle)]
    assert engine.answer([request])[0].ids == whole.ids, "the slot is clean again"


def test_scores_that_break_in_a_burst_are_an_error_of_the_request(runner: CudaRunner, tokenizer: Tokenizer) -> None:
    engine = Engine(runner, tokenizer, slots=4)
    request = Request((5, 17, 3), max_tokens=12)
    engine.answer([request])
    program = runner.program(None)
    broken = program.vector(
        next(step.norm.tensor for step in program.plan.steps if isinstance(step, Head) and step.norm)
    )
    kept = broken.clone()
    stream = engine.stream(request)
    next(iter(stream))
    broken.fill_(float("nan"))
    with pytest.raises(OrchardError, match="broken"):
        list(stream)
    broken.copy_(kept)
    assert engine.answer([request])[0].finish == "length"
