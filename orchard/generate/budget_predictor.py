"""Predicts from a prompt's last hidden vector how often the model would be right without thinking.

A two-layer network, trained on the model's own record: some hundred prompts, each answered several times without
thinking. It is for one model only, whose signature it carries, and costs nothing beside reading the prompt. numpy
runs it; torch is needed to fit it. The idea and the threshold of 0.3 are of Adaptive Thinking (OpenReview
2i6Rp0gCq6); the graded budget is a suggestion of ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from orchard.core.errors import BadFile, UsageError
from orchard.core.files import atomic_write

if TYPE_CHECKING:
    from torch import nn

FORMAT = "orchard self-consistency 1"
TAU = 0.3
WIDTH = 64
Layer = tuple[np.ndarray, np.ndarray]
"""Weights [out, in] and biases [out], float32."""


class SelfConsistency:
    """`predict(hidden)` is the share of right answers to expect, `budget(share, most)` the thoughts that this is worth."""

    def __init__(
        self,
        mean: np.ndarray,
        scale: np.ndarray,
        layers: Sequence[Layer],
        *,
        signature: str = "",
        tau: float = TAU,
        exponent: float | None = None,
    ) -> None:
        """`mean`, `scale` [d]: hidden vectors are brought to mean 0 and spread 1. `signature`: the model's; empty: unknown.
        `tau`: above it no thinking, below it all. `exponent`: a graded budget instead, most · (1 - share)^exponent."""
        self.mean, self.scale = _floats(mean), _floats(scale)
        self.layers = [(_floats(weight), _floats(bias)) for weight, bias in layers]
        self.signature = signature
        self.tau, self.exponent = _policy(tau, exponent)
        _check_shapes(self.mean, self.scale, self.layers)

    @property
    def dim(self) -> int:
        return len(self.mean)

    @property
    def flops(self) -> int:
        """Of one prediction, a multiplication and an addition counted as two."""
        return 2 * self.dim + sum(2 * weight.size for weight, _ in self.layers)

    def check(self, hidden: np.ndarray, signature: str | None = None) -> None:
        """Refuse another model's vectors."""
        if np.shape(hidden)[-1:] != (self.dim,):
            raise UsageError(
                f"hidden vectors of shape {list(np.shape(hidden))} for a predictor of width {self.dim}",
                hint="fit one for this model: each predictor knows one model only",
            )
        if self.signature and signature and self.signature != signature:
            raise UsageError("this predictor was fitted for another model", hint="fit one for this model")

    def predict(self, hidden: np.ndarray) -> Any:
        """A number for a vector [d], an array [n] for vectors [n, d]. What is not finite predicts 0: then the model thinks."""
        self.check(hidden)
        x = (np.asarray(hidden, np.float32) - self.mean) / self.scale
        with np.errstate(all="ignore"):
            for place, (weight, bias) in enumerate(self.layers):
                x = (x if place == 0 else np.maximum(x, 0)) @ weight.T + bias
            share = 1 / (1 + np.exp(-x[..., 0].astype(np.float64)))
        share = np.nan_to_num(share, nan=0.0)
        return float(share) if share.ndim == 0 else share

    def budget(self, share: float, most: int) -> int:
        """Tokens of thinking; 0: none."""
        if self.exponent is not None:
            return int(most * (1 - share) ** self.exponent)
        return 0 if share > self.tau else most

    def with_policy(self, *, tau: float = TAU, exponent: float | None = None) -> SelfConsistency:
        """The same network, used in another way."""
        return SelfConsistency(self.mean, self.scale, self.layers, signature=self.signature, tau=tau, exponent=exponent)

    def save(self, path: str | Path) -> None:
        """A safetensors file, whole or not at all."""
        from safetensors.numpy import save

        tensors = {"mean": self.mean, "scale": self.scale}
        for place, (weight, bias) in enumerate(self.layers):
            tensors |= {f"layers.{place}.weight": weight, f"layers.{place}.bias": bias}
        about = {"signature": self.signature, "tau": self.tau, "exponent": self.exponent, "layers": len(self.layers)}
        data = save(tensors, metadata={"format": FORMAT, "about": json.dumps(about)})
        with atomic_write(Path(path)) as file:
            file.write(data)

    @classmethod
    def load(cls, path: str | Path) -> SelfConsistency:
        """What `save` wrote; `BadFile` for anything else."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="numpy") as file:
                known = file.metadata() or {}
                if known.get("format") != FORMAT:
                    raise ValueError("it does not say that it is one")
                about = json.loads(known["about"])
                names = [(f"layers.{n}.weight", f"layers.{n}.bias") for n in range(min(int(about["layers"]), 8))]
                layers = [(file.get_tensor(weight), file.get_tensor(bias)) for weight, bias in names]
                mean, scale = file.get_tensor("mean"), file.get_tensor("scale")
            options = {"tau": about["tau"], "exponent": about["exponent"], "signature": str(about["signature"])}
            return cls(mean, scale, layers, **options)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, UsageError) as error:
            raise BadFile(f"{path} is no predictor of self-consistency: {error}", hint="fit it again") from error


def fit(
    hidden: np.ndarray,
    consistency: np.ndarray,
    *,
    signature: str = "",
    width: int = WIDTH,
    seed: int = 0,
    epochs: int = 400,
    held_out: float = 0.2,
) -> SelfConsistency:
    """Learn to predict the shares `consistency` [n] (0 to 1) from the vectors `hidden` [n, d], by squared error.

    A part is held out, and the epoch that predicts it best is kept. `width` 0: no hidden layer (a linear probe). The same
    arguments give the same predictor. What it is used for, a threshold, is chosen by `choose_tau`.
    """
    import torch

    x, y = _examples(hidden, consistency)
    order = np.random.default_rng(seed).permutation(len(x))
    tested, learned = np.split(order, [max(1, int(held_out * len(x)))])
    mean = x[learned].mean(0)
    scale = np.maximum(x[learned].std(0), 1e-3 * max(float(x[learned].std()), 1e-6))
    inputs, targets = torch.from_numpy((x - mean) / scale), torch.from_numpy(y)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        net = _network(x.shape[1], width)
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.1)
        best, kept = math.inf, _layers(net)
        for _ in range(epochs):
            optimizer.zero_grad()
            guessed = net(inputs[learned])[:, 0].sigmoid()
            (guessed - targets[learned]).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                error = float((net(inputs[tested])[:, 0].sigmoid() - targets[tested]).square().mean())
            if error < best:
                best, kept = error, _layers(net)
    return SelfConsistency(mean, scale, kept, signature=signature)


def choose_tau(
    predicted: np.ndarray,
    direct: np.ndarray,
    thinking: np.ndarray,
    direct_cost: np.ndarray,
    thinking_cost: np.ndarray,
    *,
    loss: float = 0.0,
) -> float:
    """The threshold that costs least among those that lose at most `loss` of the accuracy of always thinking.

    All arrays [n], of prompts that the predictor was not fitted on: what it predicts, how often the model is right without
    and with thinking, and the tokens that it writes. 1.0: always think.
    """
    order = np.argsort(-np.asarray(predicted, np.float64), kind="stable")
    shares = np.asarray(predicted, np.float64)[order]
    gain = np.cumsum((np.asarray(direct, np.float64) - thinking)[order]) / len(order)
    saved = np.cumsum((np.asarray(thinking_cost, np.float64) - direct_cost)[order])
    # A threshold cuts between two different predictions only, and no threshold is below 0.
    cuts = np.append(shares[:-1] > shares[1:], True) & (shares > 0)
    allowed = cuts & (gain >= -loss - 1e-12) & (saved > 0)
    if not allowed.any():
        return 1.0
    last = int(np.flatnonzero(allowed)[np.argmax(saved[allowed])])
    below = shares[last + 1] if last + 1 < len(shares) else 0.0
    return float((shares[last] + below) / 2)


def _network(dim: int, width: int) -> nn.Sequential:
    from torch import nn

    if not width:
        return nn.Sequential(nn.Linear(dim, 1))
    return nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, 1))


def _layers(net: Any) -> list[Layer]:
    linear = [part for part in net if hasattr(part, "weight")]
    return [(part.weight.detach().numpy().copy(), part.bias.detach().numpy().copy()) for part in linear]


def _examples(hidden: np.ndarray, consistency: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, y = _floats(hidden), _floats(consistency)
    if x.ndim != 2 or y.shape != x.shape[:1] or len(x) < 2:
        raise UsageError(
            f"hidden vectors {list(x.shape)} and shares {list(y.shape)}",
            hint="give vectors [n, d] and one share for each, at least two of them",
        )
    if not np.isfinite(x).all() or not ((y >= 0) & (y <= 1)).all():
        raise UsageError("vectors that are not finite, or shares outside 0 to 1", hint="check how they were made")
    return x, y


def _policy(tau: Any, exponent: Any) -> tuple[float, float | None]:
    for name, value, most in (("tau", tau, 1.0), ("exponent", exponent, math.inf)):
        if value is None and name == "exponent":
            continue
        if (
            not isinstance(value, (int, float))
            or isinstance(value, bool)
            or not 0 <= value <= most
            or value == math.inf
        ):
            raise UsageError(f"{name} is {value!r}", hint="tau is a number from 0 to 1, the exponent one from 0")
    return float(tau), None if exponent is None else float(exponent)


def _check_shapes(mean: np.ndarray, scale: np.ndarray, layers: Sequence[Layer]) -> None:
    width, known = mean.shape[0] if mean.ndim == 1 else -1, bool(layers) and scale.shape == mean.shape
    for weight, bias in layers:
        known = known and weight.ndim == 2 and weight.shape[1] == width and bias.shape == weight.shape[:1]
        width = weight.shape[0] if weight.ndim == 2 else -1
    arrays = (mean, scale, *(array for layer in layers for array in layer))
    if not known or width != 1 or not all(np.isfinite(array).all() for array in arrays) or not (scale > 0).all():
        raise UsageError("the parts of this predictor do not fit together", hint="make it with `fit`, or load it again")


def _floats(array: Any) -> np.ndarray:
    return np.ascontiguousarray(array, np.float32)
