"""Options: the SDK's names and refusals, numbers that stay numbers, and how they reach the engine."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.errors import UsageError
from orchard.generate.request import Sampling
from orchard.session.options import (
    ContextOptions,
    GenerationOptions,
    OptionsError,
    ReasoningLevel,
    SamplingMode,
    SamplingModeType,
    ToolCallingMode,
)


def test_nothing_said() -> None:
    options = GenerationOptions()
    assert options.sampling is options.temperature is options.maximum_response_tokens is None
    assert options.to_dict() == {} and options.tool_mode == "allowed" and options.chosen_seed is None
    assert options.sampling_of() == Sampling()  # the likeliest token, as in Model.generate and on the command line


def test_positions_are_those_of_the_sdk() -> None:
    mode = SamplingMode.random(50, seed=42)
    options = GenerationOptions(mode, 0.75, 100)
    assert (options.sampling, options.temperature, options.maximum_response_tokens) == (mode, 0.75, 100)
    with pytest.raises(TypeError):
        GenerationOptions(mode, 0.75, 100, "required")  # type: ignore[misc]
    assert options == GenerationOptions(temperature=0.75, maximum_response_tokens=100, sampling=mode)
    assert options != GenerationOptions(mode, 0.75, 101) and "0.75" in repr(options) and "100" in repr(options)


def test_sampling_modes() -> None:
    greedy = SamplingMode.greedy()
    assert greedy.mode_type == "greedy" and greedy.mode_type is SamplingModeType.GREEDY
    assert greedy.top is greedy.probability_threshold is greedy.seed is None
    top = SamplingMode.random(top=50, seed=42)
    assert top.mode_type == "random" and (top.top, top.seed) == (50, 42) and top != greedy
    assert all(part in repr(top) for part in ("SamplingMode", "random", "50", "42"))
    assert SamplingMode.random(probability_threshold=0.9) == SamplingMode("random", None, 0.9)  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        top.top = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        (GenerationOptions(temperature=0.7), Sampling(0.7)),
        (GenerationOptions(temperature=0), Sampling(0.0)),
        (GenerationOptions(SamplingMode.greedy()), Sampling()),
        (GenerationOptions(SamplingMode.greedy(), 0.9), Sampling()),
        (GenerationOptions(SamplingMode.random()), Sampling(1.0)),
        (GenerationOptions(SamplingMode.random(), 0.0), Sampling(0.0)),
        (GenerationOptions(SamplingMode.random(top=40)), Sampling(1.0, top_k=40)),
        (GenerationOptions(SamplingMode.random(top=40), 0.5), Sampling(0.5, top_k=40)),
        (GenerationOptions(SamplingMode.random(probability_threshold=0.9)), Sampling(1.0, top_p=0.9)),
        (GenerationOptions(SamplingMode.random(probability_threshold=1)), Sampling(1.0, top_p=1)),
        (GenerationOptions(SamplingMode.random(probability_threshold=0.0)), Sampling(1.0, top_k=1)),
        (
            GenerationOptions(temperature=0.5, min_p=0.1, repetition_penalty=1.2),
            Sampling(0.5, min_p=0.1, repetition_penalty=1.2),
        ),
    ],
)
def test_what_the_engine_is_told(options: GenerationOptions, sampling: Sampling) -> None:
    assert options.sampling_of() == sampling


def test_numbers_stay_numbers() -> None:
    """The SDK turns top, probability_threshold and seed into texts, which its Swift side then ignores."""
    given = GenerationOptions(SamplingMode.random(top=50, seed=2**63), 0.5, 10).to_dict()
    assert given == {
        "sampling": {"mode": "random", "top_k": 50, "seed": 2**63},
        "temperature": 0.5,
        "maximum_response_tokens": 10,
    }
    nucleus = GenerationOptions(SamplingMode.random(probability_threshold=0.25)).to_dict()
    assert nucleus == {"sampling": {"mode": "random", "top_p": 0.25}}
    assert GenerationOptions(SamplingMode.greedy()).to_dict() == {"sampling": {"mode": "greedy"}}
    assert json.loads(json.dumps(given)) == given


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GenerationOptions(temperature=-0.5), "temperature.*non-negative"),
        (lambda: GenerationOptions(temperature="high"), "temperature.*number"),
        (lambda: GenerationOptions(temperature=True), "temperature.*number"),
        (lambda: GenerationOptions(temperature=float("nan")), "temperature.*number"),
        (lambda: GenerationOptions(maximum_response_tokens=0), "maximum_response_tokens.*positive"),
        (lambda: GenerationOptions(maximum_response_tokens=-100), "maximum_response_tokens.*positive"),
        (lambda: GenerationOptions(maximum_response_tokens=10**9), "maximum_response_tokens"),
        (lambda: GenerationOptions(maximum_response_tokens=500.5), "maximum_response_tokens.*integer"),
        (lambda: GenerationOptions(maximum_response_tokens=True), "maximum_response_tokens.*integer"),
        (lambda: GenerationOptions(sampling="greedy"), "sampling.*SamplingMode"),
        (lambda: GenerationOptions(seed="x"), "seed.*integer"),
        (lambda: GenerationOptions(SamplingMode.random(seed=1), seed=2), "seed is 2 here and 1 in sampling"),
        (lambda: GenerationOptions(stop=[""]), "stop"),
        (lambda: GenerationOptions(stop=5), "stop"),
        (lambda: GenerationOptions(logprobs=-1), "logprobs"),
        (lambda: GenerationOptions(logprobs="2"), "logprobs"),
        (lambda: GenerationOptions(min_p=2), "min_p"),
        (lambda: GenerationOptions(repetition_penalty=0), "repetition_penalty"),
        (lambda: GenerationOptions(tool_calling_mode=""), "tool calling mode"),
        (lambda: GenerationOptions(tool_calling_mode=5), "tool calling mode"),
        (lambda: SamplingMode.random(top=50, probability_threshold=0.9), "Cannot specify both"),
        (lambda: SamplingMode.random(top=0), "top.*positive integer"),
        (lambda: SamplingMode.random(top=-5), "top.*positive integer"),
        (lambda: SamplingMode.random(top=50.5), "top.*positive integer"),
        (lambda: SamplingMode.random(probability_threshold=-0.1), "probability_threshold.*between 0.0 and 1.0"),
        (lambda: SamplingMode.random(probability_threshold=1.5), "probability_threshold.*between 0.0 and 1.0"),
        (lambda: SamplingMode.random(seed="random"), "seed.*integer"),
        (lambda: SamplingMode("hot"), "no sampling mode"),
        (lambda: ToolCallingMode.named("required"), "cannot be named"),
        (lambda: ContextOptions("yes"), "include_schema_in_prompt"),
        (lambda: ContextOptions(reasoning_level=""), "reasoning level"),
        (lambda: ContextOptions(reasoning_level=3), "reasoning level"),
        (lambda: GenerationOptions.from_dict({"heat": 1}), "no option called heat"),
        (lambda: GenerationOptions.from_dict({"sampling": "greedy"}), "sampling"),
        (lambda: GenerationOptions.from_dict({"sampling": {"mode": "random", "k": 1}}), "sampling"),
    ],
)
def test_refusals_are_value_errors_with_a_hint(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        make()
    assert isinstance(caught.value, OptionsError | UsageError) and caught.value.hint and caught.value.exit_code == 2


def test_a_wrong_value_set_later_is_refused_when_used() -> None:
    options = GenerationOptions(temperature=0.5)
    options.temperature = -1
    with pytest.raises(OptionsError, match="temperature"):
        options.sampling_of()


def test_convenient_forms() -> None:
    options = GenerationOptions(stop="\n", logprobs=True, tool_calling_mode="required")  # type: ignore[arg-type]
    assert options.stop == ("\n",) and options.logprobs == 0
    assert options.tool_calling_mode == ToolCallingMode.required and options.tool_mode == "required"
    assert GenerationOptions(logprobs=False).logprobs is None


def test_tool_calling_modes() -> None:
    def weather() -> None: ...

    class Weather:
        name = "get_weather"

    assert [ToolCallingMode.allowed.mode, ToolCallingMode.disallowed.mode] == ["allowed", "disallowed"]
    assert ToolCallingMode.allowed.tool is None and ToolCallingMode.named("f").tool == "f"
    assert ToolCallingMode.named(weather).mode == "weather" and ToolCallingMode.named(Weather()).mode == "get_weather"
    assert GenerationOptions(tool_calling_mode=weather).tool_mode == "weather"  # type: ignore[arg-type]


def test_context_options() -> None:
    assert ContextOptions() == ContextOptions(True, None) and ContextOptions().reasoning is None
    assert ContextOptions(reasoning_level="deep") == ContextOptions(reasoning_level=ReasoningLevel.deep)  # type: ignore[arg-type]
    assert ContextOptions(reasoning_level=ReasoningLevel.custom("xhigh")).reasoning == "xhigh"
    assert {ReasoningLevel.light.level, ReasoningLevel.moderate.level} == {"light", "moderate"}


def test_merging() -> None:
    session = GenerationOptions(SamplingMode.random(top=50), 0.9, 200, seed=1, stop=("END",), logprobs=2)
    assert GenerationOptions().merged(session) == session
    assert session.merged(None) is session and session.merged(GenerationOptions()) == session
    call = GenerationOptions(temperature=0.1, stop=("\n",), tool_calling_mode=ToolCallingMode.disallowed)
    merged = call.merged(session)
    assert merged.sampling_of() == Sampling(0.1, top_k=50) and merged.maximum_response_tokens == 200
    assert merged.stop == ("\n",) and merged.seed == 1 and merged.tool_mode == "disallowed"
    assert GenerationOptions(SamplingMode.greedy()).merged(session).sampling_of() == Sampling()
    assert GenerationOptions(temperature=0).merged(session).sampling_of().temperature == 0
    assert session.temperature == 0.9 and call.sampling is None  # neither was changed


def test_a_seed_of_the_call_is_stronger_wherever_it_is() -> None:
    inside = GenerationOptions(SamplingMode.random(seed=7))
    outside = GenerationOptions(seed=3)
    assert inside.chosen_seed == 7 and outside.chosen_seed == 3
    assert inside.merged(outside).chosen_seed == 7
    assert outside.merged(inside).chosen_seed == 3
    assert outside.merged(inside).sampling == SamplingMode.random(seed=3)
    assert GenerationOptions(temperature=0.5).merged(inside).chosen_seed == 7
    assert GenerationOptions(SamplingMode.random(top=5)).merged(outside).chosen_seed == 3


WHOLE = st.none() | st.integers(1, 1000)
SHARE = st.none() | st.floats(0.01, 1)
MODES = st.one_of(
    st.none(),
    st.just(SamplingMode.greedy()),
    st.builds(lambda top: SamplingMode.random(top=top), WHOLE),
    st.builds(lambda share: SamplingMode.random(probability_threshold=share), SHARE),
)
OPTIONS = st.builds(
    GenerationOptions,
    MODES,
    st.none() | st.floats(0, 2),
    WHOLE,
    seed=st.none() | st.integers(-5, 2**64),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
    logprobs=st.none() | st.integers(0, 5),
    min_p=SHARE,
    repetition_penalty=SHARE,
    tool_calling_mode=st.sampled_from([None, "allowed", "required", "disallowed", "weather"]),
)


@given(OPTIONS)
def test_dict_and_back(options: GenerationOptions) -> None:
    assert GenerationOptions.from_dict(json.loads(json.dumps(options.to_dict()))) == options


@given(OPTIONS, OPTIONS)
def test_merging_keeps_what_is_said_and_fills_the_rest(call: GenerationOptions, session: GenerationOptions) -> None:
    merged, said, before = call.merged(session).to_dict(), call.to_dict(), session.to_dict()
    assert {name: value for name, value in merged.items() if name in said} == said
    assert {name: value for name, value in merged.items() if name not in said} == {
        name: value for name, value in before.items() if name not in said
    }
