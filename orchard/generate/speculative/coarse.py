"""Coarse-grained acceptance: a drafted token is kept when its GROUP of similar tokens passes the test of speculation.

For codec tokens only. Many codes of an audio codec sound alike, and a draft that names another one of them is refused by exact
speculation although nobody would hear the difference. Here tokens with similar embeddings form overlapping groups, one seeded by
each token, and a token's probability is split evenly over the groups that hold it. Speculative sampling then runs on groups:
the group of each token written follows exactly the target's law over groups, and which member of it is written follows the draft
where the draft was kept. So the law of TOKENS changes. Words of a text are not interchangeable: never use this for plain language
models. With groups of one token each it is ordinary speculative sampling, and where the target leaves one token nothing changes.

The method is "principled coarse-grained acceptance" (arXiv 2511.13732). One thing is added: a token to which the target gives
probability 0 (a grammar forbids it, top_p left it out) is never kept, and the law over groups stays exact, because the draft's
mass on such tokens counts as lying in no group (`strict`). Temperature, top_p and every other rule come before all this: `p` and
`q` are what is left after them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from orchard.core.errors import UsageError
from orchard.core.frozen import frozen

MOST_MEMBERS = 2**27
"""All groups together: half a gigabyte. More than that, and groups are so large that they say nothing."""
AT_A_TIME = 2**22
"""Cosines held at once while groups are made."""


class Groups:
    """For each token those that are like it, itself among them; a token is in as many groups as its own has members.

    Likeness is mutual, so one list serves both ways: the members of group k, and the groups that hold token k. They are
    stored one after another: group k is `members[offsets[k] : offsets[k + 1]]`, in the order of ids.
    """

    __slots__ = ("members", "offsets", "sizes")

    def __init__(self, offsets: np.ndarray, members: np.ndarray) -> None:
        """From arrays that an earlier one had; `from_embeddings` makes new ones."""
        self.offsets = np.asarray(offsets, np.int64)
        self.members = np.asarray(members, np.int32)
        self.sizes = np.diff(self.offsets)
        _check_mutual(self)

    @classmethod
    def from_embeddings(
        cls, table: np.ndarray, theta: float, *, alone: Iterable[int] = (), at_a_time: int = AT_A_TIME
    ) -> Groups:
        """Tokens whose rows of `table` [V, D] (the target's embeddings) have a cosine above `theta`; above 1: each its own.

        `alone`: ids that stay by themselves: control tokens, and those that were never trained, whose directions are random.
        """
        if not isinstance(theta, (int, float)) or isinstance(theta, bool) or not math.isfinite(theta):
            raise UsageError(
                f"theta is {theta!r}", hint="use a number; 0.4 to 0.5 is usual, above 1 gives groups of one"
            )
        rows = _directions(table, alone)
        count = len(rows)
        low, high, found = [np.arange(count)], [np.arange(count)], 0
        for start, cosines in _cosines(rows, at_a_time) if theta < 1 else ():
            at, other = np.nonzero(cosines > theta)
            low.append(at + start)
            high.append(other + start)
            found += 2 * len(at)
            if found > MOST_MEMBERS:
                raise UsageError(
                    f"groups of {count:,} tokens at theta {theta} have more than {found // count:,} members on average",
                    hint="use a larger theta: groups should have some tens of members, a hundred or two at most",
                )
        one, two = np.concatenate(low), np.concatenate(high)
        apart = one != two
        owner = np.concatenate([one, two[apart]])
        member = np.concatenate([two, one[apart]])
        offsets = np.concatenate([[0], np.bincount(owner, minlength=count).cumsum()])
        return cls(offsets, member[np.argsort(owner * count + member)])

    @classmethod
    def of_size(cls, table: np.ndarray, mean: float, *, alone: Iterable[int] = ()) -> Groups:
        """Groups of about `mean` members on average, and not more: by a theta in steps of 1/2048. In a large vocabulary some
        thousand tokens speak for all, and the mean may come out a little above."""
        if not isinstance(mean, (int, float)) or not mean >= 1:
            raise UsageError(
                f"a mean group size of {mean!r}", hint="use a number from 1 on: each token is in its own group"
            )
        alone = tuple(alone)
        rows = _directions(table, alone)
        steps = 4096
        counts = np.zeros(steps, np.int64)
        some = np.unique(np.linspace(0, len(rows) - 1, 4096).astype(np.int64))
        for part in np.array_split(some, math.ceil(len(some) * len(rows) / AT_A_TIME)):
            cosines = rows[part] @ rows.T
            cosines[np.arange(len(part)), part] = np.nan
            counts += np.histogram(cosines[np.isfinite(cosines)], steps, (-1.0, 1.0))[0]
        above = counts[::-1].cumsum()[::-1]  # likenesses at or above the lower edge of each step
        fits = np.flatnonzero(1 + above / len(some) <= mean)
        theta = -1 + 2 * float(fits[0]) / steps if len(fits) else 2.0
        return cls.from_embeddings(table, theta, alone=alone)

    def __len__(self) -> int:
        return len(self.sizes)

    def __repr__(self) -> str:
        return f"Groups({len(self):,} tokens, {self.mean_size:.1f} in a group on average)"

    @property
    def mean_size(self) -> float:
        return len(self.members) / max(len(self), 1)

    @property
    def nbytes(self) -> int:
        return self.offsets.nbytes + self.members.nbytes + self.sizes.nbytes

    def group(self, token: int) -> np.ndarray:
        """The members of this token's group, which are also the groups that hold this token."""
        return self.members[self.offsets[token] : self.offsets[token + 1]]

    def owner(self, token: int, uniform: float) -> int:
        """One of the groups that hold this token, all equally likely."""
        return int(self.members[self.offsets[token] + int(uniform * self.sizes[token])])

    def law(self, p: np.ndarray) -> np.ndarray:
        """The probability of each group, float64 [V]: every token's mass in equal parts to the groups that hold it."""
        some = np.flatnonzero(p)
        sizes = self.sizes[some]
        if 4 * len(some) > len(self):
            return np.add.reduceat((np.asarray(p, np.float64) / self.sizes)[self.members], self.offsets[:-1])
        # After top_p few are left: walk through their groups only.
        within = np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)
        places = self.members[np.repeat(self.offsets[some], sizes) + within]
        return np.bincount(places, np.repeat(np.asarray(p, np.float64)[some] / sizes, sizes), len(self))

    def mass(self, k: int, p: np.ndarray) -> float:
        """The probability of group k alone."""
        inside = self.group(k)
        return float((p[inside] / self.sizes[inside]).sum(dtype=np.float64))


class Judged(NamedTuple):
    """`token` is written; `group` is the group it was written for, and has the target's law over groups."""

    accepted: bool
    token: int
    group: int


@frozen
class CoarseAcceptance:
    """Judges drafted tokens one after another. `p` and `q` are probabilities [V], the target's and the draft's, each after
    the request's rules; `q` None: the draft was sure of its token (looked up, not sampled)."""

    groups: Groups
    strict: bool = True
    """Never keep a token to which the target gives probability 0. False is the published method: a difference only where
    rules leave tokens out."""
    tries: int = 64
    """Redraws after a refusal before the law of what is left is worked out in full. Both give the same law."""

    def judge(self, p: np.ndarray, q: np.ndarray | None, token: int, uniforms: Iterable[float]) -> tuple[bool, int]:
        """Whether a token that was drawn from `q` is kept, and the token to write: it, or another one in its place.

        `uniforms` are numbers in [0, 1) used up in order: two, and after a refusal up to 3 × `tries` + 2 more.
        """
        accepted, chosen, _ = self.decide(p, q, token, uniforms)
        return accepted, chosen

    def decide(self, p: np.ndarray, q: np.ndarray | None, token: int, uniforms: Iterable[float]) -> Judged:
        """The same, with the group."""
        self._check(p, q, token)
        draw = iter(uniforms)
        group = self.groups.owner(token, next(draw))
        chance = next(draw)
        if not (self.strict and p[token] == 0):
            drafted = self._drafted(group, p, q, token)
            if chance * drafted < self.groups.mass(group, p):  # a drafted mass of 0 cannot be: `token` came from it
                return Judged(True, token, group)
        return self._instead(p, q, token, draw)

    def acceptance(self, p: np.ndarray, q: np.ndarray) -> float:
        """The probability that a token drawn from `q` is kept."""
        drafted = np.where(p > 0, q, 0) if self.strict else q
        return float(np.minimum(self.groups.law(p), self.groups.law(drafted)).sum())

    def _drafted(self, k: int, p: np.ndarray, q: np.ndarray | None, token: int) -> float:
        """The draft's probability of group k, without what the target rules out."""
        inside = self.groups.group(k)
        if q is None:
            held = bool((inside == token).any()) and not (self.strict and p[token] == 0)
            return float(held) / float(self.groups.sizes[token])
        share = q[inside] / self.groups.sizes[inside]
        return float((np.where(p[inside] > 0, share, 0) if self.strict else share).sum(dtype=np.float64))

    def _instead(self, p: np.ndarray, q: np.ndarray | None, token: int, draw: Iterator[float]) -> Judged:
        """A group from what the target has left after the draft's part, and a token of it by the target's own law.

        First by thinning: draw from the target, keep it with the share of its group that is left. That takes one redraw for
        each refusal on average over all positions, where the whole law of groups would be walked through each time.
        """
        some = np.flatnonzero(p > 0)
        sums = np.asarray(p, np.float64)[some].cumsum()
        for _ in range(self.tries):
            other = int(some[_place(sums, next(draw))])
            group = self.groups.owner(other, next(draw))
            wanted = self.groups.mass(group, p)
            if next(draw) * wanted < wanted - self._drafted(group, p, q, token):
                return Judged(False, other, group)
        law = self.groups.law(p)
        left = np.maximum(law - self._whole_draft(p, q, token), 0)
        if not left.sum() > 0:  # equal laws but for rounding
            left = law
        group = _pick(left, next(draw))
        inside = self.groups.group(group)
        return Judged(False, int(inside[_pick(p[inside] / self.groups.sizes[inside], next(draw))]), group)

    def _whole_draft(self, p: np.ndarray, q: np.ndarray | None, token: int) -> np.ndarray:
        if q is None:
            q = np.zeros(len(self.groups))
            q[token] = 1
        return self.groups.law(np.where(p > 0, q, 0) if self.strict else q)

    def _check(self, p: np.ndarray, q: np.ndarray | None, token: int) -> None:
        for whose, given in (("target", p), ("draft", q)):
            if given is not None and given.shape != (len(self.groups),):
                raise UsageError(
                    f"the groups are of {len(self.groups):,} tokens, the {whose}'s probabilities have shape {given.shape}",
                    hint="make the groups from the embeddings of the model that answers",
                )
        if not 0 <= token < len(self.groups):
            raise UsageError(f"there is no token {token} among {len(self.groups):,}", hint="ids count from 0")


def _place(sums: np.ndarray, uniform: float) -> int:
    return min(int(np.searchsorted(sums, uniform * sums[-1], side="right")), len(sums) - 1)


def _pick(mass: np.ndarray, uniform: float) -> int:
    """A place whose mass is not 0, by its share."""
    some = np.flatnonzero(mass > 0)
    return int(some[_place(np.asarray(mass, np.float64)[some].cumsum(), uniform)])


def _directions(table: np.ndarray, alone: Iterable[int]) -> np.ndarray:
    """Rows of length 1; NaN for those that are like no other, because no comparison with NaN holds."""
    rows = np.array(table, np.float32)
    if rows.ndim != 2 or not rows.size:
        raise UsageError(
            f"an embedding table has two sides, not the shape {rows.shape}", hint="pass [tokens, dimensions]"
        )
    if not np.isfinite(rows).all():
        raise UsageError("the embedding table has numbers that are infinite or NaN", hint="load the model again")
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    rows /= np.where(lengths > 0, lengths, np.nan)
    for token in alone:
        if not 0 <= token < len(rows):
            raise UsageError(f"token {token} cannot stay alone: there are {len(rows):,}", hint="ids count from 0")
        rows[token] = np.nan
    return rows


def _cosines(rows: np.ndarray, at_a_time: int) -> Iterator[tuple[int, np.ndarray]]:
    """Every pair once: blocks of rows against all rows from the block's first on, NaN where the pair is another block's or
    a token and itself. Rounding may tell (a, b) from (b, a), so each pair must be looked at one way only."""
    start = 0
    while start < len(rows):
        stop = min(len(rows), start + max(1, at_a_time // (len(rows) - start)))
        cosines = rows[start:stop] @ rows[start:].T
        cosines[np.tril_indices(stop - start)] = np.nan
        yield start, cosines
        start = stop


def _check_mutual(groups: Groups) -> None:
    """Every token in its own group, and every likeness both ways: on that the arithmetic of laws stands."""
    count, members = len(groups), groups.members
    owner = np.repeat(np.arange(count), groups.sizes)
    right = groups.offsets[0] == 0 and groups.offsets[-1] == len(members) and (groups.sizes > 0).all()
    right = right and len(members) > 0 and members.min() >= 0 and members.max() < count
    if right:
        keys = owner * count + members
        right = bool((np.diff(keys) > 0).all()) and int(np.count_nonzero(owner == members)) == count
        right = right and np.array_equal(np.sort(members.astype(np.int64) * count + owner), keys)
    if not right:
        raise UsageError(
            "these arrays are no groups: each token must be in its own group, and in those of all members of it",
            hint="make them with Groups.from_embeddings",
        )
