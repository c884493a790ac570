"""Groups in a file: the same numbers as from memory, exactly the bytes that a choice adds, and sequences that choose anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from orchard.cache.experts import BudgetTooSmall, Records, RecordsUnreadable
from orchard.core.context import Context
from orchard.core.errors import UsageError
from orchard.transforms.ifprune_answer import Answering
from orchard.transforms.ifprune_choice import Choice
from orchard.transforms.ifprune_gather import gathered
from orchard.transforms.ifprune_model import Instructed
from orchard.transforms.ifprune_resident import Stored, write_groups
from tests.transforms.ifprune_models import VOCAB, decoder, instructed

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.fixture
def model() -> Instructed:
    return instructed()


@pytest.fixture
def path(model: Instructed, tmp_path: Path) -> Path:
    write_groups(model.decoder, tmp_path / "groups", {"model": "tiny"})
    return tmp_path / "groups"


@pytest.fixture
def stored(model: Instructed, path: Path) -> Iterator[Stored]:
    records = Records.open(path, expect={"model": "tiny"})
    made = Stored(model, records, budget_bytes=2 * 3 * records.record_bytes)
    yield made
    made.close()


def run(one: Answering, ids: list[int], cuts: list[int]) -> torch.Tensor:
    """Hidden vectors of a sequence that is read in pieces."""
    cache, parts, start = one.cache(batch=1, length=64), [], 0
    with torch.inference_mode():
        for stop in [*cuts, len(ids)]:
            positions = torch.arange(start, stop)[None]
            parts.append(one.hidden(torch.tensor([ids[start:stop]]), Context(positions=positions, cache=cache)))
            start = stop
    return torch.cat(parts, 1)


def test_from_a_file_as_from_memory(model: Instructed, stored: Stored) -> None:
    one = Answering(stored, IDS[:6])
    small = gathered(model.decoder, one.choice)
    with torch.no_grad():
        want = small.hidden(torch.tensor([IDS]), Context.whole(torch.tensor([IDS])))
    assert torch.allclose(run(one, IDS, [6]), want, atol=1e-5)
    assert torch.allclose(run(Answering(model, IDS[:6]), IDS, [6, 7, 8]), want, atol=1e-5)


def test_a_choice_is_read_once(stored: Stored) -> None:
    one, size = Answering(stored, IDS[:6]), stored.resident.slot_bytes
    run(one, IDS, [6, 7, 8, 9])
    assert stored.counters.bytes == 2 * 3 * size
    run(one, IDS, [6])
    assert stored.counters.bytes == 2 * 3 * size


def test_growing_a_budget_reads_the_difference(stored: Stored) -> None:
    choice, size = stored.choose(IDS, 2), stored.resident.slot_bytes
    stored.load(choice)
    assert stored.counters.bytes == 2 * 2 * size
    stored.load(choice.within(3))
    assert stored.counters.bytes == 2 * 3 * size
    stored.load(choice.within(1))
    assert stored.counters.bytes == 2 * 3 * size


def test_prefetched_groups_are_not_read_again(stored: Stored) -> None:
    choice = stored.choose(IDS)
    stored.prefetch(choice)
    stored.load(choice)
    assert stored.counters.bytes == 2 * 3 * stored.resident.slot_bytes
    assert stored.counters.prefetched == 6


def test_what_is_in_memory_is_what_is_counted(model: Instructed, stored: Stored) -> None:
    cfg = model.decoder.config.stack.layers[1].mlp
    rest = sum(p.nbytes for p in decoder().parameters()) - 2 * 3 * 4 * cfg.dim * cfg.size * cfg.groups
    assert stored.nbytes == rest + 6 * stored.resident.slot_bytes


@pytest.mark.parametrize("every", [2, 3])
def test_choosing_anew_depends_on_the_sequence_alone(stored: Stored, every: int) -> None:
    one = Answering(stored, IDS[:5], every=every)
    whole = run(one, IDS, [5])
    assert torch.allclose(run(one, IDS, [2, 5, 6, 7, 8, 9, 10]), whole, atol=1e-5)
    frozen = run(Answering(stored, IDS[:5]), IDS, [5])
    assert torch.allclose(whole[:, : 5 + every], frozen[:, : 5 + every], atol=1e-6)
    assert not torch.allclose(whole[:, 5 + every :], frozen[:, 5 + every :], atol=1e-3)


def test_going_back_goes_back_to_the_choice_of_that_place(stored: Stored) -> None:
    one = Answering(stored, IDS[:5], every=2)
    cache = one.cache(batch=1, length=64)

    def read(ids: list[int], start: int) -> torch.Tensor:
        positions = torch.arange(start, start + len(ids))[None]
        with torch.inference_mode():
            return one.hidden(torch.tensor([ids]), Context(positions=positions, cache=cache))

    read(IDS[:5], 0)
    first = read(IDS[5:9], 5)
    assert [at for at, _ in cache.choices] == [0, 7]
    cache.rewind(torch.tensor([6]))
    assert [at for at, _ in cache.choices] == [0]
    read([0, 0], 6)  # a wrong guess
    cache.rewind(torch.tensor([6]))
    assert torch.allclose(read(IDS[6:9], 6), first[:, 1:], atol=1e-5)


def test_hysteresis_reads_less(stored: Stored) -> None:
    ids = [int(t) for t in torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(1))]
    read = []
    for margin in (0.0, 1000.0):
        before = stored.counters.bytes
        run(Answering(stored, ids[:4], every=2, margin=margin), ids, [4])
        read.append(stored.counters.bytes - before)
    assert read[1] < read[0]


def test_a_file_of_another_model_and_too_little_memory(model: Instructed, path: Path) -> None:
    other = instructed(groups=8)
    with Records.open(path) as records, pytest.raises(UsageError, match="another model"):
        Stored(other, records, budget_bytes=1 << 20)
    with Records.open(path) as records, pytest.raises(BudgetTooSmall):
        Stored(model, records, budget_bytes=2 * records.record_bytes)
    with pytest.raises(UsageError):
        write_groups(decoder(), path)


def test_a_disk_that_goes_away_harms_one_call(model: Instructed, path: Path, stored: Stored) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:4096])
    one = Answering(stored, IDS[:6])
    with pytest.raises(RecordsUnreadable):
        run(one, IDS, [6])
    path.write_bytes(whole)
    assert torch.allclose(run(one, IDS, [6]), run(Answering(model, IDS[:6]), IDS, [6]), atol=1e-5)


def test_one_prompt_one_sequence(stored: Stored) -> None:
    with pytest.raises(UsageError):
        Answering(stored, IDS).cache(batch=2, length=8)
    with pytest.raises(UsageError):
        Answering(stored, IDS, every=0)
    with pytest.raises(UsageError):
        Choice(torch.zeros(2, 6), 7)
