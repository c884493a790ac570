"""Beginnings of prompts that are kept: what is found, what goes, what is shared, and engines that use them."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from orchard.core.errors import UsageError
from orchard.generate.engine import Engine
from orchard.generate.prefix import GRAIN, Prefixes
from orchard.generate.prefix_tree import KEEPING
from orchard.generate.protocol import Held, Use
from orchard.generate.request import Request, Sampling
from orchard.session.model import load

LONG = tuple(range(4 * GRAIN))
ROOM = GRAIN * 10 + KEEPING
"""Bytes of one block below."""


def block(ids: tuple[int, ...], variant: str | None = None) -> np.ndarray:
    """Bytes that depend on all tokens so far, as keys and values do."""
    return np.random.default_rng([len(variant or ""), *ids]).integers(0, 256, 10 * GRAIN, np.uint8)


def held(ids: tuple[int, ...], variant: str | None = None) -> Held:
    return Held(ids, tuple(block(ids[: at + GRAIN], variant) for at in range(0, len(ids), GRAIN)))


def piece(ids: tuple[int, ...]) -> Held:
    return Held(ids, np.concatenate(held(ids).data), whole=True)


def right(use: Use, ids: tuple[int, ...], variant: str | None = None) -> bool:
    """Whether what was found is what a runner would have given for these tokens."""
    wanted = piece(ids) if use.held.whole else held(ids, variant)
    same = all(np.array_equal(one, other) for one, other in zip(use.held.data, wanted.data, strict=True))
    return same and use.tokens == len(ids) and use.held.ids == ids


def found(kept: Prefixes, ids: tuple[int, ...], variant: str | None = None) -> int:
    use = kept.find(ids, variant)
    assert use is None or right(use, tuple(ids[: use.tokens]), variant)
    return use.tokens if use is not None else 0


def test_the_longest_beginning_is_found_and_one_token_is_left_to_read() -> None:
    kept = Prefixes()
    kept.add(held(LONG[:GRAIN] + (9,) * GRAIN))
    kept.add(held(LONG[: 2 * GRAIN]))
    assert found(kept, LONG) == 2 * GRAIN
    assert found(kept, LONG[: 2 * GRAIN]) == GRAIN
    assert found(kept, LONG[: GRAIN + 5] + (3,) * 90) == GRAIN
    assert found(kept, (8, *LONG)) == found(kept, LONG[:GRAIN]) == found(kept, ()) == found(kept, (1 << 70,) * 100) == 0


def test_what_can_only_be_used_whole() -> None:
    kept = Prefixes()
    kept.add(piece(LONG[: 2 * GRAIN]))
    assert found(kept, LONG[: 2 * GRAIN]) == 0
    assert found(kept, LONG) == 2 * GRAIN
    kept.add(piece(LONG[: 3 * GRAIN]))
    assert found(kept, LONG) == 3 * GRAIN and found(kept, LONG[: 3 * GRAIN]) == 2 * GRAIN
    kept.add(piece(LONG[: 3 * GRAIN + 7]))  # ends inside a block, so no prompt will lead there
    assert len(kept) == 2


def test_one_array_for_many_tokens_is_used_whole() -> None:
    kept = Prefixes()
    kept.add(Held(LONG, np.zeros(40 * GRAIN, np.uint8)))
    use = kept.find((*LONG, 1))
    assert use is not None and use.held.whole and use.tokens == len(LONG) and kept.find(LONG) is None


def test_blocks_take_the_place_of_a_piece_and_not_the_other_way_round() -> None:
    kept = Prefixes()
    kept.add(piece(LONG[: 2 * GRAIN]))
    kept.add(held(LONG[: 3 * GRAIN]))
    kept.add(piece(LONG[: 2 * GRAIN]))
    assert len(kept) == 3 and kept.nbytes == KEEPING + 3 * ROOM
    assert found(kept, LONG) == 3 * GRAIN and found(kept, LONG[: 2 * GRAIN]) == GRAIN


def test_shared_blocks_are_there_once() -> None:
    kept = Prefixes()
    for count in (1, 2, 3, 4):
        kept.add(held(LONG[: count * GRAIN]))
    assert len(kept) == 4
    kept.add(held((*LONG[: 3 * GRAIN], *(7,) * GRAIN)))
    assert len(kept) == 5 and kept.nbytes == KEEPING + 5 * ROOM
    kept.clear()
    assert len(kept) == kept.nbytes == 0


def test_the_limit_holds_and_what_was_used_longest_ago_goes_first() -> None:
    kept = Prefixes(limit=KEEPING + 2 * ROOM)
    for token in (1, 2):
        kept.add(held((token,) * GRAIN))
    assert found(kept, (1,) * 100)  # used, so the other one is the oldest now
    kept.add(held((3,) * GRAIN))
    assert kept.nbytes <= kept.limit and not found(kept, (2,) * 100) and found(kept, (1,) * 100)
    assert Prefixes(limit=0).worth(LONG, None) == 0
    with pytest.raises(UsageError):
        Prefixes(limit=-1)


def test_ends_go_before_beginnings_and_a_prompt_too_long_is_kept_as_far_as_there_is_room() -> None:
    kept = Prefixes(limit=KEEPING + 3 * ROOM)
    kept.add(held((5,) * GRAIN))
    kept.add(held(LONG))
    assert found(kept, (*LONG, 1)) == 3 * GRAIN and not found(kept, (5,) * 100)
    kept.add(held((5,) * GRAIN))
    assert found(kept, (*LONG, 1)) == 2 * GRAIN and found(kept, (5,) * 100)


def test_nothing_stays_of_what_does_not_fit() -> None:
    kept = Prefixes(limit=KEEPING)
    kept.add(held(LONG))
    kept.add(piece(LONG))
    assert len(kept) == kept.nbytes == 0


def test_worth_only_what_is_new() -> None:
    kept = Prefixes()
    kept.add(held(LONG[: 2 * GRAIN]))
    assert kept.worth(LONG[: 2 * GRAIN + 5], kept.find(LONG[: 2 * GRAIN + 5])) == 0
    assert kept.worth(LONG[: 2 * GRAIN], kept.find(LONG[: 2 * GRAIN])) == 0  # one block was found, but both are here
    assert kept.worth(LONG[: 2 * GRAIN], None, "other") == 2 * GRAIN
    assert kept.worth(LONG, kept.find(LONG)) == 4 * GRAIN
    assert kept.worth(LONG[: GRAIN - 1], None) == 0


def test_variants_share_nothing() -> None:
    kept = Prefixes()
    kept.add(held(LONG))
    kept.add(held(LONG, "poet"), "poet")
    assert len(kept) == 8 and found(kept, (*LONG, 1)) == found(kept, (*LONG, 1), "poet") == len(LONG)
    assert kept.find((*LONG, 1), "judge") is None
    kept.drop("poet")
    kept.drop("nobody")
    assert len(kept) == 4 and kept.find((*LONG, 1), "poet") is None and found(kept, (*LONG, 1)) == len(LONG)


def test_a_name_that_goes_to_another_variant_takes_nothing_along() -> None:
    class Owner:
        variants: dict[str, Owner]

    owner = Owner()
    owner.variants = {"poet": Owner()}
    kept = Prefixes(owner)
    kept.add(held(LONG, "poet"), "poet")
    assert found(kept, (*LONG, 1), "poet") == len(LONG)
    owner.variants = {"poet": Owner()}
    assert kept.worth(LONG, None, "poet") == len(LONG) and kept.find((*LONG, 1), "poet") is None and len(kept) == 0
    kept.add(held(LONG, "poet"), "poet")
    owner.variants = {"judge": Owner(), "poet": Owner()}
    kept.add(held(LONG[:GRAIN], "poet"), "poet")
    assert len(kept) == 1


def test_what_goes_is_safe_with_who_uses_it() -> None:
    kept = Prefixes(limit=KEEPING + 4 * ROOM)
    kept.add(held(LONG))
    use = kept.find((*LONG, 1))
    kept.add(held((5,) * 4 * GRAIN))
    assert use is not None and not kept.find((*LONG, 1)) and right(use, LONG)
    with pytest.raises(ValueError, match="read-only"):
        use.held.data[0][0] = 1


def test_a_view_is_copied_lest_it_keeps_more_alive_than_is_counted() -> None:
    whole, kept = np.zeros(1 << 20, np.uint8), Prefixes()
    kept.add(Held(LONG[:GRAIN], (whole[:10],)))
    use = kept.find(LONG)
    assert use is not None and use.held.data[0].base is None and whole.flags.writeable


def test_memory_goes_at_once_and_not_when_somebody_collects_it() -> None:
    kept = Prefixes()
    kept.add(held(LONG))
    use = kept.find((*LONG, 1))
    assert use is not None
    alive = [weakref.ref(data) for data in use.held.data]
    del use
    gc.disable()
    try:
        assert all(one() is not None for one in alive)
        del kept
        assert not any(one() is not None for one in alive)
    finally:
        gc.enable()


def test_keys_and_values_that_are_not_of_these_tokens() -> None:
    kept = Prefixes()
    with pytest.raises(ValueError, match="3 arrays"):
        kept.add(Held(LONG, held(LONG).data[:3]))
    with pytest.raises(ValueError, match="rows of bytes"):
        kept.add(Held(LONG[:GRAIN], (np.zeros(8, np.float32),)))
    assert len(kept) == 0


def test_many_threads() -> None:
    kept, wrong = Prefixes(limit=KEEPING + 9 * ROOM), []
    prompts = [(*LONG[: shared * GRAIN], *(own,) * GRAIN, 1) for shared in range(4) for own in (3, 4, 5)]

    def use_it(seed: int) -> None:
        try:
            for place in np.random.default_rng(seed).integers(0, len(prompts), 150):
                ids = prompts[place]
                if found(kept, ids) < len(ids) - 1:
                    kept.add(held(ids[:-1]))
                assert kept.nbytes <= kept.limit
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=use_it, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.real
def test_an_answer_is_the_same_hot_and_cold(smollm2: Path) -> None:
    model = load("smollm2")
    engine = Engine(model.runner, model.tokenizer)
    ids = tuple(model.tokenizer.encode("A fox and a crow met by the river, and talked about the weather. " * 12))
    request = Request(ids, max_tokens=12, sampling=Sampling(temperature=1.0), seed=5)
    cold, hot = engine.answer([request])[0], engine.answer([request])[0]
    assert cold.usage.cached == 0 and hot.usage.cached == (len(ids) - 1) // GRAIN * GRAIN
    assert cold.ids == hot.ids and cold.usage.calls == hot.usage.calls == 12
    longer = Request((*ids, *cold.ids, 30, 31), max_tokens=8, sampling=Sampling(temperature=1.0), seed=6)
    apart = Engine(model.runner, model.tokenizer, prefix_bytes=0)
    assert engine.answer([longer])[0].ids == apart.answer([longer])[0].ids
    assert len(apart.prefixes) == 0


@pytest.mark.real
def test_two_prompts_share_three_blocks_and_give_the_same_scores_as_read_alone(smollm2: Path, tmp_path: Path) -> None:
    model = load("smollm2")
    engine = Engine(model.runner, model.tokenizer)
    words = model.tokenizer.encode("The old mill by the river has not been used for many years. " * 40)
    start = tuple(words[: 3 * GRAIN])
    first, second = (*start, *words[300:400]), (*start, *words[350:450])
    greedy = [Request(ids, max_tokens=6, logprobs=5) for ids in (first, second)]
    one = engine.answer([greedy[0]])[0]
    assert len(engine.prefixes) == 4 and one.usage.cached == 0
    two = engine.answer([greedy[1]])[0]
    assert len(engine.prefixes) == 5 and two.usage.cached == 3 * GRAIN
    assert engine.prefixes.save_all(tmp_path / "kept") == 5
    apart = Engine(model.runner, model.tokenizer)
    assert apart.prefixes.load_all(tmp_path / "kept") == 5
    again, cold = apart.answer([greedy[1]])[0], Engine(model.runner, model.tokenizer, prefix_bytes=0)
    assert again.usage.cached == 4 * GRAIN
    for request, hot in ((greedy[0], one), (greedy[1], two), (greedy[1], again)):
        alone = cold.answer([request])[0]
        assert alone.usage.cached == 0 and alone.ids == hot.ids and alone.logprobs == hot.logprobs  # bit for bit


@pytest.mark.real
def test_a_warm_prompt_need_not_be_read(smollm2: Path) -> None:
    model = load("smollm2")
    engine = Engine(model.runner, model.tokenizer)
    ids = tuple(model.tokenizer.encode("One, two, three, four, five, six. " * 15))
    assert engine.warm(ids) == len(ids) // GRAIN * GRAIN == engine.warm(ids)
    assert engine.answer([Request((*ids, 5), max_tokens=1)])[0].usage.cached == len(ids) // GRAIN * GRAIN
    assert engine.warm(ids[:10]) == 0
