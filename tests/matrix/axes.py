"""The axes of the matrix, found by walking the packages: a new codec, policy, format, scaling, mixer or MLP joins by itself.

Parts whose configs have required fields get their arguments from `EXAMPLES`; a part that needs an entry and has none is
listed by `without_example()`, and a test fails on it by name.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import orchard.cache.codecs
import orchard.cache.policies
import orchard.nn
import orchard.nn.attention
import orchard.nn.formats
from orchard.cache.codecs import Codec
from orchard.cache.policies import Policy
from orchard.core.config import REQUIRED, Config, Configurable
from orchard.nn.attention import Attention, Rotary
from orchard.nn.attention.scaling import Scaling
from orchard.nn.formats import Format
from orchard.nn.norm import RMSNorm
from tests.cache.vq_files import file_for

DIM, HEADS, HEAD_DIM = 16, 4, 8

# One entry per class that cannot be made without arguments, or that is worth trying in several ways.
EXAMPLES: dict[str, dict[str, dict[str, Any]]] = {
    "orchard.cache.policies.window:Window": {
        "window": {"window": 3},
        "sinks": {"window": 4, "sinks": 2},
        "wide": {"window": 64, "sinks": 1},
    },
    # Roomy: what is forgotten, and how, is tried with every codec and owner in tests/matrix/test_budgets.py.
    "orchard.cache.policies.keydiff:KeyDiff": {
        "even": {"budget": 12, "block": 4, "sinks": 2},
        "flat": {"budget": 12, "block": 4, "sinks": 2, "heads": "flat"},
    },
    "orchard.cache.policies.recent:Recent": {"budget": {"budget": 12, "block": 4}},
    "orchard.cache.policies.snap:Snap": {"budget": {"budget": 12, "block": 4, "last": 3}},
    "orchard.cache.policies.probe:Probe": {"budget": {"budget": 12, "block": 4}},
    "orchard.cache.codecs.commvq:CommVQ": {
        "": {"file": file_for(1, 3, 8, HEAD_DIM), "model": "a test", "layer": 0, "rounds": 3, "words": 8, "sinks": 0},
    },
    # Variations of a format that only rounding can tell apart are tried in tests/nn/test_formats.py: here each costs many cases.
    "orchard.nn.formats.int8:Int8": {"rows": {}, "groups": {"group": 8}},
    "orchard.nn.formats.int4:Int4": {"minimum": {"group": 8, "minimum": True}},
    "orchard.nn.formats.int2:Int2": {"groups": {"group": 8}},
    "orchard.nn.formats.learned:Learned": {"four": {"bits": 4, "group": 8}},
    "orchard.nn.attention.scaling:Linear": {"linear": {"factor": 2.0}},
    "orchard.nn.attention.scaling:Ntk": {"ntk": {"factor": 2.0}},
    "orchard.nn.attention.scaling:Llama3": {"llama3": {"factor": 4.0, "original": 16}},
    "orchard.nn.attention.scaling:Yarn": {"yarn": {"factor": 4.0, "original": 64}},
    "orchard.nn.attention.scaling:Factors": {"factors": {"factors": (1.0, 1.5, 2.0, 4.0)}},
    "orchard.nn.attention.attention:Attention": {"attention": {"heads": HEADS, "kv_heads": 2, "head_dim": HEAD_DIM}},
    "orchard.nn.attention.rattention:RAttention": {
        "residual": {"heads": HEADS, "kv_heads": 2, "head_dim": HEAD_DIM, "window": 3, "chunk": 4},
    },
    "orchard.nn.mlp:GatedMLP": {"gated": {"hidden_dim": 24}},
    "orchard.nn.feed_forward:FeedForward": {"plain": {"hidden_dim": 24}},
    "orchard.nn.moe.moe:MoE": {"mixture": {"hidden_dim": 16, "experts": 4}},
    "orchard.nn.moe.shared:SharedMLP": {"shared": {"hidden_dim": 24}},
}
# Filled by the parent, so an example need not give them.
FROM_THE_PARENT = {"dim", "layer"}


def discover(package: ModuleType, base: type | None = None) -> Iterator[type]:
    """Concrete configurable classes that the modules below a package define; subclasses of `base` where it is given."""
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        module = importlib.import_module(found.name)
        for _, kind in inspect.getmembers(module, inspect.isclass):
            mine = kind.__module__ == module.__name__ and issubclass(kind, Configurable) and "Config" in vars(kind)
            if mine and not inspect.isabstract(kind) and (base is None or issubclass(kind, base)):
                yield kind


def _layers(*, mixers: bool) -> list[type]:
    """Modules called as (x, context). Mixers keep keys and values in a store; MLPs have a hidden width."""
    wanted = {"layer", "store"} if mixers else {"hidden_dim"}
    return [
        kind
        for kind in discover(orchard.nn)
        if wanted <= _fields(kind).keys()
        and list(inspect.signature(getattr(kind, "forward", id)).parameters) == ["self", "x", "context"]
    ]


def _fields(kind: type) -> dict[str, Any]:
    return getattr(kind, "Config").__dataclass_fields__  # noqa: B009


def _key(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _needs_example(kind: type) -> bool:
    missing = {name for name, field in _fields(kind).items() if field.default is REQUIRED}
    return bool(missing - FROM_THE_PARENT) and _key(kind) not in EXAMPLES


def _examples(kinds: list[type]) -> dict[str, Config]:
    cases: dict[str, Config] = {}
    for kind in kinds:
        if _needs_example(kind):
            continue
        for name, arguments in EXAMPLES.get(_key(kind), {"": {}}).items():
            label = f"{kind.__name__}.{name}" if name else kind.__name__
            assert label not in cases, f"two examples are called {label}"
            cases[label] = getattr(kind, "Config")(**arguments)  # noqa: B009
    return cases


def parts() -> dict[str, list[type]]:
    return {
        "codec": list(discover(orchard.cache.codecs, Codec)),
        "policy": list(discover(orchard.cache.policies, Policy)),
        "format": list(discover(orchard.nn.formats, Format)),
        "scaling": list(discover(orchard.nn.attention, Scaling)),
        "mixer": _layers(mixers=True),
        "mlp": _layers(mixers=False),
    }


def without_example() -> list[str]:
    return [f"{axis} {_key(kind)}" for axis, kinds in parts().items() for kind in kinds if _needs_example(kind)]


def codecs(dim: int = HEAD_DIM) -> dict[str, Config]:
    """For heads of so many channels, which codebooks have to fit."""
    cases: dict[str, Any] = _examples(parts()["codec"])
    return {**cases, "CommVQ": cases["CommVQ"].clone(file=file_for(1, 3, 8, dim))}


def policies() -> dict[str, Config]:
    return _examples(parts()["policy"])


def formats() -> dict[str, Config]:
    return _examples(parts()["format"])


def scalings() -> dict[str, Config]:
    return _examples(parts()["scaling"])


def mlps() -> dict[str, Config]:
    return _examples(parts()["mlp"])


def mixers() -> dict[str, Config]:
    """Every discovered mixer as it comes, and every variation of attention that a family uses."""
    cases = _examples(parts()["mixer"])
    plain: Any = Attention.Config(heads=HEADS, kv_heads=2, head_dim=HEAD_DIM)
    norms = {"q_norm": RMSNorm.Config(), "k_norm": RMSNorm.Config()}
    cases |= {
        "window": plain.clone(window=3),
        "nope": plain.clone(rotary=None),
        "norm_head": plain.clone(**norms),
        "norm_all": plain.clone(**norms, norm_over="all"),
        "softcap": plain.clone(softcap=2.0),
        "softcap_window": plain.clone(softcap=2.0, window=3, scale=0.5),
        "one_group": plain.clone(kv_heads=HEADS),
        "one_kv_head": plain.clone(kv_heads=1),
        "partial": plain.clone(rotary=Rotary.Config(fraction=0.5)),
        "bias_clip": plain.clone(clip=1.5).set("q.bias", True).set("k.bias", True).set("v.bias", True),
    }
    for name, scaling in scalings().items():
        cases[f"rotary_{name}"] = plain.clone(rotary=Rotary.Config(theta=100.0, scaling=scaling))
    return cases


OWNERS = ("self", "another")
NORMS = ("before", "after", "both")
HEADS_TIED = ("tied", "untied")
