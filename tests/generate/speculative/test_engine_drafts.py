"""Draft models of an engine: used unasked where an answer is greedy, one for each variant, and never seen in an answer."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

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
from orchard.generate.speculative.drafts import Drafts
from orchard.text.tokenizer import Tokenizer
from tests.generate.conftest import make_decoder

FOUR = Speculation(kind="draft", length=4)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def runner(tokenizer: Tokenizer, seed: int = 1) -> NativeRunner:
    return NativeRunner(lower(make_decoder(tokenizer.vocab_size, context=256, seed=seed)))


def said(answers: list[Answer]) -> list[Any]:
    return [(a.text, a.ids, a.finish, a.logprobs, a.error, a.usage.output) for a in answers]


def requests(**changes: Any) -> list[Request]:
    text = tuple(b"the and the and ab")
    made = [
        Request(text, 24, seed=1),
        Request(text[3:], 24, seed=2, constraint=Constraint.regex("(ab|ba|the )*")),
        Request(text, 40, seed=3, constraint=Constraint.json_schema(SCHEMA)),
        Request(text[:4], 20, Sampling(repetition_penalty=1.3), seed=4, logprobs=1),
    ]
    return [replace(one, **changes) for one in made]


def kept(engine: Engine, name: str = "draft") -> tuple[int, int]:
    facts = engine.facts()["speculation"][name]
    return facts["kept"], facts["guessed"]


@pytest.mark.parametrize("good", [True, False], ids=["the model itself", "another"])
@pytest.mark.parametrize("adapter", [None, "other"])
def test_greedy_answers_are_the_same_with_a_good_and_a_bad_draft(
    tokenizer: Tokenizer, good: bool, adapter: str | None
) -> None:
    model, other = runner(tokenizer), runner(tokenizer, seed=2)
    model.add_variant("other", other)
    expected = said(Engine(model, tokenizer).answer(requests(adapter=adapter)))
    right = model if adapter is None else other
    engine = Engine(model, tokenizer, draft=right if good else runner(tokenizer, seed=3))
    for way in (None, FOUR):
        asked = requests(adapter=adapter, speculation=way)
        assert said(engine.answer(asked)) == expected
        assert said([engine.answer([one])[0] for one in asked]) == expected
    true, guessed = kept(engine)
    assert guessed > 0 and (true > 0.9 * guessed if good else true < 0.9 * guessed)


def test_a_draft_that_is_the_model_is_always_right(tokenizer: Tokenizer) -> None:
    model = runner(tokenizer)
    engine = Engine(model, tokenizer, draft=model)
    answer = engine.answer([Request(tuple(b"the and"), 41, seed=1, speculation=FOUR)])[0]
    true, guessed = kept(engine)
    assert true == guessed == 32 and answer.usage.output == 41 and answer.usage.calls == 9


def test_only_greedy_requests_are_guessed_for_unasked(tokenizer: Tokenizer) -> None:
    engine = Engine(runner(tokenizer), tokenizer, draft=runner(tokenizer))
    hot = Request(tuple(b"the and"), 20, Sampling(temperature=0.7), seed=1)
    engine.answer([hot])
    assert "speculation" not in engine.facts()
    engine.answer([replace(hot, sampling=Sampling())])
    assert engine.facts()["speculation"]["draft"]["drafts"] > 0


def test_a_device_that_goes_on_by_itself_is_left_to_it(tokenizer: Tokenizer) -> None:
    class Bursting:
        config = runner(tokenizer).config

        def adapted(self) -> None: ...

    drafts = Drafts(Bursting(), runner(tokenizer), ends=(), slots=4)  # type: ignore[arg-type]
    plain, *looked_at = requests()
    assert drafts.usual(plain) is None and all(drafts.usual(one) is not None for one in looked_at)
    assert drafts.usual(replace(plain, speculation=FOUR)) is FOUR


def test_a_variant_has_a_draft_of_its_own(tokenizer: Tokenizer) -> None:
    model, other = runner(tokenizer), runner(tokenizer, seed=2)
    model.add_variant("other", other)
    engine = Engine(model, tokenizer)
    variant = engine.variant("other")
    expected = said(Engine(model, tokenizer).answer([*requests(), *requests(adapter="other")]))
    variant.guess_with(other)
    both = [*requests(), *requests(adapter="other")]
    assert said(engine.answer(both)) == expected
    assert said(variant.answer(requests(speculation=FOUR))) == expected[4:]
    assert list(engine.facts()["speculation"]) == ["draft of other"]
    assert kept(engine, "draft of other")[0] > 0
    with pytest.raises(UsageError, match="no draft model"):
        engine.answer(requests(speculation=FOUR))
    engine.guess_with(model)
    assert said(engine.answer(both)) == expected
    assert set(engine.facts()["speculation"]) == {"draft", "draft of other"}
    with pytest.raises(DraftMismatch):
        variant.guess_with(NativeRunner(lower(make_decoder(100))))


def test_a_draft_that_is_dropped_is_freed_and_answers_go_on(tokenizer: Tokenizer) -> None:
    model, other = runner(tokenizer), runner(tokenizer, seed=2)
    model.add_variant("other", other)
    request = requests(adapter="other")[0]
    expected = said(Engine(model, tokenizer).answer([request]))
    engine = Engine(model, tokenizer)
    draft = runner(tokenizer, seed=2)
    engine.variant("other").guess_with(draft)
    stream = engine.stream(request)
    for _ in range(6):
        next(stream)
    engine.drafts.drop("other")
    gone = weakref.ref(draft)
    del draft
    for _ in stream:
        pass
    assert said([stream.answer]) == expected
    assert said(engine.answer([request])) == expected and "draft of other" not in engine.facts().get("speculation", {})
    del stream
    gc.collect()
    assert gone() is None


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 2)), min_size=2, max_size=6))
@settings(max_examples=15)
def test_rows_of_all_kinds_share_slots_and_lose_them(tokenizer: Tokenizer, kinds: list[tuple[int, bool, int]]) -> None:
    """Two slots for all: rows with and without an adapter, with forms, of other priorities."""
    model, other = runner(tokenizer), runner(tokenizer, seed=2)
    model.add_variant("other", other)
    asked = [
        replace(requests()[kind], adapter="other" if adapted else None, priority=priority)
        for kind, adapted, priority in kinds
    ]
    expected = said(Engine(model, tokenizer).answer(asked))
    engine = Engine(model, tokenizer, draft=model, slots=2, prefix_bytes=0)
    engine.variant("other").guess_with(other)
    assert said(engine.answer(asked)) == expected
    streams = []
    for request in asked:
        streams.append(engine.stream(request))
        next(streams[-1])
    for stream in streams[::-1]:
        for _ in stream:
            pass
    assert said([stream.answer for stream in streams]) == expected


def test_what_a_grammar_forces_is_not_guessed_but_known(tokenizer: Tokenizer) -> None:
    """Spelled as the answer spells it, and without a call of the draft model."""
    model = runner(tokenizer)
    form = Constraint.regex("([ab](the and the and)){6}")
    request = Request(tuple(b"the and"), 60, seed=1, constraint=form)
    expected = Engine(model, tokenizer).answer([request])[0]
    engine = Engine(model, tokenizer, draft=runner(tokenizer, seed=5))
    way = Speculation(kind="draft", length=24)
    answer = engine.answer([replace(request, speculation=way)])[0]
    assert said([answer]) == said([expected])
    facts = engine.facts()["speculation"]["draft"]
    assert facts["rounds"] < facts["guessed"] / 3
    logged = replace(request, logprobs=0)
    expected = Engine(model, tokenizer).answer([logged])[0]
    assert said(engine.answer([replace(logged, speculation=way)])) == said([expected])
