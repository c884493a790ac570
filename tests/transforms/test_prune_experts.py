"""Expert pruning: a model without some experts is the one that never routes to them, and every criterion is what it says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard.core.batch import Batch
from orchard.core.config import REQUIRED, BaseConfig, Configurable, config
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.generate.lowering import lower
from orchard.models.language.decoder import Decoder
from orchard.nn.attention.attention import Attention
from orchard.nn.formats import Int8
from orchard.nn.linear import GroupedLinear
from orchard.nn.mlp import GatedMLP
from orchard.nn.moe import MoE, TopK
from orchard.nn.stack import Block, Stack
from orchard.nn.tensors import carried
from orchard.ops.plan.reference import Reference
from orchard.transforms.prune_experts import PruneExperts, expert_bytes, loads
from orchard.transforms.prune_experts_cut import cut_experts
from orchard.transforms.prune_experts_look import ANSWERS, ROUTES, look
from orchard.transforms.prune_experts_scores import CRITERIA, HIGH

EXPERTS, DIM, HIDDEN, VOCAB = 6, 32, 16, 50
IDS = torch.tensor([[5, 17, 3, 38, 41, 2, 9, 20], [1, 2, 3, 4, 5, 6, 7, 8]])
PATHS = ["stack.layers.0.mlp", "stack.layers.2.mlp"]


def tree(k: int = 2, *, renormalize: bool = True, bias: bool = False) -> Any:
    """Mixtures around a layer without one."""
    moe = MoE.Config(hidden_dim=HIDDEN, experts=EXPERTS, router=TopK.Config(k=k, renormalize=renormalize))
    moe.router.gate.bias = bias
    mlps = [moe, GatedMLP.Config(hidden_dim=24), moe.clone()]
    blocks = [Block.Config(mixer=Attention.Config(heads=4, kv_heads=2, head_dim=8), mlp=mlp) for mlp in mlps]
    return Decoder.Config(vocab=VOCAB, dim=DIM, context=64, stack=Stack.Config(layers=blocks)).complete()


def built(cfg: Any) -> Decoder:
    torch.manual_seed(0)
    model: Decoder = cfg.build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
            else:
                parameter.uniform_(0.5, 1.5)
    return model.eval().requires_grad_(False)


def texts(*, padded: bool = False) -> list[Batch]:
    draw = np.random.default_rng(0)
    found = []
    for _ in range(2):
        ids = draw.integers(0, VOCAB, (3, 12))
        places = np.broadcast_to(np.arange(12), ids.shape).copy()
        if padded:
            places[0, 7:] = -1
        found.append(Batch(ids, np.roll(ids, -1, 1), places, np.where(places < 0, -1, 0), plain=not padded))
    return found


@torch.no_grad()
def scores(model: Decoder) -> torch.Tensor:
    return model(IDS)


@torch.no_grad()
def never_asked(model: Decoder, kept: dict[str, torch.Tensor]) -> torch.Tensor:
    """The whole model's scores when the router finds all others infinitely unlikely."""
    hooks = []
    for path, stay in kept.items():
        gone = [expert for expert in range(EXPERTS) if expert not in stay.tolist()]

        def shut(_: Any, given: Any, logits: torch.Tensor, gone: list[int] = gone) -> torch.Tensor:
            return logits.index_fill(-1, torch.tensor(gone, dtype=torch.long), -torch.inf)

        hooks.append(model.get_submodule(f"{path}.router.gate").register_forward_hook(shut))
    try:
        return scores(model)
    finally:
        for hook in hooks:
            hook.remove()


# Cutting --------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
@given(
    st.sets(st.integers(0, EXPERTS - 1), min_size=2),
    st.sets(st.integers(0, EXPERTS - 1), min_size=2),
    st.booleans(),
    st.booleans(),
)
def test_a_cut_model_never_routes_there(first: set[int], last: set[int], renormalize: bool, bias: bool) -> None:
    model = built(tree(renormalize=renormalize, bias=bias))
    kept = {path: torch.tensor(sorted(stay)) for path, stay in zip(PATHS, (first, last), strict=True)}
    small = cut_experts(model, kept)
    assert torch.allclose(scores(small), never_asked(model, kept), atol=1e-5)
    assert expert_bytes(small) / expert_bytes(model) == (len(first) + len(last)) / (2 * EXPERTS)


def test_half_of_the_experts_are_half_of_the_bytes_and_the_tree_is_known_before() -> None:
    model = built(tree())
    before = scores(model)
    prune = PruneExperts(keep=0.5, by="ewn")
    small = prune.apply(model)
    assert expert_bytes(small) * 2 == expert_bytes(model)
    assert small.config.complete() == prune(model.config)
    assert small.stack.layers[0].mlp.router.gate.weight.shape == (3, DIM)  # type: ignore[union-attr]
    assert torch.equal(scores(model), before) and not torch.allclose(scores(small), before, atol=1e-3)


def test_packed_experts_leave_with_their_codes() -> None:
    model = built(tree())
    packed = carried(
        model, model.config.rewrite(GroupedLinear, lambda node: node.clone(format=Int8.Config(group=16, half=True)))
    )
    kept = {path: torch.tensor([1, 4]) for path in PATHS}
    small = cut_experts(packed, kept)
    for path in PATHS:
        old, new = (each.get_submodule(f"{path}.up").packed() for each in (packed, small))  # type: ignore[operator]
        assert all(torch.equal(new[name], old[name][[1, 4]]) for name in old)
    assert expert_bytes(small) * 3 == expert_bytes(packed) < expert_bytes(model)
    assert PruneExperts(by="ean").apply(packed, texts()).stack.layers[0].mlp.config.experts == 3  # type: ignore[union-attr]
    with pytest.raises(UnsupportedPair, match=r"layers\.0\.mlp\.gate is packed"):
        PruneExperts(by="ege").apply(packed, texts())


def test_a_pruned_model_is_lowered() -> None:
    small = PruneExperts(keep=0.5, by="ean").apply(built(tree()), texts())
    got = Reference(lower(small, stores="f32"), 1, 16).run(IDS[0].tolist(), [0] * 8, list(range(8)), list(range(8)))
    assert np.allclose(got, scores(small)[0].numpy(), atol=1e-3)


# Criteria -------------------------------------------------------------------------------------------------------------


def told(model: Decoder, given: list[Batch]) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Of the first mixture, the plain way: who is asked [N, K], by which ids [N], and every expert's answers to its tokens."""
    moe: Any = model.get_submodule(PATHS[0])
    rows: list[torch.Tensor] = []
    asked: list[torch.Tensor] = []
    ids: list[torch.Tensor] = []
    hooks = [
        moe.register_forward_pre_hook(lambda _, args: rows.append(args[0].flatten(0, 1))),
        moe.router.register_forward_hook(lambda _, args, routing: asked.append(routing.experts)),
    ]
    with torch.no_grad():
        for each in given:
            batch = each.to()
            model(batch.ids)
            ids.append(batch.ids.flatten())
    for hook in hooks:
        hook.remove()
    x, chosen = torch.cat(rows), torch.cat(asked)
    answers = []
    for expert in range(EXPERTS):
        mine = x[(chosen == expert).any(1)]
        hidden = torch.nn.functional.silu(mine @ moe.gate.weight[expert].T) * (mine @ moe.up.weight[expert].T)
        answers.append(hidden @ moe.down.weight[expert].T)
    return chosen, torch.cat(ids), answers


def scored(name: str, model: Decoder, given: list[Batch]) -> torch.Tensor:
    need = CRITERIA[name].needs
    seen = look(model, PATHS, given, [need] if need else [])[PATHS[0]]
    return CRITERIA[name].score(model.get_submodule(PATHS[0]), seen).double()


def test_routes_are_counted() -> None:
    model, given = built(tree()), texts()
    chosen, ids, _ = told(model, given)
    asked = [set((chosen == expert).any(1).nonzero()[:, 0].tolist()) for expert in range(EXPERTS)]
    words = [set(ids[sorted(mine)].tolist()) for mine in asked]
    assert torch.allclose(scored("euf", model, given), torch.tensor([len(a) / len(ids) for a in asked]).double())
    assert torch.allclose(scored("evtc", model, given), torch.tensor([len(w) / VOCAB for w in words]).double())
    both = torch.tensor([[len(a & b) for b in asked] for a in asked]).double()
    assert torch.equal(scored("ecc", model, given), both)
    assert torch.equal(scored("ets", model, given), torch.tensor([[len(a & b) for b in words] for a in words]).double())


def test_answers_are_measured_before_the_weights_of_the_router() -> None:
    model, given = built(tree()), texts()
    answers = [each.double() for each in told(model, given)[2]]
    assert torch.allclose(scored("ean", model, given), torch.stack([a.norm(dim=0).sum() for a in answers]), rtol=1e-4)
    entropy = torch.stack([a.std(0, correction=0).clamp_min(1e-12).log().sum() for a in answers])
    assert torch.allclose(scored("eae", model, given), entropy, rtol=1e-3, atol=1e-2)
    outside = [((a - a.mean()).abs() > 3 * a.std(correction=0)).sum() for a in answers]
    assert torch.equal(scored("eao", model, given), torch.stack(outside).double()) and sum(outside) > 0
    means = torch.stack([a.mean(0) for a in answers])
    alike = torch.nn.functional.cosine_similarity(means[:, None], means[None], dim=-1)
    want = torch.stack([alike[e, [o for o in range(EXPERTS) if o != e]].mean() for e in range(EXPERTS)])
    assert torch.allclose(scored("eas", model, given), want, atol=1e-4)


def test_slopes_are_those_of_the_loss() -> None:
    model, given = built(tree()), texts()
    moe: Any = model.get_submodule(PATHS[0])
    twin = carried(model, model.config).requires_grad_(True)
    for each in given:
        batch = each.to()
        torch.nn.functional.cross_entropy(
            twin(batch.ids).flatten(0, 1), batch.targets.flatten(), reduction="sum"
        ).backward()
    own: Any = twin.get_submodule(PATHS[0])
    slopes = torch.cat([own.gate.weight.grad, own.up.weight.grad, own.down.weight.grad.mT], 1).double()
    flat = slopes.flatten(1)
    assert torch.allclose(scored("egn", model, given), flat.norm(dim=1), rtol=1e-4)
    assert torch.allclose(scored("ege", model, given), slopes.std(1, correction=0).log().sum(1), rtol=1e-3)
    far = ((flat - flat.mean(1, keepdim=True)).abs() > 3 * flat.std(1, keepdim=True, correction=0)).sum(1)
    assert (scored("ego", model, given) - far).abs().max() <= 1  # a number at the very edge
    alike = torch.nn.functional.cosine_similarity(flat[:, None], flat[None], dim=-1).sum(1) - 1
    assert torch.allclose(scored("egs", model, given), alike, atol=1e-4)
    assert not any(weight.requires_grad for weight in (moe.gate.weight, moe.up.weight, moe.down.weight))


def test_weights_are_measured() -> None:
    model = built(tree())
    moe: Any = model.get_submodule(PATHS[0])
    maps = [moe.gate.weight, moe.up.weight, moe.down.weight]
    flat = torch.cat([each.flatten(1) for each in maps], 1)
    none: list[Batch] = texts()
    assert torch.allclose(scored("ewn", model, none).float(), flat.norm(dim=1))
    assert torch.allclose(scored("rwn", model, none).float(), moe.router.gate.weight.norm(dim=1))
    ranks = [torch.linalg.svdvals(each).square() for each in maps]
    want = torch.stack([each.sum(1) / each[:, 0] for each in ranks]).mean(0)
    assert torch.allclose(scored("wsr", model, none).float(), want, rtol=1e-4)
    alike = torch.nn.functional.cosine_similarity(flat[:, None], flat[None], dim=-1).sum(1) - 1
    assert torch.allclose(scored("ews", model, none).float(), alike, atol=1e-4)


@pytest.mark.parametrize("name", CRITERIA)
def test_both_ends_of_every_criterion(name: str) -> None:
    assert len(CRITERIA) == 16
    model, given = built(tree()), texts()
    ways = {drop: PruneExperts(by=name, drop=drop).order(model, given) for drop in ("low", "high", "usual")}
    assert ways["usual"] == ways["high" if name in HIGH else "low"]
    for path in PATHS:
        assert sorted(ways["low"][path]) == list(range(EXPERTS))
        if not CRITERIA[name].pairs:
            worth = CRITERIA[name].score(
                model.get_submodule(path), look(model, [path], given, [str(CRITERIA[name].needs)])[path]
            )
            assert worth[ways["low"][path]].tolist() == sorted(worth.tolist())
            assert worth[ways["high"][path]].tolist() == sorted(worth.tolist(), reverse=True)
    assert PruneExperts(by=name).looks is (CRITERIA[name].needs is not None)


def test_of_a_pair_the_one_that_is_asked_less_goes() -> None:
    model, given = built(tree()), texts()
    seen = look(model, PATHS[:1], given, [ROUTES])[PATHS[0]]
    first = PruneExperts(by="ecc").order(model, given)[PATHS[0]][0]
    apart = seen.together - torch.diag(seen.together.diagonal())
    a, b = divmod(int(apart.argmax()), EXPERTS)
    assert first in (a, b) and seen.used[first] == min(seen.used[a], seen.used[b])


@pytest.mark.parametrize("name", ["ewn", "rwn", "euf", "evtc", "eae", "ean", "ege", "egn"])
def test_experts_that_nobody_asks_go_first_and_cost_nothing(name: str) -> None:
    model = built(tree(bias=True))
    with torch.no_grad():
        for path in PATHS:
            moe: Any = model.get_submodule(path)
            for expert in (0, 3, 5):
                moe.router.gate.bias[expert] = -1e4
                for part in (moe.router.gate, moe.gate, moe.up, moe.down):
                    part.weight[expert] *= 1e-3
    small = PruneExperts(by=name).apply(model, texts())
    assert torch.allclose(scores(small), scores(model), atol=1e-5)


def test_padding_asks_nobody() -> None:
    model = built(tree())
    given = texts(padded=True)
    seen = look(model, PATHS, given, [ANSWERS])[PATHS[0]]
    assert seen.tokens == 2 * (3 * 12 - 5) and float(seen.used.sum()) == 2 * seen.tokens
    other = [
        Batch(np.where(b.positions < 0, 7, b.ids), b.targets, b.positions, b.documents, plain=False) for b in given
    ]
    for name in CRITERIA:  # whatever stands in the padding
        assert torch.allclose(scored(name, model, given), scored(name, model, other), atol=1e-6), name


# Rounds ---------------------------------------------------------------------------------------------------------------


@given(st.floats(0.34, 1.0), st.integers(1, 9))
def test_rounds_go_down_to_the_share(keep: float, rounds: int) -> None:
    cfg = tree()
    steps = PruneExperts(keep=keep, rounds=rounds).counts(cfg)
    assert 1 <= len(steps) <= rounds and steps[-1] == dict.fromkeys(PATHS, max(1, round(EXPERTS * keep)))
    for path in PATHS:
        counts = [EXPERTS, *(step[path] for step in steps)]
        assert all(a > b for a, b in pairwise(counts)) or counts == [EXPERTS, EXPERTS]


def test_every_round_looks_at_the_model_as_it_is_then() -> None:
    """After the first round the router is turned round by `heal`; who goes next is chosen by what it does now."""
    model, given = built(tree(k=1)), texts()
    before = scores(model)
    seen: list[tuple[int, int]] = []

    def heal(made: Decoder, number: int) -> Decoder:
        moe: Any = made.get_submodule(PATHS[0])
        seen.append((number, moe.config.experts))
        with torch.no_grad():
            if number == 0:
                used = look(made, PATHS[:1], given, [ROUTES])[PATHS[0]].used
                busiest = int(used.argmax())
                gone.append(moe.up.weight[busiest].clone())
                moe.router.gate.weight[busiest] = 0
                moe.up.weight[busiest] = 0
        return made

    gone: list[torch.Tensor] = []
    small = PruneExperts(keep=0.5, by="ean", rounds=3).in_rounds(model, given, heal)
    assert seen == [(0, 5), (1, 4), (2, 3)] and torch.equal(scores(model), before)
    left: Any = small.get_submodule(PATHS[0])
    assert not any(torch.equal(weight, gone[0]) or bool((weight == 0).all()) for weight in left.up.weight)


def test_random_experts_go_by_seed() -> None:
    model = built(tree())
    orders = [PruneExperts(by="random", seed=seed).order(model) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2] and not PruneExperts(by="random").looks


def test_loads_are_one_on_average() -> None:
    seen = look(built(tree()), PATHS, texts(), [ROUTES])[PATHS[1]]
    assert float(loads(seen).mean()) == pytest.approx(1) and float(loads(seen).max()) > 1


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"by": "eax"}, "eax"),
        ({"keep": 0.0}, "keep is 0"),
        ({"keep": 1.5}, "keep is 1.5"),
        ({"drop": "both"}, "both"),
        ({"rounds": 0}, "rounds is 0"),
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PruneExperts(**wrong)


class Alphabetic(Configurable, torch.nn.Module):
    """A router of another kind: nothing says what it would do with fewer experts."""

    @config
    class Config(BaseConfig):
        dim: int = REQUIRED
        experts: int = REQUIRED


def test_a_router_of_another_kind_is_refused_by_name() -> None:
    odd = tree()
    odd.stack.layers[2].mlp.router = Alphabetic.Config()
    with pytest.raises(UnsupportedPair, match=r"layers\[2\]\.mlp has a router of another kind \(Alphabetic\)"):
        PruneExperts()(odd)


def test_models_that_cannot_be_pruned() -> None:
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp would keep 2 of 6 experts, and each token asks 3"):
        PruneExperts(keep=0.34)(tree(k=3))
    plain = tree().rewrite(MoE, lambda node: GatedMLP.Config(hidden_dim=8))
    with pytest.raises(UnsupportedPair, match="no mixture"):
        PruneExperts()(plain)
    model = built(tree())
    with pytest.raises(ConfigError, match="no texts"):
        PruneExperts().apply(model)
    for wrong in ([0, 0, 1], [4, 6]):
        with pytest.raises(ConfigError, match="cannot keep the experts"):
            cut_experts(model, {PATHS[0]: torch.tensor(wrong)})
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp"):
        cut_experts(model, {"stack.layers.1.mlp": torch.tensor([0, 1])})
    with torch.no_grad():
        model.stack.layers[0].mlp.up.weight[3] = torch.nan  # type: ignore[union-attr,index,operator]
    for name in ("ewn", "wsr", "ean", "egn"):
        with pytest.raises(ConfigError, match=r"layers\.[02]\.mlp.*not finite"):
            PruneExperts(by=name).apply(model, texts())
