"""Text that a model writes by itself, many rows at a time: what a smaller form of it learns from when nobody gives a corpus.

Every row goes on for a fixed number of tokens. It begins with an opening (the beginning of a document, or of somebody's turn in
a conversation), the model goes on with tokens drawn from its own distribution, and when it ends, the row's next opening is put
in, token by token, and it goes on. So no row waits for another, shapes never change, and on a GPU a step is one recorded graph:
the processor is asked for nothing until the rows are full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchard.core.context import Context
from orchard.core.errors import UnsupportedPair, UsageError
from orchard.core.progress import progress
from orchard.core.seeds import fold
from orchard.models.language.decoder import Decoder
from orchard.text.chat import chat_ids
from orchard.text.tokenizer import Tokenizer

SHOWN = 64
"""Slots by which what a step looks at grows: each size is recorded once."""
WARM = 3
"""Steps before one is recorded: libraries choose their ways then."""
MARKER = "\u2056"
"""A user's words, to find where they stand in a template; nobody's template holds it."""


@dataclass(frozen=True)
class Script:
    """What is put into rows: openings one after another, each whenever the model has ended; from the first again at the end."""

    openings: Sequence[Sequence[int]]
    share: float = 1.0
    """Of the rows, beside other scripts."""
    heat: Sequence[float] = ()
    """Temperatures of what follows each opening, as factors of the run's; none: 1."""


def documents(tokenizer: Tokenizer) -> Script:
    """Documents from nothing: after the mark that ends one, or begins one."""
    known = tokenizer.control_tokens
    mark = known.get("<|endoftext|>", tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id)
    if mark is None:
        raise UsageError("this tokenizer has no mark for the beginning of a text", hint="give openings of your own")
    return Script([[mark]])


def conversations(tokenizer: Tokenizer, systems: Sequence[str | None] = (None,), answers: float = 1.0) -> Script:
    """Both sides of conversations: the model makes up what the user says (Magpie, arXiv 2406.08464), and answers, at a
    temperature of its own: people rarely ask for answers at 1."""
    openings: list[list[int]] = []
    for system in systems:
        first = [] if system is None else [{"role": "system", "content": system}]
        before, after = _around_words(tokenizer, first)
        ends = [i for i, token in enumerate(after) if token in tokenizer.eos_ids]
        openings += [
            before,
            after[ends[0] + 1 if ends else 0 :],
        ]  # the model itself writes what ends the user's turn
    return Script(openings, heat=() if answers == 1.0 else (1.0, answers) * len(systems))


def answers(tokenizer: Tokenizer, prompts: Sequence[str], heat: Sequence[float] = (1.0,)) -> Script:
    """Answers to given prompts, at these temperatures by turns."""
    # A user's words are encoded by themselves wherever they stand, so a template is rendered once for all of them.
    before, after = _around_words(tokenizer)
    openings = [[*before, *tokenizer.encode(prompt), *after] for prompt in prompts]
    return Script(openings, heat=[heat[number % len(heat)] for number in range(len(openings))])


def _around_words(tokenizer: Tokenizer, first: Sequence[dict[str, str]] = ()) -> tuple[list[int], list[int]]:
    """What a chat template puts before a user's words and after them."""
    whole, words = chat_ids(tokenizer, [*first, {"role": "user", "content": MARKER}]), tokenizer.encode(MARKER)
    at = next((i for i in range(len(whole)) if whole[i : i + len(words)] == words), None)
    if at is None:
        raise UsageError("this model's chat template changes what users say", hint="give openings of your own")
    return whole[:at], whole[at + len(words) :]


def own_text(decoder: Decoder, scripts: Sequence[Script], **how: Any) -> np.ndarray:
    """The ids of `own_turns` alone."""
    return own_turns(decoder, scripts, **how)[0]


@torch.inference_mode()
def own_turns(
    decoder: Decoder,
    scripts: Sequence[Script],
    *,
    rows: int,
    length: int,
    ends: Sequence[int],
    seed: int = 0,
    temperature: float = 1.0,
    batch: int = 256,
    until: Callable[[], bool] = lambda: False,
) -> tuple[np.ndarray, np.ndarray]:
    """Ids [rows, length] int32, opening and all, and which of them the model chose; fewer rows where `until` says so between two
    batches. `ends`: the tokens that end a document or a turn. The same seed gives the same rows on the same device."""
    if not scripts or any(not script.openings or not all(script.openings) for script in scripts):
        raise UsageError("there is no opening to write from", hint="give scripts with openings of at least one token")
    if any(script.heat and (len(script.heat) != len(script.openings) or min(script.heat) <= 0) for script in scripts):
        raise UsageError("temperatures that are not above 0, or not one for each opening", hint="give one for each")
    if length > decoder.config.context:
        raise UsageError(
            f"rows of {length:,} tokens for a model with a context of {decoder.config.context:,}", hint="shorter rows"
        )
    batch = min(batch, rows)
    found: list[Tensor] = []
    writer = _Writer(decoder, scripts, batch, length, list(ends), temperature)
    with progress("writing text", total=rows * length, unit="tokens") as advance:
        for number in range(-(-rows // batch)):
            if found and until():
                break
            found.append(writer.write(fold(seed, "own text", number) % 2**62))
            advance(batch * length)
    made: np.ndarray = torch.cat(found)[:rows].numpy()
    chosen = made >= 0
    return np.where(chosen, made, ~made), chosen


class _Writer:
    """A batch of rows and all that a step reads and changes, at fixed places in memory."""

    def __init__(
        self,
        decoder: Decoder,
        scripts: Sequence[Script],
        batch: int,
        length: int,
        ends: list[int],
        temperature: float,
    ) -> None:
        device = decoder.device
        self.decoder, self.batch, self.length = decoder, batch, length
        self.cache = decoder.cache(batch=batch, length=length)
        openings = [list(opening) for script in scripts for opening in script.openings]
        longest = max(map(len, openings))
        padded = [opening + [0] * (longest - len(opening)) for opening in openings]
        self.openings = torch.tensor(padded, device=device)
        self.sizes = torch.tensor([len(opening) for opening in openings], device=device)
        heats = [heat for script in scripts for heat in (script.heat or [1.0] * len(script.openings))]
        self.heat = torch.tensor(heats, dtype=torch.float32, device=device) * temperature
        counts = np.array([len(script.openings) for script in scripts])
        self.firsts, self.counts = np.concatenate([[0], np.cumsum(counts)[:-1]]), counts
        shares = np.array([script.share for script in scripts], dtype=np.float64)
        self.whose = np.searchsorted(np.cumsum(shares / shares.sum()), (np.arange(batch) + 0.5) / batch)
        first, count = (torch.from_numpy(one[self.whose]).to(device) for one in (self.firsts, self.counts))
        self.first, self.count = first, count
        self.ends = torch.zeros(decoder.config.vocab, dtype=torch.bool, device=device)
        self.ends[ends] = True
        self.turn, self.offset, self.token, self.place = (
            torch.zeros(batch, dtype=torch.long, device=device) for _ in range(4)
        )
        self.drawn = torch.zeros(batch, dtype=torch.bool, device=device)
        """Whether the model chose the token: an opening may hold marks that end something, too."""
        self.state = (self.turn, self.offset, self.token, self.place, self.drawn)
        self.written = torch.zeros(batch, length, dtype=torch.int32, device=device)
        self.graphs: dict[int, Any] = {}

    def write(self, seed: int) -> Tensor:
        torch.manual_seed(seed)
        draw = np.random.default_rng(seed)
        try:
            self.cache.rewind(torch.zeros(self.batch, dtype=torch.long, device=self.first.device))
        except (
            UnsupportedPair
        ):  # windows forget, and cannot go back: fresh stores, and what was recorded on the old ones goes
            self.cache = self.decoder.cache(batch=self.batch, length=self.length)
            self.graphs.clear()
        self.turn.copy_(torch.from_numpy(draw.integers(0, self.counts[self.whose])))
        if self.counts.max() > 1:  # conversations begin with the user's side: their openings come in pairs
            self.turn.sub_(self.turn % 2 * (self.count % 2 == 0).long())
        self.token.copy_(self.openings[self.first + self.turn, 0])
        self.offset.fill_(1)
        self.place.zero_()
        self.drawn.zero_()
        for step in range(self.length - 1):
            self._go(min(-(-(step + 1) // SHOWN) * SHOWN, self.length))
        self._note()
        return self.written.cpu().clone()

    def _note(self) -> None:
        """What the model did not choose is noted as its complement, which is below 0."""
        noted = torch.where(self.drawn, self.token, ~self.token)
        self.written.scatter_(1, self.place[:, None], noted.int()[:, None])

    def _step(self, upto: int) -> None:
        """Note the token, read it, and choose the next: the opening's own while it lasts."""
        self._note()
        context = Context(positions=self.place[:, None], cache=self.cache, upto=upto)
        scores = self.decoder(self.token[:, None], context)[:, 0].float()
        scores.div_(self.heat[self.first + self.turn, None])
        # The largest of p / e, e drawn from the exponential distribution, is a draw from p.
        noise = torch.empty_like(scores).exponential_().log_()
        drawn = scores.sub_(noise).argmax(-1)
        ended = self.ends[self.token] & self.drawn
        turn = torch.where(ended, (self.turn + 1) % self.count, self.turn)
        offset = torch.where(ended, 0, self.offset)
        which = self.first + turn
        given = offset < self.sizes[which]
        opening = self.openings[which, offset.clamp_max(self.openings.shape[1] - 1)]
        self.token.copy_(torch.where(given, opening, drawn))
        self.turn.copy_(turn)
        self.offset.copy_(offset + given.long())
        self.drawn.copy_(~given)
        self.place.add_(1)

    def _go(self, upto: int) -> None:
        if self.token.device.type != "cuda":
            self._step(upto)
            return
        if upto not in self.graphs:
            self.graphs[upto] = self._record(upto)
        self.graphs[upto].replay()

    def _record(self, upto: int) -> Any:
        """A step as one graph. What trying it out changed is put back: the state of rows; slots are written again anyway."""
        state = [one.clone() for one in self.state]
        seen = [(slots.positions, slots.positions.clone()) for slots in self.cache.tables.values()]

        def restore() -> None:
            for one, kept in zip(self.state, state, strict=True):
                one.copy_(kept)
            for positions, kept in seen:
                positions.copy_(kept)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                self._step(upto)
                restore()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(upto)
        restore()
        return graph
