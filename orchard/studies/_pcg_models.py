"""Two small language models of codes, a target and a draft: recurrent networks that read a sound's kind and then its codes.

They are trained here, on the codes of generated sounds, in a minute or two. A recurrent network's state is one vector, so going
back after a refused draft is keeping an older one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orchard.core.progress import Advance
from orchard.core.seeds import generator


class CodeModel(nn.Module):
    """Embedding, GRU, and scores by the same embedding."""

    def __init__(self, vocab: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        nn.init.normal_(
            self.embed.weight, std=0.02
        )  # small: directions must come from training, groups are made of them
        self.mix = nn.GRU(dim, hidden, batch_first=True)
        self.out = nn.Linear(hidden, dim)
        self.bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, ids: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scores [B, T, V] after each token, and the states [B, T, H] there."""
        mixed, _ = self.mix(self.embed(ids), state)
        return F.linear(self.out(mixed), self.embed.weight, self.bias), mixed

    @torch.inference_mode()
    def read(self, ids: Sequence[int], state: Tensor | None) -> tuple[np.ndarray, Tensor]:
        """Scores [T, V] after each of some tokens of one sequence, and the states [T, 1, 1, H] to go on from."""
        scores, states = self(torch.tensor([list(ids)]), state)
        return scores[0].numpy(), states[0][:, None, None]

    @property
    def table(self) -> np.ndarray:
        return self.embed.weight.detach().numpy()

    @property
    def weights(self) -> int:
        return sum(one.numel() for one in self.parameters())


def train(
    model: CodeModel, codes: np.ndarray, *, passes: int, seed: int, rate: float, advance: Advance, batch: int = 32
) -> CodeModel:
    """Next-token training on sequences [n, time], the first token of each being what it is given."""
    ids = torch.from_numpy(codes.astype(np.int64))
    steps = passes * (len(ids) // batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1)
    random = generator(seed, "order")
    for _ in range(passes):
        order = torch.randperm(len(ids), generator=random)[: len(ids) // batch * batch]
        for rows in order.view(-1, batch):
            scores, _ = model(ids[rows, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), ids[rows, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            advance(1 / steps)
    return model.eval()


@torch.inference_mode()
def surprise(model: CodeModel, codes: np.ndarray) -> float:
    """The mean surprise at each next code of sequences that were not trained on, in nats."""
    ids = torch.from_numpy(codes.astype(np.int64))
    scores, _ = model(ids[:, :-1])
    return float(F.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten()))


@contextmanager
def one_thread() -> Iterator[None]:
    """Networks this small lose more by sharing work among threads than they gain, and far more on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make(vocab: int, dim: int, hidden: int, seed: int, name: str) -> CodeModel:
    """A model with weights of its own seed; the caller's random numbers stay as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, name).initial_seed())
        return CodeModel(vocab, dim, hidden)
