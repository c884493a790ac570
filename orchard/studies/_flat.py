"""The reference: the same models in the flat-argument style, as source text before and after a feature is added.

Each model has its own file with its own block, as in most codebases of this field; attention and feed-forward layers
are shared, which is the kinder assumption. Three ways to hand arguments down are measured:

- `keywords`: each model has its own argument class and passes every argument by name to the shared layers;
- `own-args`: each model has its own argument class and hands the whole object to the shared layers;
- `shared-args`: one argument class for all models, handed down whole.

Where else there was a choice it favours the reference: one line per argument as formatters write it, an altered line counts
once, encodings share arguments where they can, the choice between a feed-forward layer and a mixture takes one line, the
balance loss is not threaded through, experiments that switch a feature on are not counted, and neither is new layer
code (it stands in files of its own: `encodings.py`, `moe.py`). The templates hold `#@ name` where a feature adds lines.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchard.studies import _flat_text as text

STYLES = ("keywords", "own-args", "shared-args")


@dataclass(frozen=True)
class Shape:
    """What a reference model takes over from a tree."""

    name: str
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_dim: int
    vocabulary: int
    theta: float
    before: bool
    after: bool
    tied: bool
    window: int | None

    @property
    def title(self) -> str:
        return "".join(word.capitalize() for word in self.name.split("_"))


@dataclass(frozen=True)
class Feature:
    """What a feature adds: flat arguments (name, type, default) and lines at marked places of the shared layers."""

    name: str
    arguments: tuple[tuple[str, str, str], ...] = ()
    dispatch: tuple[str, ...] = ()
    init: tuple[str, ...] = ()
    mixture: bool = False


ENCODINGS = (
    Feature(
        "truncated",
        (("rope_type", "str", '"default"'), ("rope_keep", "float", "0.5")),
        ('if {a}rope_type == "truncated":', "    freqs = encodings.truncated(freqs, {a}rope_keep)"),
    ),
    Feature(
        "neighbours",
        (),
        ('if {a}rope_type == "neighbours":', "    return encodings.neighbours(x, positions, freqs)"),
    ),
    Feature(
        "grouped",
        (("rope_group", "int", "4"),),
        ('if {a}rope_type == "grouped":', "    positions = encodings.grouped(positions, {a}rope_group)"),
    ),
    Feature(
        "logarithmic",
        (("rope_stretch", "float", "8.0"),),
        ('if {a}rope_type == "logarithmic":', "    positions = encodings.logarithmic(positions, {a}rope_stretch)"),
    ),
    Feature(
        "randomized",
        (("rope_span", "int", "256"),),
        ('if {a}rope_type == "randomized":', "    positions = encodings.randomized(positions, {a}rope_span)"),
    ),
    Feature(
        "axial",
        (("rope_width", "int", "4"),),
        ('if {a}rope_type == "axial":', "    return encodings.axial(x, positions, freqs, {a}rope_width)"),
    ),
    Feature(
        "sinusoidal",
        (),
        ('if {a}rope_type == "sinusoidal":', "    return encodings.sinusoidal(x, positions, freqs)"),
    ),
    Feature(
        "learned",
        (("rope_length", "int", "64"),),
        ('if {a}rope_type == "learned":', "    return encodings.learned(x, self.position_table)"),
        ('if {a}rope_type == "learned":', "    self.position_table = encodings.table({a}rope_length, {a}head_dim)"),
    ),
)
EXPERTS = Feature("moe", (("num_experts", "int", "0"), ("experts_per_token", "int", "2")), mixture=True)


def render(shapes: Sequence[Shape], features: Sequence[Feature], style: str) -> dict[str, str]:
    """Every file of the reference with some features added, by name."""
    shared = {"__init__.py": "", "layers.py": _layers(features, style)}
    if any(not feature.mixture for feature in features):
        shared["encodings.py"] = text.ENCODINGS
    if any(feature.mixture for feature in features):
        shared["moe.py"] = text.MOE
    if style == "shared-args":
        fields = [f"{name}: {kind} = {default}" for f in features for name, kind, default in f.arguments]
        shared["args.py"] = _fill(text.SHARED_ARGS, {"args": fields})
    return shared | {f"{shape.name}.py": _model(shape, features, style) for shape in shapes}


def _layers(features: Sequence[Feature], style: str) -> str:
    positions = [feature for feature in features if not feature.mixture]
    names = [argument for feature in positions for argument in feature.arguments]
    template = text.LAYERS_KEYWORDS if style == "keywords" else text.LAYERS_OBJECT
    inside, later = ("", "self.") if style == "keywords" else ("args.", "self.args.")
    return _fill(
        template,
        {
            "imports": ["from . import encodings"] if positions else [],
            "parameters": [f"{name}: {kind} = {default}," for name, kind, default in names],
            "keep": [f"self.{name} = {name}" for name, _, _ in names],
            "init": [line.format(a=inside) for feature in positions for line in feature.init],
            "dispatch": [line.format(a=later) for feature in positions for line in feature.dispatch],
        },
    )


def _model(shape: Shape, features: Sequence[Feature], style: str) -> str:
    mixture = any(feature.mixture for feature in features)
    arguments = [argument for feature in features for argument in feature.arguments]
    positions = [name for feature in features if not feature.mixture for name, _, _ in feature.arguments]
    values = {"title": shape.title, **dataclasses.asdict(shape)}
    dense, mixed = text.FEED_FORWARD[style]
    edits = {
        "imports": ["from .moe import MixtureOfExperts"] if mixture else [],
        "args": [f"{name}: {kind} = {default}" for name, kind, default in arguments],
        "pass": [f"{name}=args.{name}," for name in positions],
        "feed_forward": [mixed if mixture else dense],
        "norms": [f"self.{name} = nn.RMSNorm(args.dim)" for name in _norms(shape)],
        "forward": _forward(shape),
        "head": [] if shape.tied else ["self.output = nn.Linear(args.dim, args.vocab_size, bias=False)"],
        "scores": ["return x @ self.tok_embeddings.weight.T" if shape.tied else "return self.output(x)"],
    }
    return _fill(text.MODEL[style], edits, values)


def _norms(shape: Shape) -> list[str]:
    before = ["attention_norm", "ffn_norm"] if shape.before else []
    return before + (["post_attention_norm", "post_ffn_norm"] if shape.after else [])


def _forward(shape: Shape) -> list[str]:
    lines = []
    for part, norm in (("attention", "attention_norm"), ("feed_forward", "ffn_norm")):
        inner = f"self.{part}(self.{norm}(x))" if shape.before else f"self.{part}(x)"
        lines.append(f"x = x + self.post_{norm}({inner})" if shape.after else f"x = x + {inner}")
    return [*lines, "return x"]


def _fill(template: str, edits: Mapping[str, Sequence[str]], values: Mapping[str, object] | None = None) -> str:
    """Replace each `#@ name` line by lines with its indentation (none when there is nothing to add)."""

    def lines(match: re.Match[str]) -> str:
        return "".join(f"{match.group(1)}{line}\n" for line in edits.get(match.group(2), ()))

    filled = re.sub(r"(?m)^( *)#@ (\w+)\n", lines, template)
    for name, value in (values or {}).items():
        filled = filled.replace(f"<{name}>", str(value))
    return filled
