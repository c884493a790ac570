"""The executor over a model of this machine: every tool mode with the default model, and models of other templates by script."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import pytest

from orchard.core.errors import BadFile, UsageError
from orchard.generate.constraint import Constraint
from orchard.generate.engine import Engine
from orchard.generate.protocol import Held, Use, Work
from orchard.generate.request import Sampling
from orchard.session.errors import ExceededContextWindowSizeError
from orchard.session.executors.local import LocalExecutor
from orchard.session.model import Model, load
from orchard.session.tools import ToolBox
from orchard.session.turn import Call, Done, Event, Executor, Reasoning, Text, ToolSpec, Turn
from orchard.text.messages import Message
from orchard.text.tokenizer import Tokenizer
from tests.session.tools.test_call_formats import HERMES_TEMPLATE, LLAMA_TEMPLATE, tokenizer_of
from tests.tiny import TEMPLATE


def get_weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


TOOLS = ToolBox([get_weather, add])
USER = (Message("user", "What is the weather in Paris?"),)


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.delta for event in events if isinstance(event, Text))


def calls_of(events: Sequence[Event]) -> list[tuple[str, Any]]:
    return [(event.name, json.loads(event.arguments)) for event in events if isinstance(event, Call)]


def done_of(events: Sequence[Event]) -> Done:
    assert isinstance(events[-1], Done) and sum(isinstance(event, Done) for event in events) == 1
    return events[-1]


# A model by script -----------------------------------------------------------------------------------------------------


class Limits:
    def __init__(self, vocab: int, context: int) -> None:
        self.vocab, self.context = vocab, context


class ScriptedSlots:
    goes_back = True
    copies = False

    def __init__(self, runner: ScriptedRunner, count: int) -> None:
        self.runner = runner
        self.count = count
        self.lengths = [0] * count

    def open(self, slot: int, length: int, use: Use | None = None, variant: str | None = None) -> int:
        return 0

    def copy(self, source: int, target: int, tokens: int) -> bool:
        return False

    def run(self, work: Sequence[Work]) -> list[np.ndarray]:
        found = []
        for one in work:
            self.lengths[one.slot] += len(one.tokens)
            length = self.lengths[one.slot]
            found.append(self.runner.scores(range(length - one.wanted + 1, length + 1)))
        return found

    def back(self, slot: int, tokens: int) -> None:
        self.lengths[slot] = tokens

    def hold(self, slot: int, tokens: int) -> Held | None:
        return None

    def hidden(self, slot: int) -> np.ndarray | None:
        return None

    def close(self, slot: int) -> None:
        self.lengths[slot] = 0

    def nbytes(self, length: int) -> int:
        return 0


class ScriptedRunner:
    """Wants to say one text after so many tokens (`began`), wherever prompts end."""

    def __init__(self, tokenizer: Tokenizer, says: str, context: int = 4096) -> None:
        self.config = Limits(tokenizer.vocab_size, context)
        self.says = [*tokenizer.encode_piece(says, first=False), tokenizer.eos_id]
        self.began = 0

    def slots(self, count: int) -> ScriptedSlots:
        return ScriptedSlots(self, count)

    def scores(self, lengths: Sequence[int]) -> np.ndarray:
        rows = np.zeros((len(lengths), self.config.vocab), np.float32)
        for row, length in enumerate(lengths):
            rows[row, self.says[min(max(length - self.began, 0), len(self.says) - 1)]] = 20
        return rows


class ScriptedModel:
    """As much of a `Model` as an executor uses."""

    adapters: Any = None

    def __init__(self, folder: Path, template: str, says: str, context: int = 4096) -> None:
        self.name = "scripted"
        self.tokenizer = tokenizer_of(folder, template)
        self.context = context
        self.runner = ScriptedRunner(self.tokenizer, says, context)
        self.engine = Engine(self.runner, self.tokenizer)  # type: ignore[arg-type]


def scripted(folder: Path, template: str, says: str, turn: Turn, context: int = 4096) -> list[Event]:
    model = ScriptedModel(folder, template, says, context)
    executor = LocalExecutor(model)  # type: ignore[arg-type]
    model.runner.began = executor.count(turn.messages, turn.tools)
    return list(executor.run(turn, threading.Event()))


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def test_text_and_then_a_call_in_the_models_own_format(tmp_path: Path) -> None:
    events = scripted(tmp_path, HERMES_TEMPLATE, "Let me add.\n" + CALL, Turn(USER, TOOLS.specs()))
    assert text_of(events) == "Let me add.\n"
    assert calls_of(events) == [("add", {"a": 1, "b": 2})]
    assert done_of(events).finish == "tool_calls"
    assert next(event.id for event in events if isinstance(event, Call)).startswith("call_")


def test_several_calls_at_once_or_one(tmp_path: Path) -> None:
    second = CALL.replace("1", "7")
    events = scripted(tmp_path, HERMES_TEMPLATE, f"{CALL}\n{second}", Turn(USER, TOOLS.specs()))
    assert calls_of(events) == [("add", {"a": 1, "b": 2}), ("add", {"a": 7, "b": 2})]
    assert len({event.id for event in events if isinstance(event, Call)}) == 2
    single = Turn(USER, TOOLS.specs(), parallel_calls=False)
    assert len(calls_of(scripted(tmp_path, HERMES_TEMPLATE, f"{CALL}\n{second}", single))) == 1


def test_no_call_is_made_that_the_model_does_not_open(tmp_path: Path) -> None:
    events = scripted(tmp_path, HERMES_TEMPLATE, "It is sunny. <tool", Turn(USER, TOOLS.specs()))
    assert text_of(events) == "It is sunny. <tool" and not calls_of(events) and done_of(events).finish == "stop"


def test_a_wrong_call_is_bent_into_a_right_one(tmp_path: Path) -> None:
    wrong = '<tool_call>\n{"name": "subtract", "arguments": {"a": "x", "c": 2}}\n</tool_call>'
    events = scripted(tmp_path, HERMES_TEMPLATE, wrong, Turn(USER, TOOLS.specs(), max_tokens=200))
    for name, arguments in calls_of(events):
        assert TOOLS.call(name, json.dumps(arguments)).error is None
    assert done_of(events).finish in ("tool_calls", "length")


def test_required_and_named_calls_need_no_opening(tmp_path: Path) -> None:
    events = scripted(tmp_path, HERMES_TEMPLATE, CALL, Turn(USER, TOOLS.specs(), "required"))
    assert calls_of(events) == [("add", {"a": 1, "b": 2})] and not text_of(events)
    named = scripted(tmp_path, HERMES_TEMPLATE, CALL, Turn(USER, TOOLS.specs(), "get_weather", max_tokens=300))
    assert all(name == "get_weather" for name, _ in calls_of(named))


def test_calls_as_bare_json_with_parameters(tmp_path: Path) -> None:
    says = '{"name": "add", "parameters": {"a": 3, "b": 4}}'
    assert calls_of(scripted(tmp_path, LLAMA_TEMPLATE, says, Turn(USER, TOOLS.specs()))) == [("add", {"a": 3, "b": 4})]


def test_a_stop_text_of_the_caller_is_no_call(tmp_path: Path) -> None:
    events = scripted(tmp_path, HERMES_TEMPLATE, "One. END " + CALL, Turn(USER, TOOLS.specs(), stop=("END",)))
    assert text_of(events) == "One. " and not calls_of(events)


def test_a_wanted_form_is_for_text_and_not_for_calls(tmp_path: Path) -> None:
    form = Constraint.choices(["yes", "no"])
    called = scripted(tmp_path, HERMES_TEMPLATE, CALL, Turn(USER, TOOLS.specs(), constraint=form))
    assert calls_of(called) == [("add", {"a": 1, "b": 2})]
    said = scripted(tmp_path, HERMES_TEMPLATE, "no idea", Turn(USER, TOOLS.specs(), constraint=form))
    assert text_of(said) == "no" and not calls_of(said)


def test_thoughts_come_apart_from_text(tmp_path: Path) -> None:
    events = scripted(tmp_path, TEMPLATE, "<think>\nHm, 4?\n</think>\n\nFour.", Turn(USER))
    assert "".join(event.delta for event in events if isinstance(event, Reasoning)).strip() == "Hm, 4?"
    assert text_of(events) == "Four."
    assert 0 < done_of(events).usage.reasoning < done_of(events).usage.output


def test_thoughts_that_the_template_opened(tmp_path: Path) -> None:
    events = scripted(tmp_path, TEMPLATE + "<think>\n", "So.</think>Four.", Turn(USER))
    assert isinstance(events[0], Reasoning)
    assert text_of(events) == "Four."


def test_logprobs_of_every_token_of_the_text(tmp_path: Path) -> None:
    events = scripted(tmp_path, TEMPLATE, "Héllo", Turn(USER, logprobs=2))
    ids = [one for event in events if isinstance(event, Text) for one in event.ids]
    logprobs = [one for event in events if isinstance(event, Text) for one in event.logprobs]
    assert len(ids) == len(logprobs) == done_of(events).usage.output == len("Héllo".encode())
    assert [one.id for one in logprobs] == ids and all(len(one.top) == 2 for one in logprobs)


def test_an_answer_begins_as_told(tmp_path: Path) -> None:
    assert text_of(scripted(tmp_path, TEMPLATE, "Hello", Turn(USER, begin="Well: "))).startswith("Well: ")
    form = Constraint.choices(["yes, please", "no"])
    assert text_of(scripted(tmp_path, TEMPLATE, "no", Turn(USER, begin="yes", constraint=form))) == "yes, please"
    with pytest.raises(UsageError, match="cannot begin"):
        scripted(tmp_path, TEMPLATE, "no", Turn(USER, begin="maybe", constraint=form))


def test_turns_that_cannot_be_answered_raise_at_once(tmp_path: Path) -> None:
    executor = LocalExecutor(ScriptedModel(tmp_path, TEMPLATE, "x", context=256))  # type: ignore[arg-type]
    cancel = threading.Event()
    with pytest.raises(ExceededContextWindowSizeError) as caught:
        executor.run(Turn((Message("user", "long " * 200),)), cancel)
    assert caught.value.limit == 256 and caught.value.tokens > 1000
    for turn, words in (
        (Turn(USER, (), "required"), "no tools"),
        (Turn(USER, TOOLS.specs(), "subtract"), "subtract"),
        (Turn(USER, (ToolSpec("t", "", {"type": "object"}),), "required", begin="x"), "begin"),
        (Turn(USER, max_tokens=0), "max_tokens"),
    ):
        with pytest.raises(UsageError, match=words):
            executor.run(turn, cancel)


def test_room_is_all_that_is_left(tmp_path: Path) -> None:
    events = scripted(tmp_path, TEMPLATE, "".join(Random(1).choices("abcdefgh", k=1000)), Turn(USER), context=256)
    assert done_of(events).finish == "length"
    assert done_of(events).usage.input + done_of(events).usage.output == 256


def test_what_is_not_whole_is_no_call(tmp_path: Path) -> None:
    events = scripted(tmp_path, HERMES_TEMPLATE, CALL, Turn(USER, TOOLS.specs(), "required", max_tokens=40))
    assert not calls_of(events) and done_of(events).finish == "length"


# The default model ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Model:
    return load(smollm2)


@pytest.fixture(scope="module")
def executor(model: Model) -> LocalExecutor:
    return LocalExecutor(model)


def run(executor: LocalExecutor, turn: Turn) -> list[Event]:
    return list(executor.run(turn, threading.Event()))


@pytest.mark.real
def test_it_is_an_executor(executor: LocalExecutor) -> None:
    assert isinstance(executor, Executor)
    assert (
        executor.context_size == 8192 and "tools" in executor.capabilities and "reasoning" not in executor.capabilities
    )
    assert not executor.format.native


@pytest.mark.real
def test_allowed_calls_where_a_tool_fits_and_else_answers(executor: LocalExecutor) -> None:
    called = run(executor, Turn(USER, TOOLS.specs()))
    assert calls_of(called)[0][0] == "get_weather" and calls_of(called)[0][1]["city"] == "Paris"
    assert done_of(called).finish == "tool_calls" and not text_of(called)
    said = run(executor, Turn((Message("user", "Tell me a joke"),), TOOLS.specs(), max_tokens=8))
    assert text_of(said) and not calls_of(said)


@pytest.mark.real
def test_a_tool_that_was_called_is_not_called_again_for_the_same_words(executor: LocalExecutor) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    talk = (*USER, Message("assistant", "", tool_calls=[call]), Message("tool", "It is sunny.", name="get_weather"))
    events = run(executor, Turn(talk, TOOLS.specs()[:1], max_tokens=40))
    assert "sunny" in text_of(events) and not calls_of(events)


@pytest.mark.real
def test_another_tool_may_follow_for_the_same_words(executor: LocalExecutor) -> None:
    asked = Message("user", "Add 5 and 7, and tell me the weather in Paris.")
    first = calls_of(run(executor, Turn((asked,), TOOLS.specs(), "required")))
    assert len(first) == 1  # one a step, also where several are allowed
    call = {"id": "1", "type": "function", "function": {"name": first[0][0], "arguments": first[0][1]}}
    talk = (asked, Message("assistant", "", tool_calls=[call]), Message("tool", "done", name=first[0][0]))
    second = calls_of(run(executor, Turn(talk, TOOLS.specs(), max_tokens=60)))
    assert {name for name, _ in first + second} == {"add", "get_weather"}


@pytest.mark.real
def test_required_named_and_disallowed(executor: LocalExecutor) -> None:
    sum_ = (Message("user", "What is 17 plus 25?"),)
    assert calls_of(run(executor, Turn(sum_, TOOLS.specs(), "required", parallel_calls=False))) == [
        ("add", {"a": 17, "b": 25})
    ]
    named = calls_of(run(executor, Turn(sum_, TOOLS.specs(), "get_weather", parallel_calls=False)))
    assert [name for name, _ in named] == ["get_weather"]
    said = run(executor, Turn(USER, TOOLS.specs(), "disallowed", max_tokens=5))
    assert text_of(said) and not calls_of(said)


@pytest.mark.real
@pytest.mark.parametrize("seed", range(2))
def test_calls_are_valid_at_any_temperature(executor: LocalExecutor, seed: int) -> None:
    hot = Turn(
        USER,
        TOOLS.specs(),
        "required",
        parallel_calls=False,
        sampling=Sampling(temperature=1.5),
        seed=seed,
        max_tokens=200,
    )
    events = run(executor, hot)
    for name, arguments in calls_of(events):
        assert TOOLS.call(name, json.dumps(arguments)).error is None
    again = run(executor, hot)
    assert calls_of(again) == calls_of(events) and done_of(again).seed == seed


@pytest.mark.real
def test_fixed_text_of_a_call_costs_no_run_of_the_model(executor: LocalExecutor) -> None:
    usage = done_of(run(executor, Turn(USER, TOOLS.specs()[:1], "required", parallel_calls=False))).usage
    assert usage.calls <= 0.7 * usage.output


@pytest.mark.real
def test_cancel_ends_it_within_a_token(executor: LocalExecutor) -> None:
    cancel = threading.Event()
    events: Iterator[Event] = executor.run(Turn((Message("user", "Count to a thousand."),)), cancel)
    first = next(events)
    cancel.set()
    rest = list(events)
    assert isinstance(first, Text) and done_of(rest).finish == "cancelled" and len(rest) <= 3
    before = threading.Event()
    before.set()
    assert done_of(list(executor.run(Turn(USER, TOOLS.specs()), before))).finish == "cancelled"


@pytest.mark.real
def test_counts_of_messages_and_of_tools(executor: LocalExecutor) -> None:
    plain, with_tools = executor.count(USER), executor.count(USER, TOOLS.specs()[:1])
    events = run(executor, Turn(USER, TOOLS.specs()[:1], "required", parallel_calls=False))
    assert 0 < executor.count(USER, answer=False) < plain < with_tools == done_of(events).usage.input
    assert executor.count((), TOOLS.specs()) > 0 and executor.count((), ()) == 0


@pytest.mark.real
def test_a_prewarmed_prompt_is_found_and_answers_alike(model: Model) -> None:
    cold, warm = LocalExecutor(load(model.source or "")), LocalExecutor(load(model.source or ""))
    long = (Message("system", "You are a careful assistant. " * 20), *USER)
    warm.prewarm(long[:1])
    turn = Turn(long, max_tokens=5)
    one, two = run(cold, turn), run(warm, turn)
    assert text_of(one) == text_of(two)
    assert done_of(one).usage.cached == 0 and done_of(two).usage.cached >= 64


@pytest.mark.real
def test_what_was_read_goes_from_process_to_process(model: Model, tmp_path: Path) -> None:
    long = (Message("system", "You are a careful assistant. " * 20), *USER)
    path = tmp_path / "prefix"
    saved = LocalExecutor(model).save_prefix(long, (), path)
    other = LocalExecutor(load(model.source or ""))
    assert saved >= 64 and other.load_prefix(path) >= saved
    assert done_of(run(other, Turn(long, max_tokens=2))).usage.cached >= 64
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(BadFile):
        other.load_prefix(path)
