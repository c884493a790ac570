"""Which tool does a message ask for, if any? For models that were never taught to call tools.

Asked directly, a small model says yes to everything, or no. Turned round it does much better: how much likelier does a tool's
description make the user's words than they are without it (a noisy channel, arXiv 2108.04106)? The likeliest tool is the one
to call, and where none makes the words much likelier, none is needed. What was measured is in docs/log.md.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from orchard.core.frozen import frozen
from orchard.generate.engine import Engine
from orchard.generate.protocol import State
from orchard.generate.request import Request
from orchard.session.tools.formats import short
from orchard.session.turn import ToolSpec
from orchard.text.chat import chat_ids
from orchard.text.messages import Message

MARGIN, PER_TOKEN = 2.0, 0.2
"""How much likelier, in nats and in nats for each token, a tool must make a message to be worth a call."""
LONGEST = 96
"""Tokens of a message that are looked at."""
_AT_ONCE = 8
_NEEDS = "Write a request that needs the function {name}: {description}"
_OTHER = ("other", "Something else.")
"""A tool that is never there. Beside it, a tool's own words count, and not that there is a tool at all."""


class Recite:
    """A rule that has the model say given tokens, and adds up how likely it finds them."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self.total = 0.0

    def __call__(self, scores: np.ndarray, state: State) -> np.ndarray:
        token = self.tokens[len(state.output)]
        best = scores.max()
        self.total += float(scores[token] - best - np.log(np.exp(scores - best).sum()))
        forced = np.full_like(scores, -np.inf)
        forced[token] = 0.0
        return forced


@frozen
class Weighed:
    """For each tool, how many nats its words add to the user's; and how often the model was run for it."""

    evidence: tuple[float, ...]
    tokens: int
    runs: int = 0

    @property
    def best(self) -> int:
        """The tool that fits best."""
        return max(range(len(self.evidence)), key=self.evidence.__getitem__)

    @property
    def enough(self) -> bool:
        """Whether it fits well enough to be called."""
        return self.evidence[self.best] >= MARGIN + PER_TOKEN * self.tokens


def weighed(engine: Engine, said: str, tools: Sequence[ToolSpec], cancel: threading.Event) -> Weighed:
    """How well each tool fits what the user said. There is at least one."""
    tokens = engine.tokenizer.encode_piece(said, first=False)[:LONGEST]
    if not tokens:
        return Weighed((0.0,) * len(tools), 0)
    told = [_OTHER, *((tool.name, short(tool.description)) for tool in tools)]
    prompts = [_NEEDS.format(name=name, description=words) for name, words in told]
    totals: list[float] = []
    for start in range(0, len(prompts), _AT_ONCE):
        some = prompts[start : start + _AT_ONCE]
        rules = [Recite(tokens) for _ in some]
        ids = [tuple(chat_ids(engine.tokenizer, [Message("user", prompt)])) for prompt in some]
        engine.answer(
            [Request(one, len(tokens), rules=(rule,)) for one, rule in zip(ids, rules, strict=True)], cancel=cancel
        )
        totals += [rule.total for rule in rules]
    runs = len(tokens) * -(-len(prompts) // _AT_ONCE)
    return Weighed(tuple(total - totals[0] for total in totals[1:]), len(tokens), runs)
