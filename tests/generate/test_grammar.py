"""Constraints as rules on tokens: what may come next, what must, when it ends; going back; what is refused."""

from __future__ import annotations

import gc
import json
import random
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.generate.constraint import Constraint
from orchard.generate.errors import BadGrammar, GrammarStuck, NumericError, UnsupportedSchema
from orchard.generate.grammar import KEPT, GrammarRule, grammar_for, grammar_text
from orchard.generate.grammar_words import token_bytes
from orchard.generate.protocol import State
from orchard.text.tokenizer import Tokenizer

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def allowed(rule: GrammarRule, state: State, vocab: int) -> list[int]:
    return [int(token) for token in np.flatnonzero(np.isfinite(rule(np.zeros(vocab, np.float32), state)))]


def state_of(tokenizer: Tokenizer, text: str) -> State:
    return State((1,), tokenizer.encode(text))


def random_answer(tokenizer: Tokenizer, constraint: Constraint, seed: int, most: int = 400) -> State:
    """An answer of random tokens that the rule allows, forced ones as they come; it ends with an end token."""
    chance = random.Random(seed)
    rule = grammar_for(tokenizer, constraint).rule()
    state = State((1,))
    while len(state.output) < most and not (state.output and state.output[-1] in tokenizer.eos_ids):
        tokens = rule.forced(state) or (chance.choice(allowed(rule, state, tokenizer.vocab_size)),)
        for token in tokens:
            state = state.plus(token)
    return state


def text_of(tokenizer: Tokenizer, state: State) -> str:
    return b"".join(tokenizer.token_bytes(i) for i in state.output if i not in tokenizer.eos_ids).decode()


def test_tokens_that_do_not_fit_are_ruled_out_and_the_scores_stay_as_they_were(tokenizer: Tokenizer) -> None:
    rule = grammar_for(tokenizer, Constraint.regex("(?:the|and)!")).rule()
    scores = np.arange(tokenizer.vocab_size, dtype=np.float32)
    before = scores.copy()
    out = rule(scores, State((1,)))
    first = {tokenizer.token_bytes(int(i)) for i in np.flatnonzero(np.isfinite(out))}
    assert first == {b"t", b"th", b"the", b"a", b"an", b"and"}
    assert (out[np.isfinite(out)] == before[np.isfinite(out)]).all() and (scores == before).all()
    assert out.dtype == np.float32


def test_the_end_comes_only_where_the_answer_may_end_and_then_nothing_else(tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_id
    rule = grammar_for(tokenizer, Constraint.regex("[ab]{2,3}")).rule()
    vocab = tokenizer.vocab_size
    assert end not in allowed(rule, state_of(tokenizer, "a"), vocab)
    assert (
        end in allowed(rule, state_of(tokenizer, "ab"), vocab)
        and len(allowed(rule, state_of(tokenizer, "ab"), vocab)) == 3
    )
    full = state_of(tokenizer, "aba")
    assert allowed(rule, full, vocab) == [end] and rule.complete(full) and rule.forced(full) == ()
    assert not rule.complete(state_of(tokenizer, "ab"))


def test_an_answer_that_is_over_stays_over(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_id is not None
    rule = grammar_for(tokenizer, Constraint.regex("[ab]{2,3}")).rule()
    over = state_of(tokenizer, "ab").plus(tokenizer.eos_id)
    assert rule.complete(over) and allowed(rule, over, tokenizer.vocab_size) == [tokenizer.eos_id]
    assert rule.forced(over) == () and not rule.complete(state_of(tokenizer, "ab"))


def test_scores_beyond_the_vocabulary_are_ruled_out_and_missing_ones_do_no_harm(tokenizer: Tokenizer) -> None:
    rule = grammar_for(tokenizer, Constraint.regex(".*")).rule()
    vocab = tokenizer.vocab_size
    assert max(allowed(rule, State((1,)), vocab + 50)) < vocab
    assert len(rule(np.zeros(100, np.float32), State((1,)))) == 100
    assert allowed(rule, state_of(tokenizer, "the"), vocab + 50) == allowed(rule, state_of(tokenizer, "the"), vocab)


def test_control_tokens_are_never_allowed_as_text(tokenizer: Tokenizer) -> None:
    rule = grammar_for(tokenizer, Constraint.regex("[^x]+")).rule()
    assert set(allowed(rule, State((1,)), tokenizer.vocab_size)).isdisjoint(tokenizer.control_ids)


def test_every_kind_of_constraint_holds(tokenizer: Tokenizer) -> None:
    kinds = {
        Constraint.json_schema(PERSON): lambda text: set(json.loads(text)) == {"name", "age"},
        Constraint.regex(r"^\d{2}-[a-c]+$"): lambda text: (
            text[:2].isdigit() and text[2] == "-" and set(text[3:]) <= set("abc")
        ),
        Constraint.choices(["yes", "no", 'a "quoted" — one\n', "no way"]): lambda text: (
            text in ("yes", "no", 'a "quoted" — one\n', "no way")
        ),
        Constraint.lark('start: "<" word ">"\nword: /[a-z]{1,4}/'): lambda text: text[0] == "<" and text[-1] == ">",
    }
    for constraint, right in kinds.items():
        for seed in range(5):
            state = random_answer(tokenizer, constraint, seed)
            assert state.output[-1] == tokenizer.eos_id and right(text_of(tokenizer, state)), constraint


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), back=st.data())
def test_going_back_gives_what_a_fresh_rule_gives(tokenizer: Tokenizer, seed: int, back: Any) -> None:
    constraint = Constraint.json_schema(PERSON)
    state = random_answer(tokenizer, constraint, seed)
    rule, vocab = grammar_for(tokenizer, constraint).rule(), tokenizer.vocab_size
    for length in back.draw(st.lists(st.integers(0, len(state.output)), min_size=2, max_size=8)):
        here = State((1,), state.output[:length])  # equal tokens of another object
        fresh = grammar_for(tokenizer, constraint).rule()
        assert allowed(rule, here, vocab) == allowed(fresh, here, vocab)
        assert rule.forced(here) == fresh.forced(here) and rule.complete(here) == fresh.complete(here)


def test_two_continuations_of_the_same_tokens_do_not_mix(tokenizer: Tokenizer) -> None:
    rule = grammar_for(tokenizer, Constraint.choices(["abc", "abd!", "axe"])).rule()
    start = State((1,), [tokenizer.encode("a")[0]])
    left, right = start.plus(tokenizer.encode("b")[0]), start.plus(tokenizer.encode("x")[0])
    for _ in range(2):
        assert {tokenizer.token_bytes(i) for i in allowed(rule, left, tokenizer.vocab_size)} == {b"c", b"d"}
        assert tokenizer.token_bytes(allowed(rule, right, tokenizer.vocab_size)[0]) == b"e"


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_forced_tokens_are_the_only_ones_that_the_mask_allows(tokenizer: Tokenizer, seed: int) -> None:
    constraint = Constraint.json_schema(PERSON)
    rule, other, chance = (
        grammar_for(tokenizer, constraint).rule(),
        grammar_for(tokenizer, constraint).rule(),
        random.Random(seed),
    )
    state = State((1,))
    while not (state.output and state.output[-1] in tokenizer.eos_ids):
        options = allowed(other, state, tokenizer.vocab_size)
        for token in rule.forced(state):
            assert allowed(other, state, tokenizer.vocab_size) == [token]
            state = state.plus(token)
            options = allowed(other, state, tokenizer.vocab_size)
        state = state.plus(chance.choice(options))


def test_a_rule_says_how_many_guesses_could_follow_and_stays_where_it_was(tokenizer: Tokenizer) -> None:
    rule = grammar_for(tokenizer, Constraint.json_schema(PERSON)).rule()
    state = state_of(tokenizer, '{"name":')
    before = allowed(rule, state, tokenizer.vocab_size)
    fits, wrong = tokenizer.encode('"Ann"'), tokenizer.encode("]")
    assert rule.reads(state, [*fits, *wrong]) == len(fits)
    assert rule.reads(state, wrong) == 0
    assert allowed(rule, state, tokenizer.vocab_size) == before


def test_a_character_may_be_split_over_tokens(tokenizer: Tokenizer) -> None:
    rule = grammar_for(tokenizer, Constraint.json_schema({"const": "é€😀"})).rule()
    spelled = '"é€😀"'.encode()
    state = State((1,))
    for byte in spelled:
        options = {tokenizer.token_bytes(i): i for i in allowed(rule, state, tokenizer.vocab_size)}
        state = state.plus(options[bytes([byte])])
    assert rule.complete(state)


def test_a_token_that_does_not_fit_is_a_typed_error_and_the_rule_can_go_on_elsewhere(tokenizer: Tokenizer) -> None:
    rule = grammar_for(tokenizer, Constraint.choices(["the end"])).rule()
    for ask in (rule.forced, rule.complete, lambda state: rule(np.zeros(300, np.float32), state)):
        with pytest.raises(GrammarStuck) as caught:
            ask(state_of(tokenizer, "then"))  # type: ignore[operator]
        assert isinstance(caught.value, NumericError) and "token" in str(caught.value) and caught.value.hint
        assert not rule.complete(state_of(tokenizer, "the"))
    with pytest.raises(GrammarStuck):
        rule(np.zeros(300, np.float32), State((1,), [10**6]))


@pytest.mark.parametrize(
    ("constraint", "error"),
    [
        (Constraint.regex(r"(?=a)b"), BadGrammar),
        (Constraint.regex(r"(a"), BadGrammar),
        (Constraint.regex(r"(a)\1"), BadGrammar),
        (Constraint.regex("[]"), BadGrammar),
        (Constraint.lark("start: nothing_there"), BadGrammar),
        (Constraint.lark("begin: /a/"), BadGrammar),
        (Constraint.lark("start: /a/ &"), BadGrammar),
        (Constraint.lark("start: A\nA: /a/ & /b/"), BadGrammar),
        (Constraint.json_schema({"minLenght": 3}), UnsupportedSchema),
        (Constraint.json_schema(False), UnsupportedSchema),
        (Constraint.json_schema({"type": "string", "minLength": 5, "maxLength": 4}), UnsupportedSchema),
    ],
)
def test_what_cannot_be_held_to_is_refused_before_any_token(
    tokenizer: Tokenizer, constraint: Constraint, error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        grammar_for(tokenizer, constraint)
    assert caught.value.hint and caught.value.exit_code == 2  # type: ignore[attr-defined]


def test_a_pattern_may_have_anchors_and_flags_of_the_other_dialect(tokenizer: Tokenizer) -> None:
    for pattern in ("^(?:yes|no)$", "yes|no", "^yes|no$", "(?i)YES|no"):
        assert text_of(tokenizer, random_answer(tokenizer, Constraint.regex(pattern), 3)).lower() in ("yes", "no")


def test_a_grammar_is_made_once_and_only_so_many_are_kept(tokenizer: Tokenizer) -> None:
    first = grammar_for(tokenizer, Constraint.regex("kept"))
    assert grammar_for(tokenizer, Constraint.regex("kept")) is first
    for number in range(KEPT):
        grammar_for(tokenizer, Constraint.regex(f"other{number}"))
    assert grammar_for(tokenizer, Constraint.regex("kept")) is not first


def test_a_grammar_that_has_learned_gives_the_same_masks(tokenizer: Tokenizer) -> None:
    constraint = Constraint.json_schema({**PERSON, "title": "learned"})
    fresh, vocab = grammar_for(tokenizer, constraint).rule(), tokenizer.vocab_size
    for seed in range(3):
        answer = random_answer(tokenizer, constraint, seed)
        assert grammar_for(tokenizer, constraint).rule().complete(answer)
    state = State((1,))
    learned = grammar_for(tokenizer, constraint).rule()
    for token in answer.output:
        assert allowed(learned, state, vocab) == allowed(fresh, state, vocab)
        state = state.plus(token)


def test_many_threads_may_share_a_grammar(tokenizer: Tokenizer) -> None:
    wrong: list[str] = []

    def work(seed: int) -> None:
        try:
            for number in range(6):
                constraint = Constraint.json_schema({**PERSON, "description": str(number % 3)})
                assert json.loads(text_of(tokenizer, random_answer(tokenizer, constraint, seed * 100 + number)))
        except BaseException as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_tokenizer_can_go_away(tokenizer: Tokenizer) -> None:
    twin = Tokenizer(tokenizer._loaded)
    grammar_for(twin, Constraint.regex("a+")).rule()
    gone = weakref.ref(twin)
    del twin
    gc.collect()
    assert gone() is None


def test_bytes_of_tokens_are_the_same_in_one_go(tokenizer: Tokenizer) -> None:
    assert token_bytes(tokenizer) == [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]


def test_constraints_are_texts_that_others_can_build_on() -> None:
    assert grammar_text(Constraint.choices(["a\x7fb", 'say "x"'])) == 'start: "a\\u007fb" | "say \\"x\\""\n'
    assert grammar_text(Constraint.regex("a/b")) == "start: TEXT\nTEXT: /a\\x{2F}b/\n"


def test_large_constraints_do_not_add_up(tokenizer: Tokenizer) -> None:
    from orchard.generate.grammar import KEPT_CHARACTERS, _kept

    for number in range(6):
        grammar_for(
            tokenizer, Constraint.choices([f"{number} {'x' * 300} {n}" for n in range(KEPT_CHARACTERS // 1200)])
        )
    kept = _kept[tokenizer]
    assert sum(len(one.source) for one in kept) <= KEPT_CHARACTERS and 1 < len(kept) < 6
