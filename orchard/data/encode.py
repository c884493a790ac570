"""Rows become samples: conversations by the model's own chat template, texts as they are, preferences as pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from orchard.core.config import REQUIRED, BaseConfig, config
from orchard.core.errors import OrchardError, TemplateError, UsageError
from orchard.data.chat import conversation
from orchard.data.errors import BadSample, Tally, check_choice
from orchard.data.source import Pair, Row, Sample, Stage, State, needed
from orchard.text.tokenizer import Tokenizer


class Encode(Stage[Any]):
    """`Sample` for every row, `Pair` for every preference."""

    @config
    class Config(BaseConfig):
        source: BaseConfig = REQUIRED
        turns: str = "all"
        """Which answers of a conversation are learnt: `all`, or the `last`."""
        chat: bool = True
        """Prompts and completions that are texts become a user's message and its answer, as `orchard respond` would put them.
        False: they are texts that follow each other."""
        end: bool = True
        """A text ends with the tokenizer's end token, and that it ends is learnt."""
        variables: dict[str, Any] = field(default_factory=dict)
        """What else the chat template may ask for."""
        on_bad: str = "stop"

    def __init__(self, cfg: Config, *, tokenizer: Tokenizer | None = None) -> None:
        check_choice("turns", cfg.turns, ("all", "last"))
        self.tokenizer = needed(tokenizer, "Encode")
        settings = {name: getattr(cfg, name) for name in ("turns", "chat", "end", "variables")}
        known = {"vocabulary": self.tokenizer.vocab_size, "template": self.tokenizer.template_hash}
        super().__init__([cfg.source.build(tokenizer=tokenizer)], Tally(cfg.on_bad), **settings, **known)
        self.cfg = cfg
        self.tokens = 0

    def __next__(self) -> Sample | Pair:
        while True:
            row = next(self.sources[0])
            try:
                item = self.encoded(row)
            except (BadSample, TemplateError, UsageError) as error:
                assert self.tally is not None
                self.tally.add(_placed(error, row.place))
                continue
            self.tokens += sum(len(sample.ids) for sample in _samples(item))
            return item

    def encoded(self, row: Row) -> Sample | Pair:
        data, tools = row.data, row.data.get("tools")
        if "chosen" in data:
            sides = (self._answered(data[name], tools, "last", row.place) for name in ("chosen", "rejected"))
            return Pair(*sides)
        if "text" in data:
            return self._text(data["text"], row.place)
        return self._answered(data, tools, self.cfg.turns, row.place)

    def _text(self, text: str, place: str) -> Sample:
        ids = self.tokenizer.encode(text, bos=self.tokenizer.add_bos)
        return Sample.of(ids + self._end(), place=place)

    def _answered(self, data: Mapping[str, Any], tools: Any, turns: str, place: str) -> Sample:
        messages = data.get("messages")
        if messages is None and self.cfg.chat:
            roles = {"user": data["prompt"], "assistant": data["completion"]}
            messages = [{"role": role, "content": content} for role, content in roles.items()]
        if messages is not None:
            options: dict[str, Any] = {"tools": tools, "variables": self.cfg.variables or None}
            return conversation(self.tokenizer, messages, turns=turns, place=place, **options)
        asked = self.tokenizer.encode(data["prompt"], bos=self.tokenizer.add_bos)
        answer = self.tokenizer.encode_piece(data["completion"], first=False) + self._end()
        return Sample.of(asked + answer, [False] * len(asked) + [True] * len(answer), place)

    def _end(self) -> list[int]:
        return [self.tokenizer.eos_id] if self.cfg.end and self.tokenizer.eos_id is not None else []

    def counts(self) -> dict[str, int]:
        return super().counts() | {"encoded": self.tokens}

    def _own(self) -> State:
        return {"tokens": self.tokens}

    def _take(self, state: Mapping[str, Any]) -> None:
        self.tokens = int(state["tokens"])


def _samples(item: Sample | Pair) -> tuple[Sample, ...]:
    return (item.chosen, item.rejected) if isinstance(item, Pair) else (item,)


def _placed(error: OrchardError, place: str) -> OrchardError:
    """The same error, saying where."""
    if place and not error.message.startswith(place):
        error.message = f"{place}: {error.message}"
    return error
