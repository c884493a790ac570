"""A conversation becomes a sample: the very ids that inference would read, with the assistant's tokens as targets.

What the model reads before an answer is `chat_ids` of the messages before it, with the generation prompt: the same function, so
the same ids. What it has to write is the rest of the template's own rendering of the answer, up to and including the token
that ends the turn; what the template puts after that token (a line break, mostly) the model never writes, so it is no target.

With `turns="all"` one sequence has to serve every answer of a conversation, so the prompt of each answer must begin with
everything up to the answer before it. Some templates do not keep to that: they take the thoughts out of earlier turns, say.
Then no one sequence is what inference reads, and the conversation is refused (`UnstableTemplate`). `turns="last"` learns the last
answer only, which is exact with any template that writes an answer behind its own generation prompt; one that does not is
refused as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from orchard.data.errors import BadSample, UnstableTemplate, check_choice
from orchard.data.source import Sample
from orchard.text.chat import chat_ids, conversation_pieces, plain_prompt
from orchard.text.messages import messages_from
from orchard.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


def conversation(
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    turns: str = "all",
    variables: Mapping[str, Any] | None = None,
    place: str = "",
) -> Sample:
    """The sample of one conversation. `variables`: what else the template may ask for, as at inference."""
    check_choice("turns", turns, ("all", "last"))
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise BadSample("no message of the assistant", reason="no-answer", place=place)
    writer = _Writer(tokenizer, messages, tools, variables, place)
    for index in answers if turns == "all" else answers[-1:]:
        writer.answer(index, is_last=index == answers[-1])
    return Sample.of(writer.ids, writer.learnt, place)


class _Writer:
    """The sequence as it grows, answer by answer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        place: str,
    ) -> None:
        # It stands in for the tokenizer in everything that `chat_ids` asks for.
        self.tokenizer = cast(Tokenizer, _Remembering(tokenizer))
        self.messages, self.place = messages, place
        self.options: dict[str, Any] = {"tools": tools, "variables": variables}
        self.ids: list[int] = []
        self.learnt: list[bool] = []

    def answer(self, index: int, *, is_last: bool) -> None:
        before, after = self.messages[:index], self.messages[: index + 1]
        prompt = self._prompt(before)
        if prompt[: len(self.ids)] != self.ids:
            raise self._changed(index, prompt)
        whole = chat_ids(self.tokenizer, after, add_generation_prompt=False, **self.options)
        rest = whole[len(prompt) :] if whole[: len(prompt)] == prompt else self._apart(index, prompt, whole)
        written = self._ended(index, rest, is_last)
        if not written:
            raise BadSample(
                f"message {index}: the template writes nothing for it", reason="empty-answer", place=self.place
            )
        self.learnt += [False] * (len(prompt) - len(self.ids)) + [True] * len(written)
        self.ids = prompt + written

    def _prompt(self, before: Messages) -> list[int]:
        if before:
            return chat_ids(self.tokenizer, before, add_generation_prompt=True, **self.options)
        raise BadSample("an answer to nothing: no message comes before it", reason="roles", place=self.place)

    def _ended(self, index: int, rest: list[int], is_last: bool) -> list[int]:
        """The answer with the token that ends its turn, without what the template puts after that."""
        tokenizer = self.tokenizer
        ends = [place for place, token in enumerate(rest) if token in tokenizer.control_ids]
        if ends and not tokenizer.decode(rest[ends[-1] + 1 :], skip_special=False).strip():
            return rest[: ends[-1] + 1]
        if not is_last:
            raise UnstableTemplate(
                f"{self._where(index)}: the template puts no token that ends the turn after the answer",
                hint="learn from the last answer only: turns='last'",
            )
        while rest and not tokenizer.decode(rest[-1:], skip_special=False).strip():
            rest = rest[:-1]
        return rest + ([] if tokenizer.eos_id is None or not rest else [tokenizer.eos_id])

    def _apart(self, index: int, prompt: list[int], whole: list[int]) -> list[int]:
        """The answer's ids where tokens would grow together across its beginning: at inference the prompt is there first, so
        the answer is encoded by itself. Refused where that would spell something else."""
        before, after = (self._pieces(index + extra, extra == 0) for extra in (0, 1))
        rest = _behind(before, after)
        if rest is None:
            raise self._unstable(index, "does not write it behind its own generation prompt", prompt, whole)
        ids: list[int] = []
        for piece in rest:
            ids += [piece] if isinstance(piece, int) else self.tokenizer.encode_piece(piece, first=False)
        spelled, wanted = (self.tokenizer.decode(found, skip_special=False) for found in (prompt + ids, whole))
        if spelled != wanted:
            raise self._unstable(index, "joins it to its generation prompt", prompt, whole)
        return ids

    def _pieces(self, count: int, prompted: bool) -> list[str | int]:
        messages = messages_from(self.messages[:count])
        if self.tokenizer.chat_template is None:
            return [plain_prompt(messages, prompted)]
        return _joined(conversation_pieces(self.tokenizer, messages, prompted, **self.options))

    def _changed(self, index: int, prompt: list[int]) -> UnstableTemplate:
        """Who is to blame: the template, or a tokenizer that joins what the template kept apart."""
        had, found = (self.tokenizer.decode(ids, skip_special=False) for ids in (self.ids, prompt))
        what = "writes the turns before it differently once they are past"
        if found.startswith(had):
            what = "keeps the turns before it, but the tokenizer joins an answer to what stands before it"
        return self._unstable(index, what, self.ids, prompt)

    def _unstable(self, index: int, what: str, had: list[int], found: list[int]) -> UnstableTemplate:
        same = next((i for i, (a, b) in enumerate(zip(had, found)) if a != b), min(len(had), len(found)))
        shown = [self.tokenizer.decode(ids[max(same - 4, 0) : same + 8], skip_special=False) for ids in (had, found)]
        return UnstableTemplate(
            f"{self._where(index)}: the template {what}: {shown[0]!r} became {shown[1]!r} (token {same})",
            hint="learn from the last answer only: turns='last'",
        )

    def _where(self, index: int) -> str:
        return f"{self.place + ': ' if self.place else ''}message {index}"


class _Remembering:
    """A tokenizer that encodes equal stretches of one conversation once: every prompt repeats all that came before it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[str, bool], list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_piece(self, text: str, *, first: bool) -> list[int]:
        known = self._known.get((text, first))
        if known is None:
            known = self._known[text, first] = self._tokenizer.encode_piece(text, first=first)
        return known


def _joined(pieces: Sequence[str | int]) -> list[str | int]:
    """Neighbouring texts as one, without empty ones."""
    joined: list[str | int] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        elif piece != "":
            joined.append(piece)
    return joined


def _behind(before: list[str | int], after: list[str | int]) -> list[str | int] | None:
    """What `after` has more than `before`; None where it does not begin with it."""
    if not before:
        return after
    place = len(before) - 1
    if before[:place] != after[:place] or len(after) < len(before):
        return None
    ours, theirs = before[place], after[place]
    if isinstance(ours, str) and isinstance(theirs, str) and theirs.startswith(ours):
        return _joined([theirs[len(ours) :], *after[place + 1 :]])
    return after[place + 1 :] if ours == theirs else None
