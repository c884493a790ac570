"""What experts do with some texts: who is asked, with whom, by which tokens; what they answer; what the loss would change.

Everything is gathered in sums, so texts of any length take the same room. Answers are those of an expert to the tokens that
asked it, before the router's weights come in.

Shapes: N tokens, E experts, K chosen, D the model's dimension, H hidden units of an expert, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchard.core.batch import IGNORED, Batch
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.formats import Plain
from orchard.transforms.base import Tell, silent
from orchard.transforms.prune_experts_cut import PARTS
from orchard.transforms.sensitivity_fisher import context_of, pieces

ROUTES, ANSWERS, OUTLIERS, SLOPES = "routes", "answers", "outliers", "slopes"
"""What can be looked at. Outliers take a second pass; slopes one forward and back."""
FAR = 3.0
"""Standard deviations from the mean at which an outlier begins."""


@dataclass
class Seen:
    """Of one mixture; what nobody asked to look at stays zero."""

    tokens: int
    used: Tensor
    """[E]: tokens that asked an expert."""
    together: Tensor
    """[E, E]: tokens that asked both; `used` on the diagonal."""
    words: Tensor
    """[E, V]: whether a token id ever asked an expert."""
    sums: Tensor
    """[E, D]: of answers, over tokens."""
    squares: Tensor
    """[E, D]"""
    outliers: Tensor
    """[E]: numbers in an expert's answers that are far from the mean of all of them."""
    slopes: Tensor | None = None
    """[E, 3H, D]: what the loss changes by with the weights, hidden units as rows; a sum over tokens."""

    @classmethod
    def nothing(cls, experts: int, dim: int, vocab: int, device: torch.device) -> Seen:
        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        words = zeros(experts, vocab, dtype=torch.bool)
        sums = (zeros(experts, dim), zeros(experts, dim))
        return cls(0, zeros(experts), zeros(experts, experts), words, *sums, zeros(experts))

    @property
    def means(self) -> Tensor:
        """[E, D]: of answers; zero for an expert that nobody asked."""
        return self.sums / self.used.clamp_min(1)[:, None]

    @property
    def spreads(self) -> Tensor:
        """[E, D]: standard deviations of answers over tokens."""
        mean_square = self.squares / self.used.clamp_min(1)[:, None]
        return (mean_square - self.means.square()).clamp_min(0).sqrt()

    def band(self, expert: int) -> tuple[float, float]:
        """Between which an expert's numbers usually are: over all tokens and channels."""
        count = max(1.0, float(self.used[expert]) * self.sums.shape[1])
        mean = float(self.sums[expert].sum()) / count
        spread = max(0.0, float(self.squares[expert].sum()) / count - mean * mean) ** 0.5
        return mean - FAR * spread, mean + FAR * spread


def look(
    model: nn.Module, paths: Collection[str], texts: Sequence[Batch], wanted: Collection[str], tell: Tell = silent
) -> dict[str, Seen]:
    """What the mixtures at these paths do with the texts. The model stays as it was."""
    device = next(model.parameters()).device
    cut = pieces(texts, device)
    if not any(bool((batch.positions >= 0).any()) for batch in cut):
        raise ConfigError("there are no texts to look at", hint="give some batches of the text the model is for")
    tree: Any = model.config
    vocab = tree.vocab if ROUTES in wanted else 0  # of many experts and words this is the largest part
    mixtures: dict[str, Any] = {path: model.get_submodule(path) for path in paths}
    seen = {path: Seen.nothing(part.config.experts, part.config.dim, vocab, device) for path, part in mixtures.items()}
    passes = [kind for kind in (ANSWERS, OUTLIERS) if kind in wanted or (kind == ANSWERS and OUTLIERS in wanted)]
    passes = passes or ([ROUTES] if ROUTES in wanted else [])
    total = len(passes) + (2 if SLOPES in wanted else 0)
    training = model.training
    model.eval()
    try:
        for kind in passes:
            _watch(model, mixtures, seen, cut, kind, lambda part: tell(part / total))
        if SLOPES in wanted:
            _slopes(model, mixtures, seen, cut, lambda part: tell(2 * part / total))
    finally:
        model.train(training)
    _refuse_broken(seen)
    return seen


# Forward --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _watch(
    model: Any, mixtures: dict[str, Any], seen: dict[str, Seen], texts: Sequence[Batch], kind: str, tell: Tell
) -> None:
    now: list[Batch] = []
    read: dict[str, Tensor] = {}

    def keep(path: str) -> Any:
        def before(module: nn.Module, given: tuple[Any, ...]) -> None:
            read[path] = given[0].flatten(0, -2)

        return before

    def watch(path: str) -> Any:
        def after(module: nn.Module, given: tuple[Any, ...], routing: Any) -> None:
            real = (now[0].positions >= 0).flatten()
            tokens, chosen = read.pop(path)[real], routing.experts[real]
            if kind != OUTLIERS:
                _add_routes(seen[path], chosen, now[0].ids.flatten()[real])
            if kind != ROUTES:
                _add_answers(seen[path], mixtures[path], tokens, chosen, outliers=kind == OUTLIERS)

        return after

    hooks = [module.register_forward_pre_hook(keep(path)) for path, module in mixtures.items()]
    hooks += [module.router.register_forward_hook(watch(path)) for path, module in mixtures.items()]
    try:
        for batch in texts:
            now[:] = [batch]
            model.hidden(batch.ids, context_of(batch))
            tell(1 / len(texts))
    finally:
        for hook in hooks:
            hook.remove()


def _add_routes(seen: Seen, chosen: Tensor, ids: Tensor) -> None:
    asked = torch.zeros(len(chosen), len(seen.used), dtype=torch.float64, device=chosen.device).scatter_(1, chosen, 1.0)
    seen.tokens += len(chosen)
    seen.used += asked.sum(0)
    seen.together += asked.T @ asked
    if seen.words.shape[1]:
        for expert in range(len(seen.used)):
            seen.words[expert, ids[asked[:, expert] > 0]] = True


def _add_answers(seen: Seen, mixture: Any, tokens: Tensor, chosen: Tensor, *, outliers: bool) -> None:
    for expert in range(len(seen.used)):
        run = tokens[(chosen == expert).any(-1)]
        if not len(run):
            continue
        answers = mixture.down(mixture.act(mixture.gate(run, expert)) * mixture.up(run, expert), expert).double()
        if outliers:
            low, high = seen.band(expert)
            seen.outliers[expert] += ((answers < low) | (answers > high)).sum()
        else:
            seen.sums[expert] += answers.sum(0)
            seen.squares[expert] += answers.square().sum(0)


# And back -------------------------------------------------------------------------------------------------------------


def _slopes(model: Any, mixtures: dict[str, Any], seen: dict[str, Seen], texts: Sequence[Batch], tell: Tell) -> None:
    """The gradient of the summed loss of the next tokens, for the weights of experts and nothing else."""
    weights: list[nn.Parameter] = []
    for path, mixture in mixtures.items():
        for name in PARTS:
            part = getattr(mixture, name)
            if not isinstance(part.format, Plain):
                raise UnsupportedPair(
                    f"{path}.{name} is packed, and packed weights have no gradient",
                    hint="prune before packing, or choose by what experts answer: by=ean",
                )
            weights.append(part.weight)
    learnt = [weight.requires_grad for weight in weights]
    found = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    try:
        for weight in weights:
            weight.requires_grad_(True)
        for batch in texts:
            targets = torch.where(batch.positions >= 0, batch.targets, IGNORED)
            with torch.enable_grad():
                scores = model(batch.ids, context_of(batch)).float()
                loss = functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
            # An expert that nobody asked has no gradient, which is one of zeros.
            for total, slope in zip(found, torch.autograd.grad(loss, weights, allow_unused=True), strict=True):
                if slope is not None:
                    total += slope.float()
            tell(1 / len(texts))
    finally:
        for weight, before in zip(weights, learnt, strict=True):
            weight.requires_grad_(before)
    for place, path in enumerate(mixtures):
        gate, up, down = found[3 * place : 3 * place + 3]
        seen[path].slopes = torch.cat([gate, up, down.mT], 1)


def _refuse_broken(seen: dict[str, Seen]) -> None:
    for path, one in seen.items():
        if not (one.squares.isfinite().all() and (one.slopes is None or bool(one.slopes.isfinite().all()))):
            raise ConfigError(
                f"{path}: its experts' answers, or their gradients, are not finite",
                hint="a broken model cannot be pruned",
            )
