"""What may be asked of `orchard bench memory`, checked before any work: policies, budgets, codecs, owners, tasks, sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchard.bench.memory_model import OWN, rewriting
from orchard.bench.memory_policies import FULL, POLICIES
from orchard.core.errors import UsageError
from orchard.core.sizes import bytes_of

RECALL = "recall"


@dataclass(frozen=True)
class Options:
    """What a person may ask for. `budgets`: "256" tokens, "8x" smaller than the conversation, or "16MB" for budget and block."""

    model: str = "smollm2"
    policies: tuple[str, ...] = POLICIES
    budgets: tuple[str, ...] = ("8x", "4x")
    codecs: tuple[str, ...] = (OWN,)
    owners: tuple[str, ...] = (OWN,)
    tasks: tuple[str, ...] = (RECALL,)
    tokens: int = 2048
    talks: int = 2
    questions: int = 24
    block: int | None = None
    sinks: int = 4
    episodes: int = 4
    medoids: int = 4
    decode: int = 16
    embedder: str | None = None
    seed: int = 0

    def check(self) -> None:
        """Everything that can be known to be wrong before a model is loaded."""
        for policy in self.policies:
            if policy not in POLICIES:
                raise UsageError(f"no policy called {policy!r}", hint="one of " + ", ".join(POLICIES))
        for budget in self.budgets:
            Budget.parse(budget)
        if not (self.policies and self.codecs and self.owners and self.tasks):
            raise UsageError("nothing to measure", hint="name at least one policy, codec, owner and task")
        if set(self.policies) != {FULL} and not self.budgets:
            raise UsageError("no budget", hint="name one, such as --budget 8x")
        for codec in self.codecs:
            for owner in self.owners:
                rewriting(codec, owner)
        if min(self.tokens, self.talks, self.questions, self.block or 1, self.episodes, self.medoids) < 1:
            raise UsageError("sizes below one", hint="use one or more of each")


@dataclass(frozen=True)
class Budget:
    """Tokens, a part of the conversation, or bytes."""

    kind: str
    amount: float

    @classmethod
    def parse(cls, text: str) -> Budget:
        word = text.strip().lower()
        try:
            if word.endswith("x"):
                found = cls("times", float(word[:-1]))
            elif word.endswith("b"):
                found = cls("bytes", bytes_of(word))
            else:
                found = cls("tokens", int(word))
        except ValueError:
            raise UsageError(
                f"{text!r} is no budget", hint="tokens (512), a compression (8x) or bytes (16MB)"
            ) from None
        if not found.amount >= 1:
            raise UsageError(f"a budget of {text}", hint="one token or more; 8x is an eighth of the conversation")
        return found

    def settle(
        self, tokens: int, block: int | None, least: int, size: Callable[[], tuple[float, float]]
    ) -> tuple[int, int]:
        """Tokens of budget and block. Without a block that was asked for it is as large as the budget, or as a question needs."""
        if self.kind == "bytes":
            each, fixed = size()
            room = int((self.amount - fixed) / each)
            chosen = block or max(least, room // 2)
            return room - chosen, chosen
        budget = int(self.amount) if self.kind == "tokens" else max(1, round(tokens / self.amount))
        return budget, block or max(budget, least)


def shares(words: str | None, otherwise: Sequence[str]) -> tuple[str, ...]:
    """A list as the command line has it: parts between commas, each once."""
    parts = [part.strip() for part in (words or "").split(",") if part.strip()]
    return tuple(dict.fromkeys(parts)) or tuple(otherwise)


def named(words: str) -> tuple[str, ...]:
    """The same for what may be a step with settings of its own, whose commas are its own too."""
    return (words,) if ":" in words else shares(words, ())
