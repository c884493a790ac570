"""Speculation through the engine: the same answers as without, in company, under grammars, after preemption; typed refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import UsageError
from orchard.generate.constraint import Constraint
from orchard.generate.engine import Engine
from orchard.generate.errors import DraftMismatch
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.generate.request import Answer, Request, Sampling
from orchard.generate.speculative import Speculation
from orchard.generate.speculative.coarse import Groups
from orchard.generate.speculative.early import early_runner
from orchard.models.language.decoder import Decoder
from orchard.session.model import Model, load
from orchard.text.tokenizer import Tokenizer
from tests.generate.conftest import make_decoder

WAYS = {
    "lookup": Speculation(),
    "lookup 5": Speculation(length=5),
    "draft": Speculation(kind="draft"),
    "draft 4": Speculation(kind="draft", length=4),
    "early": Speculation(kind="early"),
    "early 2, 3": Speculation(kind="early", layers=2, length=3),
}
HOT = Sampling(temperature=0.8, top_p=0.95)
RECORD = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def make_engine(tokenizer: Tokenizer, **options: Any) -> Engine:
    """Three layers that answer and another model of one layer that guesses."""
    model = NativeRunner(lower(make_decoder(tokenizer.vocab_size, context=256)))
    draft = NativeRunner(early_of(model))
    return Engine(model, tokenizer, draft=draft, **options)


def early_of(model: NativeRunner) -> Any:
    from orchard.ops.plan.early import early_plan

    return early_plan(model.plan, 1)


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> Engine:
    return make_engine(tokenizer)


def mixed(speculation: Speculation | None) -> list[Request]:
    """Answers of many sorts; every third has no speculation in any case."""
    text = tuple(b"the and the and ab")
    requests = [
        Request(text, 24, seed=1),
        Request(text[:5], 20, HOT, seed=2),
        Request((*text, *text), 24, HOT, seed=3, logprobs=2),
        Request(text, 30, Sampling(temperature=0.6, repetition_penalty=1.2), seed=4),
        Request(text[3:], 24, HOT, seed=5, constraint=Constraint.regex("(ab|ba|the )*")),
        Request(text, 40, seed=6, constraint=Constraint.json_schema({"type": "array", "items": RECORD, "minItems": 2})),
        Request(text, 24, Sampling(temperature=1.5), seed=7, stop=("e", "\x00")),
    ]
    return [replace(request, speculation=speculation if place % 3 else None) for place, request in enumerate(requests)]


def plain(answers: list[Answer]) -> list[Any]:
    """Everything but how often the model was run."""
    return [(a.text, a.ids, a.finish, a.logprobs, a.error, a.usage.output) for a in answers]


@pytest.fixture(scope="module")
def expected(engine: Engine, tokenizer: Tokenizer) -> list[Any]:
    """By an engine that has no draft model: where there is one, greedy requests are guessed for unasked."""
    return plain(Engine(engine.model, tokenizer).answer(mixed(None)))


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_the_same_together_and_alone(engine: Engine, expected: list[Any], way: str) -> None:
    requests = mixed(WAYS[way])
    assert plain(engine.answer(requests)) == expected
    assert plain([engine.answer([request])[0] for request in requests]) == expected


@given(st.integers(0, 10_000), st.sampled_from(sorted(WAYS)), st.sampled_from([Sampling(), HOT]), st.integers(1, 40))
@settings(max_examples=25)
def test_any_request_gets_the_answer_it_had(engine: Engine, seed: int, way: str, sampling: Sampling, room: int) -> None:
    random = np.random.default_rng(seed)
    ids = tuple(int(token) for token in random.integers(97, 101, random.integers(1, 30)))
    request = Request(ids, room, sampling, seed=seed)
    assert plain(engine.answer([replace(request, speculation=WAYS[way])])) == plain(engine.answer([request]))


@pytest.mark.parametrize("way", ["lookup 5", "draft 4"])
def test_a_row_that_loses_its_slot_goes_on_as_if_nothing_had_been(
    tokenizer: Tokenizer, expected: list[Any], way: str
) -> None:
    """One slot, and every request takes it from the one before."""
    small = make_engine(tokenizer, slots=1, prefix_bytes=0)
    requests = [replace(one, speculation=WAYS[way], priority=place) for place, one in enumerate(mixed(None))]
    streams = []
    for request in requests:
        streams.append(small.stream(request))
        next(streams[-1])
        next(streams[-1])
    for stream in streams[::-1]:
        for _ in stream:
            pass
    assert plain([stream.answer for stream in streams]) == expected
    facts = small.facts()
    assert facts["preempted"] > 3
    assert facts["speculation"][way.split()[0]].get("slots", 0) == 0


@pytest.mark.parametrize("way", WAYS)
def test_variants_of_the_model_are_guessed_for_by_the_same_drafters(tokenizer: Tokenizer, way: str) -> None:
    """Guesses come from the model itself, answers from its variant, side by side with the model's own."""
    engine = make_engine(tokenizer)
    assert isinstance(engine.model, NativeRunner)
    engine.model.add_variant("other", NativeRunner(lower(make_decoder(tokenizer.vocab_size, context=256, seed=2))))
    requests = [replace(one, adapter="other" if place % 2 else None) for place, one in enumerate(mixed(None))]
    before = plain(engine.answer(requests))
    assert before != plain(engine.answer(mixed(None)))
    assert plain(engine.answer([replace(request, speculation=WAYS[way]) for request in requests])) == before


def test_a_torch_model_can_be_guessed_for(decoder: Callable[..., Decoder], tokenizer: Tokenizer) -> None:
    engine = Engine(decoder(context=128), tokenizer)
    request = Request(tuple(b"ab ab ab"), 24, HOT, seed=5)
    assert plain(engine.answer([replace(request, speculation=Speculation(length=3))])) == plain(
        engine.answer([request])
    )
    with pytest.raises(UsageError, match="natively"):
        engine.answer([replace(request, speculation=Speculation(kind="early"))])


def test_a_draft_that_is_the_model_saves_calls(tokenizer: Tokenizer) -> None:
    model = NativeRunner(lower(make_decoder(tokenizer.vocab_size, context=256)))
    engine = Engine(model, tokenizer, draft=model)
    for accept in ("same", "rejection"):
        way = Speculation(kind="draft", length=4, accept=accept)
        answer = engine.answer([Request(tuple(b"the and"), 40, HOT, seed=3, speculation=way)])[0]
        assert answer.usage.output == 40 and answer.usage.calls <= 12, accept


def test_an_answer_that_is_closed_leaves_no_slot_behind(engine: Engine) -> None:
    stream = engine.stream(Request(tuple(b"the and"), 40, seed=3, speculation=WAYS["draft 4"]))
    next(stream), next(stream)
    assert engine.facts()["speculation"]["draft"]["slots"] == 1
    stream.close()
    facts = engine.facts()
    assert facts["running"] == 0 and facts["speculation"]["draft"]["slots"] == 0


def test_what_cannot_be_done_is_refused_before_any_work(engine: Engine, tokenizer: Tokenizer) -> None:
    request = Request((1, 2, 3), 5, seed=1)
    alone = Engine(engine.model, tokenizer)
    for way, match in (
        (WAYS["draft"], "no draft model"),
        (Speculation(kind="early", layers=4), "4 early layers of a model that has 3"),
        (Speculation(accept="coarse", groups=Groups.from_embeddings(np.eye(5), 2.0)), "groups of 5 tokens"),
    ):
        with pytest.raises(UsageError, match=match) as caught:
            alone.answer([replace(request, speculation=way)])
        assert caught.value.hint
    with pytest.raises(DraftMismatch, match=f"100 tokens.*{tokenizer.vocab_size}"):
        Engine(engine.model, tokenizer, draft=NativeRunner(lower(make_decoder(100))))


def test_a_rule_that_fails_on_a_guess_fails_nobody_else(engine: Engine, expected: list[Any]) -> None:
    def third(scores: np.ndarray, state: Any) -> np.ndarray:
        if len(state.output) == 3:
            raise ValueError("three is too many")
        return scores

    bad = Request((1, 2, 3), 10, seed=1, rules=(third,), speculation=WAYS["draft 4"])
    *good, failed = engine.answer([*mixed(WAYS["draft 4"]), bad])
    assert plain(good) == expected
    assert failed.finish == "error" and len(failed.ids) == 3 and "three is too many" in str(failed.error)


def test_coarse_answers_are_held_to_their_grammar(engine: Engine) -> None:
    vocab = engine.model.config.vocab
    groups = Groups.from_embeddings(np.random.default_rng(0).normal(size=(vocab, 4)), 0.8)
    way = Speculation(kind="draft", length=4, accept="coarse", groups=groups)
    regex = Constraint.regex("[a-f]{20}")
    answer = engine.answer([Request((1, 2, 3), 40, HOT, seed=1, constraint=regex, speculation=way)])[0]
    assert len(answer.text) == 20 and set(answer.text) <= set("abcdef")


# The default model ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Model:
    return load("smollm2")


@pytest.mark.real
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.3)])
def test_lookup_on_the_default_model(model: Model, sampling: Sampling) -> None:
    text = (
        "The library opens at nine and closes at six. Members may borrow five books. A late book costs ten cents a day."
    )
    ids = tuple(model.tokenizer.encode(f"First:\n{text}\n\nOnce more, word for word:\nThe library opens"))
    request = Request(ids, 24, sampling, seed=3)
    before = model.engine.answer([request])[0]
    after = model.engine.answer([replace(request, speculation=Speculation(length=6))])[0]
    assert (after.ids, after.text) == (before.ids, before.text)
    assert after.usage.calls < before.usage.calls


@pytest.mark.real
def test_lookup_under_a_json_grammar(model: Model) -> None:
    schema = {"type": "array", "items": RECORD, "minItems": 3, "maxItems": 3}
    records = json.dumps(
        [{"a": "fig", "b": True}, {"a": "pear", "b": True}, {"a": "plum", "b": True}], separators=(",", ":")
    )
    ids = tuple(model.tokenizer.encode(f"Input:\n{records}\nThe same again:\n"))
    request = Request(ids, 60, seed=3, constraint=Constraint.json_schema(schema))
    before = model.engine.answer([request])[0]
    after = model.engine.answer([replace(request, speculation=Speculation(length=6))])[0]
    assert after.ids == before.ids and len(json.loads(after.text)) == 3
    assert after.usage.calls < before.usage.calls


@pytest.mark.real
def test_the_default_model_without_its_last_layer_guesses_for_it(model: Model) -> None:
    ids = tuple(model.prompt_ids("Name three colours."))
    request = Request(ids, 16, seed=3)
    engine = Engine(model.engine.model, model.tokenizer, draft=early_runner(model.engine.model, 29))
    before = engine.answer([request])[0]
    for way in (Speculation(kind="draft", length=3), Speculation(kind="early", layers=29, length=3)):
        assert engine.answer([replace(request, speculation=way)])[0].ids == before.ids
    for kind in engine.facts()["speculation"].values():
        assert kind["kept"] > 0
