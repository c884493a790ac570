"""Whether two config trees compute the same: what a file says of a model, held against the model that it was written from.

Formats of weights and stores of caches are Orchard's affair. A rotary stretch may be written in other words (GGUF keeps a tensor
of divisors), so the angles themselves are compared. A number that differs only by the rounding to float32 is the same.
"""

from __future__ import annotations

import math

import torch

from orchard.core.config_text import Change, diff
from orchard.models.language.decoder import Decoder
from orchard.nn.attention import Rotary
from orchard.weights.export import shape_only, without_stretch

CLOSE = 1e-6


def config_change(ours: Decoder.Config, theirs: Decoder.Config) -> Change | None:
    """The first thing that `theirs` computes in another way; None where there is none."""
    ours, theirs = (shape_only(tree.complete()) for tree in (ours, theirs))
    changes = diff(without_stretch(ours), without_stretch(theirs))
    return next((change for change in changes if not _close(change)), None) or _turned(ours, theirs)


def _close(change: Change) -> bool:
    try:
        return math.isclose(float(change.old), float(change.new), rel_tol=CLOSE)
    except ValueError:
        return False


def _turned(ours: Decoder.Config, theirs: Decoder.Config) -> Change | None:
    """The first rotary part whose angles differ."""
    others = {path: node for path, node in theirs.walk() if isinstance(node, Rotary.Config)}
    for path, node in ours.walk():
        if not isinstance(node, Rotary.Config):
            continue
        (fast, gain), (other, other_gain) = (_angles(each) for each in (node, others[path]))
        if not math.isclose(gain, other_gain, rel_tol=CLOSE):
            return Change(f"{path}.gain", str(gain), str(other_gain))
        wrong = (~torch.isclose(fast, other, rtol=1e-4, atol=0)).nonzero()
        if len(wrong):
            at = int(wrong[0])
            return Change(f"{path}, frequency {at}", f"{float(fast[at]):.6g}", f"{float(other[at]):.6g}")
    return None


def _angles(node: Rotary.Config) -> tuple[torch.Tensor, float]:
    rotary: Rotary = node.build()
    return rotary.frequencies(torch.device("cpu")), 1.0 if rotary.scaling is None else float(rotary.scaling.gain)
