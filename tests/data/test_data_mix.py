"""Order: permutations, shuffles, epochs and mixtures depend on seeds and weights alone, and go on exactly."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.config import REQUIRED, BaseConfig, config
from orchard.core.errors import ConfigError, UsageError
from orchard.data import Encode, Jsonl, Mix, Repeat, Row, Sample, Shuffle
from orchard.data.mix import due_by_samples, whole_weights
from orchard.data.order import Permutation
from orchard.data.source import Source, Stage, from_json, to_json
from tests.data.data_tools import resumed, tokenizer_for, write_lines


class Numbers(Stage[Row]):
    """The numbers below `size`, each told with its epoch."""

    @config
    class Config(BaseConfig):
        size: int = REQUIRED
        name: str = "n"

    def __init__(self, cfg: Config, *, tokenizer: Any = None) -> None:
        super().__init__()
        self.cfg, self.at, self.epoch = cfg, 0, 0

    def __next__(self) -> Row:
        if self.at >= self.cfg.size:
            raise StopIteration
        self.at += 1
        return Row({"text": f"{self.cfg.name}{self.epoch}.{self.at - 1}"})

    def _own(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def _take(self, state: Any) -> None:
        self.at, self.epoch = state["at"], state["epoch"]

    def _reset(self, epoch: int) -> None:
        self.at, self.epoch = 0, epoch


def texts(source: Any, count: int | None = None) -> list[str]:
    return [row.data["text"] for row in islice(source, count)]


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 5))
@settings(max_examples=60)
def test_a_permutation_holds_every_number_once(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size, seed, "x", epoch)
    assert sorted(order[place] for place in range(size)) == list(range(size))


def test_permutations_are_fixed_for_ever_and_far_from_sorted() -> None:
    small = Permutation(10, 0, "x")
    assert [small[i] for i in range(10)] == [1, 3, 8, 2, 7, 0, 9, 4, 5, 6]
    large = Permutation(10_000, 1)
    order = [large[i] for i in range(10_000)]
    moved = sum(abs(a - b) for a, b in enumerate(order)) / 10_000
    assert 3000 < moved < 3700  # a third of the size, as for a fair shuffle
    followed = sum(b - a == 1 for a, b in pairwise(order))
    assert followed < 10
    firsts = {tuple(Permutation(3, seed)[i] for i in range(3)) for seed in range(60)}
    assert len(firsts) == 6
    with pytest.raises(IndexError):
        Permutation(3, 0)[3]


@given(st.integers(0, 60), st.integers(1, 30), st.integers(0, 100), st.integers(0, 70))
def test_a_shuffle_gives_everything_once_and_goes_on_anywhere(size: int, buffer: int, seed: int, cut: int) -> None:
    cfg = Shuffle.Config(source=Numbers.Config(size=size), buffer=buffer, seed=seed)
    everything = texts(cfg.build())
    assert sorted(everything) == sorted(texts(Numbers.Config(size=size).build()))
    for place, text in enumerate(everything):  # nothing comes earlier than the buffer allows
        assert int(text.split(".")[1]) < place + buffer
    first, second = resumed(cfg, cut)
    assert first == second


def test_shuffles_differ_by_seed_and_by_epoch() -> None:
    def order(seed: int, epoch: int) -> list[str]:
        source = Shuffle.Config(source=Numbers.Config(size=40), buffer=16, seed=seed).build()
        source.begin(epoch)
        return [text.split(".")[1] for text in texts(source)]

    assert order(0, 0) == order(0, 0) != order(1, 0) and order(0, 0) != order(0, 1)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 30))
def test_epochs(size: int, epochs: int, cut: int) -> None:
    cfg = Repeat.Config(source=Numbers.Config(size=size), epochs=epochs)
    assert texts(cfg.build()) == [f"n{epoch}.{i}" for epoch in range(epochs) for i in range(size)]
    first, second = resumed(cfg, cut)
    assert first == second
    endless = cfg.clone(epochs=None)
    assert texts(endless.build(), 3 * size)[-1] == f"n2.{size - 1}"


def test_an_empty_source_is_not_repeated_for_ever() -> None:
    with pytest.raises(UsageError, match="nothing to learn from"):
        next(Repeat.Config(source=Numbers.Config(size=0)).build())
    with pytest.raises(UsageError, match="nothing to learn from"):
        next(Mix.Config(sources=[Numbers.Config(size=0)], weights=[1]).build())


weights_of = st.lists(st.integers(1, 50), min_size=1, max_size=7)


@given(weights_of, st.integers(0, 9), st.sampled_from([1.0, 0.1, 0.001, 7.0]))
def test_shares_are_never_off_by_a_sample(weights: list[int], seed: int, scale: float) -> None:
    shares = whole_weights([weight * scale for weight in weights], len(weights))
    used = [0] * len(weights)
    everyone, ranks = list(range(len(weights))), {i: i ^ seed for i in range(len(weights))}
    for step in range(1, 400):
        used[due_by_samples(shares, used, everyone, ranks)] += 1
        for number, weight in enumerate(weights):
            assert abs(used[number] - step * weight / sum(weights)) < 1 + 1e-9


@given(
    weights_of,
    st.integers(0, 50),
    st.integers(0, 80),
    st.sampled_from(["repeat", "drop", "stop"]),
    st.integers(1, 8),
)
@settings(max_examples=60)
def test_mixtures_go_on_anywhere(weights: list[int], seed: int, cut: int, at_end: str, size: int) -> None:
    sources: list[Any] = [
        Shuffle.Config(source=Numbers.Config(size=size + i, name="abcdefg"[i]), buffer=3) for i in range(len(weights))
    ]
    cfg = Mix.Config(sources=sources, weights=[float(w) for w in weights], seed=seed, at_end=at_end)
    first, second = resumed(cfg, cut, take=60)
    assert first == second
    if at_end == "drop":
        assert sorted(texts(cfg.build())) == sorted(text for source in sources for text in texts(source.build()))


def test_ends_of_sources() -> None:
    def mixed(at_end: str) -> list[str]:
        sources = [Numbers.Config(size=2, name="a"), Numbers.Config(size=4, name="b")]
        return texts(Mix.Config(sources=sources, weights=[1, 1], at_end=at_end).build(), 9)

    assert len(mixed("stop")) in (4, 5) and len(mixed("drop")) == 6 and len(mixed("repeat")) == 9
    assert "a1.0" in mixed("repeat") and "a1.0" not in mixed("drop")


def test_the_seed_decides_who_goes_first_and_nothing_else_matters() -> None:
    def stream(seed: int, weights: list[float]) -> str:
        sources = [Numbers.Config(size=100, name=name) for name in "abc"]
        return "".join(text[0] for text in texts(Mix.Config(sources=sources, weights=weights, seed=seed).build(), 60))

    assert len({stream(seed, [1, 1, 1])[:3] for seed in range(30)}) == 6
    assert stream(3, [0.2, 0.3, 0.5]) == stream(3, [2, 3, 5])
    assert stream(3, [0.2, 0.3, 0.5]).count("c") == 30 and "b" not in stream(0, [1, 0, 1])


@pytest.mark.parametrize("weights", [[1], [-1, 2], [0, 0], [float("nan"), 1], [float("inf"), 1]])
def test_weights_that_make_no_sense_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigError):
        Mix.Config(sources=[Numbers.Config(size=1), Numbers.Config(size=1)], weights=weights).build()


def test_shares_of_tokens(tmp_path: Path) -> None:
    write_lines(tmp_path / "long.jsonl", [{"text": "word " * 200}])
    write_lines(tmp_path / "short.jsonl", [{"text": "word"}])
    sources = [Encode.Config(source=Jsonl.Config(paths=str(tmp_path / f"{name}.jsonl"))) for name in ("long", "short")]
    source = Mix.Config(sources=sources, weights=[1, 3], by="tokens").build(tokenizer=tokenizer_for())
    sizes = {"long": 0, "short": 0}
    for sample in islice(source, 2000):
        sizes["long" if "long" in sample.place else "short"] += len(sample.ids)
    assert sizes["short"] / sum(sizes.values()) == pytest.approx(0.75, abs=0.05)
    assert source.given[1] > 100 * source.given[0]
    with pytest.raises(ConfigError, match="its sources give rows"):
        next(Mix.Config(sources=[Numbers.Config(size=1)], weights=[1], by="tokens").build())


def test_stages_are_sources_and_items_survive_json() -> None:
    assert isinstance(Numbers.Config(size=1).build(), Source)
    for item in (Row({"text": "x"}, "a:1"), Sample.of([1, 2, 3], [True, False, True], "p")):
        assert from_json(to_json(item)) == item
    assert not Sample.of([1, 2]).learnt[0]  # nothing comes before the first token
