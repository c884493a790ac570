"""Draft models and their slots, early layers, and what the scheduler sees of it all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.errors import ConfigError, OrchardError, UnsupportedPair, UsageError
from orchard.generate.constraint import Constraint
from orchard.generate.errors import DraftMismatch, NumericError
from orchard.generate.grammar import Grammar, GrammarRule
from orchard.generate.grammar_words import words_of
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.generate.protocol import State
from orchard.generate.request import Request, Sampling
from orchard.generate.sampling import Sampler
from orchard.generate.speculative.accept import chooser_of
from orchard.generate.speculative.coarse import Groups
from orchard.generate.speculative.drafting import Ask
from orchard.generate.speculative.early import early_layers
from orchard.generate.speculative.model import ModelDrafter, check_vocabulary
from orchard.generate.speculative.options import Speculation
from orchard.generate.speculative.speculator import Speculator
from orchard.models.language.decoder import Decoder
from orchard.ops.plan.early import early_plan, layer_count
from orchard.ops.plan.file import to_json
from orchard.ops.plan.steps import Torch
from orchard.text.tokenizer import Tokenizer
from tests.generate.speculative.synthetic import Synthetic, Talker, speak

DRAFT = Speculation(kind="draft", length=3)


def ask(state: State, most: int = 3, key: int = 1, length: int = 0) -> Ask:
    request = Request(state.prompt, seed=1, speculation=DRAFT)
    return Ask(key, state, most, chooser_of(request, Sampler(request)), length)


def said(model: Synthetic, state: State, count: int) -> tuple[int, ...]:
    """What the model itself would say."""
    tokens = [*state.prompt, *state.output]
    for _ in range(count):
        tokens.append(int(model.scores(tokens).argmax()))
    return tuple(tokens[-count:])


# Draft models -----------------------------------------------------------------------------------------------------------


@given(
    moves=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(1, 4)), max_size=25),
    seats=st.integers(1, 3),
    prompts=st.lists(st.integers(1, 40), min_size=3, max_size=3),
)
@settings(max_examples=60)
def test_guesses_are_what_the_draft_model_says_whatever_came_before(
    moves: list[tuple[int, int, int]], seats: int, prompts: list[int]
) -> None:
    """Answers that take some guesses and refuse others, three sequences for as few as one slot."""
    model = Synthetic(7, past=5)
    drafter = ModelDrafter(model, slots=seats)
    states = [State(tuple(range(length))).plus(5) for length in prompts]
    for who, kept, most in moves:
        state = states[who]
        made = drafter.propose([ask(state, most, key=who)])[0]
        assert made.ids == said(model, state, most)
        for token in made.ids[:kept]:
            state = state.plus(token)
        states[who] = state.plus((made.ids[min(kept, most - 1)] + 1) % 7)
        assert len(model.made[0].held) <= seats


def test_rows_are_asked_together() -> None:
    model = Synthetic(7)
    drafter = ModelDrafter(model, slots=8)
    states = [State((key, 2), (3,)) for key in range(6)]
    made = drafter.propose([ask(state, 3, key) for key, state in enumerate(states)])
    assert [draft.ids for draft in made] == [said(model, state, 3) for state in states]
    assert model.made[0].calls == 1 + 3  # all prompts, then a call for each guess


def test_a_long_prompt_is_read_in_stretches() -> None:
    model = Synthetic(7)
    drafter = ModelDrafter(model)
    state = State(tuple(number % 7 for number in range(1100)), (3,))
    small = State((1, 2), (3,))
    sizes = []
    for _ in range(4):
        long, short = drafter.propose([ask(state, key=1), ask(small, key=2)])
        sizes.append(len(long))
        assert short.ids == said(model, small, 3)
    assert sizes == [0, 0, 3, 3]


def test_an_answer_far_ahead_is_caught_up_with() -> None:
    """A row that comes back after it was preempted."""
    model = Synthetic(7)
    drafter = ModelDrafter(model)
    state = State((1, 2), tuple(number % 7 for number in range(1200)))
    drafts = [drafter.propose([ask(state)])[0] for _ in range(3)]
    assert [len(draft) for draft in drafts] == [0, 0, 3]
    assert drafts[-1].ids == said(model, state, 3)


def test_no_guess_goes_beyond_the_room() -> None:
    model = Synthetic(7, context=10)
    drafter = ModelDrafter(model)
    state = State((1, 2, 3, 4, 5), (6, 1, 2))
    assert len(drafter.propose([ask(state, 9)])[0]) == 3  # the last guess is not fed
    assert len(drafter.propose([ask(State((1,) * 10, (1,)), key=2)])[0]) == 0
    assert len(drafter.propose([ask(State((1, 2), (3,)), 9, key=3, length=5)])[0]) == 3


def test_guesses_end_with_an_end() -> None:
    model = Synthetic(7)
    state = State((1, 2), (3,))
    first, second, *_ = said(model, state, 3)
    drafter = ModelDrafter(model, ends=[second])
    assert drafter.propose([ask(state, 5)])[0].ids == ((first,) if first == second else (first, second))


def test_a_draft_model_that_fails_costs_guesses_and_nothing_else() -> None:
    model, draft = Synthetic(7, past=2), Synthetic(7, past=2)
    speculator = Speculator(model, draft=draft)
    speculator.check(DRAFT)
    draft.made[0].fail = 3
    requests = [Request((1, key), 12, seed=1, speculation=DRAFT) for key in range(3)]
    answers = [talker.output for talker in speak(model, requests, speculator)]
    assert answers == [said(model, State((1, key)), 12) for key in range(3)]
    assert speculator.facts()["draft"]["failures"] == 3
    assert speculator.facts()["draft"]["kept"] > 0
    assert not draft.made[0].held


def test_a_rule_that_cannot_bear_a_guess_ends_the_guessing() -> None:
    def twice(scores: np.ndarray, state: State) -> np.ndarray:
        if len(state.output) % 3 == 2:
            raise NumericError("not here", hint="elsewhere")
        return scores

    request = Request((1, 2), seed=1, rules=(twice,), speculation=DRAFT)
    model = Synthetic(7)
    asked = Ask(1, State((1, 2), (3,)), 3, chooser_of(request, Sampler(request)))
    assert len(ModelDrafter(model).propose([asked])[0]) == 1


def test_another_vocabulary_is_refused_by_name(tokenizer: Tokenizer) -> None:
    with pytest.raises(DraftMismatch, match=r"50 tokens.*40") as caught:
        Speculator(Synthetic(40), draft=Synthetic(50))
    assert isinstance(caught.value, UsageError) and caught.value.hint
    same = Synthetic(40)
    check_vocabulary(same, same, tokenizer, tokenizer)


def test_tokenizers_that_spell_differently_are_refused(tokenizer: Tokenizer) -> None:
    class Other:
        vocab_size, eos_ids = tokenizer.vocab_size, tokenizer.eos_ids

        def decode(self, ids: list[int], skip_special: bool) -> str:
            return "?" if ids == [70] else tokenizer.decode(ids, skip_special=skip_special)

    model = Synthetic(tokenizer.vocab_size)
    with pytest.raises(DraftMismatch, match="token 70"):
        check_vocabulary(model, model, tokenizer, Other())  # type: ignore[arg-type]


# Early layers -----------------------------------------------------------------------------------------------------------


def scores_of(runner: NativeRunner, prompt: list[int], answer: list[int]) -> list[np.ndarray]:
    return [runner.scores(prompt), runner.scores([*prompt, *answer])]


@pytest.mark.parametrize("fused", [True, False])
def test_a_plan_with_all_its_layers_is_the_plan(decoder: Callable[..., Decoder], fused: bool) -> None:
    plan = lower(decoder(), fused=fused)
    assert layer_count(plan) == 3
    early = early_plan(plan, 3)
    assert to_json(early) == to_json(plan)
    assert all(early.tensors[name] is tensor for name, tensor in plan.tensors.items())
    whole, cut = (scores_of(NativeRunner(one), [1, 2, 3, 4], [5, 6]) for one in (plan, early))
    assert all(np.array_equal(a, b) for a, b in zip(whole, cut, strict=True))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_plan_cut_short_is_the_model_without_its_last_layers(
    decoder: Callable[..., Decoder], layers: int, fused: bool
) -> None:
    import torch

    model = decoder()
    early = early_plan(lower(model, fused=fused), layers)
    assert len(early.stores) == layers
    model.stack.layers = torch.nn.ModuleList(list(model.stack.layers)[:layers])
    shorter = lower(model, fused=fused)
    ids = [1, 2, 3, 4, 5, 6, 7]
    assert np.array_equal(NativeRunner(early).scores(ids), NativeRunner(shorter).scores(ids))


def test_bad_cuts_are_refused(decoder: Callable[..., Decoder]) -> None:
    plan = lower(decoder())
    for layers in (0, 4, -1):
        with pytest.raises(ConfigError, match="of 3"):
            early_plan(plan, layers)
    plan.steps.insert(1, Torch(src=0, to=1, node="x", reason="none"))
    with pytest.raises(UnsupportedPair):
        early_plan(plan, 1)
    with pytest.raises(UsageError, match="natively"):
        early_layers(Synthetic(5))


# The speculator ---------------------------------------------------------------------------------------------------------


def test_what_an_engine_cannot_do_is_refused_before_any_work() -> None:
    speculator = Speculator(Synthetic(6))
    with pytest.raises(UsageError, match="no draft model"):
        speculator.check(DRAFT)
    with pytest.raises(UsageError, match="natively"):
        speculator.check(Speculation(kind="early"))
    groups = Groups.from_embeddings(np.eye(4), 2.0)
    with pytest.raises(UsageError, match="groups of 4"):
        speculator.check(Speculation(accept="coarse", groups=groups))
    speculator.check(Speculation())
    for speculation in (DRAFT, Speculation(kind="early")):
        with pytest.raises(OrchardError):
            speculator.drafts([Talker(1, Request((1,), speculation=speculation))])


def test_guesses_that_never_come_true_are_given_up_and_tried_again_now_and_then() -> None:
    model = Synthetic(50, seed=1, past=4)
    speculator = Speculator(model, draft=Synthetic(50, seed=2, past=4))
    talker = speak(model, [Request((1, 2), 900, seed=1, speculation=Speculation(kind="draft"))], speculator)[0]
    late = [len(draft) for draft in talker.drafts[-400:]]
    assert sum(map(bool, late)) <= 12
    assert sum(late) >= 1
    assert speculator.facts()["draft"]["rates"][0] < 0.4


def test_a_guess_that_was_not_judged_counts_for_nothing() -> None:
    """The answer ended before it."""
    speculator, talker = (
        Speculator(Synthetic(6)),
        Talker(1, Request((1, 2, 3, 1, 2), speculation=Speculation(length=4))),
    )
    rates = []
    for finished in (True, False):
        draft = speculator.drafts([talker])[0]
        talker.finished = finished
        speculator.settle(talker, draft, 1)
        rates.append(speculator.facts()["lookup"]["rates"][draft.sort])
        talker.finished = False
    assert rates[1] < rates[0]


def test_guesses_that_always_come_true_make_answers_of_few_calls() -> None:
    model = Synthetic(50, seed=1, past=4)
    speculator = Speculator(model, draft=Synthetic(50, seed=1, past=4))
    for width in range(1, 18):  # calls that take long, and hardly longer with more tokens
        for _ in range(3):
            speculator.times.add(width, 100.0 + width)
    speculator.times.add = lambda tokens, seconds: None  # type: ignore[method-assign]
    talker = speak(model, [Request((1, 2), 300, seed=1, speculation=Speculation(kind="draft"))], speculator)[0]
    assert talker.calls < 300 / 3
    assert speculator.facts()["draft"]["rates"][0] > 0.9


def test_a_row_that_ended_leaves_nothing_behind() -> None:
    model, draft = Synthetic(9), Synthetic(9)
    speculator = Speculator(model, draft=draft)
    kinds = [DRAFT, Speculation(length=2), None]
    requests = [Request((1, 2, key), 20, seed=key, speculation=kinds[key % 3]) for key in range(9)]
    speak(model, requests, speculator)
    assert not draft.made[0].held and not speculator._talks
    speculator.forget(4)
    speculator.forget(12345)


@given(st.integers(1, 6), st.integers(0, 5))
@settings(max_examples=20)
def test_an_answer_is_never_longer_than_its_room(room: int, length: int) -> None:
    model = Synthetic(9)
    speculation = Speculation(kind="draft", length=length)
    request = Request((1, 2), room, Sampling(temperature=0.5), seed=2, speculation=speculation)
    talker = speak(model, [request], Speculator(model, draft=model))[0]
    assert len(talker.output) == room


def test_nothing_is_guessed_behind_an_end() -> None:
    model = Synthetic(6)
    talker = Talker(1, Request((1, 2, 3, 5, 4, 1, 2), speculation=Speculation(length=4)))
    talker.state = talker.state.plus(3)
    assert Speculator(model, ends=[5]).drafts([talker])[0].ids == (5,)
    assert Speculator(model).drafts([talker])[0].ids == (5, 4, 1, 2)


def test_guesses_that_a_grammar_forbids_are_cut_before_the_call(tokenizer: Tokenizer) -> None:
    class Reading(GrammarRule):
        def reads(self, state: State, ids: Sequence[int]) -> int:
            self._follow(state.output)
            return 0 if self._stopped() else int(self._matcher.validate_tokens(list(ids)))

    rule = Reading(Grammar(words_of(tokenizer), Constraint.regex("[a-c]{9}")))
    prompt = tuple(b"abcabcdab")
    request = Request(prompt, 20, seed=1, rules=(rule,), speculation=Speculation(length=8))
    talker = Talker(1, request)
    speculator = Speculator(Synthetic(tokenizer.vocab_size))
    for token, guesses in ((b"c", b""), (b"a", b"bc"), (b"b", b"c"), (b"c", b"")):  # what follows is a "d"
        talker.state = talker.state.plus(token[0])
        draft = speculator.drafts([talker])[0]
        assert bytes(draft.ids) == guesses
        assert rule.reads(talker.state, draft.ids) == len(draft)  # looking ahead has moved nothing


def test_a_rule_that_fails_when_it_looks_ahead_costs_guesses_only() -> None:
    class Broken:
        def __call__(self, scores: np.ndarray, state: State) -> np.ndarray:
            return scores

        def reads(self, state: State, ids: Sequence[int]) -> int:
            raise ValueError("no")

    talker = Talker(1, Request((1, 2, 3, 1, 2), seed=1, rules=(Broken(),), speculation=Speculation(length=4)))
    assert not len(Speculator(Synthetic(6)).drafts([talker])[0])
