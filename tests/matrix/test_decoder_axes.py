"""Every pair of axes in a small decoder: with a cache and without, in pieces, padded, trained, saved, and built on meta."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from orchard.cache.codecs import Codec
from orchard.cache.policies import Scored
from orchard.cache.store import Store
from orchard.core.config import BaseConfig
from orchard.core.context import Context, KVView, Rotate
from orchard.core.errors import UnsupportedPair
from orchard.models.language import Decoder
from orchard.nn.attention import Attention
from orchard.nn.linear import Embedding, GroupedLinear, Linear, Weight
from orchard.nn.moe import MoE
from orchard.nn.norm import RMSNorm
from orchard.nn.stack import Block, Stack
from tests.matrix import axes

VOCAB, LENGTH = 23, 12
LENGTHS = (12, 5, 9)
PARTS: dict[str, dict[str, Any]] = {
    "codec": axes.codecs(),
    # Of the policies with budgets, which differ only in what they forget, one stands for all.
    "policy": {
        name: cfg for name, cfg in axes.policies().items() if not issubclass(cfg.builds, Scored) or "KeyDiff" in name
    },
    "format": axes.formats(),
    "mixer": axes.mixers(),
    "mlp": axes.mlps(),
    "owner": dict.fromkeys(axes.OWNERS),
    "norm": dict.fromkeys(axes.NORMS),
    "head": dict.fromkeys(axes.HEADS_TIED),
}


def refused(case: dict[str, str]) -> bool:
    """RATTENTION sums up what leaves a store, and not every policy tells that."""
    sums = case.get("mixer", "").startswith("RAttention")
    return sums and "policy" in case and not PARTS["policy"][case["policy"]].builds.tells


def every_pair(choices: dict[str, list[str]]) -> set[Any]:
    pairs = (((a, x), (b, y)) for a, b in itertools.combinations(choices, 2) for x in choices[a] for y in choices[b])
    return {pair for pair in pairs if not refused(dict(pair))}


def pairwise(choices: dict[str, list[str]]) -> list[dict[str, str]]:
    """Cases that hold every pair of values of every two axes at least once, but those that are refused; greedy, and the same each
    time."""
    left = every_pair(choices)
    cases: list[dict[str, str]] = []
    while left:
        case = dict(min(left))
        for axis in choices:
            if axis not in case:
                used = Counter(old[axis] for old in cases)
                fits = [value for value in choices[axis] if not refused({**case, axis: value})]
                gains = {value: len(left & _pairs(choices, {**case, axis: value})) for value in fits}
                case[axis] = max(gains, key=lambda value: (gains[value], -used[value]))
        left -= _pairs(choices, case)
        cases.append(case)
    return cases


def _pairs(choices: dict[str, list[str]], case: dict[str, str]) -> set[Any]:
    return set(itertools.combinations([(axis, case[axis]) for axis in choices if axis in case], 2))


CHOICES = {axis: list(values) for axis, values in PARTS.items()}
CASES = pairwise(CHOICES)


def tree(case: dict[str, str]) -> Any:
    """Three layers: the first and the last are of the case's kind, the middle one is the default with a store of its own.

    Where the owner is another layer, the last one reads the store of the first.
    """
    store = Store.Config(codec=PARTS["codec"][case["codec"]], policy=PARTS["policy"][case["policy"]])
    mixer, mlp = PARTS["mixer"][case["mixer"]].clone(store=store), PARTS["mlp"][case["mlp"]]
    before = None if case["norm"] == "after" else RMSNorm.Config()
    after = None if case["norm"] == "before" else RMSNorm.Config(offset=1.0, cast_first=False)
    block = Block.Config(
        mixer=mixer, mlp=mlp, mixer_norm=before, mlp_norm=before, mixer_out_norm=after, mlp_out_norm=after
    )
    last = block.set("mixer.store.owner", 0) if case["owner"] == "another" else block
    middle = block.clone(mixer=axes.mixers()["Attention.attention"])
    cfg = Decoder.Config(
        vocab=VOCAB,
        dim=axes.DIM,
        context=LENGTH,
        stack=Stack.Config(layers=[block, middle, last]).clone(),
        embedding=Embedding.Config(scale=2.0),
        head=None if case["head"] == "tied" else Linear.Config(),
        softcap=5.0 if case["head"] == "tied" else None,
    )
    for kind in (Linear, GroupedLinear, Embedding):
        if cfg.find(kind):
            cfg = cfg.rewrite(kind, lambda node: node.clone(format=PARTS["format"][case["format"]]))
    return cfg


def built(cfg: Any, seed: int = 0) -> Decoder:
    """A model with weights large enough that a wrong mask or position shows."""
    model: Decoder = cfg.build()
    make = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Weight):
            module.assign(torch.randn(module.shape, generator=make) * 0.35)
        elif isinstance(module, RMSNorm):
            torch.nn.init.normal_(module.weight, 1.0 - module.config.offset, 0.2, generator=make)
    return model


def steady(model: Decoder) -> Decoder:
    """Rounding to integers and choosing experts turn the last bit of a sum into a jump, and that bit depends on how many
    rows a matrix product has. Models that do so are compared in float64, where it does not reach the decision."""
    jumps = model.config.find(MoE) or not all(lossless(store.codec) for store in model.stores())
    return model.double() if jumps else model


class Recompute:
    """A cache that stores nothing: for one step over whole sequences, it shows what the stores promise to show."""

    def __init__(self, stores: list[Any]) -> None:
        self.codecs = [cfg.codec.build() for cfg in stores]
        self.policies = [cfg.policy for cfg in stores]
        self.residues = [cfg.residue for cfg in stores]

    def append(self, layer: int, k: Tensor, v: Tensor, context: Context, rotate: Rotate | None) -> KVView:
        codec, policy = self.codecs[layer], self.policies[layer]
        late = codec.before_rotation or policy.builds.unrotated or self.residues[layer] is not None
        k = k if late or rotate is None else rotate(k, context.places)
        raw = k = codec.decode(codec.encode(k, "k"), "k", k.dtype)
        k = rotate(k, context.places) if late and rotate is not None else k
        v = codec.decode(codec.encode(v, "v"), "v", v.dtype)
        return KVView(
            *(k, v, context.places, context.places >= 0),
            window=getattr(policy, "window", None),
            sinks=getattr(policy, "sinks", 0),
            raw=raw if late else None,
        )


def pieces(model: Decoder, ids: Tensor, positions: Tensor, size: int, upto: bool) -> Tensor:
    """Scores of a padded batch [B, T], fed `size` columns at a time through a cache."""
    cache = model.cache(batch=len(ids), length=LENGTH)
    scores = []
    for start in range(0, ids.shape[1], size):
        end = min(start + size, ids.shape[1])
        known = int(positions[:, :end].max()) + 1 if upto else None
        scores.append(model(ids[:, start:end], Context(positions[:, start:end], cache=cache, upto=known)))
    return torch.cat(scores, dim=1)


def sees_everything(cfg: Any) -> bool:
    """Whether no store of the tree loses anything: then the scores are those of a model without stores."""
    for _, mixer in cfg.find(Attention):
        kept = getattr(mixer.store.policy, "window", None)
        narrow = kept is not None and kept < min(LENGTH, mixer.window or LENGTH)
        if narrow or not lossless(mixer.store.codec):
            return False
    return True


def lossless(cfg: Any) -> bool:
    codec, x = cfg.build(), torch.randn(1, 1, 4, axes.HEAD_DIM)
    return bool(codec.decode(codec.encode(x, "k"), "k", x.dtype).equal(x))


def padded(sequences: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    ids, valid = (
        torch.zeros(len(sequences), LENGTH, dtype=torch.long),
        torch.zeros(len(sequences), LENGTH, dtype=torch.bool),
    )
    for row, one in enumerate(sequences):
        here = slice(LENGTH - len(one), LENGTH) if side == "left" else slice(0, len(one))
        ids[row, here], valid[row, here] = one, True
    return ids, valid


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def name(case: dict[str, str]) -> str:
    return "-".join(case[axis] for axis in CHOICES)


each_case = pytest.mark.parametrize("case", CASES, ids=name)
SEQUENCES = [torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


def test_every_pair_is_in_some_case() -> None:
    covered = set().union(*(_pairs(CHOICES, case) for case in CASES))
    assert every_pair(CHOICES) <= covered
    assert len(CASES) < 150


def test_what_is_not_in_any_case_is_refused_by_name() -> None:
    found = [
        (mixer, policy)
        for mixer in PARTS["mixer"]
        for policy in PARTS["policy"]
        if refused({"mixer": mixer, "policy": policy})
    ]
    assert found
    for mixer, policy in found:
        with pytest.raises(UnsupportedPair, match="does not tell what leaves"):
            tree({**CASES[0], "mixer": mixer, "policy": policy}).complete()


@each_case
@torch.no_grad()
def test_in_pieces_and_padded_as_whole_and_alone(case: dict[str, str]) -> None:
    model = steady(built(tree(case)))
    exact = sees_everything(model.config)
    alone = []
    for one in SEQUENCES:
        naive = Context.whole(one[None])
        naive.cache = Recompute(model.stores())
        alone.append(model(one[None], naive)[0])
        if exact:
            close(model(one[None])[0], alone[-1])
    for side in ("right", "left"):
        ids, valid = padded(SEQUENCES, side)
        context = Context.whole(ids, valid)
        runs = [
            pieces(model, ids, context.positions, size, upto) for size, upto in ((1, True), (5, False), (LENGTH, True))
        ]
        runs += [model(ids, context)] if exact else []
        for scores in runs:
            assert scores.isfinite().all()
            for row, want in enumerate(alone):
                close(scores[row][valid[row]], want)


@each_case
def test_every_trained_parameter_gets_a_gradient(case: dict[str, str]) -> None:
    model = built(tree(case))
    context = Context.whole(SEQUENCES[0][None])
    model(SEQUENCES[0][None], context).square().sum().backward()
    without = [key for key, value in model.named_parameters() if value.grad is None or not value.grad.abs().sum() > 0]
    assert not without
    trained = {id(value) for value in model.parameters()}
    for module in model.modules():
        if isinstance(module, Weight):
            for key, part in module.format.layout(module.shape).items():
                assert (id(getattr(module, key)) in trained) == part.trained
    assert len(context.collected.get("moe.balance", ())) == len(model.config.find(MoE))


@each_case
@torch.no_grad()
def test_saved_rebuilt_and_built_on_meta(case: dict[str, str]) -> None:
    model = built(tree(case))
    want = model(SEQUENCES[0][None])
    state = model.state_dict()
    cfg: Any = BaseConfig.from_dict(tree(case).to_dict())
    assert cfg == tree(case) and BaseConfig.from_dict(model.config.to_dict()) == model.config
    other = built(cfg, seed=1)
    assert not torch.allclose(other(SEQUENCES[0][None]), want, atol=1e-2)
    other.load_state_dict(state, strict=True)
    assert other(SEQUENCES[0][None]).equal(want)
    with torch.device("meta"):
        empty: Decoder = tree(case).build()
    tensors = {**dict(empty.named_parameters()), **dict(empty.named_buffers())}
    assert all(value.is_meta for value in tensors.values())
    assert {key: (value.shape, value.dtype) for key, value in tensors.items()} == {
        key: (value.shape, value.dtype) for key, value in state.items()
    }
    assert empty.cache(batch=2, length=LENGTH).nbytes == model.cache(batch=2, length=LENGTH).nbytes
    empty.load_state_dict(state, strict=True, assign=True)
    assert empty(SEQUENCES[0][None]).equal(want)


# Whole decoders take long to compile; the stores are compiled one by one in test_stores.py.
COMPILED = [case for case in CASES if case["mlp"].startswith("GatedMLP") and case["owner"] == "another"][:2]


@pytest.mark.parametrize("case", COMPILED, ids=name)
@torch.no_grad()
def test_a_whole_decoder_step_compiles_without_a_break(case: dict[str, str]) -> None:
    torch._dynamo.reset()
    model = steady(built(tree(case)))
    ids = torch.stack([SEQUENCES[0], SEQUENCES[0].flip(0)])
    plain, compiled = (model.cache(batch=2, length=LENGTH) for _ in range(2))

    def step(cache: Any, ids: Tensor, positions: Tensor) -> Tensor:
        return model(ids, Context(positions, cache=cache, upto=LENGTH))

    fast = torch.compile(step, fullgraph=True, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for p in range(6):
            positions = torch.full((2, 1), p)
            close(fast(compiled, ids[:, p : p + 1], positions), step(plain, ids[:, p : p + 1], positions))


# Discovery ------------------------------------------------------------------------------------------------------------


def test_every_part_found_has_an_example() -> None:
    missing = axes.without_example()
    assert not missing, f"give these an entry in EXAMPLES of tests/matrix/axes.py: {missing}"
    assert all(axes.parts().values())


def test_a_new_file_joins_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "grown_codecs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "fresh.py").write_text(
        "from orchard.cache.codecs.plain import Plain\n"
        "from orchard.core.config import REQUIRED, BaseConfig, config\n"
        "class Fresh(Plain):\n"
        "    @config\n"
        "    class Config(BaseConfig):\n"
        "        bits: int = REQUIRED\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import grown_codecs  # type: ignore[import-not-found]

    (found,) = axes.discover(grown_codecs, Codec)
    assert found.__name__ == "Fresh"
    assert axes._needs_example(found)  # and is asked for its arguments
