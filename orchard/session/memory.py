"""A model whose conversations stay within some bytes, however long they get.

session = orchard.Session(model="smollm2", memory="64MB")
print(session.memory)     # what was chosen, and what is in use

The bytes are for keys and values: those that are kept, the block that is read before some are forgotten, and rows that look and
are not kept. What is kept, and in which form, follows from the bytes unless it is said: values of 8 bits where 16 would hold less
than the model's own context, and what is needed to repeat what was said (KVzip), which costs a second look at each block.
"episodic" keeps a cache for each thing spoken of; it recalls more, and costs a reading of the history whenever the talk turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from orchard.core.errors import OrchardError, UnsupportedPair, UsageError
from orchard.core.frozen import frozen
from orchard.core.sizes import bytes_of
from orchard.generate.memory.conversation import Conversation
from orchard.generate.memory.episodes import Utterance
from orchard.generate.memory.runner import MemoryRunner

if TYPE_CHECKING:
    from orchard.generate.memory.episodes import Embed
    from orchard.generate.native import NativeRunner
    from orchard.session.model import Model

POLICIES = {"recent": "recent", "keydiff": "keydiff", "snap": "snap", "kvzip": "probe", "episodic": "probe"}
"""How what stays is chosen, and the scoring that does it."""
CODECS = {"plain": None, "int8": "int8"}
"""How it is kept: as the model keeps it, or another codec of the native engine."""
SINKS, BLOCK, LEAST = 4, 512, 64
REPEAT = "Repeat the part of the previous context exactly."
EMBEDDER = "minilm"


@frozen
class Memory:
    """How much memory a conversation has, and how it is used."""

    size: int | str
    """Bytes, or as in "64MB"."""
    policy: str = "auto"
    codec: str = "auto"
    embedder: Any = None
    """For "episodic": a name, texts to vectors, or None: `minilm` where it is pulled, words without meaning where it is not."""
    folder: str | Path | None = None
    """Where episodes that are not open lie; None: in memory, beyond the size."""

    def __post_init__(self) -> None:
        if self.policy != "auto" and self.policy not in POLICIES:
            raise UsageError(f"no memory policy {self.policy!r}", hint=f"one of auto, {', '.join(POLICIES)}")
        if self.codec != "auto" and self.codec not in CODECS:
            raise UsageError(f"no memory codec {self.codec!r}", hint=f"one of auto, {', '.join(CODECS)}")
        if not isinstance(self.size, int | str) or isinstance(self.size, bool) or self.bytes < 1:
            raise UsageError(f"{self.size!r} is no size", hint="write bytes, or a number and a unit as in 64MB")

    @classmethod
    def of(cls, given: int | str | Memory) -> Memory:
        return given if isinstance(given, Memory) else cls(given)

    def to_dict(self) -> dict[str, Any]:
        """What can be written down: an embedder that is no name is given again."""
        embedder = str(self.embedder) if isinstance(self.embedder, str | Path) else None
        folder = None if self.folder is None else str(self.folder)
        return {"size": self.size, "policy": self.policy, "codec": self.codec, "embedder": embedder, "folder": folder}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Memory:
        return cls(**{name: values[name] for name in ("size", "policy", "codec", "embedder", "folder")})

    @property
    def bytes(self) -> int:
        return bytes_of(self.size) if isinstance(self.size, str) else self.size


@dataclass(frozen=True)
class Chosen:
    """What a size came to for one model."""

    policy: str
    codec: str
    bytes: int
    budget: int
    """Tokens of each layer that stay."""
    block: int
    """Tokens that are read before some go."""
    token_bytes: int
    embedder: str = ""

    def __str__(self) -> str:
        seen = f", episodes by {self.embedder}" if self.embedder else ""
        return (
            f"{self.budget:,} tokens stay ({self.policy}, {self.codec}{seen}), {self.block} more are read before some go: "
            f"{self.bytes / 1e6:.1f} MB for a conversation of any length"
        )


class Remembering:
    """A model with conversations in fixed memory: `model` answers as any other does, `chosen` and `facts` say how."""

    def __init__(self, base: Model, memory: Memory, conversations: int = 1) -> None:
        from orchard.generate.engine import Engine
        from orchard.session.model import Model

        self.memory = memory
        embed, name = _embedder(memory) if memory.policy == "episodic" else (None, "")
        self._runner, self.chosen = _fitted(base, memory, name)
        tokenizer = base.tokenizer
        repeat = tokenizer.encode(REPEAT)
        chosen, runner = self.chosen, self._runner

        def make() -> Conversation:
            from orchard.generate.memory.native_kept import NativeKept

            scoring: Any = POLICIES[chosen.policy]
            kept = NativeKept(runner, budget=chosen.budget, block=chosen.block, sinks=SINKS, scoring=scoring)
            kept.reserve(chosen.block + LEAST if scoring == "probe" else 0)
            if embed is None:
                return Conversation(kept, repeat)
            from orchard.generate.memory.episodic_conversation import EpisodicConversation
            from orchard.generate.memory.shelf import Shelf

            shelf = Shelf(None if memory.folder is None else Path(memory.folder))
            return EpisodicConversation(kept, embed, utterances_of(tokenizer), repeat=repeat, shelf=shelf)

        self.runner = MemoryRunner(make, runner.config.vocab, conversations)
        engine = Engine(self.runner, tokenizer, slots=conversations)
        self.model = Model(base._later, tokenizer, name=base.name, source=base.source, plan=base.plan, engine=engine)
        self.model.aside = base.engine

    def facts(self) -> dict[str, Any]:
        """What was chosen and what is in use, for the conversation that was used last."""
        used = self.runner.conversations[-1].facts() if self.runner.conversations else {}
        return {
            **vars(self.chosen),
            "limit_bytes": self.memory.bytes,
            "conversations": len(self.runner.conversations),
            **used,
        }

    def __repr__(self) -> str:
        facts = self.facts()
        used = f"; {facts['tokens']:,} tokens read, {facts['bytes'] / 1e6:.1f} MB in use" if "tokens" in facts else ""
        return f"<memory: {self.chosen}{used}>"


def utterances_of(tokenizer: Any) -> Callable[[Sequence[int]], list[Utterance]]:
    """Cuts a conversation's tokens after every end of a turn."""
    ends = set(tokenizer.eos_ids)

    def cut(ids: Sequence[int]) -> list[Utterance]:
        found: list[Utterance] = []
        start = 0
        for place, token in enumerate(ids):
            if token in ends or place == len(ids) - 1:
                some = tuple(ids[start : place + 1])
                found.append(Utterance(tokenizer.decode(some), some))
                start = place + 1
        return found

    return cut


def _embedder(memory: Memory) -> tuple[Embed, str]:
    given = memory.embedder
    if given is not None and not isinstance(given, str | Path):
        return given, getattr(given, "name", "what was given")
    from orchard.generate.memory.lexical import Lexical
    from orchard.session.embedder import load_embedder

    try:
        made = load_embedder(given or EMBEDDER)
    except OrchardError:
        if given is not None:
            raise
        lexical = Lexical()
        return lexical, f"{lexical.name}; `orchard pull {EMBEDDER}` gives it meaning"

    def embed(texts: Sequence[str]) -> np.ndarray:
        return made.embed(list(texts), truncate=True).vectors

    return embed, made.name


def _fitted(base: Model, memory: Memory, embedder: str) -> tuple[NativeRunner, Chosen]:
    """The runner with the codec, and as many tokens as the bytes have room for, measured."""
    from orchard.generate.memory.native_kept import NativeKept
    from orchard.generate.native import NativeRunner

    runner = base.runner
    if not isinstance(runner, NativeRunner):
        raise UnsupportedPair(
            "conversations in fixed memory run on the native engine",
            hint='load the model with device="cpu" and dtype="auto"',
        )
    policy = "kvzip" if memory.policy == "auto" else memory.policy
    scoring: Any = POLICIES[policy]
    codec = memory.codec
    if codec == "auto":
        plain = memory.bytes // _token_bytes(runner)
        codec = "plain" if plain >= runner.config.context else "int8"
    runner = _with_codec(runner, CODECS[codec], base)
    each = _token_bytes(runner)
    tokens = memory.bytes // each
    while True:
        block = min(BLOCK, max(tokens // 8 // LEAST * LEAST, LEAST))
        looking = block + LEAST if scoring == "probe" else 0
        budget = (tokens - block - looking) // LEAST * LEAST
        if budget < 2 * LEAST:
            raise UsageError(
                f"{memory.bytes:,} bytes hold {memory.bytes // each:,} tokens of this model, which is too few to talk",
                hint=f"give at least {-(-6 * LEAST * each // 1_000_000)} MB",
            )
        kept = NativeKept(runner, budget=budget, block=block, sinks=SINKS, scoring=scoring)
        kept.reserve(looking)
        if kept.nbytes <= memory.bytes:
            return runner, Chosen(policy, codec, kept.nbytes, budget, block, each, embedder)
        tokens -= LEAST


def _with_codec(runner: NativeRunner, codec: str | None, base: Model) -> NativeRunner:
    from orchard.generate.native import NativeRunner

    plan = runner.plan
    if codec is None or all(spec.codec == codec for spec in plan.stores):
        return runner
    changed = replace(plan, stores=[replace(spec, codec=codec) for spec in plan.stores])
    return NativeRunner(changed, decoder=lambda: base.decoder)


def _token_bytes(runner: NativeRunner) -> int:
    """Of one token in all stores."""
    sizes = {"f32": 4, "bf16": 2, "int8": 1}
    total = 0
    for spec in runner.plan.stores:
        width = -(-spec.dim // 32) * 32 * sizes[spec.codec] + (4 if spec.codec == "int8" else 0)
        total += 2 * spec.heads * width
    return max(total, 1)
