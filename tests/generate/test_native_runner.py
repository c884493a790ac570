"""The native engine against the modules it was made from: every family, whole prompts, single steps, batches, mixed plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchard.cache.codecs import Int8
from orchard.cache.policies import Window
from orchard.cache.store import Store
from orchard.core.config import BaseConfig, Configurable, config
from orchard.core.context import Context
from orchard.core.errors import ContextOverflow, UsageError
from orchard.generate.lowering import lower
from orchard.generate.native import NativeRunner
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.mlp import GatedMLP
from orchard.nn.stack import Block, Stack
from orchard.weights.checkpoint import open_checkpoint
from orchard.weights.load import load_decoder
from tests.parity.families import CASES, reference, save

EXACT = 1e-4
IDS = [5, 17, 3, 88, 41, 2, 9, 60, 33, 7, 71, 12, 50, 50, 4, 29, 64, 81, 15, 90, 22, 38]
LEVELS = (0, 1, 2)


@pytest.fixture(scope="module", params=sorted(CASES))
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = save(reference(request.param), tmp_path_factory.mktemp(request.param))
    with open_checkpoint(folder) as checkpoint:
        return load_decoder(checkpoint)


def runner(model: Decoder, *, threads: int = 2, level: int = 2) -> NativeRunner:
    """Everything in float32: level 3 reads prompts in bfloat16."""
    return NativeRunner(lower(model, stores="f32"), decoder=lambda: model, threads=threads, level=level)


@torch.inference_mode()
def expected(model: Decoder, ids: list[int]) -> np.ndarray:
    return model(torch.tensor([ids]))[0].float().numpy()


def stepwise(native: NativeRunner, prompts: list[list[int]], more: list[list[int]]) -> list[np.ndarray]:
    """Scores after the prompts and after each further token."""
    run = native.begin(prompts, length=max(map(len, prompts)) + len(more))
    run.read(0, run.longest)
    out = [run.first().copy()]
    for ids in more:
        out.append(run.step(ids).copy())
    return out


@pytest.mark.parametrize("level", LEVELS)
def test_a_whole_prompt(decoder: Decoder, level: int) -> None:
    scores = runner(decoder, level=level).scores(IDS)
    assert np.abs(scores - expected(decoder, IDS)).max() < EXACT


def test_matrix_units_stay_close(decoder: Decoder) -> None:
    """By bfloat16 rounding. A router near a tie may choose another expert for it, so most tokens count and not the worst."""
    scores, exact = runner(decoder, level=3).scores(IDS), expected(decoder, IDS)
    error = np.abs(scores - exact).max(1) / np.abs(exact).max()
    assert np.quantile(error, 0.8) < 0.03


def test_prompt_in_pieces_then_steps(decoder: Decoder) -> None:
    run = runner(decoder).begin([IDS[:11]], length=len(IDS))
    for start in (0, 4, 5):
        run.read(start, {0: 4, 4: 5, 5: 11}[start])
    exact = expected(decoder, IDS)
    assert np.abs(run.first()[0] - exact[10]).max() < EXACT
    for place in range(11, len(IDS)):
        assert np.abs(run.step([IDS[place]])[0] - exact[place]).max() < EXACT


def test_sequences_in_one_batch_do_not_see_each_other(decoder: Decoder) -> None:
    prompts, more = [IDS[:9], IDS[4:7], IDS[2:15]], [[1, 2, 3], [44, 55, 66], [9, 8, 7]]
    together = stepwise(runner(decoder), prompts, more)
    for row, prompt in enumerate(prompts):
        exact = expected(decoder, [*prompt, *[ids[row] for ids in more]])
        for step, scores in enumerate(together):
            assert np.abs(scores[row] - exact[len(prompt) - 1 + step]).max() < EXACT


def test_sequences_leave(decoder: Decoder) -> None:
    run = runner(decoder).begin([IDS[:5], IDS[5:8], IDS[1:9]], length=24)
    run.read(0, 8)
    run.first()
    run.keep([2, 0])
    scores = run.step([7, 70])
    assert np.abs(scores[0] - expected(decoder, [*IDS[1:9], 7])[-1]).max() < EXACT
    assert np.abs(scores[1] - expected(decoder, [*IDS[:5], 70])[-1]).max() < EXACT


def test_the_number_of_threads_changes_nothing(decoder: Decoder) -> None:
    one = stepwise(runner(decoder, threads=1), [IDS], [[3], [4]])
    three = stepwise(runner(decoder, threads=3), [IDS], [[3], [4]])
    assert all(np.array_equal(left, right) for left, right in zip(one, three))


# Stores ------------------------------------------------------------------------------------------------------------


def small(*stores: Store.Config, window: int | None = None, heads: int = 6, **more: Any) -> Decoder:
    torch.manual_seed(3)
    layers = [
        Block.Config(
            mixer=Attention.Config(heads=heads, kv_heads=2, head_dim=16, store=store, window=window),
            mlp=GatedMLP.Config(hidden_dim=64),
        )
        for store in stores
    ]
    model = Decoder.Config(vocab=96, dim=32, context=4096, stack=Stack.Config(layers=layers), **more).build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.eval().requires_grad_(False)


def cached(model: Decoder, ids: list[int], cut: int) -> np.ndarray:
    """Scores after `cut` tokens read at once and each one after that, through the torch stores."""
    cache, out = model.cache(batch=1, length=len(ids)), []
    with torch.inference_mode():
        for start, stop in [(0, cut), *((at, at + 1) for at in range(cut, len(ids)))]:
            positions = torch.arange(start, stop)[None]
            hidden = model.hidden(torch.tensor([ids[start:stop]]), Context(positions=positions, cache=cache))
            out.append(model.scores(hidden[:, -1])[0].numpy())
    return np.stack(out)


LONG = [(i * 37 + i // 7) % 96 for i in range(700)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "store",
    [
        lambda: Store.Config(),
        lambda: Store.Config(codec=Int8.Config()),
        lambda: Store.Config(policy=Window.Config(window=40, sinks=3)),
        lambda: Store.Config(codec=Int8.Config(), policy=Window.Config(window=33)),
    ],
)
def test_long_contexts_over_every_store(store: Any, level: int) -> None:
    model = small(store(), store(), store())
    native = runner(model, level=level)
    exact = cached(model, LONG, 650)
    run = native.begin([LONG[:650]], length=len(LONG))
    run.read(0, 650)
    got = [run.first()[0].copy()] + [run.step([token])[0].copy() for token in LONG[650:]]
    error = np.abs(np.stack(got) - exact).max() / np.abs(exact).max()
    assert error < (5e-3 if "Int8" in repr(store()) else EXACT)


def test_a_ring_smaller_than_the_chunk_that_fills_it() -> None:
    model = small(Store.Config(policy=Window.Config(window=8, sinks=2)), window=8)
    exact = cached(model, LONG, 600)
    run = runner(model).begin([LONG[:600]], length=len(LONG))
    run.read(0, 600)
    got = [run.first()[0].copy()] + [run.step([token])[0].copy() for token in LONG[600:]]
    assert np.abs(np.stack(got) - exact).max() < EXACT * np.abs(exact).max()


def test_borrowed_stores_skip_the_prompt() -> None:
    model = small(Store.Config(), Store.Config(), Store.Config(owner=1), Store.Config(owner=1))
    plan = lower(model, stores="f32")
    assert "narrow" in [step.kind for step in plan.steps]
    exact = expected(model, LONG[:100])
    native = NativeRunner(plan, threads=2, level=2)
    assert np.abs(native.scores(LONG[:100]) - exact).max() < EXACT * np.abs(exact).max()
    scores = stepwise(native, [LONG[:60], LONG[:30]], [[LONG[60], LONG[30]]])
    assert np.abs(scores[0][0] - exact[59]).max() < EXACT * np.abs(exact).max()
    assert np.abs(scores[1][1] - exact[30]).max() < EXACT * np.abs(exact).max()


# Plans that need torch ---------------------------------------------------------------------------------------------


class Twice(Configurable, torch.nn.Module):
    """An MLP that no plan knows."""

    @config
    class Config(BaseConfig):
        dim: int = 0

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.weight = torch.nn.Parameter(torch.randn(cfg.dim, cfg.dim) * 0.2)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return torch.tanh(x @ self.weight) + 0.1 * context.positions[..., None].clamp_min(0)


def test_a_module_without_a_native_form_runs_between_native_steps() -> None:
    model = small(Store.Config(), Store.Config(), Store.Config())
    tree = model.config
    tree.stack.layers[1].mlp = Twice.Config()
    torch.manual_seed(5)
    model = tree.build().eval().requires_grad_(False)
    native = runner(model)
    assert not native.plan.whole
    prompts, more = [LONG[:9], LONG[20:23]], [[5, 6], [7, 8]]
    for step, scores in enumerate(stepwise(native, prompts, more)):
        for row, prompt in enumerate(prompts):
            exact = expected(model, [*prompt, *[ids[row] for ids in more]])[len(prompt) - 1 + step]
            assert np.abs(scores[row] - exact).max() < EXACT * max(1, np.abs(exact).max())


# What is refused ---------------------------------------------------------------------------------------------------


def test_bad_calls_are_refused_and_harm_nothing(decoder: Decoder) -> None:
    native = runner(decoder)
    run = native.begin([IDS[:4]], length=6)
    run.read(0, 4)
    before = run.first().copy()
    with pytest.raises(UsageError, match="vocabulary"):
        native.begin([[10_000]], length=4).read(0, 1)
    run.step([1])
    run.step([1])
    with pytest.raises(ContextOverflow):
        run.step([1])
    with pytest.raises(UsageError, match="memory"):
        native.begin([IDS], length=2**40)
    again = native.begin([IDS[:4]], length=6)
    again.read(0, 4)
    assert np.array_equal(again.first(), before)


def test_it_works_after_a_fork(decoder: Decoder, tmp_path: Path) -> None:
    import os

    native = runner(decoder)
    before = native.scores(IDS)
    child = os.fork()
    if child == 0:
        same = np.array_equal(native.scores(IDS), before)
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
