"""What the scheduler calls: guesses for all rows before a call, what became of them after it.

    drafts = speculator.drafts(rows)                        # one for each row, perhaps empty
    # run every row's pending tokens and draft.ids in one call, wanted = 1 + len(draft)
    # row: state = judge.step(state, scores[place], draft, place), place after place, while what it gives is what was guessed
    speculator.settle(row, draft, agreed(new_tokens, draft.ids))    # for every row, also where the draft is empty
    speculator.forget(row.key)                              # when it has ended or was preempted

`accept.judge_of(request, sampler)` makes a row's judge. Guesses never change what an answer is (accept="same") or the law it is
drawn from ("rejection"), so nothing here has to be repeatable: lengths follow the clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from orchard.core.errors import UsageError
from orchard.generate.protocol import Runner
from orchard.generate.sampling import Sampler
from orchard.generate.speculative.accept import chooser_of, forced_of, possible
from orchard.generate.speculative.adapt import CallTimes, Rate, best_lengths, nearby
from orchard.generate.speculative.drafting import NOTHING, Ask, Choose, Draft, Drafter, Forced, Speaker
from orchard.generate.speculative.early import early_layers, early_runner
from orchard.generate.speculative.lookup import BELIEVED, LookupDrafter
from orchard.generate.speculative.model import ModelDrafter, check_vocabulary
from orchard.generate.speculative.options import Speculation

USUAL = 16
"""Tokens guessed at most for one call where a request names no number."""
USUALLY = 0.6
"""How often guesses of a model are believed to come true before anything was seen."""
DRAFT = Speculation(kind="draft")
PROBE, LONGEST_PAUSE = 8, 256
"""Where guesses do not pay, a few are made again after so many calls."""


@dataclass
class Count:
    """What is remembered of one kind of guesses, over all rows."""

    rates: dict[int, Rate] = field(default_factory=dict)
    drafts: int = 0
    guessed: int = 0
    kept: int = 0
    pause: int = PROBE
    """Calls without guesses before a row tries some again; it doubles while nothing is kept."""

    def rate(self, sort: int) -> Rate:
        """Sorts above 0 are those of `lookup`."""
        return self.rates.setdefault(sort, Rate(BELIEVED.get(sort, USUALLY)))


@dataclass
class Talk:
    """What is remembered of one row."""

    drafter: Drafter
    count: Count
    sampler: Sampler
    choose: Choose
    forced: Forced | None = None
    rates: dict[int, Rate] = field(default_factory=dict)
    idle: int = 0
    probing: bool = False

    def rate(self, sort: int) -> Rate:
        """A row begins with what others of its kind have seen."""
        return self.rates.setdefault(sort, Rate(self.count.rate(sort).value))


class Speculator:
    """One for each scheduler, called by one thread at a time, but for `check`, `facts`, `guess_with` and `drop`. `draft` is the
    model that kind "draft" asks, and `own` are those of variants, by their names; a variant without one has that of the model.
    `slots`: how many sequences a draft model follows at once; `ends`: tokens after which nothing is guessed."""

    def __init__(
        self,
        model: Runner,
        *,
        draft: Runner | None = None,
        own: Mapping[str, Runner] = MappingProxyType({}),
        ends: Collection[int] = (),
        slots: int = 64,
    ) -> None:
        for one in (draft, *own.values()):
            if one is not None:
                check_vocabulary(model, one)
        self.model = model
        self.draft = draft
        self._own = own
        self.times = CallTimes()
        self._ends = frozenset(ends)
        self._slots = slots
        self._lock = threading.Lock()
        self._drafters: dict[str, Drafter] = {}
        self._counts: dict[str, Count] = {}
        self._talks: dict[int, Talk] = {}
        self._calls = 0
        self._begun: tuple[float, int] | None = None  # when the last drafts were handed out, and for how many tokens

    def check(self, speculation: Speculation, adapter: str | None = None) -> None:
        """Raise `UsageError` where this engine cannot do what a request asks for; before any work."""
        if speculation.kind == "early":
            early_layers(self.model, speculation.layers)
        groups = speculation.groups
        if groups is not None and len(groups) != self.model.config.vocab:
            raise UsageError(
                f"groups of {len(groups):,} tokens for a vocabulary of {self.model.config.vocab:,}",
                hint="make them from this model's table of embeddings",
            )
        self._drafter(speculation, adapter)

    def drafts(self, rows: Sequence[Speaker], given: int | None = None) -> list[Draft]:
        """Guesses for all rows of the next call. `given`: tokens that it has anyway, where some rows have more than one."""
        self._calls += 1
        given = len(rows) if given is None else given
        talks = {place: talk for place, row in enumerate(rows) if (talk := self._talk(row)) is not None}
        drafts = [NOTHING] * len(rows)
        if talks:
            looked = self._looked_up(rows, talks)
            lengths = self._lengths(rows, talks, looked, given)
            for place, draft in looked.items():
                drafts[place] = draft.first(lengths[place])
            self._asked(rows, talks, lengths, drafts)
        self._begun = (time.perf_counter(), given + sum(map(len, drafts)))
        return drafts

    def settle(self, row: Speaker, draft: Draft, accepted: int) -> None:
        """How many of the guesses came true. The first of these after `drafts` also tells what the call took."""
        if self._begun is not None:
            begun, tokens = self._begun
            self.times.add(tokens, time.perf_counter() - begun)
            self._begun = None
        talk = self._talks.get(row.key)
        if talk is None or not len(draft):
            return
        refused = accepted < len(draft) and not row.finished
        talk.rate(draft.sort).add(accepted, refused)
        count = talk.count
        count.rate(draft.sort).add(accepted, refused)
        count.drafts += 1
        count.guessed += len(draft)
        count.kept += accepted
        if talk.probing:
            count.pause = PROBE if accepted else min(2 * count.pause, LONGEST_PAUSE)

    def forget(self, key: int) -> None:
        """Free what is kept for a row; if it comes back, everything is worked out again."""
        talk = self._talks.pop(key, None)
        if talk is not None:
            talk.drafter.forget(key)

    def guess_with(self, draft: Runner) -> None:
        """Another draft model from now on; rows that have begun go on with theirs."""
        with self._lock:
            self.draft = draft
            self._drafters.pop(DRAFT.kind, None)
            self._counts.pop(DRAFT.kind, None)

    def drop(self, adapter: str) -> None:
        """Forget a variant's own draft model. Rows that have begun with it go on with it."""
        name = _name(DRAFT, adapter)
        with self._lock:
            self._drafters.pop(name, None)
            self._counts.pop(name, None)

    def facts(self) -> dict[str, Any]:
        """For each kind: drafts, tokens guessed and kept, and lately how likely a guess is to come true."""
        with self._lock:
            drafters, counts = dict(self._drafters), dict(self._counts)
        return {
            kind: {
                "drafts": count.drafts,
                "guessed": count.guessed,
                "kept": count.kept,
                "rates": {sort: round(rate.value, 3) for sort, rate in sorted(dict(count.rates).items())},
                "seconds per guess": drafters[kind].seconds,
                **getattr(drafters[kind], "facts", dict)(),
            }
            for kind, count in counts.items()
            if kind in drafters
        }

    def _talk(self, row: Speaker) -> Talk | None:
        wanted = row.request.speculation
        if wanted is None or row.finished:
            return None
        talk = self._talks.get(row.key)
        if talk is None or talk.sampler is not row.sampler:  # a row may get other rules when its prompt has been read
            adapter = row.request.adapter
            if talk is not None:  # the same drafter, also where its variant is gone by now
                drafter, count = talk.drafter, talk.count
            elif wanted.kind == "draft" and adapter is not None and self.draft is None and adapter not in self._own:
                return None  # the variant's own was there when the request came
            else:
                drafter = self._drafter(wanted, adapter)
                count = self._counts.setdefault(self._key(wanted, adapter), Count())
            choose, forced = chooser_of(row.request, row.sampler), forced_of(row.request, row.sampler)
            talk = self._talks[row.key] = Talk(drafter, count, row.sampler, choose, forced)
        return talk

    def _key(self, wanted: Speculation, adapter: str | None) -> str:
        return _name(wanted, adapter if adapter in self._own else None)

    def _drafter(self, wanted: Speculation, adapter: str | None) -> Drafter:
        name = self._key(wanted, adapter)
        with self._lock:  # requests are checked by their own threads
            if name not in self._drafters:
                self._drafters[name] = self._made(wanted, adapter)
            return self._drafters[name]

    def _made(self, wanted: Speculation, adapter: str | None) -> Drafter:
        if wanted.kind == "lookup":
            return LookupDrafter()
        if wanted.kind == "early":
            return ModelDrafter(early_runner(self.model, wanted.layers), slots=self._slots, ends=self._ends)
        draft = self._own.get(adapter, self.draft) if adapter is not None else self.draft
        if draft is None:
            raise UsageError("there is no draft model here", hint="give the engine one, or use kind 'lookup'")
        return ModelDrafter(draft, slots=self._slots, ends=self._ends)

    def _looked_up(self, rows: Sequence[Speaker], talks: dict[int, Talk]) -> dict[int, Draft]:
        """Guesses that cost nothing to make come first: how good they are is known only when they are there."""
        looked = {}
        for place, talk in talks.items():
            if isinstance(talk.drafter, LookupDrafter):
                ask = _ask(rows[place], talk, _most(rows[place]))
                draft = self._until_end(talk.drafter.propose([ask])[0])
                looked[place] = self._possible(draft, talk, rows[place])
        return looked

    def _possible(self, draft: Draft, talk: Talk, row: Speaker) -> Draft:
        try:
            return possible(draft, talk.sampler, row.state) if talk.sampler.rules else draft
        except Exception:  # a rule that cannot go on: the answer will say so itself
            return NOTHING

    def _until_end(self, draft: Draft) -> Draft:
        end = next((place for place, token in enumerate(draft.ids) if token in self._ends), None)
        return draft if end is None else draft.first(end + 1)

    def _lengths(
        self, rows: Sequence[Speaker], talks: dict[int, Talk], looked: dict[int, Draft], given: int
    ) -> dict[int, int]:
        lengths = {place: _most(rows[place]) for place in talks if _fixed(rows[place])}
        free = [place for place in talks if place not in lengths]
        if not free:
            return lengths
        drafts = [looked.get(place) for place in free]
        most = [_most(rows[place]) if draft is None else len(draft) for place, draft in zip(free, drafts, strict=True)]
        rates, costs = [], []
        for place, draft in zip(free, drafts, strict=True):
            talk = talks[place]
            rates.append(talk.rate(0 if draft is None else draft.sort).value if draft is not NOTHING else 0.0)
            costs.append(talk.drafter.seconds)
        given += sum(lengths.values())
        best = best_lengths(rates, most, costs, self.times, given, nearby(self._calls))
        for place, length, room in zip(free, best, most, strict=True):
            lengths[place] = _probed(talks[place], length, room)
        return lengths

    def _asked(
        self, rows: Sequence[Speaker], talks: dict[int, Talk], lengths: dict[int, int], drafts: list[Draft]
    ) -> None:
        """Guesses of models, for all rows of one model together."""
        groups: dict[int, list[int]] = {}
        for place, talk in talks.items():
            if lengths[place] and not isinstance(talk.drafter, LookupDrafter):
                groups.setdefault(id(talk.drafter), []).append(place)
        for places in groups.values():
            talk = talks[places[0]]
            asks = [_ask(rows[place], talks[place], lengths[place]) for place in places]
            for place, draft in zip(places, talk.drafter.propose(asks), strict=True):
                drafts[place] = draft


def _name(wanted: Speculation, adapter: str | None = None) -> str:
    if wanted.kind == "draft" and adapter is not None:
        return f"draft of {adapter}"
    return f"early {wanted.layers}" if wanted.layers else wanted.kind


def _ask(row: Speaker, talk: Talk, most: int) -> Ask:
    return Ask(row.key, row.state, most, talk.choose, len(row.request.ids) + row.limit, talk.forced)


def _fixed(row: Speaker) -> bool:
    return row.request.speculation is not None and row.request.speculation.length > 0


def _most(row: Speaker) -> int:
    """Guesses that there is room for: the call gives one token more than come true."""
    wanted = row.request.speculation
    length = USUAL if wanted is None or not wanted.length else wanted.length
    return max(0, min(length, row.limit - len(row.state.output) - 1))


def _probed(talk: Talk, length: int, room: int) -> int:
    """Where guesses do not pay, a few now and then: the text may have changed."""
    talk.probing = False
    if length or not room:
        talk.idle = 0 if length else talk.idle
        return length
    talk.idle += 1
    if talk.idle < talk.count.pause:
        return 0
    talk.idle, talk.probing = 0, True
    return min(2, room)
