"""A draft model: any runner of the same vocabulary, asked for one token after another, for all sequences at once.

It keeps a slot for each sequence. Guesses that did not come true are taken back before the next ones. A prompt is read a stretch
at a time, so that a long one holds nobody up: until it has been read its sequence gets no guesses.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchard.core.errors import OrchardError, UsageError
from orchard.generate.errors import DraftMismatch
from orchard.generate.protocol import Runner, State, Work
from orchard.generate.speculative.drafting import NOTHING, Ask, Draft

if TYPE_CHECKING:
    import numpy as np

    from orchard.text.tokenizer import Tokenizer

STRETCH = 512
"""Tokens that are caught up with in one call."""
LOOKED_AT = 2048
"""Tokens of two vocabularies that are compared: different ones differ nearly everywhere, and a wrong guess changes no answer."""


def check_vocabulary(
    model: Runner, draft: Runner, tokenizer: Tokenizer | None = None, draft_tokenizer: Tokenizer | None = None
) -> None:
    """Raise `DraftMismatch` unless ids mean the same to both, as far as that can be seen."""
    ours, theirs = model.config.vocab, draft.config.vocab
    if ours != theirs:
        raise DraftMismatch(f"the draft model has a vocabulary of {theirs:,} tokens, the model one of {ours:,}")
    if tokenizer is None or draft_tokenizer is None or tokenizer is draft_tokenizer:
        return
    # Files may name tokens that nobody uses, up to the rows of the embedding, or leave them out.
    shared = min(tokenizer.vocab_size, draft_tokenizer.vocab_size)
    for token in range(0, shared, max(1, shared // LOOKED_AT)):
        mine, other = (one.decode([token], skip_special=False) for one in (tokenizer, draft_tokenizer))
        if mine != other:
            raise DraftMismatch(f"token {token} is {other!r} to the draft model and {mine!r} to the model")


@dataclass
class Seat:
    """What the draft model has of one sequence."""

    slot: int
    prompt: tuple[int, ...]
    length: int
    read: int = 0
    """Tokens of the prompt."""
    fed: list[int] = field(default_factory=list)
    """Tokens of the answer, guesses among them."""
    sure: int = 0
    """How many of those are known to be the answer's."""


@dataclass
class Guessing:
    """One draft in the making."""

    ask: Ask
    seat: Seat
    state: State
    new: tuple[int, ...]
    most: int
    ids: list[int] = field(default_factory=list)
    laws: list[np.ndarray] = field(default_factory=list)

    def draft(self) -> Draft:
        return Draft(tuple(self.ids), self.laws if self.laws else None) if self.ids else NOTHING


class ModelDrafter:
    """`ends`: tokens after which nothing is guessed. `failures` counts calls that the draft model could not do: nobody gets
    guesses from it then, and no answer suffers. One caller at a time."""

    def __init__(self, runner: Runner, *, slots: int = 64, ends: Collection[int] = ()) -> None:
        self.runner = runner
        self.failures = 0
        self.rounds = 0
        """Calls for guesses so far."""
        self.seconds = 0.0
        self._ends = frozenset(ends)
        self._slots = runner.slots(slots)
        if not self._slots.goes_back:
            raise UsageError(
                "this model cannot take guesses back, so it cannot be a draft model",
                hint="use one whose stores keep everything, or lookup",
            )
        self._free = list(range(slots))[::-1]
        self._seats: OrderedDict[int, Seat] = OrderedDict()  # used last at the end

    def propose(self, wanted: Sequence[Ask]) -> list[Draft]:
        try:
            seated = [(ask, self._seat(ask, {other.key for other in wanted})) for ask in wanted]
            self._read_prompts([seat for _, seat in seated if seat is not None])
            guessing = {ask.key: made for ask, seat in seated if seat and (made := self._caught_up(ask, seat))}
            self._guess(list(guessing.values()))
        except Exception:  # no memory, most likely, in whatever words. Slots of a failed call can only be closed
            self.failures += 1
            for ask in wanted:
                self.forget(ask.key)
            return [NOTHING] * len(wanted)
        return [guessing[ask.key].draft() if ask.key in guessing else NOTHING for ask in wanted]

    def forget(self, key: int) -> None:
        seat = self._seats.pop(key, None)
        if seat is not None:
            self._slots.close(seat.slot)
            self._free.append(seat.slot)

    def facts(self) -> dict[str, Any]:
        return {"slots": len(self._seats), "rounds": self.rounds, "failures": self.failures}

    def _seat(self, ask: Ask, present: Collection[int]) -> Seat | None:
        seat = self._seats.get(ask.key)
        if seat is not None and (seat.prompt is not ask.state.prompt or seat.sure > len(ask.state.output)):
            self.forget(ask.key)
            seat = None
        if seat is None:
            seat = self._open(ask, present)
        else:
            self._seats.move_to_end(ask.key)
        return seat

    def _open(self, ask: Ask, present: Collection[int]) -> Seat | None:
        context = self.runner.config.context
        length = min(ask.length or context, context)
        if len(ask.state.prompt) + len(ask.state.output) >= length:
            return None
        if not self._free:
            absent = next((key for key in self._seats if key not in present), None)
            if absent is None:
                return None
            self.forget(absent)
        slot = self._free.pop()
        try:
            self._slots.open(slot, length)
        except OrchardError:
            self._free.append(slot)
            self.failures += 1
            return None
        seat = self._seats[ask.key] = Seat(slot, ask.state.prompt, length)
        if not self._slots.goes_back:  # some know it only when they have seen a store
            self.failures += 1
            self.forget(ask.key)
            return None
        return seat

    def _read_prompts(self, seats: Sequence[Seat]) -> None:
        """One call of at most a stretch, those with the least left first."""
        room, work = STRETCH, []
        for seat in sorted(seats, key=lambda seat: len(seat.prompt) - seat.read):
            tokens = seat.prompt[seat.read : seat.read + room]
            if tokens:
                work.append((seat, tokens))
                room -= len(tokens)
        if work:
            self._slots.run([Work(seat.slot, tokens, prompt=True) for seat, tokens in work])
        for seat, tokens in work:
            seat.read += len(tokens)

    def _caught_up(self, ask: Ask, seat: Seat) -> Guessing | None:
        """Bring the slot to where the answer stands, but for the tokens that the first call will be given."""
        output = ask.state.output
        if seat.read < len(seat.prompt) or not len(output):
            return None
        same = seat.sure
        while same < min(len(seat.fed), len(output)) and seat.fed[same] == output[same]:
            same += 1
        same = min(same, len(output) - 1)  # scores are wanted after the last token, so it is given again if need be
        if same < len(seat.fed):
            self._slots.back(seat.slot, len(seat.prompt) + same)
            del seat.fed[same:]
        seat.sure = same
        new = output[same : same + STRETCH]
        most = min(ask.most, seat.length - len(seat.prompt) - len(output) + 1)
        if len(new) < len(output) - same or most < 1:  # far behind, after a pause: no guesses this time
            if most >= 1:
                self._feed([(seat, new)])
            return None
        return Guessing(ask, seat, ask.state, new, most)

    def _guess(self, guessing: Sequence[Guessing]) -> None:
        live, begun = list(guessing), time.perf_counter()
        while live:
            scores = self._feed([(one.seat, one.new) for one in live], wanted=1)
            self.rounds += 1
            live = [one for one, row in zip(live, scores, strict=True) if self._add(one, row[0])]
        if made := sum(len(one.ids) for one in guessing):
            each = (time.perf_counter() - begun) / made
            self.seconds += (each - self.seconds) * (0.2 if self.seconds else 1.0)

    def _add(self, one: Guessing, scores: np.ndarray) -> bool:
        """One more guess, and what must follow it; whether there is another to make."""
        try:
            token, law = one.ask.choose(scores, one.state)
            one.ids.append(token)
            if law is not None:
                one.laws.append(law)
            one.state, one.new = one.state.plus(token), (token,)
            if one.ask.forced is not None and token not in self._ends:
                for token in one.ask.forced(one.state)[: one.most - len(one.ids)]:
                    one.ids.append(token)
                    one.state, one.new = one.state.plus(token), (*one.new, token)
        except Exception:  # a rule of the request's that cannot bear a guess: the answer itself never sees it
            return False
        return len(one.ids) < one.most and one.ids[-1] not in self._ends

    def _feed(self, given: Sequence[tuple[Seat, tuple[int, ...]]], wanted: int = 0) -> list[np.ndarray]:
        scores = self._slots.run([Work(seat.slot, new, wanted) for seat, new in given])
        for seat, new in given:
            seat.fed.extend(new)
        return scores
