"""Whether a written model is the model that was meant: the same questions to both, and the first answer that differs.

Here is what is measured: some thousand values of every tensor, so that one wrong tensor is found and named even where 4 bits
hide it from the scores; and the scores of fixed prompts at every position: largest and mean difference, KL divergence, and how
often both choose the same token. The source is computed in float32, with adapters beside its weights and not merged into them.
What has to be the same to the letter (tokens, templates, ids) is in `parity_words`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from orchard.session.parity_texts import LONGEST, PROMPTS
from orchard.session.parity_words import ExportDrift
from orchard.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from orchard.models.language.decoder import Decoder

SAMPLED = 4096
"""Values of a tensor that are compared."""


@dataclass(frozen=True)
class Limit:
    """`largest`: the most that one score may differ, where scores are as large as 1; where the largest of the source is above
    that, as a share of it. `mean`: of all differences, as a share of the scores' standard deviation. `tensor`: the root mean
    square of a tensor's differences, as a share of its own."""

    largest: float
    mean: float
    tensor: float


# Measured on tiny random models of 13 kinds, and on SmolLM2-135M from Q4_1. The largest values found stand beside each
# type, in the order of the fields (the first without mixtures, which have no such limit if rounded); limits are 1.7 to 4.5
# times that, for f32 more. One score says little where attention is sharp; the mean is steady. Four bits hide much from both
# (a rotary base of 100 for 10,000 moves a tiny model less), so what a file says of the model's config is held against the source
# to the letter, and each tensor by itself. Unrelated scores are 1.13 deviations apart.
LIMITS: dict[str, Limit] = {
    "f32": Limit(largest=1e-4, mean=1e-5, tensor=1e-6),  # 6.6e-6 (merged adapters), 1.5e-6, 2.5e-7
    "f16": Limit(largest=3e-2, mean=3e-3, tensor=1e-3),  # 1.3e-2, 9.6e-4, 2.2e-4
    "bf16": Limit(largest=0.2, mean=4e-2, tensor=4e-3),  # 9.2e-2, 1.6e-2, 1.8e-3
    "q8_0": Limit(largest=0.4, mean=6e-2, tensor=2e-2),  # 0.16, 2.6e-2, 6.7e-3
    "q4_0": Limit(largest=2.0, mean=0.8, tensor=0.2),  # 1.2, 0.41, 0.11
}


@dataclass(frozen=True, eq=False)
class Numbers:
    """What a model makes of the fixed prompts, and a sample of its tensors."""

    scores: tuple[np.ndarray, ...]  # per prompt: [positions, vocab]
    samples: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Parity:
    """How far apart source and target are, and how far they might have been."""

    limit: float | None
    """Of `scaled_difference`. None for a mixture whose weights are rounded: where two experts are nearly as good, rounding
    chooses the other, and one position says little; the mean is what counts."""
    mean_limit: float
    raised: bool
    """Whether somebody asked for another limit than the type's own."""
    max_difference: float
    scaled_difference: float
    """The largest difference as a share of the largest score."""
    mean_difference: float
    scaled_mean: float
    """The mean difference as a share of the scores' standard deviation."""
    kl: float
    same_choice: float
    """The share of positions where both find the same token likeliest."""
    positions: int
    tensors: int
    worst_tensor: str
    worst_tensor_error: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# Asking -----------------------------------------------------------------------------------------------------------------


def prompts_of(tokenizer: Tokenizer, vocab: int, context: int) -> list[list[int]]:
    """Token ids to score: the fixed prompts, and ids from all over the vocabulary that no text need lead to."""
    length = min(LONGEST, context)
    found = [[i for i in tokenizer.encode(text, bos=tokenizer.add_bos) if i < vocab][:length] for text in PROMPTS]
    spread = [(place * 7919 + 13) % vocab for place in range(length)]
    return [*[ids for ids in found if ids], spread]


def scores_of(decoder: Decoder, prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, ...]:
    import torch

    from orchard.core.context import Context

    found = []
    with torch.inference_mode():
        for ids in prompts:
            batch = torch.tensor([list(ids)], device=decoder.device)
            found.append(decoder(batch, Context.whole(batch))[0].float().cpu().numpy())
    return tuple(found)


def samples_of(decoder: Decoder) -> dict[str, np.ndarray]:
    """Values from all over each tensor, at places that depend on its size alone."""
    import torch

    from orchard.weights.load import dense_tensor, tensor_names

    found = {}
    for name, (module, attribute) in tensor_names(decoder).items():
        flat = dense_tensor(module, attribute, torch.float32).detach().cpu().flatten()
        if len(flat) > SAMPLED:
            flat = flat[(torch.arange(SAMPLED) * 2_654_435_761) % len(flat)]
        found[name] = flat.numpy().copy()
    return found


# Comparing --------------------------------------------------------------------------------------------------------------


def compare_numbers(
    source: Numbers, target: Numbers, prompts: Sequence[Sequence[int]], kind: str, tolerance: float | None = None
) -> Parity:
    """Hold scores and tensors against the limits of a target's type; `tolerance` takes the place of that of one score."""
    limit = LIMITS[kind]
    # Who allows scores to be further off allows as much more of their mean, and of the weights that make them.
    more = 1.0 if tolerance is None else max(1.0, tolerance / limit.largest)
    worst = _compare_tensors(source.samples, target.samples, limit.tensor * more)
    apart = [np.abs(ours - theirs) for ours, theirs in zip(source.scores, target.scores)]
    divergences = np.concatenate([_kl(a, b) for a, b in zip(source.scores, target.scores)])
    chosen = np.concatenate([a.argmax(-1) == b.argmax(-1) for a, b in zip(source.scores, target.scores)])
    everything = np.concatenate([scores.ravel() for scores in source.scores])
    largest, spread = max(1.0, float(np.abs(everything).max())), float(everything.std()) or 1.0
    most, mean = (float(measure([float(measure(each)) for each in apart])) for measure in (np.max, np.mean))
    mixture = any(".router." in name for name in source.samples)
    found = Parity(
        limit=tolerance if tolerance is not None else None if mixture and kind != "f32" else limit.largest,
        mean_limit=limit.mean * more,
        raised=tolerance is not None,
        max_difference=most,
        scaled_difference=most / largest,
        mean_difference=mean,
        scaled_mean=mean / spread,
        kl=float(divergences.mean()),
        same_choice=float(chosen.mean()),
        positions=len(chosen),
        tensors=len(source.samples),
        worst_tensor=worst[0],
        worst_tensor_error=worst[1],
    )
    _hold(found, source, target, apart, prompts, largest)
    return found


def _hold(
    found: Parity,
    source: Numbers,
    target: Numbers,
    apart: Sequence[np.ndarray],
    prompts: Sequence[Sequence[int]],
    largest: float,
) -> None:
    """Name the first score that is further off than it may be; where only the mean is, the one that is furthest off."""
    allowed = float("inf") if found.limit is None else found.limit * largest
    too_far = not found.scaled_mean <= found.mean_limit
    if found.max_difference <= allowed and not too_far:
        return
    wrong = [~(each <= allowed) for each in apart]  # what is no number is wrong too
    if not any(each.any() for each in wrong):
        wrong = [each == found.max_difference for each in apart]
    number = next(number for number, each in enumerate(wrong) if each.any())
    position, token = (int(place) for place in np.argwhere(wrong[number])[0])
    where = f"prompt {number} ({list(prompts[number][:6])} …), position {position}, token {token}"
    if too_far:
        where += f"; the mean is {found.scaled_mean:.3g} of a deviation off, of {found.mean_limit:.3g} allowed"
    else:
        where += f"; {allowed:.3g} is allowed"
    ours, theirs = (float(each.scores[number][position, token]) for each in (source, target))
    raise ExportDrift("scores", where, ours, theirs, hint="choose a wider --type; --tolerance raises the limits")


def _compare_tensors(
    source: Mapping[str, np.ndarray], target: Mapping[str, np.ndarray], allowed: float
) -> tuple[str, float]:
    """The tensor that is furthest off, and how far."""
    odd = sorted(source.keys() ^ target.keys())
    if odd:
        raise ExportDrift("weights", odd[0], *("there" if odd[0] in each else "missing" for each in (source, target)))
    worst = ("", 0.0)
    for name, ours in source.items():
        theirs = target[name]
        if ours.shape != theirs.shape:
            raise ExportDrift("weights", f"{name}, values", len(ours), len(theirs))
        size = float(np.sqrt(np.mean(np.square(ours, dtype=np.float64))))
        error = float(np.sqrt(np.mean(np.square(ours - theirs, dtype=np.float64)))) / (size or 1.0)
        if not error <= allowed:
            at = int(np.argmax(np.abs(ours - theirs)))
            where = f"{name}, off by {error:.3g} of its size where {allowed:.3g} is allowed; sampled value {at}"
            raise ExportDrift("weights", where, float(ours[at]), float(theirs[at]))
        worst = max(worst, (name, error), key=lambda found: found[1])
    return worst


def _kl(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Of the source from the target, at each position, in nats."""
    p, q = (_log_softmax(scores.astype(np.float64)) for scores in (ours, theirs))
    divergence: np.ndarray = (np.exp(p) * (p - q)).sum(-1)
    return divergence


def _log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max(-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
