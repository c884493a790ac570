"""What a load consists of: which prompts, and when each request is due. Everything is fixed before the first one is sent.

Prompts are seeded words, each one token in the vocabularies we know (how many an endpoint really counts is asked for before
the run, see `measure.calibrated`). Arrivals of a Poisson load are drawn beforehand and latency counts from them: a server
that stalls cannot slow down the clients that measure it (coordinated omission).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from orchard.core.errors import UsageError

ENDPOINTS = {"chat": "/chat/completions", "completions": "/completions"}
_TEXT = (
    "about above action after again air almost alone already always animals answer apart apple area art average away "
    "back balance bank bear before begin best black blue boat body book bread bridge broken building button car card "
    "case cat century chain chair city class climate clock coat coin cold company computer correct country cover "
    "current dark day deep degrees device doctor door down dry early earth easy edge eight empty energy enough every "
    "expected eye face far fast file fire first five floor food forest form four free game general glass gold good "
    "great green half hand head heart heat heavy help high home hour house human hundred ice inside interest iron "
    "item keep keys kind lake land large last late lead leaves left length letter library light line list little live "
    "load long loop lost low make many marks medicine members metal minute money month moon more most music name near "
    "neck never new next night nine noise note number ocean often oil old open order other outside oxygen page "
    "parents part path people picture place plan plant plate point port present pressure price prime process product "
    "quarter question quiet rain rare rate reaction read real red release repair result rice right river road rock "
    "round rules safe salt sand school screen second seven share short side signal simple site sky sleep slow small "
    "smooth snow soft sound soup spring square stand station steps stone street strong style sun system table team "
    "theory thing third thought three time title today total town traffic train turn under value walk wall warm water "
    "weather week white wide wind window winter word work year"
)
WORDS = tuple(_TEXT.split())
_BEGINNING = 3
"""Words that tell prompts apart: so many of `WORDS` are enough for millions of them."""


@cache
def _order(seed: int) -> tuple[str, ...]:
    return tuple(random.Random(f"{seed}:order").sample(WORDS, len(WORDS)))


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a person may ask for. `rate`: requests that arrive in a second, at random; otherwise `clients` send one after another.

    `extra` goes into every body, over everything else. `words`: how many words make a prompt; None: as many as tokens.
    """

    model: str = ""
    endpoint: str = "chat"
    rate: float | None = None
    clients: int | None = None
    requests: int | None = None
    seconds: float | None = None
    prompt_tokens: int = 128
    max_tokens: int = 64
    shared_prefix: int = 0
    seed: int = 0
    target_ttft: float | None = None
    target_itl: float | None = None
    timeout: float = 300.0
    words: int | None = None
    usage: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise UsageError(f"no endpoint called {self.endpoint!r}", hint="choose among " + ", ".join(ENDPOINTS))
        if self.rate is not None and self.clients is not None:
            raise UsageError("both a rate and a number of clients", hint="give --rate or --clients, not both")
        for name in ("rate", "clients", "requests", "seconds", "prompt_tokens", "max_tokens", "timeout"):
            given = getattr(self, name)
            if given is not None and not given > 0:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} is {given}", hint=f"give --{option} a number above 0")
        if not 0 <= self.shared_prefix <= max(0, self.prompt_tokens - _BEGINNING):
            hint = f"leave room for the {_BEGINNING} words that tell prompts apart: less than --prompt-tokens"
            raise UsageError(f"a shared prefix of {self.shared_prefix} in {self.prompt_tokens} tokens", hint=hint)

    @property
    def at_once(self) -> int:
        """Clients of a closed loop."""
        return self.clients or 8

    @property
    def count(self) -> int | None:
        """How many requests there are; None: as many as the time holds."""
        return self.requests if self.requests is not None or self.seconds is not None else 64

    def prompt(self, number: int) -> str:
        """The prompt of a request: made from the seed and its number alone."""
        draw = random.Random(f"{self.seed}:{number}")
        length = self.words or self.prompt_tokens
        shared = random.Random(f"{self.seed}:shared").choices(WORDS, k=min(self.shared_prefix, length))
        words = [*shared, *self._beginning(number)]
        words += draw.choices(WORDS, k=max(0, length - len(words)))
        return " ".join(words[: max(1, length)])

    def _beginning(self, number: int) -> list[str]:
        """Three words that no other request of this load has: its number, written in words in a seeded order."""
        order = _order(self.seed)
        digits = []
        for _ in range(_BEGINNING):
            number, digit = divmod(number, len(order))
            digits.append(order[digit])
        return digits

    def body(self, number: int, *, stream: bool = True, max_tokens: int | None = None) -> bytes:
        """What is sent: greedy, streamed, with usage at the end where the endpoint can."""
        prompt = self.prompt(number)
        asked: dict[str, Any] = {"model": self.model} if self.model else {}
        if self.endpoint == "chat":
            asked["messages"] = [{"role": "user", "content": prompt}]
        else:
            asked["prompt"] = prompt
        asked |= {"max_tokens": max_tokens or self.max_tokens, "temperature": 0.0, "stream": stream}
        if stream and self.usage:
            asked["stream_options"] = {"include_usage": True}
        return json.dumps(asked | dict(self.extra)).encode()

    def arrivals(self) -> Iterator[float]:
        """Seconds from the start at which requests of a Poisson load are due, for as long as it lasts."""
        draw = random.Random(f"{self.seed}:arrivals")
        due, number = 0.0, 0
        while (self.count is None or number < self.count) and (self.seconds is None or due < self.seconds):
            yield due
            due += draw.expovariate(self.rate or 1.0)
            number += 1
