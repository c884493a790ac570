"""Context policies: what comes out fits or an error says why not, and nothing else is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import ContextOverflow, UsageError
from orchard.session.errors import DecodingFailureError, ExceededContextWindowSizeError
from orchard.session.policies import (
    Chain,
    ContextPolicy,
    DropToolCalls,
    Fitted,
    RollingWindow,
    Room,
    Strict,
    Summarise,
    fit,
)
from orchard.session.transcript import (
    Entry,
    Instructions,
    Prompt,
    Response,
    ToolCall,
    ToolCalls,
    ToolOutput,
    Transcript,
)


def words(transcript: Transcript) -> int:
    """A token a word, and one for every message."""
    return sum(1 + len(message.content.split()) for message in transcript.messages())


def room(limit: int, reserve: int = 0) -> Room:
    return Room(limit, words, reserve)


def turn(number: int, *, tool: bool = False, done: bool = True, more: int = 0) -> list[Entry]:
    """Ten tokens of question and answer; with a tool, six more for its call and output."""
    entries: list[Entry] = [Prompt(f"q{number} a b c" + " more" * more, id=f"p{number}")]
    if tool:
        entries += [ToolCalls([ToolCall("f", {}, f"t{number}")], id=f"c{number}")]
        entries += [ToolOutput("f", "w x y z", f"t{number}", id=f"o{number}")]
    return [*entries, Response(f"r{number} d e f", id=f"r{number}")] if done else entries


def talk(turns: int, *, tool: bool = False, more: int = 0) -> Transcript:
    """`turns` that are over, and a question that is being answered."""
    over = [entry for number in range(turns) for entry in turn(number, tool=tool, more=more)]
    return Transcript([Instructions("Be brief.", id="i"), *over, Prompt("now what", id="now")])


def ids(transcript: Transcript) -> list[str]:
    return [entry.id for entry in transcript]


def test_strict_keeps_everything_or_says_by_how_much() -> None:
    transcript = talk(3)
    assert words(transcript) == 36
    assert fit(None, transcript, room(36)) == Fitted(transcript) == fit(Strict(), transcript, room(36))
    with pytest.raises(ExceededContextWindowSizeError) as caught:
        fit(Strict(), transcript, room(30))
    assert (caught.value.tokens, caught.value.limit) == (36, 30) and isinstance(caught.value, ContextOverflow)
    assert "36" in str(caught.value) and "30" in str(caught.value) and "6 tokens too long" in caught.value.hint
    with pytest.raises(ExceededContextWindowSizeError) as caught:
        Strict().fit(transcript, room(36, reserve=5))
    assert caught.value.tokens == 41 and "5 are kept for the answer" in caught.value.hint


def test_a_plain_function_may_measure() -> None:
    transcript = talk(1)
    assert Strict().fit(transcript, lambda given: 0) == transcript
    with pytest.raises(ExceededContextWindowSizeError, match="7 tokens longer"):
        Strict().fit(transcript, lambda given: -7)


def test_rolling_window_drops_the_oldest_turns() -> None:
    transcript = talk(3)
    assert fit(RollingWindow(), transcript, room(36)).dropped == ()
    fitted = fit(RollingWindow(), transcript, room(30))
    assert fitted.dropped == ("p0", "r0") and ids(fitted.transcript) == ["i", "p1", "r1", "p2", "r2", "now"]
    assert ids(fit(RollingWindow(), transcript, room(25)).transcript) == ["i", "p2", "r2", "now"]
    assert ids(fit(RollingWindow(), transcript, room(6)).transcript) == ["i", "now"]
    with pytest.raises(ExceededContextWindowSizeError) as caught:
        fit(RollingWindow(), transcript, room(5))  # instructions and the question alone are too long
    assert (caught.value.tokens, caught.value.limit) == (6, 5)
    assert len(transcript) == 8


def test_rolling_window_of_so_many_turns() -> None:
    assert ids(fit(RollingWindow(keep_turns=2), talk(5), room(1000)).transcript) == ["i", "p4", "r4", "now"]
    assert ids(fit(RollingWindow(keep_turns=9), talk(1), room(1000)).transcript) == ids(talk(1))
    assert ids(fit(RollingWindow(keep_turns=3), talk(5), room(8)).transcript) == ["i", "now"]


def test_rolling_window_may_drop_instructions() -> None:
    policy = RollingWindow(keep_instructions=False)
    assert ids(fit(policy, talk(2), room(100)).transcript)[0] == "i"
    fitted = fit(policy, talk(2), room(13))
    assert ids(fitted.transcript) == ["p1", "r1", "now"] and fitted.dropped == ("i", "p0", "r0")


def test_rolling_window_never_parts_a_call_from_its_output() -> None:
    transcript = talk(3, tool=True)
    for limit in range(6, words(transcript) + 1):
        kept = set(ids(fit(RollingWindow(), transcript, room(limit)).transcript))
        for number in range(3):
            assert len(kept & {f"p{number}", f"c{number}", f"o{number}", f"r{number}"}) in (0, 4)


def test_rolling_window_counts_seldom() -> None:
    calls = 0

    def counting(transcript: Transcript) -> int:
        nonlocal calls
        calls += 1
        return words(transcript)

    assert len(fit(RollingWindow(), talk(500), Room(100, counting)).transcript.turns()) == 10
    assert calls <= 12


def test_the_turn_in_the_middle_of_a_call_stays_whole() -> None:
    asked = Transcript([*talk(2)[:-1], *turn(9, tool=True, done=False)])
    left = ids(fit(RollingWindow(), asked, room(14)).transcript)
    assert left == ["i", "p9", "c9", "o9"]
    assert ids(fit(DropToolCalls(), asked, room(100)).transcript) == ids(asked)
    with pytest.raises(ExceededContextWindowSizeError):
        fit(DropToolCalls(), asked, room(20))


def test_drop_tool_calls() -> None:
    transcript = talk(3, tool=True)
    assert words(transcript) == 54
    assert fit(DropToolCalls(), transcript, room(54)).dropped == ()
    assert fit(DropToolCalls(), transcript, room(50)).dropped == ("c0", "o0")  # no more than is needed
    fitted = fit(DropToolCalls(), transcript, room(36))
    assert ids(fitted.transcript) == ids(talk(3)) and fitted.dropped == ("c0", "o0", "c1", "o1", "c2", "o2")
    with pytest.raises(ExceededContextWindowSizeError):
        fit(DropToolCalls(keep_last=3), transcript, room(40))
    assert fit(DropToolCalls(keep_last=3), transcript, room(48)).dropped == ("c0", "o0")


def test_calls_without_an_output_stay() -> None:
    half = ToolCalls([ToolCall("f", {}, "x"), ToolCall("f", {}, "y")], id="half")
    other: list[Entry] = [Prompt("q"), half, ToolOutput("f", "4", "x", id="ox"), Response("r")]
    transcript = Transcript([*other, *turn(1, tool=True), Prompt("now")])
    reached = fit(DropToolCalls(), transcript, Room(words(transcript) - 1, words))
    assert {"half", "ox"} <= set(ids(reached.transcript)) and reached.dropped == ("c1", "o1")


def summing(prompts: list[str]) -> Callable[[str], str]:
    def summarise(prompt: str) -> str:
        prompts.append(prompt)
        return f"sum {len(prompts)}"

    return summarise


def test_summarise() -> None:
    prompts: list[str] = []
    policy = Summarise(keep_turns=2, words=5)
    transcript = talk(4, more=40)
    assert fit(policy, transcript, room(300), summarise=summing(prompts)).summary is None and not prompts
    fitted = fit(policy, transcript, room(200), summarise=summing(prompts))
    assert fitted.dropped == ("p0", "r0", "p1", "r1", "p2", "r2")
    assert fitted.summary == "Summary of the conversation so far: sum 1"
    assert [entry.id for entry in fitted.transcript][2:] == ["p3", "r3", "now"]
    assert fitted.transcript.messages()[0].content == "Be brief.\n\nSummary of the conversation so far: sum 1"
    assert (
        len(prompts) == 1
        and "User: q0 a b c more" in prompts[0]
        and "\nAssistant: r0 d e f\n" in prompts[0]
        and "q3" not in prompts[0]
    )
    assert "at most 5 words" in prompts[0]


def test_the_next_summary_takes_in_the_last_one() -> None:
    prompts: list[str] = []
    first = fit(Summarise(words=5), talk(4, more=40), room(200), summarise=summing(prompts)).transcript
    assert len(prompts) == 1
    longer = Transcript([*first[:-1], *turn(7, more=40), *turn(8, more=40), Prompt("then", id="then")])
    again = Transcript.from_json_dict(longer.to_json_dict())  # also when it was saved and loaded in between
    second = fit(Summarise(words=5), again, room(160), summarise=summing(prompts))
    assert "Summary of the conversation so far: sum 1" in prompts[1] and "q3" in prompts[1]
    assert second.summary == "Summary of the conversation so far: sum 2"
    assert sum("sum 1" in message.content for message in second.transcript.messages()) == 0
    assert second.transcript.instructions == "Be brief.\n\nSummary of the conversation so far: sum 2"


def test_a_long_history_is_summed_up_in_pieces() -> None:
    prompts: list[str] = []
    limit = 60
    fit(Summarise(words=5), talk(30), room(limit), summarise=summing(prompts))
    assert len(prompts) > 3 and all("q" in prompt for prompt in prompts)
    for prompt in prompts:
        assert words(Transcript([Prompt(prompt)])) <= limit
    assert all("Summary of what came before:\nsum" in prompt for prompt in prompts[1:])
    asked = " ".join(prompts)
    assert all(f"q{number} " in asked and f"r{number} " in asked for number in range(29))


def test_fewer_turns_are_kept_where_a_summary_needs_the_room() -> None:
    prompts: list[str] = []
    fitted = fit(Summarise(keep_turns=4, words=5), talk(6), room(32), summarise=summing(prompts))
    assert [entry.id for entry in fitted.transcript][2:] == ["p5", "r5", "now"] and len(prompts) >= 1


def test_summaries_that_fail() -> None:
    with pytest.raises(UsageError, match="no model to ask"):
        fit(Summarise(words=5), talk(4), room(40))
    with pytest.raises(DecodingFailureError, match="empty"):
        fit(Summarise(words=5), talk(4), room(40), summarise=lambda prompt: " \n")
    with pytest.raises(ExceededContextWindowSizeError):
        fit(Summarise(words=5), talk(4), room(40), summarise=lambda prompt: "blah " * 100)
    with pytest.raises(ExceededContextWindowSizeError):
        fit(Summarise(words=5), Transcript([Prompt("long " * 50)]), room(40), summarise=lambda prompt: "x")
    own = Summarise(words=5, summarise=lambda prompt: "mine")
    assert "mine" in str(fit(own, talk(4), room(40), summarise=lambda prompt: "other").summary)


def test_chains() -> None:
    transcript = talk(3, tool=True)
    chain = Chain(DropToolCalls(), RollingWindow())
    assert fit(chain, transcript, room(50)).dropped == ("c0", "o0")  # the second has nothing left to do
    fitted = fit(chain, transcript, room(30))
    assert ids(fitted.transcript) == ["i", "p1", "r1", "p2", "r2", "now"]
    with pytest.raises(ExceededContextWindowSizeError):
        fit(chain, transcript, room(5))
    nested = Chain(Chain(DropToolCalls()), Chain(Summarise(words=5)))
    assert "fine" in str(fit(nested, transcript, room(33), summarise=lambda prompt: "fine").summary)
    assert chain == Chain(DropToolCalls(), RollingWindow()) != nested and "RollingWindow" in repr(chain)


def test_functions_are_policies_and_always_applied() -> None:
    def only_last(transcript: Transcript) -> Transcript:
        del transcript[:-1]
        return transcript

    transcript = talk(3)
    fitted = fit(only_last, transcript, room(1000))
    assert ids(fitted.transcript) == ["now"] and len(fitted.dropped) == 7 and len(transcript) == 8
    assert ids(fit(Chain(only_last, Strict()), transcript, room(10)).transcript) == ["now"]
    with pytest.raises(ExceededContextWindowSizeError):
        fit(lambda given: given, transcript, room(10))


def test_a_policy_of_ones_own() -> None:
    class LastThree:
        def fit(self, transcript: Transcript, room: Any) -> Transcript:
            del transcript[:-3]
            return transcript

    class GivesUp:
        def fit(self, transcript: Transcript, room: Any) -> Transcript:
            raise ExceededContextWindowSizeError(tokens=9, limit=8)

    assert isinstance(LastThree(), ContextPolicy) and isinstance(Strict(), ContextPolicy)
    transcript = talk(3)
    assert ids(fit(LastThree(), transcript, room(20)).transcript) == ["p2", "r2", "now"] and len(transcript) == 8
    with pytest.raises(ExceededContextWindowSizeError) as caught:
        fit(LastThree(), transcript, room(5))
    assert caught.value.limit == 5
    assert ids(fit(Chain(GivesUp(), RollingWindow()), transcript, room(6)).transcript) == ["i", "now"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RollingWindow(keep_turns=0), "keep_turns is 0"),
        (lambda: RollingWindow(keep_turns=True), "keep_turns is True"),
        (lambda: DropToolCalls(keep_last=0), "keep_last is 0"),
        (lambda: Summarise(keep_turns=0), "keep_turns is 0"),
        (lambda: Summarise(words=-1), "words is -1"),
        (lambda: fit("rolling", talk(1), room(9)), "a str is no context policy"),  # type: ignore[arg-type]
        (lambda: fit(lambda given: None, talk(1), room(9)), "gave a NoneType"),  # type: ignore[arg-type, return-value]
    ],
)
def test_misuse(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        make()
    assert caught.value.hint


def test_edges() -> None:
    for policy in (Strict(), RollingWindow(), DropToolCalls(), Summarise(), Chain()):
        assert fit(policy, Transcript(), room(0)) == Fitted(Transcript())
    only = Transcript([Instructions("a b c")])
    assert fit(RollingWindow(keep_turns=1), only, room(4)).transcript == only


POLICIES = [
    Strict(),
    RollingWindow(),
    RollingWindow(keep_turns=2),
    RollingWindow(keep_instructions=False),
    DropToolCalls(),
    DropToolCalls(keep_last=2),
    Summarise(words=3, summarise=lambda prompt: "in short"),
    Chain(DropToolCalls(), RollingWindow()),
    Chain(DropToolCalls(keep_last=2), Summarise(words=3, summarise=lambda prompt: "in short"), RollingWindow()),
]


@given(st.sampled_from(POLICIES), st.lists(st.booleans(), max_size=6), st.booleans(), st.integers(0, 110))
def test_the_promise(policy: ContextPolicy, tools: list[bool], calling: bool, limit: int) -> None:
    """It fits or raises; the given one is as before; order, the question, and pairs of calls and outputs stay."""
    over = [entry for number, tool in enumerate(tools) for entry in turn(number, tool=tool)]
    now = turn(99, tool=calling, done=False)
    transcript = Transcript([Instructions("Be brief.", id="i"), *over, *now])
    before = transcript.copy()
    try:
        fitted = fit(policy, transcript, room(limit))
    except ExceededContextWindowSizeError as error:
        assert error.tokens > error.limit == limit
        return
    finally:
        assert transcript == before
    assert words(fitted.transcript) <= limit
    made, old = ids(fitted.transcript), ids(transcript)
    assert [each for each in made if each in old] == [each for each in old if each in made]
    assert set(fitted.dropped) == set(old) - set(made) and made[-len(now) :] == ids(Transcript(now))
    assert {each[1:] for each in made if each[0] == "c"} == {each[1:] for each in made if each[0] == "o"}
    if words(transcript) <= limit and policy not in (POLICIES[2],):
        assert fitted.transcript == transcript  # nothing is dropped while everything fits
