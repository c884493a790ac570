"""What a run begins with: a base out of the library or fresh weights, whose tokenizer, who teaches, what to stay near."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from orchard.core.errors import ConfigError, UnsupportedPair
from orchard.core.seeds import fold
from orchard.models.language.decoder import Decoder
from orchard.models.zoo import Family
from orchard.session.build import Built, build, tokenizer_of
from orchard.session.model import Model
from orchard.text.byte_tokens import VOCAB, byte_tokenizer
from orchard.text.tokenizer import Tokenizer
from orchard.transforms.lora import LoraLinear
from orchard.weights.adapters import Base
from orchard.weights.checkpoint import Checkpoint, open_checkpoint
from orchard.weights.library import Library
from orchard.weights.load import load_decoder

if TYPE_CHECKING:
    from orchard.recipes.run import Run

BYTES = "bytes"
BASE = "base"
"""A teacher that is the base itself."""


@dataclass
class Begun:
    """Everything that is loaded or made before the first step."""

    model: Decoder
    """What is trained; with an adapter, a twin of the base that has side paths."""
    tokenizer: Tokenizer
    words: Path | None
    """Where the tokenizer's files are."""
    family: Family | None = None
    hf_config: dict[str, Any] = field(default_factory=dict)
    base: Decoder | None = None
    """The model before training, where somebody still asks it."""
    signed: Base | None = None
    """What an adapter says it was made for."""
    scales: dict[str, float] = field(default_factory=dict)
    """Of the side paths, by path. A pipeline leaves each process some of the modules only."""


def begin(cfg: Run.Config, device: torch.device, *, alone: bool) -> Begun:
    """`alone`: no other process shares the model out, so what is frozen can be one and the same in two models."""
    begun = _fresh(cfg) if cfg.base is None else _based(cfg, device)
    _check_fits(cfg, begun)
    asked = cfg.reference or cfg.teacher == BASE
    if cfg.adapter is not None:
        assert begun.signed is not None
        base = begun.model
        begun.model = cfg.adapter.build().attach(base, cfg.train.seed)
        begun.scales = {path: one.scale for path, one in begun.model.named_modules() if isinstance(one, LoraLinear)}
        begun.base = (base if alone else _frozen(copy.deepcopy(base))) if asked else None
    else:
        begun.base = _frozen(copy.deepcopy(begun.model)).to(device) if asked else None
        begun.model.requires_grad_(True)
    return begun


def objective_of(cfg: Run.Config, begun: Begun, device: torch.device) -> Any:
    """The objective with its teacher or reference; None where its config is all it needs."""
    given: dict[str, Any] = {}
    if cfg.teacher is not None:
        given["teacher"] = begun.base if cfg.teacher == BASE else _teacher(cfg.teacher, cfg.train.dtype, device)
    if cfg.reference:
        given["reference"] = begun.base
    kind = cfg.train.objective.builds
    takes = inspect.signature(kind.__init__).parameters
    anything = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
    for name in given:
        if name not in takes and not anything:
            raise UnsupportedPair(f"{kind.__name__} has no use for a {name}", hint=f"leave {name} out of the run")
    if "teacher" in takes and "teacher" not in given:
        raise ConfigError(f"{kind.__name__} needs a teacher", hint="set teacher to a model's name, or to base")
    return cfg.train.objective.build(**given) if given else None


def tokenizer_named(name: str) -> tuple[Tokenizer, Path | None]:
    """A tokenizer, and where its files are: of a model by name or path, or `bytes`."""
    if name == BYTES:
        return byte_tokenizer(), None
    path = Library().resolve(name)
    with open_checkpoint(path) as checkpoint:
        return tokenizer_of(checkpoint), path


def vocab_named(name: str) -> int:
    """The tokens that a model with this tokenizer scores: as many as the model that it comes from."""
    if name == BYTES:
        return VOCAB
    with open_checkpoint(Library().resolve(name)) as checkpoint:
        return checkpoint.config().vocab


# Inside -----------------------------------------------------------------------------------------------------------------


def _fresh(cfg: Run.Config) -> Begun:
    assert cfg.train.model is not None and cfg.tokenizer is not None  # Run.Config sees to it
    tokenizer, words = tokenizer_named(cfg.tokenizer)
    torch.manual_seed(fold(cfg.train.seed, "model"))
    model: Decoder = cfg.train.model.build()
    return Begun(model, tokenizer, words)


def _based(cfg: Run.Config, device: torch.device) -> Begun:
    assert cfg.base is not None
    path = Library().resolve(cfg.base)
    adapter = None if cfg.adapter is None else cfg.adapter.build()
    with open_checkpoint(path) as checkpoint:
        tokenizer = tokenizer_of(checkpoint)
        tree = rewritten(cfg, checkpoint)
        tree = tree if adapter is None else adapter.kept(checkpoint, tree)
        # Weights that are trained stay wide; frozen ones are kept as they are computed with.
        narrow = adapter is not None and device.type != "cpu" and cfg.train.dtype == "bfloat16"
        decoder = load_decoder(checkpoint, tree, dtype=torch.bfloat16 if narrow else torch.float32, device=device)
        family, hf_config = checkpoint.family, checkpoint.hf_config
    for one in cfg.after:
        decoder = one.build()(decoder)
    words: Path | None = path
    if cfg.tokenizer is not None:
        tokenizer, words = tokenizer_named(cfg.tokenizer)
    signed = None
    if adapter is not None:
        signed = Model(Built(decoder, family, hf_config), tokenizer, name=cfg.base, source=path).adapters.base
    return Begun(decoder, tokenizer, words, family, hf_config, signed=signed)


def rewritten(cfg: Run.Config, checkpoint: Checkpoint) -> Decoder.Config:
    tree = checkpoint.config()
    for one in cfg.rewrites:
        tree = one.build()(tree)
    return tree


def _teacher(name: str, dtype: str, device: torch.device) -> Decoder:
    narrow = device.type != "cpu" and dtype == "bfloat16"
    _, built = build(Library().resolve(name), None, torch.bfloat16 if narrow else torch.float32, device)
    return _frozen(built.decoder)


def _frozen(decoder: Decoder) -> Decoder:
    return decoder.eval().requires_grad_(False)


def _check_fits(cfg: Run.Config, begun: Begun) -> None:
    tree = begun.model.config
    if begun.tokenizer.vocab_size > tree.vocab:
        raise ConfigError(
            f"the tokenizer has {begun.tokenizer.vocab_size:,} tokens and the model {tree.vocab:,}",
            hint="use the model's own tokenizer, or set train.model.vocab",
        )
    lengths = [getattr(node, "length", None) for _, node in cfg.train.source.walk()]
    longest = max((length for length in lengths if isinstance(length, int)), default=0)
    if longest > tree.context:
        raise ConfigError(
            f"rows of {longest:,} tokens for a model with a context of {tree.context:,}",
            hint="use shorter rows (length)",
        )
