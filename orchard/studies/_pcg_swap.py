"""Tells sounds apart by their codes, and what happens to that when codes are exchanged for others of their groups."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from orchard.core.seeds import generator
from orchard.generate.speculative.coarse import Groups


class Classifier:
    """Which kind a sound is, from the spectra of its codes: a small network over each band's mean, spread and slope."""

    def __init__(self, centres: np.ndarray, codes: np.ndarray, kinds: np.ndarray, seed: int, steps: int = 400) -> None:
        self._centres = centres
        features = self._features(codes)
        self._shift, self._scale = features.mean(0), features.std(0) + 1e-6
        count = int(kinds.max()) + 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator(seed, "classifier").initial_seed())
            self._net = nn.Sequential(nn.Linear(features.shape[1], 48), nn.Tanh(), nn.Linear(48, count))
        optimizer = torch.optim.AdamW(self._net.parameters(), lr=1e-2, weight_decay=0.05)
        x, y = self._scaled(features), torch.from_numpy(kinds.astype(np.int64))
        random = generator(seed, "classifier order")
        for _ in range(steps):
            rows = torch.randint(len(x), (128,), generator=random)
            loss = F.cross_entropy(self._net(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.inference_mode()
    def error(self, codes: np.ndarray, kinds: np.ndarray) -> float:
        """The share of sounds taken for another kind."""
        guessed = self._net(self._scaled(self._features(codes))).argmax(-1).numpy()
        return float((guessed != kinds).mean())

    def _features(self, codes: np.ndarray) -> np.ndarray:
        frames = self._centres[codes]
        half = frames.shape[1] // 2
        slope = frames[:, half:].mean(1) - frames[:, :half].mean(1)
        return np.concatenate([frames.mean(1), frames.std(1), slope], 1)

    def _scaled(self, features: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(((features - self._shift) / self._scale).astype(np.float32))


def swapped(codes: np.ndarray, groups: Groups, share: float, rng: np.random.Generator) -> tuple[np.ndarray, float]:
    """Codes with this share of them exchanged for another member of their groups, and the share that came out different: a code
    that is alone in its group stays."""
    flat = codes.reshape(-1).copy()
    for place in np.flatnonzero(rng.random(flat.size) < share):
        others = groups.group(int(flat[place]))
        others = others[others != flat[place]]
        if others.size:
            flat[place] = rng.choice(others)
    found = flat.reshape(codes.shape)
    return found, float((found != codes).mean())
