"""What an answer is worth: small judges that a config can name, and the check of what they say.

`reward(row, text, ids)` is given the row that was asked (all of its fields), the answer as text and as tokens (the end token
among them), and gives one number, or several, always as many. A judge of your own is a class with a config, like these. A
config never names a function by its path: reading a file must not run code.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.errors import ConfigError, OrchardError
from orchard.data.errors import BadSample
from orchard.train.rollout_schema import Schema


class BadReward(OrchardError):
    """A judge gave something that is no reward: no number, not finite, or not as many as before."""

    code = "bad-reward"


class Reward(ABC):
    """The contract. Pure: the same answer is worth the same."""

    @abstractmethod
    def __call__(self, row: Mapping[str, Any], text: str, ids: Sequence[int]) -> float | list[float]: ...


class ExactMatch(Configurable, Reward):
    """1 where the answer is the text in the row's field, or one of the texts there."""

    @config
    class Config(BaseConfig):
        field: str = "completion"
        strip: bool = True
        """White space around either does not matter."""
        ignore_case: bool = False

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def __call__(self, row: Mapping[str, Any], text: str, ids: Sequence[int]) -> float:
        return float(self._plain(text) in {self._plain(each) for each in wanted(row, self.config.field)})

    def _plain(self, text: str) -> str:
        text = text.strip() if self.config.strip else text
        return text.casefold() if self.config.ignore_case else text


class Matches(Configurable, Reward):
    """1 where a regular expression is found in the answer. With `field`, what its first group found (all of it, if it has no
    group) has to be the text in that field of the row as well; the last place where it is found counts."""

    @config
    class Config(BaseConfig):
        pattern: str = REQUIRED
        whole: bool = False
        """It has to match all of the answer, white space at its ends aside."""
        field: str | None = None

    def __init__(self, cfg: Config) -> None:
        self.config = cfg
        try:
            self.pattern = re.compile(cfg.pattern)
        except re.error as error:
            raise ConfigError(f"{cfg.pattern!r} is no regular expression: {error}", hint="mend the pattern") from error

    def __call__(self, row: Mapping[str, Any], text: str, ids: Sequence[int]) -> float:
        if self.config.whole:
            found = self.pattern.fullmatch(text.strip())
        else:
            found = None
            for found in self.pattern.finditer(text):  # noqa: B007 (the last one)
                pass
        if found is None or self.config.field is None:
            return float(found is not None)
        said = found.group(1 if self.pattern.groups else 0) or ""
        return float(said.strip() in {each.strip() for each in wanted(row, self.config.field)})


class ValidJson(Configurable, Reward):
    """1 where the answer is JSON that the schema allows; `parses` where it is JSON at least."""

    @config
    class Config(BaseConfig):
        schema: dict[str, Any] = field(default_factory=dict)
        """Empty: any JSON."""
        parses: float = 0.0

    def __init__(self, cfg: Config) -> None:
        self.config = cfg
        self.schema = Schema(cfg.schema)

    def __call__(self, row: Mapping[str, Any], text: str, ids: Sequence[int]) -> float:
        try:
            value = json.loads(text, parse_constant=_refused)
            return 1.0 if self.schema.allows(value) else self.config.parses
        except (ValueError, RecursionError):
            return 0.0


class Length(Configurable, Reward):
    """1 where an answer has from `least` to `most` tokens; outside, it falls to 0 over `soft` tokens more (a soft limit rather
    than a hard one, as in DAPO, arXiv 2503.14476)."""

    @config
    class Config(BaseConfig):
        least: int = 0
        most: int = REQUIRED
        soft: int = 0

        def wire(self) -> None:
            if not 0 <= self.least <= self.most or self.soft < 0:
                raise ConfigError(
                    f"from {self.least} to {self.most} tokens, and {self.soft} more",
                    hint="use numbers from 0, `least` at most as large as `most`",
                )

    def __init__(self, cfg: Config) -> None:
        self.config = cfg

    def __call__(self, row: Mapping[str, Any], text: str, ids: Sequence[int]) -> float:
        off = max(self.config.least - len(ids), len(ids) - self.config.most, 0)
        return max(0.0, 1 - off / (self.config.soft + 1))


class Several(Configurable, Reward):
    """The rewards of several judges side by side; the aggregate of the objective weighs them (`objectives`)."""

    @config
    class Config(BaseConfig):
        rewards: list[BaseConfig] = field(default_factory=list)

    def __init__(self, cfg: Config) -> None:
        if not cfg.rewards:
            raise ConfigError("several rewards, and none is named", hint="name some in `rewards`")
        self.rewards: list[Reward] = [each.build() for each in cfg.rewards]

    def __call__(self, row: Mapping[str, Any], text: str, ids: Sequence[int]) -> list[float]:
        found: list[float] = []
        for reward in self.rewards:
            found += numbers(reward, reward(row, text, ids), "")
        return found


def wanted(row: Mapping[str, Any], name: str) -> list[str]:
    """The texts in a field of a row: one, or a list of them. Numbers count as their text."""
    value = row.get(name)
    found = value if isinstance(value, list) else [value]
    if not found or not all(isinstance(each, (str, int, float)) and not isinstance(each, bool) for each in found):
        raise BadSample(
            f"the field {name!r} of the row has no text to compare an answer with",
            reason="no-reference",
            hint=f"give every row a {name!r}, or name another field in the reward",
        )
    return [str(each) for each in found]


def numbers(reward: Reward, said: Any, place: str) -> tuple[float, ...]:
    """What a judge said as numbers, or `BadReward`. `place`: whose answer it was."""
    listed = said if isinstance(said, (list, tuple)) else [said]
    about = f"{type(reward).__name__} gave {said!r}{f' for an answer to {place}' if place else ''}"
    if not listed:
        raise BadReward(f"{about}: no number at all", hint="give one number, or a list of them")
    try:
        found = tuple(float(each) for each in listed if not isinstance(each, str))
    except (TypeError, ValueError):
        found = ()
    if len(found) != len(listed):
        raise BadReward(f"{about}: that is no number and no list of numbers", hint="give a float, or a list of floats")
    if not all(map(math.isfinite, found)):
        raise BadReward(f"{about}: not finite", hint="give every answer a finite number, 0 where nothing can be said")
    return found


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
