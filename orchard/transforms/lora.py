"""Low-rank adaptation (arXiv 2106.09685): beside a frozen weight of any format, two small trained matrices.

y = W x + b + scale · B (A x), with scale = alpha / r, or alpha / √r (rank-stabilised, arXiv 2312.03732). B begins as zeros, so
the model begins as it was. `Lora` is the transform of a config tree; `attach` does the same to a model that is built, which
then shares every tensor with it, and `with_sides` puts trained side paths there, also those of DoRA (arXiv 2402.09353). Names
of parameters stay what they were (`stack.layers.0.mixer.q.weight`), with `lora_a` and `lora_b` beside them.
"""

from __future__ import annotations

import copy
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchard.core.config import REQUIRED, BaseConfig, config
from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.nn.formats import Plain
from orchard.nn.linear import GroupedLinear, Linear
from orchard.nn.lowering import floats
from orchard.ops.plan.builder import Builder, Value

ALL_LINEAR = "all-linear"
"""Every linear map inside the layers, except routers: they choose, and small changes make them choose otherwise."""
M = TypeVar("M", bound=nn.Module)
Side = tuple[Any, Any, float]
"""A [rank, in], B [out, rank] (tensors or arrays), scale."""


class LoraLinear(Linear):
    """A linear map with a side path."""

    begin: ClassVar[dict[str, Callable[[tuple[int, ...]], Tensor]]] = {
        "lora_a": lambda shape: torch.empty(shape).uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5),
        "lora_b": lambda shape: torch.zeros(shape),
    }
    """What the side path begins with; a checkpoint of the model has none."""

    @config
    class Config(Linear.Config):
        r: int = REQUIRED
        alpha: float = REQUIRED
        rslora: bool = False
        """Scale by alpha / √r: large ranks keep learning."""
        dropout: float = 0.0
        """Of what the side path reads, in training."""

    def __init__(self, cfg: Config) -> None:
        _check(cfg.r, cfg.alpha, cfg.dropout)
        super().__init__(cfg)
        self.config: Any = cfg
        self.lora_a = nn.Parameter(self.begin["lora_a"]((cfg.r, cfg.in_dim)))
        self.lora_b = nn.Parameter(self.begin["lora_b"]((cfg.out_dim, cfg.r)))

    @classmethod
    def around(cls, linear: Linear, r: int, alpha: float, rslora: bool = False, dropout: float = 0.0) -> LoraLinear:
        """A linear map that is there already, with a side path that does nothing yet. The weight is the same tensor."""
        _check(r, alpha, dropout)
        if type(linear) is not Linear:
            raise UnsupportedPair(f"{type(linear).__name__} takes no side path", hint="adapt plain linear maps")
        made: LoraLinear = cls.__new__(cls)
        made.__dict__.update(_twin(linear).__dict__)
        made.config = linear.config.derive(cls, r=r, alpha=alpha, rslora=rslora, dropout=dropout)
        out_dim, in_dim = linear.shape
        device, dtype = linear._first().device, torch.float32
        made.lora_a = nn.Parameter(
            torch.empty(r, in_dim, device=device, dtype=dtype).uniform_(-(in_dim**-0.5), in_dim**-0.5)
        )
        made.lora_b = nn.Parameter(torch.zeros(out_dim, r, device=device, dtype=dtype))
        return made

    @property
    def scale(self) -> float:
        r = int(self.config.r)
        return float(self.config.alpha) / (math.sqrt(r) if self.config.rslora else r)

    @property
    def gain(self) -> Tensor | None:
        """DoRA (arXiv 2402.09353): what each row of the adapted weight is multiplied with, so that it gets its own length."""
        return self._buffers.get("lora_gain")

    def set_magnitude(self, magnitude: Tensor) -> None:
        """Give the rows of the adapted weight these lengths. They are measured now: A and B must not change any more."""
        with torch.no_grad():
            lengths = self._adapted().norm(dim=1)
            self.register_buffer("lora_gain", magnitude.to(lengths) / lengths.clamp_min(1e-20), persistent=False)

    def _adapted(self) -> Tensor:
        return self.dense(torch.float32) + self.scale * (self.lora_b.float() @ self.lora_a.float())

    def forward(self, x: Tensor) -> Tensor:
        seen = functional.dropout(x, self.config.dropout, self.training)
        narrow = functional.linear(seen, self.lora_a.to(x.dtype))
        side = self.scale * functional.linear(narrow, self.lora_b.to(x.dtype))
        if self.gain is None:
            return super().forward(x) + side
        y = (self.format.matmul(x, self.packed()) + side) * self.gain.to(x.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def merge(self) -> Linear:
        """One plain linear map that does the same. A packed weight would be rounded again by that, and is refused."""
        if not isinstance(self.format, Plain):
            raise UnsupportedPair(
                f"a side path cannot be merged into a weight of format {type(self.format).__name__}",
                hint="load the model with dense weights (dtype='float32') to merge adapters into it",
            )
        made: Linear = Linear.__new__(Linear)
        made.__dict__.update(_twin(self).__dict__)
        made.config = self.config.derive(Linear)
        for name in ("lora_a", "lora_b"):
            del made._parameters[name]
        made._buffers.pop("lora_gain", None)
        with torch.no_grad():
            weight = self._adapted() if self.gain is None else self._adapted() * self.gain[:, None]
            made.assign(weight.to(self._first().dtype))
        return made

    def lower(self, builder: Builder, x: Value, path: str) -> Value:
        if self.gain is not None:
            raise UnsupportedPair(
                f"{path}: no plan has DoRA's magnitudes", hint="merge the adapter, or run it in torch"
            )
        y = builder.linear(x, self.native(), floats(self.bias), path=path)
        a, b = floats(self.lora_a), floats(self.lora_b)
        assert a is not None and b is not None
        return builder.low_rank(x, a, b, self.scale, y, path=f"{path}.lora")


@dataclass(frozen=True)
class Lora:
    """The transform: `Lora(r=16, alpha=32)(tree)`, or `.attach(model)`.

    `targets` are "all-linear", or names: the last part of a path ("q"; "q_proj" means the same), a longer ending
    ("mixer.q"), or a pattern of whole paths ("stack.layers[0].*").
    """

    r: int = 16
    alpha: float = 32.0
    targets: str | Sequence[str] = ALL_LINEAR
    rslora: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check(self.r, self.alpha, self.dropout)

    def __call__(self, tree: BaseConfig) -> Any:
        """The tree with a side path at every target."""
        found = self._paths({path: node for path, node in tree.walk() if isinstance(node, _KINDS)})
        return tree.rewrite(Linear, self._wrapped, lambda path, node: path in found)

    def attach(self, model: M) -> M:
        """The same for a built model: a twin that shares all its tensors and has fresh side paths to train."""
        configs = {_dotted(path): node.config for path, node in model.named_modules() if isinstance(node, _MODULES)}
        found = {path.replace("[", ".").replace("]", "") for path in self._paths(configs)}
        kept: dict[str, Any] = {"r": self.r, "alpha": self.alpha, "rslora": self.rslora, "dropout": self.dropout}
        return _replaced(model, {path: lambda linear: LoraLinear.around(linear, **kept) for path in sorted(found)})

    def _wrapped(self, node: Any) -> Any:
        kept = {"r": self.r, "alpha": self.alpha, "rslora": self.rslora, "dropout": self.dropout}
        return node.derive(LoraLinear, **kept)

    def _paths(self, nodes: Mapping[str, Any]) -> set[str]:
        """The paths that the targets name; each has to name something, and only what can take a side path."""
        asked = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
        found: set[str] = set()
        for target in asked:
            if target == ALL_LINEAR:
                named = {
                    path
                    for path, node in nodes.items()
                    if isinstance(node, Linear.Config) and path != "head" and ".router." not in path
                }
            else:
                named = {path for path in nodes if _names(target, path)}
            experts = sorted(path for path in named if not isinstance(nodes[path], Linear.Config))
            if experts:
                raise UnsupportedPair(
                    f"{experts[0]} holds experts, which take no side path", hint="adapt other linear maps"
                )
            if not named:
                raise ConfigError(f"no linear map is called {target!r}", hint="print the tree with describe()")
            found |= named
        twice = sorted(path for path in found if isinstance(nodes[path], LoraLinear.Config))
        if twice:
            raise ConfigError(f"{twice[0]} has a side path already", hint="merge it first, or adapt other linear maps")
        return found


_KINDS = (Linear.Config, GroupedLinear.Config)
_MODULES = (Linear, GroupedLinear)


def with_sides(
    model: M,
    sides: Mapping[str, Sequence[Side]],
    biases: Mapping[str, Sequence[Any]] | None = None,
    magnitudes: Mapping[str, Any] | None = None,
) -> M:
    """A twin of a built model with trained side paths, by module path; those of one module are joined into one.

    It shares every tensor with the model, which is not changed. `biases` stand in place of a module's own; of several, each
    counts by how far it is from that. `magnitudes` are DoRA's, of modules with one side path: the lengths of several do not add.
    """
    makers: dict[str, Callable[[Any], nn.Module]] = {}
    for path in {*sides, *(biases or {})}:
        makers[path] = _maker(path, sides.get(path, ()), (biases or {}).get(path, ()), (magnitudes or {}).get(path))
    return _replaced(model, makers)


def sides_of(model: nn.Module) -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
    """The side paths of a model, by module path, as float32 arrays: what an adapter's file holds."""
    return {
        path: (module.lora_a.detach().float().cpu().numpy(), module.lora_b.detach().float().cpu().numpy(), module.scale)
        for path, module in model.named_modules()
        if isinstance(module, LoraLinear)
    }


def merged(model: M) -> M:
    """A twin without side paths that does the same; only the weights beside one are new tensors."""
    found = {path: LoraLinear.merge for path, module in model.named_modules() if isinstance(module, LoraLinear)}
    return _replaced(model, found)


def freeze_base(model: nn.Module) -> list[nn.Parameter]:
    """Train the side paths and nothing else; the parameters to train."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.rpartition(".")[2] in ("lora_a", "lora_b"))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


# Inside ---------------------------------------------------------------------------------------------------------------


def _check(r: int, alpha: float, dropout: float) -> None:
    if isinstance(r, bool) or not isinstance(r, int) or r < 1:
        raise ConfigError(f"a side path of rank {r!r}", hint="use a whole number from 1")
    if not math.isfinite(alpha):
        raise ConfigError(f"alpha is {alpha!r}", hint="use a finite number")
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout is {dropout!r}", hint="use a number from 0 to below 1")


def _names(target: str, path: str) -> bool:
    plain = target.removesuffix("_proj")
    return path == plain or path.endswith(f".{plain}") or fnmatch.fnmatchcase(path, target.replace("[", "[[]"))


def _dotted(path: str) -> str:
    """A module's path as config trees write it: numbers are places in lists."""
    return "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in path.split(".")).removeprefix(".")


def _maker(
    path: str, sides: Sequence[Side], biases: Sequence[Any], magnitude: Any = None
) -> Callable[[Any], nn.Module]:
    def make(linear: Any) -> nn.Module:
        if type(linear) not in (Linear, LoraLinear):
            raise UnsupportedPair(f"{path} is a {type(linear).__name__}, which takes no side path", hint="adapt others")
        found = [*sides, *([(linear.lora_a, linear.lora_b, linear.scale)] if type(linear) is LoraLinear else [])]
        made = _twin(linear)
        if (magnitude is not None and len(found) != 1) or getattr(linear, "gain", None) is not None:
            raise UnsupportedPair(
                f"{path} has several side paths, and one is DoRA's", hint="apply a DoRA adapter alone"
            )
        if found:
            made = _joined(path, linear, found)
            if magnitude is not None:
                made.set_magnitude(_floats(magnitude, made.lora_a.device))
        if biases:
            own = torch.zeros(linear.shape[0]) if linear.bias is None else linear.bias.detach()
            away = sum(torch.as_tensor(bias).to(own) - own for bias in biases)
            made.bias = nn.Parameter(own + away, requires_grad=False)
        return made

    return make


def _joined(path: str, linear: Linear, sides: Sequence[Side]) -> LoraLinear:
    """Ranks one after another. One side path keeps its scale; several have theirs multiplied into B."""
    device = linear._first().device
    pairs = [(_floats(a, device), _floats(b, device), scale) for a, b, scale in sides]
    out_dim, in_dim = linear.shape
    for a, b, _ in pairs:
        if a.ndim != 2 or b.ndim != 2 or a.shape != (len(a), in_dim) or b.shape != (out_dim, len(a)) or not len(a):
            raise ConfigError(
                f"{path}: a side path of {tuple(a.shape)} and {tuple(b.shape)} beside {linear.shape}",
                hint="A is [rank, in] and B is [out, rank]",
            )
    rank = sum(len(a) for a, _, _ in pairs)
    scale = pairs[0][2] if len(pairs) == 1 else 1.0
    plain = linear
    if type(linear) is LoraLinear:
        plain = Linear.__new__(Linear)
        plain.__dict__.update(_twin(linear).__dict__)
        plain.config = linear.config.derive(Linear)
    made = LoraLinear.around(plain, rank, scale * rank)
    made.lora_a = nn.Parameter(torch.cat([a for a, _, _ in pairs]), requires_grad=False)
    bs = [b if len(pairs) == 1 else b * each for _, b, each in pairs]
    made.lora_b = nn.Parameter(torch.cat(bs, dim=1), requires_grad=False)
    return made


def _floats(value: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(value).detach().to(device=device, dtype=torch.float32)


def _twin(module: M) -> M:
    """The same module again: other tables of parts, in which the same tensors and children stand."""
    made = copy.copy(module)
    for table in ("_parameters", "_buffers", "_modules"):
        made.__dict__[table] = dict(module.__dict__[table])
    return made


def _replaced(model: M, makers: Mapping[str, Callable[[Any], nn.Module]]) -> M:
    """A twin in which the modules at some paths are others. Nothing on the way to them is changed in the model itself."""
    unknown = sorted(path for path in makers if not _has(model, path))
    if unknown:
        raise ConfigError(f"the model has no part called {', '.join(unknown[:3])}", hint="names are paths of modules")
    top = _twin(model)
    twins: dict[str, nn.Module] = {"": top}
    for path, make in makers.items():
        *parents, last = path.split(".")
        at = ""
        for name in parents:
            below = f"{at}.{name}" if at else name
            if below not in twins:
                twins[at]._modules[name] = twins[below] = _twin(twins[at].get_submodule(name))
            at = below
        twins[at]._modules[last] = make(twins[at]._modules[last])
    tree = getattr(top, "config", None)
    if isinstance(tree, BaseConfig):
        top.config = _described(tree, top, makers)  # type: ignore[assignment]
    return top


def _described(tree: BaseConfig, model: nn.Module, paths: Mapping[str, Any]) -> BaseConfig:
    """The config tree of a model some of whose parts were replaced."""
    tree = tree.clone()
    for path in paths:
        changed: Any = model.get_submodule(path)
        above, _, name = path.rpartition(".")
        setattr(tree.get(_dotted(above)) if above else tree, name, changed.config.clone())
    return tree


def _has(model: nn.Module, path: str) -> bool:
    try:
        return bool(path) and model.get_submodule(path) is not None
    except AttributeError:
        return False
