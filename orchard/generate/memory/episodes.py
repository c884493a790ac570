"""What a conversation was about: its utterances in short segments, clustered into episodes (EpiCache, arXiv 2509.17396).

A segment is a few utterances in a row. Segments with like vectors make an episode; those nearest its centre are its medoids, and
say best what it is about. What turns texts into vectors is given from outside. The same texts always give the same episodes: the
clustering begins at fixed places.

Shapes: N segments, E episodes, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from orchard.core.errors import UsageError

Embed = Callable[[Sequence[str]], np.ndarray]
"""Texts to vectors [N, D]; of any length, they are normalised here."""

STARTS = 4
"""Beginnings that are tried; the tightest clusters stay."""
ROUNDS = 50


@dataclass(frozen=True)
class Utterance:
    """What somebody said, as text for the embedder and as tokens for the model."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """A few utterances in a row."""

    utterances: tuple[Utterance, ...]

    @property
    def text(self) -> str:
        return "\n".join(one.text for one in self.utterances)

    @property
    def tokens(self) -> list[int]:
        return [token for one in self.utterances for token in one.tokens]


def segmented(utterances: Sequence[Utterance], size: int = 4) -> list[Segment]:
    """Segments of `size` utterances; the last may have fewer."""
    if size < 1:
        raise UsageError(f"segments of {size} utterances", hint="use one or more")
    return [Segment(tuple(utterances[at : at + size])) for at in range(0, len(utterances), size)]


@dataclass(frozen=True)
class Episodes:
    """`centres` [E, D] have length 1; `members` and `medoids` are numbers of segments, by episode, in the order of the talk."""

    centres: np.ndarray
    members: tuple[tuple[int, ...], ...]
    medoids: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.centres)

    def match(self, vector: np.ndarray) -> tuple[int, float]:
        """The episode that is nearest to a vector [D], and how near: the cosine."""
        near = self.centres @ normalised(vector[None])[0]
        return int(near.argmax()), float(near.max())

    def plus(self, vector: np.ndarray) -> Episodes:
        """With one more, about something that was not spoken of before."""
        centres = np.concatenate([self.centres, normalised(vector[None])])
        return Episodes(centres, (*self.members, ()), (*self.medoids, ()))


def clustered(vectors: np.ndarray, episodes: int = 4, medoids: int = 4) -> Episodes:
    """Cluster segments by their vectors [N, D]; no more episodes than there are different vectors."""
    if vectors.ndim != 2 or not len(vectors) or not np.isfinite(vectors).all():
        raise UsageError(f"vectors of shape {vectors.shape} cannot be clustered", hint="give one finite row a segment")
    if episodes < 1 or medoids < 1:
        raise UsageError(f"{episodes} episodes with {medoids} medoids", hint="use one or more of each")
    whole = normalised(vectors)
    count = min(episodes, len(np.unique(whole.round(6), axis=0)))
    tries = [_means(whole, count, start) for start in range(STARTS)]
    labels = min(tries, key=lambda one: one[1])[0]
    # Numbered by when an episode is first spoken of, whatever the order the clustering found them in.
    order = list(dict.fromkeys(labels.tolist()))
    members = [np.flatnonzero(labels == label) for label in order]
    centres = normalised(np.stack([whole[mine].mean(0) for mine in members]))
    nearest = []
    for mine, centre in zip(members, centres, strict=True):
        best = np.argsort(-(whole[mine] @ centre), kind="stable")[:medoids]
        nearest.append(tuple(int(number) for number in np.sort(mine[best])))
    return Episodes(centres, tuple(tuple(int(number) for number in mine) for mine in members), tuple(nearest))


def normalised(vectors: np.ndarray) -> np.ndarray:
    """Rows of length 1, float64; a row of zeros stays one."""
    rows = np.asarray(vectors, np.float64)
    made: np.ndarray = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
    return made


def _means(rows: np.ndarray, count: int, start: int) -> tuple[np.ndarray, float]:
    """Labels [N] after k-means (Lloyd), and the sum of squared distances. Beginnings are as far apart as can be, from one of
    several first rows on: nothing is random."""
    centres = rows[[start * len(rows) // STARTS]]
    while len(centres) < count:
        away = _distances(rows, centres).min(1)
        centres = np.concatenate([centres, rows[[int(away.argmax())]]])
    labels = _distances(rows, centres).argmin(1)
    for _ in range(ROUNDS):
        for number in range(count):
            mine = rows[labels == number]
            # A centre that lost everybody moves to whoever is worst served.
            centres[number] = mine.mean(0) if len(mine) else rows[_distances(rows, centres).min(1).argmax()]
        again = _distances(rows, centres).argmin(1)
        if (again == labels).all():
            break
        labels = again
    return labels, float(_distances(rows, centres).min(1).sum())


def _distances(rows: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Squared, [N, E]."""
    found: np.ndarray = ((rows[:, None] - centres[None]) ** 2).sum(-1)
    return found
