"""Part B of the study of coarse acceptance: models of the codes of generated sounds, decoded with and without groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from orchard.core.progress import Advance
from orchard.core.report import Scalar, Value
from orchard.core.seeds import fold
from orchard.generate.speculative import Speculation
from orchard.generate.speculative.coarse import Groups
from orchard.studies import _pcg_audio as audio
from orchard.studies import _pcg_laws as laws
from orchard.studies import _pcg_models as models
from orchard.studies._pcg_decode import Naive, Setting, Told, decode
from orchard.studies._pcg_swap import Classifier, swapped

SWAP = 0.95
"""Of the codes that are offered for exchange; those alone in their groups stay."""


@dataclass(frozen=True)
class Size:
    """How large part B is. The draft knows a tenth of the target's sounds: it hears where a sound goes and is unsure of codes."""

    codes: int = 2048
    frames: int = 64
    target_sounds: int = 2000
    draft_sounds: int = 200
    held_out: int = 400
    decoded: int = 192
    passes: int = 5
    draft_passes: int = 20
    temperature: float = 0.8


@dataclass(frozen=True)
class World:
    """Codes and models, ready to decode."""

    size: Size
    seed: int
    centres: np.ndarray
    codes: np.ndarray
    kinds: np.ndarray
    target: models.CodeModel
    drafts: dict[str, models.CodeModel]
    values: dict[str, Value | Scalar]

    @property
    def alone(self) -> range:
        """Ids that name kinds of sounds, and are no codes."""
        return range(len(self.centres), len(self.centres) + audio.CLASSES)

    @property
    def apart(self) -> np.ndarray:
        return laws.distances(np.concatenate([self.centres, np.zeros((audio.CLASSES, audio.BANDS))]))

    def groups(self, mean: float) -> Groups:
        """From the target's embeddings; a mean of 1 gives groups of one."""
        if mean <= 1:
            return Groups.from_embeddings(self.target.table, 2.0, alone=self.alone)
        return Groups.of_size(self.target.table, mean, alone=self.alone)

    def setting(self, draft: str = "tenth") -> Setting:
        return Setting(
            self.target,
            self.drafts[draft],
            self.apart,
            self.size.frames,
            self.size.temperature,
            fold(self.seed, "decode"),
        )

    @property
    def prompts(self) -> list[int]:
        return [self.alone[n % audio.CLASSES] for n in range(self.size.decoded)]


def world(size: Size, seed: int, advance: Advance) -> World:
    """Sounds, their codes, a target, and two drafts: one that knows few sounds, and a smaller one that knows them all."""
    rng = np.random.default_rng(fold(seed, "sounds"))
    made = audio.sounds(size.target_sounds + size.held_out, size.frames, rng)
    frames = made.frames.reshape(-1, audio.BANDS)
    known = frames[: size.target_sounds * size.frames]
    centres = audio.codebook(known[rng.permutation(len(known))[:40_000]], size.codes, rng)
    advance(1, note="sounds")
    codes = audio.encode(frames, centres).reshape(-1, size.frames)
    ids = np.concatenate([made.kinds[:, None] + size.codes, codes], 1)
    vocab = size.codes + audio.CLASSES

    def trained(name: str, dim: int, hidden: int, sounds: int, **options: float) -> models.CodeModel:
        model = models.make(vocab, dim, hidden, seed, name)
        return models.train(model, ids[:sounds], seed=fold(seed, name), advance=advance, **options)  # type: ignore[arg-type]

    target = trained("target", 48, 96, size.target_sounds, passes=size.passes, rate=1e-2)
    drafts = {
        "tenth": trained("tenth", 24, 32, size.draft_sounds, passes=size.draft_passes, rate=2e-2, batch=8),
        "small": trained("small", 16, 16, size.target_sounds, passes=max(size.passes - 1, 1), rate=2e-2),
    }
    unseen = ids[size.target_sounds :][:200]
    values: dict[str, Value | Scalar] = {
        f"b_surprise_{name}": Value(
            models.surprise(model, unseen), "nats", note=f"a code of unseen sounds; {model.weights:,} weights"
        )
        for name, model in {"target": target, **drafts}.items()
    }
    return World(size, seed, centres, codes, made.kinds, target, drafts, values)


def decoded(
    here: World, sizes: Sequence[float], main: float, share: Callable[[list, Groups], float], advance: Advance
) -> tuple[dict[str, Value | Scalar], dict[str, list], list[tuple[np.ndarray, np.ndarray]]]:
    """Decode by every way; `share` says at which share the naive way keeps as much as groups of size `main` do.

    Gives values, series, and the laws p and q of the places that exact speculation judged.
    """
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    setting, rejection = here.setting(), Speculation(kind="draft", accept="rejection")
    exact = decode(setting, here.prompts, rejection, seen=seen)
    runs: dict[float, list[Told]] = {}
    for size in sizes:
        wanted = Speculation(kind="draft", accept="coarse", groups=here.groups(size))
        runs[size] = decode(setting, here.prompts, wanted)
        advance(1, note=f"groups of {size}")
    loose = share(seen, here.groups(main))
    naive = decode(setting, here.prompts, rejection, judge=lambda sampler: Naive(sampler, loose))
    advance(1, note="naive")
    small = here.setting("small")
    other = [
        decode(small, here.prompts, wanted)
        for wanted in (rejection, Speculation(kind="draft", accept="coarse", groups=here.groups(main)))
    ]
    advance(1, note="another draft")
    ours = runs[main]
    values: dict[str, Value | Scalar] = {
        "b_decoded_tokens": Value(sum(len(one.codes) for one in exact), note="by each way"),
        "b_exact_acceptance": acceptance(exact),
        "b_acceptance": acceptance(ours),
        "b_acceptance_ratio": _ratio(ours, exact, acceptance),
        "b_exact_tokens_per_call": tokens_per_call(exact),
        "b_tokens_per_call": tokens_per_call(ours),
        "b_tokens_ratio": _ratio(ours, exact, tokens_per_call),
        "b_single_decoded_ratio": _ratio(runs[1], exact, acceptance),
        "b_decoded_distance_ratio": _ratio(ours, exact, distance),
        "b_naive_decoded_acceptance": Value(acceptance(naive), note=f"keeps p ≥ {loose:.3g} × the best"),
        "b_other_draft_exact_acceptance": Value(acceptance(other[0]), note="a smaller draft that knows all sounds"),
        "b_other_draft_acceptance_ratio": _ratio(other[1], other[0], acceptance),
        "b_other_draft_tokens_ratio": _ratio(other[1], other[0], tokens_per_call),
    }
    series = {
        "part B: decoded acceptance by mean group size": [
            [here.groups(s).mean_size, acceptance(t)] for s, t in runs.items()
        ],
        "part B: tokens per call by mean group size": [
            [here.groups(s).mean_size, tokens_per_call(t)] for s, t in runs.items()
        ],
    }
    return values, series, seen


def swap_test(here: World, groups: Groups, rounds: int = 3) -> dict[str, Value | Scalar]:
    """What a classifier of sounds loses when codes of held-out sounds are exchanged within their groups."""
    rng = np.random.default_rng(fold(here.seed, "swap"))
    known = here.size.target_sounds
    classifier = Classifier(here.centres, here.codes[:known], here.kinds[:known], here.seed)
    codes, kinds = here.codes[known:], here.kinds[known:]
    before = classifier.error(codes, kinds)
    exchanged = [swapped(codes, groups, SWAP, rng) for _ in range(rounds)]
    after = [(classifier.error(other, kinds), share) for other, share in exchanged]
    points = [100 * (error - before) for error, _ in after]
    return {
        "b_classifier_error": Value(100 * before, "%", note=f"{audio.CLASSES} kinds, {len(kinds)} unseen sounds"),
        "b_swapped_share": Value(
            min(share for _, share in after), note="of all codes, now another member of their group"
        ),
        "b_swap_points": Value(
            float(np.mean(points)),
            "points",
            min(points),
            max(points),
            note=f"mean of {rounds} exchanges, with the range",
        ),
    }


def acceptance(told: Sequence[Told]) -> float:
    return sum(one.kept for one in told) / max(sum(one.judged for one in told), 1)


def tokens_per_call(told: Sequence[Told]) -> float:
    return sum(len(one.codes) for one in told) / sum(one.calls for one in told)


def distance(told: Sequence[Told]) -> float:
    return float(np.mean([one.distance for one in told]))


def _ratio(ours: Sequence[Told], theirs: Sequence[Told], of: Callable[[Sequence[Told]], float]) -> Value:
    """With an interval of 95 % from drawing sounds anew."""
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(400):
        one, other = (rng.integers(len(told), size=len(told)) for told in (ours, theirs))
        draws.append(of([ours[i] for i in one]) / of([theirs[i] for i in other]))
    low, high = np.quantile(draws, [0.025, 0.975])
    return Value(of(ours) / of(theirs), "x", float(low), float(high))
