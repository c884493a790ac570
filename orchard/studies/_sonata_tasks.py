"""Arithmetic in two ways for the `sonata` study: the answer alone ("direct"), or every step of it first ("think").

Five families in many sizes, so that some problems can be answered at a glance and others cannot: sums of two numbers
place by place, without carrying; sums and differences with it; a number times one digit; and pairs of chains of
operations modulo 10. Problems of one kind have equal length, so they are made many at a time, as tensors of token
ids. Numbers are written with leading zeros, highest digit first. An answer begins with the mark of its mode.

Shapes: N problems, P tokens of a prompt, S of the steps, A of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WORDS = (*"0123456789", "+", "*", "-", ";", "^", "c", "=", "<think>", "</think>", "<direct>", "<end>", "<pad>")
PLUS, TIMES, MINUS, ANEW, APART, CHAIN, EQUALS, THINK, CLOSE, DIRECT, END, PAD = range(10, 22)
FACTORS = range(2, 6)
"""What numbers are multiplied by."""
IGNORED = -100
"""A target that is not scored."""


@dataclass(frozen=True)
class Kind:
    """A family and how large: digits of the numbers, or links of both chains."""

    family: str
    size: int


@dataclass(frozen=True)
class Problems:
    """Problems of one kind."""

    kind: Kind
    prompt: Tensor  # [N, P]
    steps: Tensor  # [N, S]
    answer: Tensor  # [N, A]

    def written(self, *, think: bool) -> Tensor:
        """What a perfect answer would be: the mark of the mode, the steps and their end, the answer, the end."""
        column = self.prompt.new_ones(len(self.prompt), 1)
        before = [THINK * column, self.steps, CLOSE * column] if think else [DIRECT * column]
        return torch.cat([*before, self.answer, END * column], 1)


def kinds(sizes: dict[str, int]) -> list[Kind]:
    """Every size of every family, from 1 on."""
    return [Kind(family, size) for family, most in sizes.items() for size in range(1, most + 1)]


def make(kind: Kind, count: int, generator: torch.Generator) -> Problems:
    """Problems at random, on the generator's device."""
    return Problems(kind, *_FAMILIES[kind.family](kind.size, count, generator))


def batch(problems: Sequence[Problems], *, think: bool) -> tuple[Tensor, Tensor]:
    """Token ids and what should follow each, [N, T] both: prompts are not scored, only what follows them."""
    rows = [(each.prompt, each.written(think=think)) for each in problems]
    longest = max(prompt.shape[1] + written.shape[1] for prompt, written in rows) - 1
    ids, targets = [], []
    for prompt, written in rows:
        whole = torch.cat([prompt, written], 1)
        hidden = torch.full_like(prompt[:, 1:], IGNORED)
        spare = longest - whole.shape[1] + 1
        ids.append(torch.nn.functional.pad(whole[:, :-1], (0, spare), value=PAD))
        targets.append(torch.nn.functional.pad(torch.cat([hidden, written], 1), (0, spare), value=IGNORED))
    return torch.cat(ids), torch.cat(targets)


def digits(number: Tensor, count: int) -> Tensor:
    """[N] → [N, count], lowest digit first."""
    return number[:, None] // 10 ** torch.arange(count, device=number.device) % 10


def _below(limit: int, count: int, generator: torch.Generator, first: int = 0) -> Tensor:
    return torch.randint(first, limit, (count,), generator=generator, device=generator.device)


def _places(size: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    a, b = (digits(_below(10**size, count, generator), size) for _ in range(2))
    total = (a + b) % 10
    return _two(a, APART, b), _steps(a, b, total), total.flip(1)


def _sum(size: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    one, other = _below(10**size, count, generator), _below(10**size, count, generator)
    a, b, total = digits(one, size), digits(other, size), digits(one + other, size + 1)
    low = 10 ** torch.arange(1, size + 1, device=one.device)
    carries = (one[:, None] % low + other[:, None] % low) // low
    return _two(a, PLUS, b), _steps(a, b, total[:, :size], carries), total.flip(1)


def _difference(size: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    one, other = _below(10**size, count, generator), _below(10**size, count, generator)
    one, other = torch.maximum(one, other), torch.minimum(one, other)
    a, b, rest = digits(one, size), digits(other, size), digits(one - other, size)
    low = 10 ** torch.arange(1, size + 1, device=one.device)
    borrows = (one[:, None] % low < other[:, None] % low).long()
    return _two(a, MINUS, b), _steps(a, b, rest, borrows), rest.flip(1)


def _product(size: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    one = _below(10**size, count, generator)
    other = _below(FACTORS.stop, count, generator, first=FACTORS.start)
    a, b, total = digits(one, size), other[:, None], digits(one * other, size + 1)
    low = 10 ** torch.arange(1, size + 1, device=one.device)
    carries = one[:, None] % low * b // low
    return _two(a, TIMES, b), _steps(a, total[:, :size], carries), total.flip(1)


def _chain(size: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Two chains: a digit, then operations on it modulo 10; somewhere a new digit begins the second chain. A step repeats the
    operation and writes the value after it; the answer is what both chains come to."""
    value = _below(10, count, generator)
    column, anew = value.new_ones(count, 1), _below(size + 1, count, generator)
    prompt, steps, first = [CHAIN * column, value[:, None]], [], value
    for place in range(size + 1):
        sign, operand = _below(MINUS + 1, count, generator, first=PLUS), _below(10, count, generator)
        first = torch.where(anew == place, value, first)
        moved = torch.where(sign == MINUS, value - operand, value + operand)
        moved = torch.where(sign == TIMES, value * operand, moved) % 10
        value = torch.where(anew == place, operand, moved)
        sign = torch.where(anew == place, ANEW, sign)
        prompt += [sign[:, None], operand[:, None]]
        steps += [sign[:, None], operand[:, None], value[:, None]]
    answer = torch.stack([first, value], 1)
    return torch.cat([*prompt, EQUALS * column], 1), torch.cat(steps, 1), answer


def _two(a: Tensor, sign: int, b: Tensor) -> Tensor:
    column = a.new_ones(len(a), 1)
    return torch.cat([a.flip(1), sign * column, b.flip(1), EQUALS * column], 1)


def _steps(*parts: Tensor) -> Tensor:
    """Place after place, lowest first: what is read, what is written, what is carried. [N, size] each → [N, size · parts]."""
    return torch.stack(parts, 2).flatten(1)


_FAMILIES: dict[str, Callable[[int, int, torch.Generator], tuple[Tensor, Tensor, Tensor]]] = {
    "places": _places,
    "sum": _sum,
    "product": _product,
    "chain": _chain,
    "difference": _difference,
}
