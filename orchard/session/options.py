"""How an answer is asked for: sampling, length, tools, thinking. Names and order as in Apple's Python SDK, and a little more.

Where nothing is said the answer is the likeliest one, as everywhere in Orchard: the SDK leaves its default to the model, and
of all defaults this is the one that gives the same answer twice. A temperature or `SamplingMode.random()` asks for variety;
with a seed, that is repeatable too. Numbers stay numbers on the way (the SDK writes them as texts, which its other half drops).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, ClassVar

from orchard.core.errors import UsageError
from orchard.core.frozen import frozen
from orchard.generate.request import MOST_TOKENS, Sampling

RANDOM_TEMPERATURE = 1.0
"""The temperature of random sampling where none is given: the model's own distribution."""


class OptionsError(UsageError, ValueError):
    """An option that makes no sense; a ValueError, as in the SDK."""

    code = "options"


class SamplingModeType(StrEnum):
    GREEDY = "greedy"
    RANDOM = "random"


@frozen
class SamplingMode:
    """How the next token is chosen. Make one with `greedy()` or `random()`."""

    mode_type: SamplingModeType
    top: int | None = None
    probability_threshold: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        try:
            self.__dict__["mode_type"] = SamplingModeType(self.mode_type)
        except ValueError:
            raise OptionsError(f"no sampling mode {self.mode_type!r}", hint="use greedy() or random()") from None
        if self.top is not None and self.probability_threshold is not None:
            raise OptionsError(
                f"Cannot specify both top={self.top!r} and probability_threshold={self.probability_threshold!r}",
                hint="choose one of them",
            )
        if self.top is not None and (not _is_whole(self.top) or self.top < 1):
            raise OptionsError(f"top is {self.top!r}: it must be a positive integer", hint="for example top=50")
        threshold = self.probability_threshold
        if threshold is not None and (not _is_number(threshold) or not 0 <= threshold <= 1):
            raise OptionsError(
                f"probability_threshold is {threshold!r}: it must lie between 0.0 and 1.0", hint="for example 0.9"
            )
        _seed(self.seed)

    @classmethod
    def greedy(cls) -> SamplingMode:
        """Always the likeliest token."""
        return cls(SamplingModeType.GREEDY)

    @classmethod
    def random(
        cls, top: int | None = None, probability_threshold: float | None = None, seed: int | None = None
    ) -> SamplingMode:
        """By chance: among the `top` likeliest tokens, or the likeliest that together reach the threshold, or all."""
        return cls(SamplingModeType.RANDOM, top, probability_threshold, seed)

    def to_dict(self) -> dict[str, Any]:
        named = {"top_k": self.top, "top_p": self.probability_threshold, "seed": self.seed}
        given = {key: value for key, value in named.items() if value is not None}
        return {"mode": self.mode_type.value} | (given if self.mode_type is SamplingModeType.RANDOM else {})


@frozen
class ToolCallingMode:
    """Whether the model may, must or must not call tools; `named` is the one tool that it must call."""

    mode: str
    """As `Turn.tool_mode` has it: "allowed", "required", "disallowed", or a tool's name."""

    allowed: ClassVar[ToolCallingMode]
    required: ClassVar[ToolCallingMode]
    disallowed: ClassVar[ToolCallingMode]

    def __post_init__(self) -> None:
        if not isinstance(self.mode, str) or not self.mode.strip():
            hint = 'use "allowed", "required", "disallowed" or the name of a tool'
            raise OptionsError(f"{self.mode!r} is no tool calling mode", hint=hint)

    @classmethod
    def named(cls, tool: Any) -> ToolCallingMode:
        """That tool must be called: its name, a `Tool`, or the function."""
        name = tool if isinstance(tool, str) else getattr(tool, "name", None) or getattr(tool, "__name__", None)
        if name in _TOOL_MODES:
            raise OptionsError(f"a tool called {name!r} cannot be named here", hint="give the tool another name")
        return cls(name)  # type: ignore[arg-type]  # the check is above

    @property
    def tool(self) -> str | None:
        """The tool that must be called, where there is one."""
        return None if self.mode in _TOOL_MODES else self.mode


_TOOL_MODES = ("allowed", "required", "disallowed")
for _mode in _TOOL_MODES:
    setattr(ToolCallingMode, _mode, ToolCallingMode(_mode))


@frozen
class ReasoningLevel:
    """How long a model that can think may think: `none`, `light`, `moderate`, `deep`, or a word of the model's own."""

    level: str

    none: ClassVar[ReasoningLevel]
    light: ClassVar[ReasoningLevel]
    moderate: ClassVar[ReasoningLevel]
    deep: ClassVar[ReasoningLevel]

    def __post_init__(self) -> None:
        if not isinstance(self.level, str) or not self.level.strip():
            hint = 'use "none", "light", "moderate", "deep", or a word that the model knows'
            raise OptionsError(f"{self.level!r} is no reasoning level", hint=hint)

    @classmethod
    def custom(cls, word: str) -> ReasoningLevel:
        return cls(word)


for _level in ("none", "light", "moderate", "deep"):
    setattr(ReasoningLevel, _level, ReasoningLevel(_level))


@frozen
class ContextOptions:
    """What goes into the context beside the prompt: the schema of a typed answer in words, and how much to think."""

    include_schema_in_prompt: bool = True
    reasoning_level: ReasoningLevel | None = None
    """A plain word is taken too."""

    def __post_init__(self) -> None:
        if not isinstance(self.include_schema_in_prompt, bool):
            wrong = f"include_schema_in_prompt is {self.include_schema_in_prompt!r}"
            raise OptionsError(wrong, hint="use True or False")
        if not isinstance(self.reasoning_level, ReasoningLevel | None):
            self.__dict__["reasoning_level"] = ReasoningLevel(self.reasoning_level)

    @property
    def reasoning(self) -> str | None:
        """As `Turn.reasoning` has it."""
        return self.reasoning_level.level if self.reasoning_level else None


@dataclass
class GenerationOptions:
    """Options of one answer. What is None is left to the session's options, and in the end to the defaults."""

    sampling: SamplingMode | None = None
    temperature: float | None = None
    """0: the likeliest token. Given without `sampling`, it asks for random sampling."""
    maximum_response_tokens: int | None = None
    """None: as many as the context has room for. An answer that is cut short says so in its `finish`."""
    tool_calling_mode: ToolCallingMode | None = field(default=None, kw_only=True)
    """A plain word, or the name of a tool, is taken too."""
    seed: int | None = field(default=None, kw_only=True)
    stop: tuple[str, ...] = field(default=(), kw_only=True)
    logprobs: int | None = field(default=None, kw_only=True)
    """How many alternatives to report for each token; 0 or True: only the chosen token."""
    min_p: float | None = field(default=None, kw_only=True)
    repetition_penalty: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.sampling is not None and not isinstance(self.sampling, SamplingMode):
            raise OptionsError(
                f"sampling is {self.sampling!r}: it must be a SamplingMode",
                hint="use SamplingMode.greedy() or random()",
            )
        self._check_numbers()
        if isinstance(self.tool_calling_mode, str):
            self.tool_calling_mode = ToolCallingMode(self.tool_calling_mode)
        elif not isinstance(self.tool_calling_mode, ToolCallingMode | None):
            self.tool_calling_mode = ToolCallingMode.named(self.tool_calling_mode)
        _seed(self.seed)
        inner = self.sampling.seed if self.sampling else None
        if None not in (self.seed, inner) and self.seed != inner:
            raise OptionsError(f"seed is {self.seed} here and {inner} in sampling", hint="give one of them")
        self.stop = _stop(self.stop)
        if isinstance(self.logprobs, bool):
            self.logprobs = 0 if self.logprobs else None
        self.sampling_of()

    def _check_numbers(self) -> None:
        if self.temperature is not None:
            if not _is_number(self.temperature):
                raise OptionsError(f"temperature is {self.temperature!r}: it must be a number", hint="for example 0.7")
            if self.temperature < 0:
                raise OptionsError(f"temperature is {self.temperature!r}: it must be non-negative", hint="0 or more")
        most = self.maximum_response_tokens
        if most is not None:
            if not _is_whole(most):
                raise OptionsError(
                    f"maximum_response_tokens is {most!r}: it must be an integer", hint="for example 256"
                )
            if not 0 < most <= MOST_TOKENS:
                wrong = f"maximum_response_tokens is {most!r}: it must be positive, and at most {MOST_TOKENS:,}"
                raise OptionsError(wrong, hint="leave it out for as many as the context has room for")
        if self.logprobs is not None and (not isinstance(self.logprobs, int) or self.logprobs < 0):
            raise OptionsError(f"logprobs is {self.logprobs!r}", hint="use 0 or the number of alternatives to report")

    @property
    def tool_mode(self) -> str:
        """As `Turn.tool_mode` has it."""
        return self.tool_calling_mode.mode if self.tool_calling_mode else "allowed"

    @property
    def chosen_seed(self) -> int | None:
        """The seed, wherever it was given."""
        return self.seed if self.seed is not None or self.sampling is None else self.sampling.seed

    def sampling_of(self) -> Sampling:
        """As the engine takes it. Greedy mode, or temperature 0: the likeliest token; random mode: the temperature given
        or 1.0; a temperature alone: random at that temperature; nothing at all: the likeliest token."""
        mode, top, threshold = self.sampling, None, None
        temperature = 0.0 if self.temperature is None else float(self.temperature)
        if mode is not None and mode.mode_type is SamplingModeType.GREEDY:
            temperature = 0.0
        elif mode is not None:
            temperature = RANDOM_TEMPERATURE if self.temperature is None else temperature
            top, threshold = mode.top, mode.probability_threshold
            if threshold == 0:  # no mass at all: the likeliest token is what is left
                top, threshold = 1, None
        try:
            return Sampling(temperature, top, threshold, self.min_p, self.repetition_penalty)
        except UsageError as error:
            raise OptionsError(error.message, hint=error.hint) from error

    def merged(self, defaults: GenerationOptions | None) -> GenerationOptions:
        """These options, and those of `defaults` where nothing is said here. A seed here is stronger than one there,
        wherever either was given."""
        if defaults is None:
            return self
        chosen = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, value in chosen.items():
            if value is None or value == ():
                chosen[name] = getattr(defaults, name)
        if self.chosen_seed is not None:
            chosen["seed"] = self.chosen_seed
            if chosen["sampling"] is not None and chosen["sampling"].seed is not None:
                chosen["sampling"] = replace(chosen["sampling"], seed=self.chosen_seed)
        return GenerationOptions(**chosen)

    def to_dict(self) -> dict[str, Any]:
        """What is set, with the SDK's names."""
        made: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        made["sampling"] = self.sampling.to_dict() if self.sampling else None
        made["tool_calling_mode"] = self.tool_calling_mode.mode if self.tool_calling_mode else None
        made["stop"] = list(self.stop) or None
        return {name: value for name, value in made.items() if value is not None}

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> GenerationOptions:
        """What `to_dict` gave; other names raise."""
        known = {each.name for each in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise OptionsError(f"no option called {', '.join(unknown)}", hint=f"options are {', '.join(sorted(known))}")
        given = dict(options)
        if given.get("sampling") is not None:
            given["sampling"] = _sampling(given["sampling"])
        return cls(**given)


def _sampling(given: Any) -> SamplingMode:
    names = {"mode": "mode_type", "top_k": "top", "top_p": "probability_threshold", "seed": "seed"}
    if not isinstance(given, Mapping) or "mode" not in given or not set(given) <= names.keys():
        raise OptionsError(f"sampling is {given!r}", hint='it looks like {"mode": "random", "top_k": 50}')
    return SamplingMode(**{names[name]: value for name, value in given.items()})


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _seed(seed: Any) -> None:
    if seed is not None and not _is_whole(seed):
        raise OptionsError(f"seed is {seed!r}: it must be an integer", hint="for example seed=42")


def _stop(stop: Any) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(texts, Iterable) or isinstance(texts, Mapping | bytes):
        raise OptionsError(f"stop is {stop!r}", hint="give a text, or a list of texts")
    made = tuple(texts)
    if not all(isinstance(text, str) and text for text in made):
        raise OptionsError(f"stop is {stop!r}", hint="a stop text has at least one character")
    return made
