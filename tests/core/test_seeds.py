"""Seeds: the same name gives the same numbers, another name other numbers, on every machine."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from orchard.core.seeds import fold, fresh_seed, generator

SEEDS = st.integers(0, 2**31)
NAMES = st.lists(st.from_regex(r"[a-z]{1,6}", fullmatch=True), max_size=4)


@given(SEEDS, NAMES)
def test_a_folded_seed_is_stable_and_usable(seed: int, names: list[str]) -> None:
    folded = fold(seed, *names)
    assert folded == fold(seed, *names) and 0 <= folded < 2**63
    assert torch.rand(3, generator=generator(seed, *names)).equal(torch.rand(3, generator=generator(seed, *names)))


@given(SEEDS, SEEDS, NAMES, NAMES)
def test_other_seeds_and_names_give_other_streams(a: int, b: int, one: list[str], other: list[str]) -> None:
    assert (fold(a, *one) == fold(b, *other)) == ((a, one) == (b, other))


def test_numbers_that_must_never_change() -> None:
    """Recorded seeds would otherwise repeat something else."""
    assert fold(0) == 1999793380834467432
    assert fold(1, "a", 2) == 5109509484000477796


def test_names_do_not_run_together() -> None:
    assert fold(1, "a/b") != fold(1, "a", "b")
    assert fold(1, 2) != fold(1, "2")


def test_making_one_part_does_not_disturb_another() -> None:
    alone = torch.rand(4, generator=generator(7, "layer", 3))
    torch.rand(100, generator=generator(7, "layer", 2))
    torch.rand(100)
    assert torch.rand(4, generator=generator(7, "layer", 3)).equal(alone)
    assert not torch.rand(4, generator=generator(7, "layer", 4)).equal(alone)


def test_fresh_seeds_are_small_and_differ() -> None:
    seeds = {fresh_seed() for _ in range(50)}
    assert len(seeds) > 45 and all(0 <= seed < 2**31 for seed in seeds)
